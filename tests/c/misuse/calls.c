/* Every field of the calls of a model step and of a slot's life; what only the device can see.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "misuse.h"

#include <math.h>
#include <time.h>

static replayssm_status step(const replayssm_batch *batch, const replayssm_mamba2_args *args) {
  return replayssm_mamba2_step(mamba, 0, batch, args, NULL);
}

static replayssm_status conv_step(const replayssm_batch *batch, const replayssm_conv1d_args *args) {
  return replayssm_conv1d_step(conv, 0, batch, args, NULL);
}

#define BAD_BATCH(assignment, status, word) SPOIL(replayssm_batch, good_batch(), assignment, status, word, step(&d, &args))
#define BAD_ARGS(assignment, status, word) SPOIL(replayssm_mamba2_args, good_args(), assignment, status, word, step(&batch, &d))
#define BAD_CONV_ARGS(assignment, status, word) \
  SPOIL(replayssm_conv1d_args, good_conv_args(), assignment, status, word, conv_step(&batch, &d))
#define BAD_EXEC(assignment, status, word)                                                    \
  do {                                                                                        \
    SPOIL(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), assignment, status, word,           \
          replayssm_mamba2_step(mamba, 0, &batch, &args, &d));                                \
    SPOIL(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), assignment, status, word,           \
          replayssm_commit(slots, &batch, NULL, &d));                                         \
    SPOIL(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), assignment, status, word,           \
          replayssm_reset(slots, &list, NULL, &d));                                           \
  } while (0)
#define BAD_COMMIT(assignment, status, word)                                                                   \
  SPOIL(replayssm_commit_args, REPLAYSSM_INIT(replayssm_commit_args), assignment, status, word, \
        replayssm_commit(slots, &batch, &d, NULL))
/* What is wrong with a tensor is wrong in every tensor. */
#define BAD_TENSOR(BAD, field)                                               \
  do {                                                                       \
    BAD(field.dtype = 0, INVALID, "args." #field);                           \
    BAD(field.dtype = REPLAYSSM_DTYPE_I64, INVALID, "args." #field);               \
    BAD(field.dtype = 77, UNSUPPORTED, "args." #field);                      \
    BAD(field.reserved = 1, UNSUPPORTED, "args." #field);                    \
    BAD(field.data = ODD(data), INVALID, "args." #field ".data");            \
    BAD(field.stride_head = INT64_MAX, INVALID, "args." #field ".stride");   \
    BAD(field.stride_head = INT64_MIN, INVALID, "args." #field ".stride");   \
    BAD(field.stride_head = INT64_MAX / 4, INVALID, "args." #field ".stride"); \
  } while (0)
#define BAD_INPUT(BAD, field)                                                \
  do {                                                                       \
    BAD_TENSOR(BAD, field);                                                  \
    BAD(field.stride_row = INT64_MAX, INVALID, "args." #field ".stride");    \
    BAD(field.stride_token = INT64_MIN, INVALID, "args." #field ".stride");  \
    BAD(field.stride_token = INT64_MAX, INVALID, "args." #field ".stride");  \
  } while (0)

void calls(void) {
  replayssm_batch batch = good_batch();
  replayssm_mamba2_args args = good_args();
  replayssm_list list = good_list();
  static const int32_t cu_seqlens[3] = {0, 1, 2};
  WORKS(step(&batch, &args));

  FAILS(INVALID, "layer", replayssm_mamba2_step(mamba, LAYERS, &batch, &args, NULL));
  FAILS(INVALID, "layer", replayssm_mamba2_step(mamba, -1, &batch, &args, NULL));
  FAILS(INVALID, "layer", replayssm_mamba2_step(mamba, INT32_MAX, &batch, &args, NULL));

  BAD_BATCH(flags = 8, UNSUPPORTED, "batch.flags");
  BAD_BATCH(flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.flags");
  FAILS(INVALID, "batch.flags", replayssm_mamba2_extend(mamba, 0, &batch, &args, NULL));
  BAD_BATCH(n_rows = -1, INVALID, "batch.n_rows");
  BAD_BATCH(n_rows = INT32_MIN, INVALID, "batch.n_rows");
  BAD_BATCH(tokens = 5, INVALID, "batch.tokens");
  BAD_BATCH(tokens = -1, INVALID, "batch.tokens");
  BAD_BATCH(tokens = INT32_MAX, INVALID, "batch.tokens");
  BAD_BATCH(max_tokens = 1, INVALID, "batch.max_tokens");
  BAD_BATCH(max_tokens = -1, INVALID, "batch.max_tokens");
  BAD_BATCH(keep_tail = 1, INVALID, "batch.keep_tail");
  BAD_BATCH(reserved = 1, UNSUPPORTED, "batch.reserved");
  BAD_BATCH(cu_seqlens = cu_seqlens, INVALID, "batch.tokens");
  BAD_BATCH(cu_seqlens = ODD(cu_seqlens), INVALID, "batch.cu_seqlens");
  BAD_BATCH(generation = ODD(ids), INVALID, "batch.generation");
  BAD_BATCH(slots.data = NULL, INVALID, "batch.slots");
  BAD_BATCH(slots.data = ODD(ids), INVALID, "batch.slots");
  BAD_BATCH(slots.dtype = 0, INVALID, "batch.slots");
  BAD_BATCH(slots.dtype = REPLAYSSM_DTYPE_F32, INVALID, "batch.slots");
  BAD_BATCH(slots.dtype = 99, UNSUPPORTED, "batch.slots");
  BAD_BATCH(slots.stride = INT64_MAX, INVALID, "batch.slots");
  BAD_BATCH(slots.stride = INT64_MIN, INVALID, "batch.slots");
  BAD_BATCH(slots.reserved = 1, UNSUPPORTED, "batch.slots");
  batch.rings = good_ids(two_slots);
#define BAD_RINGS(assignment, status) SPOIL(replayssm_batch, batch, assignment, status, "batch.rings", step(&d, &args))
  BAD_RINGS(rings.data = ODD(ids), INVALID);
  BAD_RINGS(rings.dtype = REPLAYSSM_DTYPE_BF16, INVALID);
  BAD_RINGS(rings.dtype = -1, UNSUPPORTED);
  BAD_RINGS(rings.stride = INT64_MAX / 2, INVALID);
  BAD_RINGS(rings.reserved = 1, UNSUPPORTED);
  BAD_RINGS(rings.data = NULL; d.rings.reserved = 1, UNSUPPORTED);
  batch = good_batch();
#define BAD_PACKED(assignment, word)                                                                                    \
  do {                                                                                                                  \
    replayssm_batch d = good_batch();                                                                                   \
    d.tokens = 0, d.cu_seqlens = cu_seqlens, d.n_tokens = 2;                                                            \
    d.assignment;                                                                                                       \
    FAILS(INVALID, word, step(&d, &args));                                                                              \
  } while (0)
  BAD_PACKED(n_tokens = -1, "batch.n_tokens");
  BAD_PACKED(max_tokens = 5, "batch.max_tokens");
  BAD_PACKED(max_tokens = -1, "batch.max_tokens");
  BAD_PACKED(n_tokens = INT64_MAX, "args.");
  SPOIL(replayssm_batch, good_batch(), keep_tail = 9; d.flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.keep_tail",
        replayssm_mamba2_extend(mamba, 0, &d, &args, NULL));
  SPOIL(replayssm_batch, good_batch(), keep_tail = -1; d.flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.keep_tail",
        replayssm_mamba2_extend(mamba, 0, &d, &args, NULL));

  BAD_INPUT(BAD_ARGS, x);
  BAD_INPUT(BAD_ARGS, B);
  BAD_INPUT(BAD_ARGS, C);
  BAD_INPUT(BAD_ARGS, dt);
  BAD_INPUT(BAD_ARGS, z);
  BAD_INPUT(BAD_ARGS, out);
  BAD_TENSOR(BAD_ARGS, A);
  BAD_TENSOR(BAD_ARGS, dt_bias);
  BAD_TENSOR(BAD_ARGS, D);
  BAD_ARGS(x.data = NULL, INVALID, "args.x");
  BAD_ARGS(B.data = NULL, INVALID, "args.B");
  BAD_ARGS(C.data = NULL, INVALID, "args.C");
  BAD_ARGS(dt.data = NULL, INVALID, "args.dt");
  BAD_ARGS(A.data = NULL, INVALID, "args.A");
  BAD_ARGS(out.data = NULL, INVALID, "args.out");
  BAD_ARGS(x.dtype = REPLAYSSM_DTYPE_BF16, INVALID, "args.x.dtype");
  BAD_ARGS(B.dtype = REPLAYSSM_DTYPE_F16, INVALID, "args.B.dtype");
  BAD_ARGS(z.dtype = REPLAYSSM_DTYPE_BF16, INVALID, "args.z.dtype");
  BAD_ARGS(out.dtype = REPLAYSSM_DTYPE_BF16, INVALID, "args.out.dtype");
  BAD_ARGS(out.stride_head = 0, INVALID, "args.out.stride_head");
  BAD_ARGS(out.stride_token = DIM - 1, INVALID, "args.out.stride_token");
  BAD_ARGS(out.stride_row = 0, INVALID, "args.out.stride_row");
  BAD_ARGS(no_softplus = -1, UNSUPPORTED, "args.no_softplus");
  BAD_ARGS(D_per_element = 2, UNSUPPORTED, "args.D_per_element");
  BAD_ARGS(D_per_element = -1, UNSUPPORTED, "args.D_per_element");
  BAD_ARGS(reserved = 1, UNSUPPORTED, "args.reserved");

  BAD_INPUT(BAD_CONV_ARGS, x);
  BAD_INPUT(BAD_CONV_ARGS, out);
  BAD_TENSOR(BAD_CONV_ARGS, weight);
  BAD_TENSOR(BAD_CONV_ARGS, bias);
  BAD_CONV_ARGS(x.data = NULL, INVALID, "args.x");
  BAD_CONV_ARGS(out.data = NULL, INVALID, "args.out");
  BAD_CONV_ARGS(weight.data = NULL, INVALID, "args.weight");
  BAD_CONV_ARGS(out.stride_token = 0, INVALID, "args.out.stride_token");
  BAD_CONV_ARGS(no_silu = 2, UNSUPPORTED, "args.no_silu");
  /* In place where both have one dtype alone. */
  replayssm_conv1d_args in_place = good_conv_args();
  in_place.out = in_place.x;
  WORKS(conv_step(&batch, &in_place));
  replayssm_pool_desc desc = good_conv();
  replayssm_layers *to_bf16 = NULL;
  desc.out = REPLAYSSM_DTYPE_BF16;
  WORKS(replayssm_layers_create(slots, &desc, NULL, 0, &to_bf16));
  in_place.out.dtype = REPLAYSSM_DTYPE_BF16;
  FAILS(INVALID, "args.out is args.x itself", replayssm_conv1d_step(to_bf16, 0, &batch, &in_place, NULL));
  replayssm_layers_destroy(to_bf16);

  BAD_EXEC(flags = 1, UNSUPPORTED, "exec.flags");
  BAD_EXEC(stream = (replayssm_stream)(uintptr_t)64, REPLAYSSM_ERROR_WRONG_STREAM, "exec.stream");
  BAD_EXEC(n_parts = -1, INVALID, "exec.n_parts");
  BAD_EXEC(part = 1, INVALID, "exec.part");
  BAD_EXEC(part = -1, INVALID, "exec.part");
  BAD_EXEC(part = 3; d.n_parts = 3, INVALID, "exec.part");
  BAD_EXEC(part = INT32_MAX, INVALID, "exec.part");

  BAD_COMMIT(convention = 3, UNSUPPORTED, "commit_args.convention");
  BAD_COMMIT(convention = -1, UNSUPPORTED, "commit_args.convention");
  BAD_COMMIT(counts = ODD(ids), INVALID, "commit_args.counts");
  BAD_COMMIT(counts = ids; d.counts_stride = INT64_MAX, INVALID, "commit_args.counts_stride");
  BAD_COMMIT(counts = ids; d.counts_stride = INT64_MIN, INVALID, "commit_args.counts_stride");
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  BAD_COMMIT(counts = ids, INVALID, "commit_args.counts");
}

#define BAD_DELTA_ARGS(assignment, status, word) \
  SPOIL(replayssm_delta_args, good_delta_args(), assignment, status, word, replayssm_delta_step(delta, 0, &batch, &d, NULL))

void delta_calls(void) {
  replayssm_batch batch = good_batch();
  replayssm_delta_args args = good_delta_args();
  const float nan = NAN;
  WORKS(replayssm_delta_step(delta, 0, &batch, &args, NULL));
  FAILS(INVALID, "layer", replayssm_delta_step(delta, LAYERS, &batch, &args, NULL));
  FAILS(INVALID, "layer", replayssm_delta_step(delta, INT32_MIN, &batch, &args, NULL));
  FAILS(INVALID, "batch.flags", replayssm_delta_extend(delta, 0, &batch, &args, NULL));
  SPOIL(replayssm_batch, good_batch(), flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.flags",
        replayssm_delta_step(delta, 0, &d, &args, NULL));
  SPOIL(replayssm_batch, good_batch(), tokens = 5, INVALID, "batch.tokens", replayssm_delta_step(delta, 0, &d, &args, NULL));

  BAD_INPUT(BAD_DELTA_ARGS, q);
  BAD_INPUT(BAD_DELTA_ARGS, k);
  BAD_INPUT(BAD_DELTA_ARGS, v);
  BAD_INPUT(BAD_DELTA_ARGS, g);
  BAD_INPUT(BAD_DELTA_ARGS, beta);
  BAD_INPUT(BAD_DELTA_ARGS, out);
  BAD_TENSOR(BAD_DELTA_ARGS, A_log);
  BAD_TENSOR(BAD_DELTA_ARGS, dt_bias);
  BAD_DELTA_ARGS(q.data = NULL, INVALID, "args.q");
  BAD_DELTA_ARGS(k.data = NULL, INVALID, "args.k");
  BAD_DELTA_ARGS(v.data = NULL, INVALID, "args.v");
  BAD_DELTA_ARGS(g.data = NULL, INVALID, "args.g");
  BAD_DELTA_ARGS(beta.data = NULL, INVALID, "args.beta");
  BAD_DELTA_ARGS(out.data = NULL, INVALID, "args.out");
  BAD_DELTA_ARGS(q.dtype = REPLAYSSM_DTYPE_BF16, INVALID, "args.q.dtype");
  BAD_DELTA_ARGS(k.dtype = REPLAYSSM_DTYPE_F16, INVALID, "args.k.dtype");
  BAD_DELTA_ARGS(v.dtype = REPLAYSSM_DTYPE_BF16, INVALID, "args.v.dtype");
  BAD_DELTA_ARGS(out.dtype = REPLAYSSM_DTYPE_F16, INVALID, "args.out.dtype");
  BAD_DELTA_ARGS(out.stride_head = 0, INVALID, "args.out.stride_head");
  BAD_DELTA_ARGS(out.stride_token = DIM - 1, INVALID, "args.out.stride_token");
  BAD_DELTA_ARGS(out.stride_row = 0, INVALID, "args.out.stride_row");

  BAD_DELTA_ARGS(gate = 3, UNSUPPORTED, "args.gate");
  BAD_DELTA_ARGS(gate = -1, UNSUPPORTED, "args.gate");
  BAD_DELTA_ARGS(A_log.data = NULL, INVALID, "args.A_log is absent");
  BAD_DELTA_ARGS(gate = REPLAYSSM_GATE_LOG_DECAY, INVALID, "args.A_log is given");
  BAD_DELTA_ARGS(gate = REPLAYSSM_GATE_LOG_DECAY; d.A_log.data = NULL, INVALID, "args.dt_bias is given");
  BAD_DELTA_ARGS(gate = REPLAYSSM_GATE_LOWER_BOUND, INVALID, "args.lower_bound");
  BAD_DELTA_ARGS(gate = REPLAYSSM_GATE_LOWER_BOUND; d.lower_bound = 1.0f, INVALID, "args.lower_bound");
  BAD_DELTA_ARGS(gate = REPLAYSSM_GATE_LOWER_BOUND; d.lower_bound = nan, INVALID, "args.lower_bound");
  BAD_DELTA_ARGS(lower_bound = -1.0f, INVALID, "args.lower_bound");
  BAD_DELTA_ARGS(lower_bound = nan, INVALID, "args.lower_bound");
  BAD_DELTA_ARGS(scale = nan, INVALID, "args.scale");
  BAD_DELTA_ARGS(l2norm_eps = nan, INVALID, "args.l2norm_eps");
  BAD_DELTA_ARGS(l2norm_eps = -1e-6f, INVALID, "args.l2norm_eps");
  BAD_DELTA_ARGS(no_l2norm = 2, UNSUPPORTED, "args.no_l2norm");
  BAD_DELTA_ARGS(no_l2norm = -1, UNSUPPORTED, "args.no_l2norm");
  BAD_DELTA_ARGS(beta_processed = 2, UNSUPPORTED, "args.beta_processed");
  BAD_DELTA_ARGS(beta_processed = -1, UNSUPPORTED, "args.beta_processed");
  BAD_DELTA_ARGS(reserved = 1, UNSUPPORTED, "args.reserved");
  args.gate = REPLAYSSM_GATE_LOWER_BOUND, args.lower_bound = -5.0f;
  WORKS(replayssm_delta_step(delta, 0, &batch, &args, NULL));

  /* GDN has one decay per head, and a 16-bit state has no room for the fp32 one that a reset would convert. */
  replayssm_pool_desc desc = good_delta();
  replayssm_layers *gdn = NULL;
  desc.family = REPLAYSSM_FAMILY_GDN;
  desc.format = REPLAYSSM_FORMAT_BF16;
  WORKS(replayssm_layers_create(slots, &desc, NULL, 0, &gdn));
  FAILS(INVALID, "args.gate is REPLAYSSM_GATE_LOWER_BOUND", replayssm_delta_step(gdn, 0, &batch, &args, NULL));
  args = good_delta_args();
  args.g = tensor(data + 2048, 2 * HEADS, HEADS, 1);
  WORKS(replayssm_delta_step(gdn, 0, &batch, &args, NULL));
  args.gate = REPLAYSSM_GATE_LOG_DECAY, args.A_log.data = NULL, args.dt_bias.data = NULL;
  WORKS(replayssm_delta_step(gdn, 0, &batch, &args, NULL));
  replayssm_list list = good_list();
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  static const int64_t positions[2] = {5, 6};
  reset.position = positions, reset.keep_checkpoint = 1, reset.convert = 1;
  FAILS(INVALID, "reset_args.convert", replayssm_reset(slots, &list, &reset, NULL));
  CHECK(position_of(0) == 0 && position_of(1) == 0);
  replayssm_layers_destroy(gdn);
  WORKS(replayssm_reset(slots, &list, &reset, NULL));
  CHECK(position_of(0) == 5 && position_of(1) == 6);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
}

#define BAD_LIST(assignment, status, word) \
  SPOIL(replayssm_list, good_list(), assignment, status, word, replayssm_reset(slots, &d, NULL, NULL))
#define BAD_RESET(assignment, status, word)                                                                  \
  SPOIL(replayssm_reset_args, REPLAYSSM_INIT(replayssm_reset_args), assignment, status, word, \
        replayssm_reset(slots, &list, &d, NULL))
#define BAD_STATE(assignment, status, word)                                                                          \
  do {                                                                                                               \
    SPOIL(replayssm_state, good_state(), assignment, status, word, replayssm_export(mamba, &list, NULL, &d, NULL));  \
    SPOIL(replayssm_state, good_state(), assignment, status, word, replayssm_import(conv, &list, NULL, &d, NULL));   \
  } while (0)

int64_t position_of(int32_t ring) {
  replayssm_list l = good_list();
  replayssm_cursor cursor;
  l.n = 1;
  l.slots = good_ids(&ring);
  WORKS(replayssm_read_cursors(slots, &l, &cursor, NULL));
  return cursor.position;
}

void lists(void) {
  replayssm_list list = good_list();
  replayssm_state state = good_state();
  replayssm_cursor cursors[2];
  static const int32_t beyond_slots[2] = {0, SLOTS}, beyond_rings[2] = {0, RINGS}, skipped[2] = {-1, INT32_MIN};
  static const int64_t positions[2] = {5, 6}, negative[2] = {0, -1}, too_large[2] = {0, ((int64_t)1 << 60) + 1};
  BAD_LIST(n = -1, INVALID, "list.n");
  BAD_LIST(n = 257; d.slots.data = ids, INVALID, "list.n");
  BAD_LIST(n = INT32_MAX; d.slots.data = ids, INVALID, "list.n");
  BAD_LIST(place = 2, UNSUPPORTED, "list.place");
  BAD_LIST(reserved = 1, UNSUPPORTED, "list.reserved");
  BAD_LIST(slots.data = NULL, INVALID, "list.slots");
  BAD_LIST(slots.data = ODD(ids), INVALID, "list.slots");
  BAD_LIST(slots.dtype = REPLAYSSM_DTYPE_F32, INVALID, "list.slots");
  BAD_LIST(slots.data = beyond_slots, INVALID, "list.slots[1]");
  BAD_LIST(rings.reserved = 1, UNSUPPORTED, "list.rings.reserved");
  BAD_LIST(rings = good_ids(beyond_rings), INVALID, "list.rings[1]");
  BAD_LIST(slots = good_ids(beyond_rings), INVALID, "list.rings[1]");

  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  BAD_RESET(keep_checkpoint = 2, UNSUPPORTED, "reset_args.keep_checkpoint");
  BAD_RESET(convert = 1, INVALID, "reset_args.convert");
  BAD_RESET(convert = 5; d.keep_checkpoint = 1, UNSUPPORTED, "reset_args.convert");
  BAD_RESET(reserved = 1, UNSUPPORTED, "reset_args.reserved");
  BAD_RESET(position = ODD(positions), INVALID, "reset_args.position");
  BAD_RESET(position = negative, INVALID, "reset_args.position[1]");
  BAD_RESET(position = too_large, INVALID, "reset_args.position[1]");
  BAD_RESET(generation = ODD(ids), INVALID, "reset_args.generation");
  BAD_RESET(seed = ODD(positions), INVALID, "reset_args.seed");
  /* Nothing happened to entry 0, which was right. */
  CHECK(position_of(0) == 0);

  BAD_STATE(dtype = 0, INVALID, "state.dtype");
  BAD_STATE(dtype = 50, UNSUPPORTED, "state.dtype");
  BAD_STATE(orientation = 2, UNSUPPORTED, "state.orientation");
  BAD_STATE(layer = LAYERS, INVALID, "state.layer");
  BAD_STATE(layer = -2, INVALID, "state.layer");
  BAD_STATE(data = NULL, INVALID, "state.data");
  BAD_STATE(data = ODD(out), INVALID, "state.data");
  BAD_STATE(stride_row = -1, INVALID, "state.stride_row");
  BAD_STATE(stride_row = 1, INVALID, "state.stride_row");
  BAD_STATE(stride_row = INT64_MAX, INVALID, "state.stride_row");
  BAD_STATE(stride_head = INT64_MAX, INVALID, "state.stride_head");
  BAD_STATE(stride_head = -8, INVALID, "state.stride_head");
  BAD_STATE(stride_layer = INT64_MAX / 2, INVALID, "state.stride_layer");
  BAD_STATE(stride_entry = INT64_MIN, INVALID, "state.stride_entry");
  BAD_STATE(stride_entry = 1, INVALID, "state.stride_entry");
  FAILS(INVALID, "position[1]", replayssm_import(mamba, &list, negative, &state, NULL));
  FAILS(INVALID, "position is", replayssm_import(mamba, &list, (const int64_t *)ODD(positions), &state, NULL));
  FAILS(INVALID, "at is", replayssm_export(mamba, &list, (const int64_t *)ODD(positions), &state, NULL));

  memset(cursors, 0x5A, sizeof cursors);
  FAILS(INVALID, "dst is NULL", replayssm_read_cursors(slots, &list, NULL, NULL));
  FAILS(INVALID, "dst is", replayssm_read_cursors(slots, &list, (replayssm_cursor *)ODD(cursors), NULL));
  list.slots.data = beyond_rings;
  FAILS(INVALID, "list.rings[1]", replayssm_read_cursors(slots, &list, cursors, NULL));
  for (size_t i = 0; i < sizeof cursors; i++) CHECK(((unsigned char *)cursors)[i] == 0x5A);
  list.slots.data = skipped;
  WORKS(replayssm_read_cursors(slots, &list, cursors, NULL));
  for (size_t i = 0; i < sizeof cursors; i++) CHECK(((unsigned char *)cursors)[i] == 0);
  list = good_list();

  /* Rewinding: three tokens are committed and one may be taken back. */
  int32_t n[2] = {0, 4}, done[2] = {77, 77};
  const int32_t below[2] = {0, -1};
  replayssm_batch batch = good_batch();
  replayssm_mamba2_args args = good_args();
  replayssm_conv1d_args conv_args = good_conv_args();
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  WORKS(step(&batch, &args));
  WORKS(replayssm_mamba2_step(mamba, 1, &batch, &args, NULL));
  WORKS(conv_step(&batch, &conv_args));
  WORKS(replayssm_conv1d_step(conv, 1, &batch, &conv_args, NULL));
  WORKS(replayssm_commit(slots, &batch, NULL, NULL));
  CHECK(position_of(0) == 2 && position_of(1) == 2);
  FAILS(REPLAYSSM_ERROR_OUT_OF_RANGE, "n[1] is 4", replayssm_rewind(slots, &list, n, NULL, NULL));
  FAILS(INVALID, "n[1]", replayssm_rewind(slots, &list, below, done, NULL));
  FAILS(INVALID, "n is NULL", replayssm_rewind(slots, &list, NULL, done, NULL));
  FAILS(INVALID, "n is", replayssm_rewind(slots, &list, (const int32_t *)ODD(n), done, NULL));
  FAILS(INVALID, "done", replayssm_rewind(slots, &list, n, (int32_t *)ODD(done), NULL));
  CHECK(done[0] == 77 && done[1] == 77 && position_of(0) == 2 && position_of(1) == 2);
  n[0] = 1;
  WORKS(replayssm_rewind(slots, &list, n, done, NULL));
  CHECK(done[0] == 1 && done[1] == 0 && position_of(0) == 1 && position_of(1) == 2);
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_REWIND && report.count == 1 && report.first_row == 1);
  /* In parts, a rewind happens once, and all of it. */
  replayssm_exec exec = REPLAYSSM_INIT(replayssm_exec);
  n[0] = 1, n[1] = 2;
  exec.n_parts = 2;
  for (exec.part = 0; exec.part < 2; exec.part++) WORKS(replayssm_rewind(slots, &list, n, NULL, &exec));
  CHECK(position_of(0) == 0 && position_of(1) == 0);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
}

/* Flushes, snapshots and copies that can never be right. */
void copies(void) {
  static const int32_t zero[1] = {0}, one[1] = {1}, far[1] = {99};
  static const int64_t low[1] = {-3}, at[1] = {0};
  static const uint32_t generation[1] = {5};
  replayssm_list src = good_list(), dst = good_list();
  src.n = dst.n = 1;
  src.slots.data = zero, dst.slots.data = one;
  WORKS(replayssm_reset(slots, &src, NULL, NULL));
  WORKS(replayssm_reset(slots, &dst, NULL, NULL));

  replayssm_flush_args flush = REPLAYSSM_INIT(replayssm_flush_args);
  WORKS(replayssm_flush(slots, &src, &flush, NULL));
  flush.later = 1;
  FAILS(INVALID, "flush_args.position", replayssm_flush(slots, &src, &flush, NULL));
  flush.later = 2;
  FAILS(UNSUPPORTED, "flush_args.later", replayssm_flush(slots, &src, &flush, NULL));
  flush.later = 0, flush.position = low;
  FAILS(INVALID, "flush_args.position[0] is -3", replayssm_flush(slots, &src, &flush, NULL));
  flush.position = (const int64_t *)ODD(at);
  FAILS(INVALID, "flush_args.position", replayssm_flush(slots, &src, &flush, NULL));

  replayssm_copy_args copy = REPLAYSSM_INIT(replayssm_copy_args);
  WORKS(replayssm_copy(slots, &src, &dst, NULL, NULL));
  copy.kind = 6;
  FAILS(UNSUPPORTED, "copy_args.kind", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.kind = REPLAYSSM_COPY_FORK, copy.position = at;
  FAILS(INVALID, "copy_args.position", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.kind = REPLAYSSM_COPY_LOAD, copy.position = NULL;
  FAILS(INVALID, "copy_args.position is NULL", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.position = low;
  FAILS(INVALID, "copy_args.position[0]", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.kind = REPLAYSSM_COPY_STORE;
  FAILS(INVALID, "copy_args.position[0]", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.position = NULL, copy.generation = generation;
  FAILS(INVALID, "copy_args.generation", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.kind = REPLAYSSM_COPY_SWAP;
  FAILS(INVALID, "copy_args.generation", replayssm_copy(slots, &src, &dst, &copy, NULL));
  copy.generation = NULL;
  FAILS(INVALID, "dst.slots[0] is 0", replayssm_copy(slots, &src, &src, &copy, NULL));
  replayssm_list both = good_list();
  FAILS(INVALID, "dst is", replayssm_copy(slots, &src, &both, &copy, NULL));
  dst.slots.data = far;
  FAILS(INVALID, "dst.slots[0] is 99", replayssm_copy(slots, &src, &dst, &copy, NULL));
  FAILS(INVALID, "src.slots[0] is 99", replayssm_copy(slots, &dst, &src, &copy, NULL));
  dst.slots.data = one;
  /* A source of many targets, but no target of many sources. */
  static const int32_t twice[2] = {1, 1};
  both.slots.data = twice;
  replayssm_list others = good_list();
  FAILS(INVALID, "dst.slots[1]", replayssm_copy(slots, &others, &both, NULL, NULL));

  /* Pools with ids of their own. */
  replayssm_layers *const named[2] = {mamba, mamba};
  const replayssm_ids ids[2] = {good_ids(zero), good_ids(zero)};
  src.n_pools = 1, src.pools = (const replayssm_layers *const *)named, src.pool_slots = ids;
  WORKS(replayssm_flush(slots, &src, NULL, NULL));
  src.n_pools = 2;
  FAILS(INVALID, "list.pools[1]", replayssm_flush(slots, &src, NULL, NULL));
  src.n_pools = -1;
  FAILS(INVALID, "list.pools", replayssm_flush(slots, &src, NULL, NULL));
  src.n_pools = 65;
  FAILS(INVALID, "list.pools", replayssm_flush(slots, &src, NULL, NULL));
  src.n_pools = 1, src.pools = NULL;
  FAILS(INVALID, "list.pools is NULL", replayssm_flush(slots, &src, NULL, NULL));
  src.pools = (const replayssm_layers *const *)named, src.pool_slots = NULL;
  FAILS(INVALID, "list.pool_slots is NULL", replayssm_flush(slots, &src, NULL, NULL));
  src.pool_slots = ids, src.rings = good_ids(zero), src.slots.data = NULL;
  FAILS(INVALID, "list.slots", replayssm_flush(slots, &src, NULL, NULL));
  src.slots.data = zero, src.pools_reserved = 1;
  FAILS(UNSUPPORTED, "list.pools_reserved", replayssm_flush(slots, &src, NULL, NULL));
  src.pools_reserved = 0;
  replayssm_cursor cursor;
  FAILS(INVALID, "list.n_pools", replayssm_read_cursors(slots, &src, &cursor, NULL));

  replayssm_batch batch = good_batch();
  replayssm_snapshot_args snapshot = good_snapshot();
  WORKS(replayssm_snapshot(slots, &batch, &snapshot, NULL));
  snapshot.at = NULL;
  FAILS(INVALID, "snapshot_args.at", replayssm_snapshot(slots, &batch, &snapshot, NULL));
  snapshot = good_snapshot();
  snapshot.dst.data = NULL;
  FAILS(INVALID, "snapshot_args.dst", replayssm_snapshot(slots, &batch, &snapshot, NULL));
  snapshot.dst.reserved = 1;
  FAILS(UNSUPPORTED, "snapshot_args.dst.reserved", replayssm_snapshot(slots, &batch, &snapshot, NULL));
  snapshot = good_snapshot();
  snapshot.n_pools = 1;
  FAILS(INVALID, "snapshot_args.pools", replayssm_snapshot(slots, &batch, &snapshot, NULL));
  FAILS(INVALID, "replayssm_snapshot_args is NULL", replayssm_snapshot(slots, &batch, NULL, NULL));
}

/* What the host cannot see: bits that are read afterwards, and no slot is harmed. */
void device_faults(void) {
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  replayssm_batch batch = good_batch();
  replayssm_mamba2_args args = good_args();
  replayssm_list list = good_list();
  replayssm_state state = good_state();
  static const int32_t beyond[2] = {0, SLOTS}, huge[2] = {INT32_MAX, 1}, negative[2] = {-1, -5};
  static const int64_t huge64[2] = {INT64_MAX, INT64_MIN};
  static const int32_t falling[3] = {2, 1, 4}, outside[3] = {0, 2, 40}, long_row[3] = {0, 4, 4};
  static const int32_t counts[2] = {3, -1};
  static const int64_t not_held[2] = {1, -1}, bad_position[2] = {-4, INT64_MAX};

  WORKS(replayssm_check(slots, 1, &report));
#define FAULT(wanted, times, id, row)                                                                     \
  do {                                                                                                    \
    WORKS(replayssm_check(slots, 1, &report));                                                            \
    CHECK(report.bits == (wanted));                                                                       \
    CHECK(report.count == (times) && report.first_slot == (id) && report.first_row == (row));             \
    CHECK(position_of(0) == 0 && position_of(1) == 0);                                                    \
    WORKS(replayssm_check(slots, 0, &report));                                                            \
    CHECK(report.bits == 0 && report.count == 0);                                                         \
  } while (0)

  batch.slots = good_ids(beyond);
  batch.tokens = 1;
  memset(out, 0x5A, sizeof out);
  WORKS(step(&batch, &args));
  CHECK(out[2 * HEADS * DIM] == 0.0f); /* the faulty row's output is zero */
  FAULT(REPLAYSSM_FAULT_ID, 1, SLOTS, 1); /* one per row, the slot first */
  batch.slots = good_ids(huge);
  WORKS(step(&batch, &args));
  FAULT(REPLAYSSM_FAULT_ID, 1, INT32_MAX, 0);
  batch.slots.data = huge64;
  batch.slots.dtype = REPLAYSSM_DTYPE_I64;
  WORKS(step(&batch, &args));
  FAULT(REPLAYSSM_FAULT_ID, 1, INT64_MAX, 0);
  batch.slots = good_ids(negative);
  WORKS(step(&batch, &args));
  WORKS(replayssm_commit(slots, &batch, NULL, NULL));
  FAULT(0, 0, report.first_slot, report.first_row); /* padding is no fault */

  batch = good_batch();
  batch.tokens = 0;
  batch.n_tokens = 4;
  batch.max_tokens = 3;
  const int32_t *lengths[3] = {falling, outside, long_row};
  const int64_t rows[3] = {0, 1, 0};
  for (int i = 0; i < 3; i++) {
    batch.cu_seqlens = lengths[i];
    WORKS(step(&batch, &args));
    FAULT(REPLAYSSM_FAULT_LENGTH, 1, rows[i], rows[i]);
  }

  /* Counts are clamped: 3 of 1 token, -1 of 1 token. */
  batch = good_batch();
  batch.tokens = 1;
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  commit.counts = counts;
  WORKS(step(&batch, &args));
  WORKS(replayssm_mamba2_step(mamba, 1, &batch, &args, NULL));
  WORKS(replayssm_commit(slots, &batch, &commit, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_COUNT && report.count == 2);
  CHECK(position_of(0) == 1 && position_of(1) == 0);

  /* A position that is not held leaves its part of the buffer alone. */
  memset(out, 0x5A, sizeof out);
  WORKS(replayssm_export(mamba, &list, not_held, &state, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_POSITION && report.first_row == 1);
  float poison;
  memset(&poison, 0x5A, sizeof poison);
  CHECK(out[0] != poison && out[LAYERS * HEADS * DIM * STATE] == poison);

  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  list.place = REPLAYSSM_WHERE_DEVICE;
  list.slots = good_ids(beyond);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK((report.bits & REPLAYSSM_FAULT_ID) && report.first_slot == SLOTS && report.first_row == 1);
  list.slots = good_ids(two_slots);
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.position = bad_position;
  WORKS(replayssm_reset(slots, &list, &reset, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_POSITION);
  CHECK(position_of(0) == 0 && position_of(1) == 0);

  /* A list of 257 is welcome on the device. */
  list.n = 257;
  list.slots = good_ids(ids);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  /* An extend that is not committed: any other call on the slot is a fault, and a reset heals it. */
  batch = good_batch();
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  WORKS(replayssm_mamba2_extend(mamba, 0, &batch, &args, NULL));
  batch.flags = 0;
  WORKS(step(&batch, &args));
  CHECK(out[0] == 0.0f);
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_POSITION && report.first_layer == 0);
  list = good_list();
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  WORKS(step(&batch, &args));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == 0);
}

/* Text of every capacity: never a byte behind it, always a final zero. */
static void texts(void) {
  static char whole[4096], part[4096];
  const replayssm_layers *pools[] = {mamba, conv, delta};
  for (size_t p = 0; p < sizeof pools / sizeof pools[0]; p++) {
    memset(whole, 0x5A, sizeof whole);
    WORKS(replayssm_explain(pools[p], 3, 4, whole, sizeof whole));
    const size_t length = strlen(whole);
    CHECK(length > 200 && length < sizeof whole && whole[length - 1] == '\n' && whole[length + 1] == 0x5A);
    for (size_t i = 0; i < length; i++) CHECK(whole[i] == '\n' || (whole[i] >= ' ' && whole[i] <= '~'));
    WORKS(replayssm_explain(pools[p], 3, 4, part, length + 1));
    CHECK(strcmp(whole, part) == 0);
    for (size_t capacity = 1; capacity <= length; capacity += capacity < 8 || capacity > length - 8 ? 1 : 13) {
      memset(part, 0x5A, sizeof part);
      FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, "capacity is", replayssm_explain(pools[p], 3, 4, part, capacity));
      CHECK(strlen(part) == capacity - 1 && memcmp(part, whole, capacity - 1) == 0 && part[capacity] == 0x5A);
    }
    char needed[64];
    snprintf(needed, sizeof needed, "capacity is 0; at least %zu", length + 1);
    FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, needed, replayssm_explain(pools[p], 3, 4, NULL, 0));
    FAILS(INVALID, "text is NULL", replayssm_explain(pools[p], 3, 4, NULL, 1));
    FAILS(INVALID, "batch is 0", replayssm_explain(pools[p], 0, 4, part, sizeof part));
    FAILS(INVALID, "batch is -1", replayssm_explain(pools[p], -1, 4, part, sizeof part));
    FAILS(INVALID, "tokens is 0", replayssm_explain(pools[p], 3, 0, part, sizeof part));
    FAILS(INVALID, "tokens is 5", replayssm_explain(pools[p], 3, 5, part, sizeof part));
    FAILS(INVALID, "tokens is 2147483647", replayssm_explain(pools[p], 3, INT32_MAX, part, sizeof part));
    WORKS(replayssm_explain(pools[p], INT32_MAX, 1, whole, sizeof whole));
  }
  const replayssm_pool_desc d = good_mamba();
  WORKS(replayssm_supports(context, &d, 0));
  WORKS(replayssm_supports(context, &d, 256));
  FAILS(INVALID, "max_step_tokens is -1", replayssm_supports(context, &d, -1));
  FAILS(UNSUPPORTED, "max_step_tokens is 257", replayssm_supports(context, &d, 257));
  FAILS(UNSUPPORTED, "max_step_tokens", replayssm_supports(context, &d, INT32_MAX));
}

/* Plans and blobs. The blobs themselves are tested where more is known of them. */
static void plans_and_blobs(void) {
  static unsigned char blob[1 << 20];
  const replayssm_slots_desc s = good_slots();
  const replayssm_pool_desc p = good_mamba();
  replayssm_plan_info info = REPLAYSSM_INIT(replayssm_plan_info);
  replayssm_component components[8];
  uint64_t bytes = 77;
  uint32_t generation = 40;
  int32_t n = 77;
  FAILS(INVALID, "n_pools is -1", replayssm_plan(&s, &p, -1, NULL, &info));
  FAILS(INVALID, "n_pools is 4097", replayssm_plan(&s, &p, 4097, NULL, &info));
  FAILS(INVALID, "replayssm_pool_desc", replayssm_plan(&s, NULL, 1, NULL, &info));
  FAILS(INVALID, "replayssm_slots_desc", replayssm_plan(NULL, &p, 1, NULL, &info));
  FAILS(INVALID, "replayssm_plan_info", replayssm_plan(&s, &p, 1, NULL, NULL));
  CHECK(info.checkpoint_bytes == 0);
  WORKS(replayssm_plan(&s, &p, 1, NULL, &info));
  CHECK(info.checkpoint_bytes > 0 && info.slots_in_budget == -1);
  memset(components, 0x5A, sizeof components);
  FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, "capacity is 4; at least 5", replayssm_plan_components(&s, &p, components, 4, &n));
  CHECK(n == 5);
  FAILS(INVALID, "n is NULL", replayssm_plan_components(&s, &p, components, 8, NULL));
  for (size_t i = 0; i < sizeof components; i++) CHECK(((unsigned char *)components)[i] == 0x5A);

  replayssm_list l = good_list();
  l.n = 1;
  FAILS(INVALID, "bytes is NULL", replayssm_save_bytes(slots, REPLAYSSM_SAVE_LIVE, NULL));
  FAILS(UNSUPPORTED, "kind is -1", replayssm_save_bytes(slots, -1, &bytes));
  CHECK(bytes == 77);
  WORKS(replayssm_save_bytes(slots, REPLAYSSM_SAVE_LIVE, &bytes));
  CHECK(bytes > 1000 && bytes < sizeof blob);
  memset(blob, 0x5A, sizeof blob);
  FAILS(UNSUPPORTED, "kind is 99", replayssm_save(slots, &l, 99, blob, sizeof blob, NULL));
  FAILS(INVALID, "blob is NULL", replayssm_save(slots, &l, REPLAYSSM_SAVE_LIVE, NULL, sizeof blob, NULL));
  FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, "capacity is", replayssm_save(slots, &l, REPLAYSSM_SAVE_LIVE, blob, bytes - 1, NULL));
  for (size_t i = 0; i < sizeof blob; i++) CHECK(blob[i] == 0x5A);
#define BAD_PLACE(assignment, word)                                                                 \
  do {                                                                                              \
    replayssm_list bad = l;                                                                         \
    bad.assignment;                                                                                 \
    FAILS(INVALID, word, replayssm_save(slots, &bad, REPLAYSSM_SAVE_LIVE, blob, sizeof blob, NULL)); \
    FAILS(INVALID, word, replayssm_restore(slots, &bad, blob, bytes, NULL, NULL));                  \
  } while (0)
  const int32_t none[1] = {-1}, high[1] = {SLOTS};
  BAD_PLACE(n = 0, "list.n is 0");
  BAD_PLACE(n = 2, "list.n is 2");
  BAD_PLACE(place = REPLAYSSM_WHERE_DEVICE, "list.place");
  BAD_PLACE(slots = good_ids(none), "list.slots[0] is -1");
  BAD_PLACE(slots = good_ids(high), "list.slots[0] is 4");
  BAD_PLACE(rings = good_ids(high), "list.rings[0] is 4");
  replayssm_exec exec = REPLAYSSM_INIT(replayssm_exec);
  exec.n_parts = 2;
  FAILS(INVALID, "exec.n_parts", replayssm_save(slots, &l, REPLAYSSM_SAVE_LIVE, blob, sizeof blob, &exec));
  WORKS(replayssm_save(slots, &l, REPLAYSSM_SAVE_LIVE, blob, sizeof blob, NULL));
  CHECK(blob[bytes] == 0x5A);
  FAILS(INVALID, "blob is NULL", replayssm_restore(slots, &l, NULL, bytes, NULL, NULL));
  FAILS(REPLAYSSM_ERROR_BAD_BLOB, "bytes is 18446744073709551615", replayssm_restore(slots, &l, blob, UINT64_MAX, NULL, NULL));
  FAILS(REPLAYSSM_ERROR_BAD_BLOB, "bytes is 0", replayssm_restore(slots, &l, blob, 0, NULL, NULL));
  FAILS(REPLAYSSM_ERROR_BAD_BLOB, "bytes is", replayssm_restore(slots, &l, blob, bytes - 1, NULL, NULL));
  replayssm_restore_args args = REPLAYSSM_INIT(replayssm_restore_args);
  args.reserved = 1;
  FAILS(UNSUPPORTED, "restore_args.reserved", replayssm_restore(slots, &l, blob, bytes, &args, NULL));
  args.reserved = 0;
  args.generation = (const uint32_t *)ODD(&generation);
  FAILS(INVALID, "restore_args.generation", replayssm_restore(slots, &l, blob, bytes, &args, NULL));
  args.generation = &generation;
  WORKS(replayssm_restore(slots, &l, blob, bytes, &args, NULL));
  replayssm_cursor cursor;
  WORKS(replayssm_read_cursors(slots, &l, &cursor, NULL));
  CHECK(cursor.generation == 40);
}

/* Giving back many ids takes time in proportion. */
static void many_ids(void) {
  const int many = short_run ? 1 << 12 : 1 << 18;
  replayssm_slots_desc d = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_slots *made = NULL;
  int32_t *taken = malloc((size_t)many * sizeof *taken);
  struct timespec begin, end;
  d.n_slots = many;
  WORKS(replayssm_slots_create(context, &d, &made));
  WORKS(replayssm_acquire(made, many, taken, NULL));
  clock_gettime(CLOCK_MONOTONIC, &begin);
  taken[0] = taken[many - 1];
  FAILS(INVALID, "an acquired id, named once", replayssm_release(made, many, taken));
  taken[0] = 0;
  WORKS(replayssm_release(made, many, taken));
  clock_gettime(CLOCK_MONOTONIC, &end);
  CHECK(end.tv_sec - begin.tv_sec < 5);
  WORKS(replayssm_acquire(made, many, taken, NULL));
  CHECK(taken[0] == many - 1 && taken[many - 1] == 0);
  replayssm_slots_destroy(made);
  free(taken);
}

/* Saved slots of more than an address space: lent memory, which nothing touches at create, is as large as its owner says. */
static void blobs_too_large(void) {
  enum { POOLS = 7, COMPONENTS = 8 };
  replayssm_slots_desc d = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc);
  replayssm_component components[COMPONENTS];
  replayssm_lent lent[COMPONENTS];
  replayssm_slots *made = NULL;
  replayssm_layers *pools[POOLS];
  uint64_t bytes = 77;
  int32_t n = 0;
  d.n_slots = 1, d.window = 256;
  p.family = REPLAYSSM_FAMILY_KDA, p.n_layers = 1 << 20, p.io = REPLAYSSM_DTYPE_F32;
  p.H = p.HV = 1 << 20, p.K = p.V = 256;
  components[0].struct_size = sizeof components[0];
  WORKS(replayssm_plan_components(&d, &p, components, COMPONENTS, &n));
  for (int i = 0; i < n; i++) {
    lent[i] = REPLAYSSM_INIT(replayssm_lent);
    lent[i].kind = components[i].kind;
    lent[i].base = data;
    lent[i].offset_bytes = (16 - (int64_t)((uintptr_t)data % 16)) % 16;
  }
  WORKS(replayssm_slots_create(context, &d, &made));
  for (int i = 0; i < POOLS; i++) WORKS(replayssm_layers_create(made, &p, lent, n, &pools[i]));
  replayssm_list l = good_list();
  l.n = 1;
  FAILS(UNSUPPORTED, "the size of a saved slot", replayssm_save_bytes(made, REPLAYSSM_SAVE_LIVE, &bytes));
  FAILS(UNSUPPORTED, "the size of a saved slot", replayssm_save(made, &l, REPLAYSSM_SAVE_LIVE, out, sizeof out, NULL));
  CHECK(bytes == 77);
  for (int i = 0; i < POOLS; i++) replayssm_layers_destroy(pools[i]);
  replayssm_slots_destroy(made);
}

void ids_and_buffers(void) {
  texts();
  plans_and_blobs();
  int32_t taken[4] = {77, 77, 77, 77}, again[2];
  uint32_t generations[4] = {77, 77, 77, 77};
  int32_t n = 77;
  replayssm_component components[8];
  FAILS(REPLAYSSM_ERROR_OUT_OF_RANGE, "n is 4", replayssm_acquire(slots, 4, taken, generations));
  FAILS(REPLAYSSM_ERROR_OUT_OF_RANGE, "n is 2147483647", replayssm_acquire(slots, INT32_MAX, taken, generations));
  FAILS(INVALID, "n is -1", replayssm_acquire(slots, -1, taken, generations));
  FAILS(INVALID, "ids is NULL", replayssm_acquire(slots, 1, NULL, generations));
  FAILS(INVALID, "ids is", replayssm_acquire(slots, 1, (int32_t *)ODD(taken), generations));
  FAILS(INVALID, "generations is", replayssm_acquire(slots, 1, taken, (uint32_t *)ODD(generations)));
  for (int i = 0; i < 4; i++) CHECK(taken[i] == 77 && generations[i] == 77);
  WORKS(replayssm_acquire(slots, RINGS, taken, generations));
  CHECK(taken[0] == 0 && taken[1] == 1 && taken[2] == 2 && generations[0] == 1 && taken[3] == 77);
  FAILS(REPLAYSSM_ERROR_OUT_OF_RANGE, "0 free ids", replayssm_acquire(slots, 1, again, NULL));
  again[0] = again[1] = 1;
  FAILS(INVALID, "ids[1]", replayssm_release(slots, 2, again));
  again[0] = 1, again[1] = -1;
  FAILS(INVALID, "ids[1] is -1", replayssm_release(slots, 2, again));
  again[1] = INT32_MAX;
  FAILS(INVALID, "ids[1] is 2147483647", replayssm_release(slots, 2, again));
  FAILS(INVALID, "n is -1", replayssm_release(slots, -1, again));
  FAILS(INVALID, "ids is NULL", replayssm_release(slots, 1, NULL));
  FAILS(INVALID, "ids is", replayssm_release(slots, 1, (const int32_t *)ODD(again)));
  WORKS(replayssm_release(slots, RINGS, taken));
  FAILS(INVALID, "ids[0]", replayssm_release(slots, 1, taken));
  many_ids();
  if (!short_run) blobs_too_large();

  memset(components, 0x5A, sizeof components);
  FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, "capacity is 4; at least 5",
        replayssm_layers_components(mamba, components, 4, &n));
  CHECK(n == 5);
  FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, "capacity is 0", replayssm_layers_components(conv, NULL, 0, &n));
  CHECK(n == 4);
  FAILS(REPLAYSSM_ERROR_BUFFER_TOO_SMALL, "capacity", replayssm_layers_components(conv, components, INT32_MIN, &n));
  FAILS(INVALID, "replayssm_component", replayssm_layers_components(conv, NULL, 8, &n));
  FAILS(INVALID, "n is NULL", replayssm_layers_components(mamba, components, 8, NULL));
  FAILS(INVALID, "n is", replayssm_layers_components(mamba, components, 8, (int32_t *)ODD(&n)));
  for (size_t i = 0; i < sizeof components; i++) CHECK(((unsigned char *)components)[i] == 0x5A);
  CHECK(strcmp(replayssm_status_string(12345), "unknown status") == 0);
  CHECK(strcmp(replayssm_status_string(REPLAYSSM_OK), "REPLAYSSM_OK") == 0);
}
