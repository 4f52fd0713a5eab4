// Mamba-2: FULL and HIGH steps of up to eight tokens, a block a head. How it is done stands in ../common/direct.cuh.
//
//   y_t = e^{c_t} S0 C_t + sum_{j<=t} dt_j e^{c(j,t)} (B_j . C_t) x_j
//
// Keys are B, columns C of each token, values x, and what else a token brings z.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_HIGH: whether the readout is HIGH rather than FULL.
#include "../common/direct.cuh"

namespace direct {

// dt and g of a token.
DEVICE float2 gates_of(const Mamba2Params &p, const Item &item, i32 t) {
  float dt = load_one(span_at(item.span, p.dt, t, item.head), p.dt.dtype), a = load_one(tensor_at(p.a, 0, 0, item.head), p.a.dtype), bias = 0.0f;
  if (p.dt_bias.data) bias = load_one(tensor_at(p.dt_bias, 0, 0, item.head), p.dt_bias.dtype);
  if (p.dt_bias.data) dt = __fadd_rn(dt, bias);
  if (p.softplus) dt = softplus(dt);
  return make_float2(dt, __fmul_rn(a, dt));
}

// Leaves what the step's tokens bring to each of them. A warp's work.
template <i32 PARTS>
DEVICE void leave_tokens(const Direct &d, i32 ring_rows, i32 len, i32 place) {
  const Known &k = known();
  i32 t = lane_index() / 4, i = lane_index() % 4 * 2;
  const float *products = products_at(d) + min(t, len - 1) * d.product_stride + ring_rows;
  float w[2];
#pragma unroll
  for (i32 e = 0; e < 2; e++)
    w[e] = i + e <= t && t < len ? __fmul_rn(__fmul_rn(decay_between(i + e, t), k.gates[i + e].x), products[i + e]) : 0.0f;
  Brought<false, PARTS> brought;
  set_half(brought, 0, w[0], w[1]);
  set_half(brought, 1, 0.0f, 0.0f);
  put_brought(d, place, brought);
}

// Outputs of the warp's tile, and records of x: two neighbouring channels a lane.
DEVICE void put_outputs(const Mamba2Params &p, const Direct &d, float2 skip) {
  const Known &k = known();
  const Item &item = k.item;
  i32 lane = lane_index(), of_tile = lane % 8 * 2, channel = warp_of() * TILE + of_tile, row = first_channel(p.state, item) + channel;
  if (channel >= item.channels) return;
  i32 size = (i32)size_of(p.out.dtype), len = (i32)item.span.len;
  char *out = span_at(item.span, p.out, 0, item.head) + row * size;
  char *ring = record_in(p.ring_x, k.item.ring, item.head, 0, p.ring_rows, p.state.rows * 2) + row * 2;
#pragma unroll 1
  for (i32 t = lane / 8; t < len; t += WARP / 8) {
    float2 y = *(const float2 *)(sums_at(d) + t * SUM_STRIDE + of_tile);
    u32 x = *(const u32 *)(value_at(d, p.ring_rows + t) + 2 * channel);
    if (p.d_skip.data) {
      y.x = fma(skip.x, pair_low(x), y.x);
      y.y = fma(skip.y, pair_high(x), y.y);
    }
    if (p.z.data) {
      u32 z = *(const u32 *)(other_at(d, t) + 2 * channel);
      y.x = __fmul_rn(y.x, fast_silu(pair_low(z)));
      y.y = __fmul_rn(y.y, fast_silu(pair_high(z)));
    }
    put_pair(p.out.dtype, out + t * p.out.token * size, y.x, y.y);
    *(u32 *)(ring + row_behind(k.at, t, p.ring_rows) * p.state.rows * 2) = x;
  }
}

// D of two neighbouring channels of the warp's tile.
DEVICE float2 skips_of(const Mamba2Params &p, const Item &item) {
  float2 skip = make_float2(0.0f, 0.0f);
  if (!p.d_skip.data) return skip;
  i32 size = (i32)size_of(p.d_skip.dtype), row = first_channel(p.state, item) + warp_of() * TILE + lane_index() % 8 * 2;
  const char *at = tensor_at(p.d_skip, 0, 0, item.head) + (p.d_per_element ? min(row, p.state.rows - 2) * size : 0);
  skip.x = load_one(at, p.d_skip.dtype);
  skip.y = load_one(at + (p.d_per_element ? size : 0), p.d_skip.dtype);
  return skip;
}

// The rest of the tokens' records: dt and g of the head; B, if it is the first of its group. Statistics, once for all heads of a row.
DEVICE void put_records(const Mamba2Params &p, bool high) {
  const Known &k = known();
  const Item &item = k.item;
  const State &s = p.state;
  i32 thread = threadIdx.x, len = (i32)item.span.len, group = item.head / p.heads_per_group;
  if (item.part != 0) return;
  if (thread < len)
    *(float2 *)record_in(p.ring_dt, k.item.ring, item.head, row_behind(k.at, thread, p.ring_rows), p.ring_rows, 8) = k.gates[thread];
  if (item.head % p.heads_per_group == 0) {
#pragma unroll 1
    for (i32 i = thread; i < len * UNITS; i += blockDim.x) {
      char *to = record_in(p.ring_b, k.item.ring, group, row_behind(k.at, i / UNITS, p.ring_rows), p.ring_rows, ROW_BYTES);
      ((uint4 *)to)[i % UNITS] = ((const uint4 *)key_at(p.ring_rows + i / UNITS))[i % UNITS];
    }
  }
  if (item.head != 0 || thread != 0) return;
  u64 elements = (u64)s.heads * s.rows * COLUMNS, size = s.format <= FORMAT_F32 ? 4 : 2;
  u64 record = (u64)s.heads * (s.rows * 2 + 8) + (u64)(s.heads / p.heads_per_group) * ROW_BYTES;
  tally(p.slots, k.folds ? (u64)s.heads * s.tiles : 0, high && !k.folds && s.format == FORMAT_SPLIT32 ? elements * 2 : elements * size,
        k.folds ? elements * size : 0, (u64)k.held * record, (u64)len * record);
}

// Folds the warp's tile.
template <i32 FORMAT>
DEVICE void fold_tile(const Mamba2Params &p, const Direct &d) {
  const Known &k = known();
  i32 i = k.from[warp_of()], stop = k.stop[warp_of()];
  if (i >= stop) return;
  Cells t;
  ask<FORMAT>(t, p.state, cells_at<FORMAT>(k.tile[warp_of()]));
  arrived<FORMAT>(t);
#pragma unroll 1
  for (; i < stop; i++) {
    i32 row = row_behind(k.oldest, i, p.ring_rows);
    float2 factor = factors_at(d)[row];
    float dt = gates_at(d)[row].x, xd[ROWS];
    values_of(d, row, xd);
#pragma unroll
    for (i32 r = 0; r < ROWS; r++) xd[r] = __fmul_rn(xd[r], dt);
    decay(t, factor.x, bits_of(factor.y));
    rank_one(t, xd, key_operand<false>(row, 1.0f));
  }
  store_folded<FORMAT>(t, p.state);
}

template <i32 FORMAT, bool HIGH>
DEVICE void mamba2(const Mamba2DirectParams &params) {
  const Mamba2Params &p = params.family;
  const Direct &d = params.direct;
  const State &s = p.state;
  Known &k = known();
  i32 lane = lane_index(), warp = warp_of(), last = warps_of() - 1, ring_rows = p.ring_rows;
  SharedAt memory = ptx_shared(shared_memory);
  Named named;
  Item item = item_of(p.batch, s, named);
  i32 group = item.head / p.heads_per_group, first = first_channel(s, item), units = item.channels / 8, len = item.is_long ? 0 : (i32)item.span.len;

  // The step's tokens.
  if (is_mine(0)) bring(memory + ring_rows * KEY_STRIDE, KEY_STRIDE, span_at(item.span, p.b, 0, group), p.b.token * 2, len, UNITS);
  if (is_mine(1)) bring(memory + d.at_queries, KEY_STRIDE, span_at(item.span, p.c, 0, group), p.c.token * 2, len, UNITS);
  if (is_mine(2))
    bring(memory + (d.at_values + ring_rows * d.value_stride), d.value_stride, span_at(item.span, p.x, 0, item.head) + first * 2, p.x.token * 2, len, units);
  if (p.z.data && is_mine(3))
    bring(memory + d.at_others, d.other_stride, span_at(item.span, p.z, 0, item.head) + first * 2, p.z.token * 2, len, units);
  float2 skip = skips_of(p, item);

  resolve(p.slots, p.batch, p.place, named, item);
  if (!item.live || len == 0) {
    ptx_copies_wait();
    if (!item.live && !p.batch.keep_null_outputs) zero_outputs(p.out, s, item);
    return;
  }
  item.tile = checkpoint_of(s, p.place.layer, item.slot, item.head, item.part * s.warps + warp, 0);
  Seen<HIGH> seen;
  ask_seen<FORMAT>(seen, s, item.tile);
  leave_item(item);
  Stands stands;
  if (warp == 0) stands = ask_stands(p.slots, p.batch, s, item);
  const char *keys = record_in(p.ring_b, item.ring, group, 0, ring_rows, ROW_BYTES);
  const char *values = record_in(p.ring_x, item.ring, item.head, 0, ring_rows, s.rows * 2) + first * 2;
  if (is_mine(2)) {
    const char *gates = record_in(p.ring_dt, item.ring, item.head, 0, ring_rows, 8);
#pragma unroll 1
    for (i32 i = lane; i < ring_rows; i += WARP) ptx_copy8(memory + (d.at_gates + 8 * i), gates + 8 * i);
  }
  if (d.brings_all) bring_records<2>(d, memory, keys, values, s.rows * 2, 0, ring_rows, ring_rows, units);
  if (warp == last) leave_gates(lane < len ? gates_of(p, item, lane) : make_float2(0.0f, 0.0f), len);
  if (warp == 0) leave_stands(p.slots, s, item, stands, ring_rows);
  if (!d.brings_all) {
    __syncthreads();
    if (k.held > 0) bring_records<2>(d, memory, keys, values, s.rows * 2, k.oldest, k.held, ring_rows, units);
  }
  ptx_copies_wait();
  __syncthreads();
  if (k.held < 0) return give_up(p.slots, p.place, s, p.out);

  constexpr i32 PARTS = HIGH ? 2 : 3;
  float y[1][4] = {};
  const char *columns[1] = {query_at(d, min(lane / 4, len - 1))};
  multiply_seen<FORMAT, HIGH, 1>(seen, columns, y);
  multiply_keys(d, query_at(d, min(lane % 8, len - 1)), products_at(d), len);
  if (warp == last) weigh_records(d, ring_rows, [&](i32 row) { return gates_at(d)[row].x; });
  if (k.folds) leave_factors(d, ring_rows);
  __syncthreads();

  i32 tiles = (ring_rows + TILE - 1) / TILE;
  leave_brought<false, PARTS>(d, ring_rows, products_at(d), len, 0);
  if (warp == last) leave_tokens<PARTS>(d, ring_rows, len, tiles);
  __syncthreads();

  i32 column = lane % 4 * 2, from = k.from[warp];
  float elapsed = weight_of_checkpoint(d, from, ring_rows);
#pragma unroll
  for (i32 e = 0; e < 4; e++) y[0][e] = __fmul_rn(y[0][e], elapsed);
  add_records<false, PARTS, 1>(d, ring_rows, from, warp * TILE * 2, y);
#pragma unroll
  for (i32 e = 0; e < 4; e++) y[0][e] = __fmul_rn(y[0][e], k.decays[min(column + e % 2, len - 1)]);
  Brought<false, PARTS> tokens[1] = {take_brought<false, PARTS>(d, tiles)};
  add_values(value_at(d, ring_rows) + warp * TILE * 2, d.value_stride, (1u << len) - 1, tokens, y);
#pragma unroll
  for (i32 e = 0; e < 4; e++)
    if (column + e % 2 < len) sums_at(d)[(column + e % 2) * SUM_STRIDE + lane / 4 + e / 2 * 8] = y[0][e];
  __syncwarp();
  put_outputs(p, d, skip);
  put_records(p, HIGH);
  if (k.folds) fold_tile<FORMAT>(p, d);
}

}  // namespace direct

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ Mamba2DirectParams p) {
  if (p.family.batch.prefetch) prefetch_checkpoint(p.family.slots, p.family.batch, p.family.place, p.family.state, INSTANCE_HIGH);
  wait_for_dependency();
  direct::mamba2<INSTANCE_FORMAT, INSTANCE_HIGH>(p);
}
