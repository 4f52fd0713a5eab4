/* Snippets of docs/INTEGRATION.md: how a prompt's state comes in. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "engine.h"

enum { N_PROMPT = 30 };

int main(void) {
  engine e;
  request a, b;
  int32_t tokens[64];
  for (int i = 0; i < 64; i++) tokens[i] = 7 * i + 3;
  make_parameters();
  create(&e);

  /* By extend. */
  start(&e, &a, 3, 2);
  const int32_t slot = a.slot, ring = a.ring;
  /* >>> extend */
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.flags = REPLAYSSM_BATCH_EXTEND; /* in every extend, and in the commit */
  batch.n_rows = 1;
  batch.tokens = N_PROMPT; /* any number; or cu_seqlens */
  batch.keep_tail = 4;     /* the last 4 tokens can be taken back afterwards; 0 if you never do that */
  batch.slots = ids(&slot);
  batch.rings = ids(&ring);
  forward(&e, &batch, tokens, N_PROMPT); /* calls replayssm_*_extend instead of replayssm_*_step */
  check(replayssm_commit(e.slots, &batch, NULL, NULL));
  /* <<< extend */
  append(&a, tokens, N_PROMPT);
  expect_plain(&e, &a);
  const replayssm_list tail = list_of(&a);
  const int32_t four = 4;
  check(replayssm_rewind(e.slots, &tail, &four, NULL, NULL));
  a.n -= 4;
  expect_plain(&e, &a);
  for (int i = 0; i < 30; i++) decode(&e, &a, tokens + i, 2, 1 + i % 2);
  expect_plain(&e, &a);

  /* From a chunk kernel's final state: here extend plays the chunk kernel, on another request. */
  static saved chunk;
  start(&e, &b, 5, 3);
  prompt(&e, &b, tokens, N_PROMPT);
  save(&e, &b, NULL, &chunk);
  start(&e, &a, 1, 0);
  const replayssm_list list = list_of(&a);
  float *final_state = chunk.states, *last_inputs = chunk.windows;
  /* >>> import */
  const int64_t n_prompt = N_PROMPT;
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.position = &n_prompt; /* tokens that are in the state already */
  check(replayssm_reset(e.slots, &list, &reset, NULL));

  replayssm_state state = REPLAYSSM_INIT(replayssm_state);
  state.dtype = REPLAYSSM_DTYPE_F32; /* BF16 and F16 are widened */
  state.orientation = REPLAYSSM_STATE_ROW_MAJOR; /* [headdim, dstate]; COL_MAJOR: [dstate, headdim] */
  for (int32_t layer = 0; layer < N_LAYERS; layer++) {
    state.layer = layer; /* or -1 and all layers in one call */
    state.data = final_state + layer * STATE_SIZE;
    check(replayssm_import(e.mamba, &list, NULL, &state, NULL));
    state.data = last_inputs + layer * WINDOW_SIZE; /* [channels, width - 1], oldest first */
    check(replayssm_import(e.conv, &list, NULL, &state, NULL));
  }
  /* <<< import */
  append(&a, tokens, N_PROMPT);
  expect_plain(&e, &a);
  for (int i = 0; i < 30; i++) decode(&e, &a, tokens + i, 2, 1 + i % 2);
  expect_plain(&e, &a);

  /* The same in place: the chunk kernel writes its fp32 state where the checkpoint lies. */
  start(&e, &a, 6, 1);
  const replayssm_list there = list_of(&a);
  /* >>> components */
  replayssm_component parts[8];
  int32_t n = 0;
  parts[0] = REPLAYSSM_INIT(replayssm_component); /* its struct_size is the element stride */
  check(replayssm_layers_components(e.mamba, parts, 8, &n));
  char *checkpoint = NULL;
  for (int32_t i = 0; i < n; i++) {
    if (parts[i].kind == REPLAYSSM_COMPONENT_CHECKPOINT) {
      /* Layer l of slot s begins at base + l * layer_stride_bytes + s * slot_stride_bytes. */
      checkpoint = (char *)parts[i].base + a.slot * parts[i].slot_stride_bytes;
    }
  }
  /* <<< components */
  REQUIRE(n == 5 && parts[0].kind == REPLAYSSM_COMPONENT_CHECKPOINT && parts[0].bytes == 4 * STATE_SIZE);
  for (int32_t layer = 0; layer < N_LAYERS; layer++) {
    memcpy(checkpoint + layer * parts[0].layer_stride_bytes, chunk.states + layer * STATE_SIZE, 4 * STATE_SIZE);
  }
  /* >>> in_place */
  replayssm_reset_args keep = REPLAYSSM_INIT(replayssm_reset_args);
  keep.position = &n_prompt;
  keep.keep_checkpoint = 1; /* the state that stands in the slot stays */
  keep.convert = 1;         /* it is fp32: turn it into the pool's format */
  check(replayssm_reset(e.slots, &there, &keep, NULL));
  replayssm_state windows = REPLAYSSM_INIT(replayssm_state);
  windows.dtype = REPLAYSSM_DTYPE_F32;
  windows.layer = -1;
  windows.data = last_inputs;
  check(replayssm_import(e.conv, &there, NULL, &windows, NULL)); /* convolution windows are always imported */
  /* <<< in_place */
  append(&a, tokens, N_PROMPT);
  expect_plain(&e, &a);
  for (int i = 0; i < 30; i++) decode(&e, &a, tokens + i, 2, 1 + i % 2);
  expect_plain(&e, &a);

  expect_faults(&e, 0);
  destroy(&e);
  puts("prompt: ok");
  return 0;
}
