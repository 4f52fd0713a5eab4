/* A C11 program that links an installed library: versions agree, and one token goes through.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <replayssm.h>
#include <stdio.h>

int main(void) {
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc);
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  replayssm_mamba2_args args = REPLAYSSM_INIT(replayssm_mamba2_args);
  replayssm_context *context = NULL;
  replayssm_slots *slots = NULL;
  replayssm_layers *pool = NULL;
  int32_t slot = 0;
  float x[2] = {1, 2}, b[2] = {3, 4}, c[2] = {1, 1}, dt = 0.5f, a = -1, y[2] = {0, 0};
  s.n_slots = 1;
  p.family = REPLAYSSM_FAMILY_MAMBA2;
  p.n_layers = p.nheads = p.ngroups = 1;
  p.headdim = p.dstate = 2;
  p.io = REPLAYSSM_DTYPE_F32;
  batch.n_rows = batch.tokens = 1;
  batch.slots.data = &slot;
  batch.slots.dtype = REPLAYSSM_DTYPE_I32;
  args.no_softplus = 1;
  args.x.data = x, args.B.data = b, args.C.data = c, args.dt.data = &dt, args.A.data = &a, args.out.data = y;
  args.x.dtype = args.B.dtype = args.C.dtype = args.dt.dtype = args.A.dtype = args.out.dtype = REPLAYSSM_DTYPE_F32;
  if (replayssm_version() != REPLAYSSM_VERSION) return 1;
  if (replayssm_context_create(NULL, &context) != REPLAYSSM_OK) return 2;
  if (replayssm_slots_create(context, &s, &slots) != REPLAYSSM_OK) return 3;
  if (replayssm_layers_create(slots, &p, NULL, 0, &pool) != REPLAYSSM_OK) return 4;
  if (replayssm_mamba2_step(pool, 0, &batch, &args, NULL) != REPLAYSSM_OK) return 5;
  if (replayssm_commit(slots, &batch, NULL, NULL) != REPLAYSSM_OK) return 6;
  replayssm_layers_destroy(pool);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
  /* y = (dt x B^T) C: (0.5 * 1) * (3 + 4) and twice that. */
  if (y[0] != 3.5f || y[1] != 7.0f) return 7;
  printf("consumer: %s\n", replayssm_build_info());
  return 0;
}
