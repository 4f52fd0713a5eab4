/* Snippets of docs/INTEGRATION.md: memory that the engine lends. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _POSIX_C_SOURCE 200112L
#include "engine.h"

int main(void) {
  engine e;
  make_parameters();
  create(&e);
  replayssm_layers_destroy(e.mamba);

  /* Pages of the engine: one per slot, all layers of a request in it, and room for something else at its end. */
  const int64_t state_bytes = 4 * STATE_SIZE, page_bytes = N_LAYERS * state_bytes + 4096;
  void *pages = NULL;
  REQUIRE(posix_memalign(&pages, 128, (size_t)(N_SLOTS * page_bytes)) == 0);
  memset(pages, 0xFF, (size_t)(N_SLOTS * page_bytes)); /* NaN */

  replayssm_pool_desc mamba = REPLAYSSM_INIT(replayssm_pool_desc);
  mamba.family = REPLAYSSM_MAMBA2;
  mamba.n_layers = N_LAYERS;
  mamba.io = REPLAYSSM_F32;
  mamba.readout = REPLAYSSM_READOUT_EXACT;
  mamba.nheads = NHEADS, mamba.headdim = HEADDIM, mamba.dstate = DSTATE, mamba.ngroups = NGROUPS;
  /* >>> lent */
  replayssm_lent lent = REPLAYSSM_INIT(replayssm_lent);
  lent.kind = REPLAYSSM_COMPONENT_CHECKPOINT; /* the library allocates what is not lent */
  lent.base = pages;                          /* layer 0 of slot 0; outlives the pool */
  lent.layer_stride_bytes = state_bytes;
  lent.slot_stride_bytes = page_bytes;        /* strides: multiples of 16 */
  check(replayssm_layers_create(e.slots, &mamba, &lent, 1, &e.mamba));
  /* <<< lent */

  /* Lent memory is not touched at create, and each slot is reset before its first step. */
  for (int64_t i = 0; i < N_SLOTS * page_bytes; i++) REQUIRE(((unsigned char *)pages)[i] == 0xFF);
  request r;
  start(&e, &r, 5, 1);
  int32_t tokens[T_MAX];
  for (int i = 0; i < 40; i++) {
    for (int t = 0; t < T_MAX; t++) tokens[t] = 100 * i + t;
    decode(&e, &r, tokens, T_MAX, 1 + i % T_MAX);
  }
  expect_plain(&e, &r);
  for (int slot = 0; slot < N_SLOTS; slot++) {
    const unsigned char *page = (const unsigned char *)pages + slot * page_bytes;
    for (int64_t i = N_LAYERS * state_bytes; i < page_bytes; i++) REQUIRE(page[i] == 0xFF);
  }

  expect_faults(&e, 0);
  destroy(&e); /* before the pages go */
  free(pages);
  puts("memory: ok");
  return 0;
}
