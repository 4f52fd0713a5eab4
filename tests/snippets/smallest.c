/* The program of the README. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
/* >>> program */
#include <replayssm.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call) \
  if ((call) != REPLAYSSM_OK) puts(replayssm_last_error_message()), exit(1)

enum { LAYERS = 2, ROWS = 2, T = 4, HEADS = 4, DIM = 64, STATE = 128 };
static float x[ROWS][T][HEADS][DIM], y[ROWS][T][HEADS][DIM], B[ROWS][T][STATE], C[ROWS][T][STATE], dt[ROWS][T][HEADS];
static float A[HEADS] = {-1, -2, -4, -8};

int main(void) {
  /* Once: a backend, the positions of a model's requests, and a pool of equal layers. */
  replayssm_context *context;
  replayssm_slots *slots;
  replayssm_layers *layers;
  CHECK(replayssm_context_create(NULL, &context));
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  s.n_slots = 8;
  s.max_step_tokens = T; /* one sampled token and three drafts */
  CHECK(replayssm_slots_create(context, &s, &slots));
  replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc);
  p.family = REPLAYSSM_FAMILY_MAMBA2;
  p.n_layers = LAYERS;
  p.io = REPLAYSSM_DTYPE_F32;
  p.nheads = HEADS, p.headdim = DIM, p.dstate = STATE, p.ngroups = 1;
  CHECK(replayssm_layers_create(slots, &p, NULL, 0, &layers));

  /* Each model step: every layer with one batch, then one commit. */
  const int32_t row_slots[ROWS] = {5, 2}, accepted[ROWS] = {4, 1};
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = ROWS;
  batch.tokens = T;
  batch.slots.data = row_slots;
  batch.slots.dtype = REPLAYSSM_DTYPE_I32;
  for (int layer = 0; layer < LAYERS; layer++) {
    replayssm_mamba2_args a = REPLAYSSM_INIT(replayssm_mamba2_args); /* strided views: of row, token, head (group) */
    a.x = (replayssm_tensor){x, T * HEADS * DIM, HEADS * DIM, DIM, REPLAYSSM_DTYPE_F32, 0};
    a.B = (replayssm_tensor){B, T * STATE, STATE, STATE, REPLAYSSM_DTYPE_F32, 0};
    a.C = (replayssm_tensor){C, T * STATE, STATE, STATE, REPLAYSSM_DTYPE_F32, 0};
    a.dt = (replayssm_tensor){dt, T * HEADS, HEADS, 1, REPLAYSSM_DTYPE_F32, 0};
    a.A = (replayssm_tensor){A, 0, 0, 1, REPLAYSSM_DTYPE_F32, 0};
    a.out = (replayssm_tensor){y, T * HEADS * DIM, HEADS * DIM, DIM, REPLAYSSM_DTYPE_F32, 0};
    CHECK(replayssm_mamba2_step(layers, layer, &batch, &a, NULL));
  }
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  commit.counts = accepted; /* of each row, the sampled token included; rejected drafts need no undoing */
  CHECK(replayssm_commit(slots, &batch, &commit, NULL));

  replayssm_stats stats = REPLAYSSM_INIT(replayssm_stats);
  CHECK(replayssm_stats_read(slots, &stats));
  printf("%d of %d tokens committed\n", (int)stats.accepted, (int)stats.tokens);
  replayssm_layers_destroy(layers);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
  return 0;
}
/* <<< program */
