/* Snippets of docs/INTEGRATION.md: an engine's own threads share a call. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <pthread.h>

#include "engine.h"

enum { N_THREADS = 3 };

typedef struct share {
  const engine *e;
  const replayssm_batch *batch;
  const replayssm_mamba2_args *ssm;
  int32_t layer, part;
} share;

/* What thread `part` of an engine's N_THREADS does for one operation. */
static void *worker(void *argument) {
  const share *s = (const share *)argument;
  const engine *e = s->e;
  const replayssm_batch *batch = s->batch;
  const replayssm_mamba2_args *ssm = s->ssm;
  const int32_t layer = s->layer, part = s->part;
  /* >>> parts */
  replayssm_exec exec = REPLAYSSM_INIT(replayssm_exec);
  exec.part = part; /* 0 to n_parts - 1: every part once, in any order, on any thread */
  exec.n_parts = N_THREADS;
  check(replayssm_mamba2_step(e->mamba, layer, batch, ssm, &exec));
  /* then a barrier of yours: the next call on these slots begins when all parts have returned */
  /* <<< parts */
  return NULL;
}

int main(void) {
  engine e;
  static float alone[N_LAYERS][4][INNER];
  const int32_t tokens[4] = {11, 12, 13, 14};
  make_parameters();
  create(&e);
  replayssm_context_destroy(e.context);
  /* >>> one_thread */
  replayssm_context_desc desc = REPLAYSSM_INIT(replayssm_context_desc);
  desc.n_threads = 1; /* the engine brings its own: the library starts none */
  check(replayssm_context_create(&desc, &e.context));
  /* <<< one_thread */
  replayssm_context_info info = REPLAYSSM_INIT(replayssm_context_info);
  check(replayssm_context_query(e.context, &info));
  REQUIRE(info.n_threads == 1);

  request r;
  start(&e, &r, 6, 2);
  prompt(&e, &r, tokens, 4);
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = 1;
  batch.tokens = 4;
  batch.slots = ids(&r.slot);
  batch.rings = ids(&r.ring);
  forward(&e, &batch, tokens, 4);
  for (int layer = 0; layer < N_LAYERS; layer++) memcpy(alone[layer], out[layer], sizeof alone[layer]);

  /* The last layer again, in parts on three threads: nothing has moved, so the bytes are the same. */
  const int32_t layer = N_LAYERS - 1;
  const int64_t wide = PROJECTED, narrow = CHANNELS;
  replayssm_mamba2_args ssm = REPLAYSSM_INIT(replayssm_mamba2_args);
  ssm.x = view(xBC[0], 0, narrow, HEADDIM);
  ssm.B = view(xBC[0] + INNER, 0, narrow, DSTATE);
  ssm.C = view(xBC[0] + INNER + BC, 0, narrow, DSTATE);
  ssm.dt = view(projected[0] + CHANNELS, 0, wide, 1);
  ssm.z = view(projected[0] + CHANNELS + NHEADS, 0, wide, HEADDIM);
  ssm.A = parameter(A[layer], 1);
  ssm.dt_bias = parameter(dt_bias[layer], 1);
  ssm.D = parameter(D[layer], 1);
  ssm.out = view(out[layer][0], 0, INNER, HEADDIM);
  memset(out[layer], 0x5A, sizeof out[layer]);
  share shares[N_THREADS];
  pthread_t threads[N_THREADS];
  for (int32_t part = 0; part < N_THREADS; part++) {
    const share s = {&e, &batch, &ssm, layer, part};
    shares[part] = s;
    REQUIRE(pthread_create(&threads[part], NULL, worker, &shares[part]) == 0);
  }
  for (int part = 0; part < N_THREADS; part++) REQUIRE(pthread_join(threads[part], NULL) == 0);
  REQUIRE(memcmp(alone[layer], out[layer], sizeof alone[layer]) == 0);
  check(replayssm_commit(e.slots, &batch, NULL, NULL));
  append(&r, tokens, 4);
  expect_plain(&e, &r);

  expect_faults(&e, 0);
  destroy(&e);
  puts("threads: ok");
  return 0;
}
