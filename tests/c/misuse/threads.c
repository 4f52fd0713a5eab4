/* Two threads on one context, and calls that race with the destruction of their handle.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "misuse.h"

#include <pthread.h>

/* Two threads on one context: each creates, works and destroys on its own, and on slots of their own of shared handles. */
static void *worker(void *argument) {
  const int me = *(int *)argument;
  const int32_t slot = me;
  float x[HEADS * DIM], y[HEADS * DIM], gates[64];
  for (int i = 0; i < HEADS * DIM; i++) x[i] = (float)(i % 5) * 0.25f;
  for (int i = 0; i < 64; i++) gates[i] = -0.5f;
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  replayssm_mamba2_args args = REPLAYSSM_INIT(replayssm_mamba2_args);
  batch.n_rows = batch.tokens = 1;
  batch.slots = good_ids(&slot);
  args.x = tensor(x, 0, 0, DIM);
  args.B = args.C = tensor(x, 0, 0, STATE);
  args.dt = args.A = tensor(gates, 0, 0, 1);
  args.out = tensor(y, 0, 0, DIM);
  long failures = 0;
  for (int round = 0; round < (short_run ? 5 : 60); round++) {
    replayssm_slots *own_slots = NULL;
    replayssm_layers *own = NULL;
    replayssm_slots_desc s = good_slots();
    replayssm_pool_desc p = good_mamba();
    failures += replayssm_slots_create(context, &s, &own_slots) != REPLAYSSM_OK;
    failures += replayssm_layers_create(own_slots, &p, NULL, 0, &own) != REPLAYSSM_OK;
    for (int i = 0; i < 4; i++) {
      failures += replayssm_mamba2_step(own, i % LAYERS, &batch, &args, NULL) != REPLAYSSM_OK;
      failures += replayssm_commit(own_slots, &batch, NULL, NULL) != REPLAYSSM_OK;
      for (int layer = 0; layer < LAYERS; layer++) {
        failures += replayssm_mamba2_step(mamba, layer, &batch, &args, NULL) != REPLAYSSM_OK;
      }
      failures += replayssm_commit(slots, &batch, NULL, NULL) != REPLAYSSM_OK;
    }
    /* Its own sentence, whatever the other thread does. */
    batch.n_rows = -1 - me;
    failures += replayssm_commit(slots, &batch, NULL, NULL) != REPLAYSSM_ERROR_INVALID_ARGUMENT;
    char wanted[32];
    snprintf(wanted, sizeof wanted, "batch.n_rows is %d", -1 - me);
    failures += strstr(replayssm_last_error_message(), wanted) == NULL;
    batch.n_rows = 1;
    replayssm_slots_destroy(own_slots);
    replayssm_layers_destroy(own);
  }
  return (void *)failures;
}

/* Calls that race with the destruction of their own handle work or say that it has been destroyed. */
static replayssm_slots *contested;
static pthread_barrier_t ready;

static void *user(void *argument) {
  long unexpected = 0;
  replayssm_list list = good_list();
  (void)argument;
  pthread_barrier_wait(&ready);
  for (int i = 0; i < 200; i++) {
    replayssm_stats stats = REPLAYSSM_INIT(replayssm_stats);
    replayssm_pool_desc p = good_mamba();
    replayssm_layers *made = NULL;
    replayssm_status status[3];
    status[0] = replayssm_stats_read(contested, &stats);
    status[1] = replayssm_reset(contested, &list, NULL, NULL);
    status[2] = i % 50 ? REPLAYSSM_OK : replayssm_layers_create(contested, &p, NULL, 0, &made);
    replayssm_layers_destroy(made);
    for (int j = 0; j < 3; j++) unexpected += status[j] != REPLAYSSM_OK && status[j] != REPLAYSSM_ERROR_INVALID_HANDLE;
  }
  return (void *)unexpected;
}

static void *destroyer(void *argument) {
  pthread_barrier_wait(&ready);
  for (int i = 0; i < *(int *)argument; i++) (void)replayssm_version();
  replayssm_slots_destroy(contested);
  return NULL;
}

/* A pool is destroyed while its slots handle is saved: the blob is that of the pools before or after. */
static replayssm_layers *leaving;

static void *leave(void *argument) {
  pthread_barrier_wait(&ready);
  for (int i = 0; i < *(int *)argument; i++) (void)replayssm_version();
  replayssm_layers_destroy(leaving);
  return NULL;
}

static void save_while_a_pool_goes(void) {
  enum { ROUNDS = 40, CAPACITY = 1 << 23 };
  unsigned char *blob = malloc(CAPACITY);
  replayssm_pool_desc p = good_mamba();
  replayssm_list list = good_list();
  list.n = 1;
  p.n_layers = 1, p.nheads = 128, p.headdim = p.dstate = 64;
  CHECK(pthread_barrier_init(&ready, NULL, 2) == 0);
  for (int round = 0; round < (short_run ? 1 : ROUNDS); round++) {
    replayssm_slots_desc s = good_slots();
    replayssm_slots *made = NULL;
    replayssm_layers *stays = NULL;
    pthread_t thread;
    int delay = round * 20000;
    WORKS(replayssm_slots_create(context, &s, &made));
    WORKS(replayssm_layers_create(made, &p, NULL, 0, &stays));
    WORKS(replayssm_layers_create(made, &p, NULL, 0, &leaving));
    CHECK(pthread_create(&thread, NULL, leave, &delay) == 0);
    pthread_barrier_wait(&ready);
    for (int i = 0; i < 4; i++) WORKS(replayssm_save(made, &list, REPLAYSSM_SAVE_LIVE, blob, CAPACITY, NULL));
    CHECK(pthread_join(thread, NULL) == 0);
    WORKS(replayssm_save(made, &list, REPLAYSSM_SAVE_LIVE, blob, CAPACITY, NULL));
    CHECK(blob[68] == 1);
    replayssm_layers_destroy(stays);
    replayssm_slots_destroy(made);
  }
  pthread_barrier_destroy(&ready);
  free(blob);
}

void threads(void) {
  pthread_t thread[2];
  int number[2] = {0, 1};
  void *failures = NULL;
  replayssm_list list = good_list();
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread[i], NULL, worker, &number[i]) == 0);
  for (int i = 0; i < 2; i++) {
    CHECK(pthread_join(thread[i], &failures) == 0);
    CHECK(failures == NULL);
  }
  CHECK(position_of(0) == (short_run ? 20 : 240) && position_of(1) == position_of(0));
  CHECK(pthread_barrier_init(&ready, NULL, 2) == 0);
  for (int round = 0; round < (short_run ? 10 : 200); round++) {
    replayssm_slots_desc s = good_slots();
    int delay = round * 50;
    WORKS(replayssm_slots_create(context, &s, &contested));
    CHECK(pthread_create(&thread[0], NULL, user, NULL) == 0);
    CHECK(pthread_create(&thread[1], NULL, destroyer, &delay) == 0);
    CHECK(pthread_join(thread[0], &failures) == 0 && failures == NULL);
    CHECK(pthread_join(thread[1], NULL) == 0);
    destroyed_slots(contested);
  }
  pthread_barrier_destroy(&ready);
  save_while_a_pool_goes();
}
