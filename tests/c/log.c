/* The log of a context: who gets which lines, when, and on which thread.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replayssm.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    checks++;                                                                   \
    if (!(condition)) {                                                         \
      fprintf(stderr, "log.c:%d: %s is not true\n", __LINE__, #condition);      \
      fprintf(stderr, "last error: %s\n", replayssm_last_error_message());      \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

static int checks;

enum { LINES = 64, LENGTH = 1024 };

/* What one context has said. */
struct heard {
  pthread_mutex_t mutex;
  pthread_t thread; /* on which lines must come */
  int n, strange;
  int32_t level[LINES];
  char text[LINES][LENGTH];
};

static void hook(void *user, int32_t level, const char *text) {
  struct heard *heard = user;
  pthread_mutex_lock(&heard->mutex);
  if (!pthread_equal(pthread_self(), heard->thread)) heard->strange++;
  if (level != REPLAYSSM_LOG_WARNING && level != REPLAYSSM_LOG_INFO) heard->strange++;
  if (strchr(text, '\n') != NULL || strlen(text) >= LENGTH) heard->strange++;
  if (heard->n < LINES) {
    heard->level[heard->n] = level;
    snprintf(heard->text[heard->n], LENGTH, "%s", text);
  }
  heard->n++;
  pthread_mutex_unlock(&heard->mutex);
}

static void listen(struct heard *heard) {
  memset(heard, 0, sizeof *heard);
  pthread_mutex_init(&heard->mutex, NULL);
  heard->thread = pthread_self();
}

/* Whether line i has this level and these words. */
static int line(const struct heard *heard, int i, int32_t level, const char *a, const char *b) {
  return i < heard->n && heard->level[i] == level && strstr(heard->text[i], a) != NULL && strstr(heard->text[i], b) != NULL;
}

static replayssm_context_desc wanting(int32_t level, struct heard *heard) {
  replayssm_context_desc d = REPLAYSSM_INIT(replayssm_context_desc);
  listen(heard);
  d.n_threads = 3;
  d.log = hook;
  d.log_user = heard;
  d.log_level = level;
  return d;
}

static replayssm_pool_desc mamba(int32_t dstate) {
  replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc);
  p.family = REPLAYSSM_FAMILY_MAMBA2;
  p.n_layers = 2;
  p.nheads = 64;
  p.ngroups = 2;
  p.headdim = 64;
  p.dstate = dstate;
  p.io = REPLAYSSM_DTYPE_F32;
  return p;
}

/* Calls of a model's life: none of them may say a thing, here or on the library's threads. */
static void work(replayssm_slots *slots, replayssm_layers *pool) {
  static float data[2 * 64 * 64];
  static const int32_t ids[2] = {0, 1};
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  replayssm_mamba2_args args = REPLAYSSM_INIT(replayssm_mamba2_args);
  replayssm_list list = REPLAYSSM_INIT(replayssm_list);
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  replayssm_stats stats = REPLAYSSM_INIT(replayssm_stats);
  const replayssm_tensor t = {data, 64 * 64, 0, 64, REPLAYSSM_DTYPE_F32, 0};
  static char text[4096];
  batch.n_rows = 2;
  batch.tokens = 1;
  batch.slots.data = ids;
  batch.slots.dtype = REPLAYSSM_DTYPE_I32;
  args.x = args.B = args.C = args.dt = args.A = t;
  args.out = t;
  args.out.data = malloc(sizeof data);
  list.n = 2;
  list.place = REPLAYSSM_WHERE_HOST;
  list.slots = batch.slots;
  CHECK(replayssm_reset(slots, &list, NULL, NULL) == REPLAYSSM_OK);
  for (int step = 0; step < 40; step++) {
    for (int32_t layer = 0; layer < 2; layer++) CHECK(replayssm_mamba2_step(pool, layer, &batch, &args, NULL) == REPLAYSSM_OK);
    CHECK(replayssm_commit(slots, &batch, NULL, NULL) == REPLAYSSM_OK);
  }
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  for (int32_t layer = 0; layer < 2; layer++) CHECK(replayssm_mamba2_extend(pool, layer, &batch, &args, NULL) == REPLAYSSM_OK);
  CHECK(replayssm_commit(slots, &batch, NULL, NULL) == REPLAYSSM_OK);
  CHECK(replayssm_mamba2_step(pool, 7, &batch, &args, NULL) != REPLAYSSM_OK);
  CHECK(replayssm_check(slots, 0, &report) == REPLAYSSM_OK && report.bits == 0);
  CHECK(replayssm_stats_read(slots, &stats) == REPLAYSSM_OK && stats.steps == 41);
  CHECK(replayssm_explain(pool, 2, 1, text, sizeof text) == REPLAYSSM_OK);
  free(args.out.data);
}

/* A whole life: info lines in order, warnings where they belong, each on this thread. */
static void everything(void) {
  static struct heard heard;
  replayssm_context_desc d = wanting(REPLAYSSM_LOG_INFO, &heard);
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_pool_desc good = mamba(64), odd = mamba(40);
  replayssm_context *context = NULL;
  replayssm_slots *slots = NULL;
  replayssm_layers *pool = NULL, *second = NULL;
  replayssm_context_info info = REPLAYSSM_INIT(replayssm_context_info);
  CHECK(replayssm_context_create(&d, &context) == REPLAYSSM_OK);
  CHECK(replayssm_context_query(context, &info) == REPLAYSSM_OK);
  CHECK(line(&heard, 0, REPLAYSSM_LOG_INFO, info.name, "3 threads"));
  /* The best instruction set is not this processor's: said in a line of its own, once. */
  const int from = heard.n;
  CHECK(from == 1 || (from == 2 && line(&heard, 1, REPLAYSSM_LOG_WARNING, "AVX2", "slower")));
  s.n_slots = 5;
  s.n_rings = 2;
  s.window = 12;
  CHECK(replayssm_slots_create(context, &s, &slots) == REPLAYSSM_OK);
  CHECK(heard.n == from + 1 && line(&heard, from, REPLAYSSM_LOG_INFO, "5 slots, 2 rings", "window 12"));
  CHECK(replayssm_layers_create(slots, &good, NULL, 0, &pool) == REPLAYSSM_OK);
  CHECK(heard.n == from + 2 && line(&heard, from + 1, REPLAYSSM_LOG_INFO, "pool 0 created: Mamba-2, 2 layers of 64 heads of 64 x 64", "SPLIT32"));
  CHECK(line(&heard, from + 1, REPLAYSSM_LOG_INFO, "FULL readout", "bytes allocated, 0 components lent"));
  CHECK(replayssm_layers_create(slots, &odd, NULL, 0, &second) == REPLAYSSM_OK);
  CHECK(heard.n == from + 4 && line(&heard, from + 2, REPLAYSSM_LOG_INFO, "pool 1 created", "64 x 40"));
  CHECK(line(&heard, from + 3, REPLAYSSM_LOG_WARNING, "pool 1: dstate is 40", "slower"));
  /* What fails has an error, and no line. */
  good.nheads = -1;
  replayssm_layers *none = pool;
  CHECK(replayssm_layers_create(slots, &good, NULL, 0, &none) != REPLAYSSM_OK && none == NULL);
  good.nheads = 64;
  CHECK(replayssm_supports(context, &good, 4) == REPLAYSSM_OK);
  work(slots, pool);
  CHECK(heard.n == from + 4);
  /* The context's handle goes first: its children still speak. */
  replayssm_context_destroy(context);
  CHECK(heard.n == from + 5 && line(&heard, from + 4, REPLAYSSM_LOG_INFO, "context destroyed", ""));
  replayssm_context_destroy(context);
  replayssm_layers_destroy(second);
  replayssm_slots_destroy(slots);
  replayssm_layers_destroy(pool);
  replayssm_layers_destroy(pool);
  CHECK(heard.n == from + 8);
  CHECK(line(&heard, from + 5, REPLAYSSM_LOG_INFO, "pool 1 destroyed", ""));
  CHECK(line(&heard, from + 6, REPLAYSSM_LOG_INFO, "slots destroyed", "on them: 1"));
  CHECK(line(&heard, from + 7, REPLAYSSM_LOG_INFO, "pool 0 destroyed", ""));
  CHECK(heard.strange == 0);
  for (int i = 0; i < heard.n; i++) printf("%d %s\n", (int)heard.level[i], heard.text[i]);
}

/* Lines of a level, and of none. */
static void levels(void) {
  static struct heard heard;
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  s.n_slots = 2;
  s.window = 6;
  s.max_step_tokens = 4;
  for (int how = 0; how < 3; how++) {
    replayssm_context_desc d = wanting(how == 0 ? REPLAYSSM_LOG_WARNING : REPLAYSSM_LOG_INFO, &heard);
    replayssm_pool_desc p = mamba(64);
    replayssm_context *context = NULL;
    replayssm_slots *slots = NULL;
    replayssm_layers *pool = NULL;
    if (how == 1) d.log_level = REPLAYSSM_LOG_NONE;
    if (how == 2) d.log_level = REPLAYSSM_LOG_NONE, d.log = NULL;
    CHECK(replayssm_context_create(&d, &context) == REPLAYSSM_OK);
    const int before = heard.n;
    CHECK(replayssm_slots_create(context, &s, &slots) == REPLAYSSM_OK);
    CHECK(replayssm_layers_create(slots, &p, NULL, 0, &pool) == REPLAYSSM_OK);
    replayssm_layers_destroy(pool);
    replayssm_slots_destroy(slots);
    replayssm_context_destroy(context);
    CHECK(heard.n - before == (how == 0 ? 1 : 0) && heard.strange == 0);
    if (how == 0) CHECK(line(&heard, before, REPLAYSSM_LOG_WARNING, "window is 6", "rewrite the checkpoint every time"));
    if (how != 0) CHECK(heard.n == 0);
  }
}

/* Contexts of several threads at once, each with a log of its own. */
static void *one_life(void *unused) {
  struct heard *heard = malloc(sizeof *heard);
  (void)unused;
  if (heard == NULL) return NULL;
  for (int round = 0; round < 20; round++) {
    replayssm_context_desc d = wanting(REPLAYSSM_LOG_INFO, heard);
    replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
    replayssm_pool_desc p = mamba(64);
    replayssm_context *context = NULL;
    replayssm_slots *slots = NULL;
    replayssm_layers *pool = NULL;
    s.n_slots = 1;
    if (replayssm_context_create(&d, &context) != REPLAYSSM_OK) return NULL;
    if (replayssm_slots_create(context, &s, &slots) != REPLAYSSM_OK) return NULL;
    if (replayssm_layers_create(slots, &p, NULL, 0, &pool) != REPLAYSSM_OK) return NULL;
    replayssm_layers_destroy(pool);
    replayssm_slots_destroy(slots);
    replayssm_context_destroy(context);
    if (heard->n < 6 || heard->strange != 0) return NULL;
  }
  free(heard);
  return &checks;
}

static void at_once(void) {
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, one_life, NULL) == 0);
  for (int i = 0; i < 4; i++) {
    void *result = NULL;
    CHECK(pthread_join(threads[i], &result) == 0 && result == &checks);
  }
}

int main(void) {
  everything();
  levels();
  at_once();
  printf("log: %d checks\n", checks);
  return 0;
}
