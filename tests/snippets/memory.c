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
  mamba.family = REPLAYSSM_FAMILY_MAMBA2;
  mamba.n_layers = N_LAYERS;
  mamba.io = REPLAYSSM_DTYPE_F32;
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

  /* The engine defragments: its pages move, and each layer gets an allocation of its own. */
  void *layer_pages[N_LAYERS];
  for (int layer = 0; layer < N_LAYERS; layer++) {
    REQUIRE(posix_memalign(&layer_pages[layer], 128, (size_t)(N_SLOTS * page_bytes)) == 0);
    memset(layer_pages[layer], 0xFF, (size_t)(N_SLOTS * page_bytes));
    for (int slot = 0; slot < N_SLOTS; slot++)
      memcpy((char *)layer_pages[layer] + slot * page_bytes + 256, (char *)pages + slot * page_bytes + layer * state_bytes,
             (size_t)state_bytes);
  }
  memset(pages, 0xFF, (size_t)(N_SLOTS * page_bytes));
  /* >>> rebind */
  replayssm_lent moved = REPLAYSSM_INIT(replayssm_lent);
  moved.kind = REPLAYSSM_COMPONENT_CHECKPOINT; /* the kinds that were lent at create, all of them */
  moved.layer_bases = layer_pages;             /* layers that were allocated one by one, at any distances */
  moved.offset_bytes = 256;                    /* what else a page holds in front */
  moved.slot_stride_bytes = page_bytes;
  check(replayssm_layers_rebind(e.mamba, &moved, 1)); /* nothing may be running on the pool; captured graphs are void */
  /* <<< rebind */
  for (int i = 0; i < 20; i++) {
    for (int t = 0; t < T_MAX; t++) tokens[t] = 7777 + 100 * i + t;
    decode(&e, &r, tokens, T_MAX, 1 + i % T_MAX);
  }
  expect_plain(&e, &r);

  expect_faults(&e, 0);
  destroy(&e); /* before the pages go */
  for (int layer = 0; layer < N_LAYERS; layer++) free(layer_pages[layer]);
  free(pages);
  puts("memory: ok");
  return 0;
}
