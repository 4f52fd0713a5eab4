// Delta rules: FULL and HIGH steps of up to eight tokens, a block a head or a part of one. How it is done stands in ../common/direct.cuh, and what is
// different with Kimi Delta Attention in direct_kda.cuh.
//
//   u_t = beta_t (v_t - S0 (e^{G_t} kh_t) - sum_{j<t} u_j (e^{G(j,t)} kh_j) . kh_t)
//   o_t = scale (S0 (e^{G_t} qh_t) + sum_{j<=t} u_j (e^{G(j,t)} kh_j) . qh_t)
//
// Keys are k, columns k and q of each token, raw, and scaled by their norms afterwards; values are u, and where records are folded v; what else a
// token brings is v.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_HIGH: whether the readout is HIGH rather than FULL. INSTANCE_KDA: whether decays are per column.
#include "../common/direct.cuh"
#include "rule.cuh"

namespace direct {

enum : i32 { FEW = MAX_COLUMNS / 2 };

// Reciprocal norms: of a ring's rows, and of the step's tokens behind them; then of queries.
DEVICE float *norms_at(const Direct &d) { return (float *)(shared_memory + d.at_norms); }
DEVICE float *query_norms_at(const Direct &d) { return norms_at(d) + d.rows; }
// What a token brings to a column, [column][token].
DEVICE float *own_at(const Direct &d) { return (float *)(shared_memory + d.at_own); }

// Columns: of up to FEW tokens k in front of q; of more k in eight, q in the next eight.
DEVICE i32 passes_of(i32 len) { return len <= FEW ? 1 : 2; }
DEVICE i32 token_of(i32 column, i32 len) { return min(column % (len <= FEW ? (i32)FEW : (i32)MAX_COLUMNS), len - 1); }
DEVICE bool is_query(i32 column, i32 len) { return column >= (len <= FEW ? (i32)FEW : (i32)MAX_COLUMNS); }
DEVICE i32 first_query(i32 len) { return len <= FEW ? (i32)FEW : (i32)MAX_COLUMNS; }

DEVICE const char *column_at(const Direct &d, i32 ring_rows, i32 column, i32 len) {
  i32 t = token_of(column, len);
  return is_query(column, len) ? query_at(d, t) : key_at(ring_rows + t);
}

DEVICE float column_norm(const Direct &d, i32 ring_rows, i32 column, i32 len) {
  i32 t = token_of(column, len);
  return is_query(column, len) ? query_norms_at(d)[t] : norms_at(d)[ring_rows + t];
}

DEVICE float gate_factor(const DeltaParams &p, const Item &item) {
  return p.a_log.data ? exp(load_one(tensor_at(p.a_log, 0, 0, item.head), p.a_log.dtype)) : 1.0f;
}

// beta of a token, and g where it is of the head.
template <bool IS_KDA>
DEVICE float2 gates_of(const DeltaParams &p, const Item &item, i32 t) {
  float beta = load_one(span_at(item.span, p.beta, t, item.head), p.beta.dtype);
  if constexpr (IS_KDA) return make_float2(p.beta_sigmoid ? sigmoid(beta) : beta, 0.0f);
  float g = load_one(span_at(item.span, p.g, t, item.head), p.g.dtype), a = gate_factor(p, item);
  if (p.dt_bias.data) g = __fadd_rn(g, load_one(tensor_at(p.dt_bias, 0, 0, item.head), p.dt_bias.dtype));
  return make_float2(p.beta_sigmoid ? sigmoid(beta) : beta, gate_of(p, a, g));
}

// Of the step's keys and queries, a warp each.
DEVICE void leave_norms(const DeltaParams &p, const Direct &d, i32 len) {
#pragma unroll 1
  for (i32 i = warp_of(); i < 2 * len; i += warps_of()) {
    bool is_key = i < len;
    i32 t = is_key ? i : i - len;
    float norm = norm_of(p, is_key ? key_at(p.ring_rows + t) : query_at(d, t));
    if (lane_index() == 0) *(is_key ? norms_at(d) + p.ring_rows + t : query_norms_at(d) + t) = norm;
  }
}

// What the step's tokens bring to each column.
DEVICE void weigh_tokens(const Direct &d, i32 ring_rows, i32 len) {
#pragma unroll 1
  for (i32 i = threadIdx.x; i < passes_of(len) * MAX_COLUMNS * MAX_TOKENS; i += blockDim.x) {
    i32 column = i / MAX_TOKENS, of = i % MAX_TOKENS, t = token_of(column, len);
    float brings = 0.0f;
    if (of <= t)
      brings = decay_between(of, t) * norms_at(d)[ring_rows + of] * column_norm(d, ring_rows, column, len) *
               products_at(d)[column * d.product_stride + ring_rows + of];
    own_at(d)[i] = brings;
  }
}

}  // namespace direct

#include "direct_kda.cuh"

namespace direct {

// From sums to outputs, and records of v and u, by forward substitution: of each channel of the tile one lane has what k reads, and another one,
// behind those of all channels, what q reads.
template <bool HIGH>
DEVICE void substitute(const DeltaParams &p, const Direct &d) {
  const Known &k = known();
  const Item &item = k.item;
  i32 lane = lane_index(), of_tile = lane % TILE, channel = warp_of() * TILE + of_tile, row = first_channel(p.state, item) + channel;
  i32 len = (i32)item.span.len;
  bool is_q = lane >= TILE, exists = channel < item.channels;
  const float *sums = sums_at(d) + (is_q ? first_query(len) * SUM_STRIDE : 0) + of_tile, *own = own_at(d) + (is_q ? first_query(len) * MAX_TOKENS : 0);
  // Of a lane of k where its records of v and of u begin, of one of q where its outputs do.
  char *first = is_q ? span_at(item.span, p.out, 0, item.head) + row * (i32)size_of(p.out.dtype)
                     : record_in(p.ring_v, item.ring, item.head, 0, p.ring_rows, p.state.rows * 2) + row * 2;
  char *ring_u = record_in(p.ring_u, item.ring, item.head, 0, p.ring_rows, p.state.rows * (HIGH ? 2 : 4)) + row * (HIGH ? 2 : 4);
  i64 out_bytes = p.out.token * size_of(p.out.dtype);
  float u[MAX_TOKENS];
#pragma unroll
  for (i32 t = 0; t < MAX_TOKENS; t++) {
    if (t >= len) break;
    float y = sums[t * SUM_STRIDE], of[MAX_TOKENS];
#pragma unroll
    for (i32 i = 0; i <= t; i += 4) {
      float4 four = *(const float4 *)(own + t * MAX_TOKENS + i);
      of[i] = four.x, of[i + 1] = four.y, of[i + 2] = four.z, of[i + 3] = four.w;
    }
#pragma unroll
    for (i32 i = 0; i < t; i++) y = fma(of[i], u[i], y);
    u16 v = ((const u16 *)other_at(d, t))[channel];
    u[t] = __shfl_sync(0xFFFFFFFFu, k.gates[t].x * (from_bf16(v) - y), of_tile);
    if (!exists) continue;
    if (is_q) {
      store_one(first + t * out_bytes, p.out.dtype, __fmul_rn(p.scale, fma(of[t], u[t], y)));
      continue;
    }
    i32 at = row_behind(k.at, t, p.ring_rows) * p.state.rows;
    *(u16 *)(first + at * 2) = v;
    if (HIGH) {
      *(u16 *)(ring_u + at * 2) = to_bf16(u[t]);
    } else {
      *(float *)(ring_u + at * 4) = canonical(u[t]);
    }
  }
}

// The rest of the tokens' records: g and beta of the head; k and its norm, if it is the first of its key head. Statistics, once for all heads
// of a row.
template <bool IS_KDA>
DEVICE void put_records(const DeltaParams &p, const Direct &d, bool high) {
  const Known &k = known();
  const Item &item = k.item;
  const State &s = p.state;
  i32 thread = threadIdx.x, len = (i32)item.span.len, key = key_head(p, item.head);
  if (item.part != 0) return;
  bool is_first = leads(p, item.head);
  if (thread < len) {
    i32 row = row_behind(k.at, thread, p.ring_rows);
    *(float *)record_in(p.ring_beta, k.item.ring, item.head, row, p.ring_rows, 4) = canonical(k.gates[thread].x);
    if (!IS_KDA) *(float *)record_in(p.ring_g, k.item.ring, item.head, row, p.ring_rows, 4) = canonical(k.gates[thread].y);
    if (is_first) *(float *)record_in(p.ring_norm, k.item.ring, key, row, p.ring_rows, 4) = canonical(norms_at(d)[p.ring_rows + thread]);
  }
  if constexpr (IS_KDA) put_logs(p, d);
  if (is_first) {
#pragma unroll 1
    for (i32 i = thread; i < len * UNITS; i += blockDim.x) {
      char *to = record_in(p.ring_k, k.item.ring, key, row_behind(k.at, i / UNITS, p.ring_rows), p.ring_rows, ROW_BYTES);
      ((uint4 *)to)[i % UNITS] = ((const uint4 *)key_at(p.ring_rows + i / UNITS))[i % UNITS];
    }
  }
  if (item.head != 0 || thread != 0) return;
  u64 elements = (u64)s.heads * s.rows * COLUMNS, state = elements * (s.format <= FORMAT_F32 ? 4 : 2);
  u64 keys = (u64)p.qk_heads * (ROW_BYTES + 4) + (u64)s.heads * 4 * (IS_KDA ? COLUMNS : 1), values = (u64)s.heads * (s.rows * 2 + 4), u = (u64)s.heads * s.rows * (high ? 2 : 4);
  u64 folds = k.folds ? (u64)(k.stop[0] - k.from[0]) : 0;
  tally(p.slots, k.folds ? (u64)s.heads * s.tiles : 0, high && !k.folds && s.format == FORMAT_SPLIT32 ? elements * 2 : state, k.folds ? state : 0,
        folds * (keys + values) + ((u64)k.held - folds) * (keys + u), (u64)len * (keys + values + u));
}

// Folds the warp's tile, once v of its records has come.
template <i32 FORMAT, bool IS_KDA>
DEVICE void fold_tile(const DeltaParams &p, const Direct &d) {
  const Known &k = known();
  i32 i = k.from[warp_of()], stop = k.stop[warp_of()];
  if (i >= stop) return;
  Cells t;
  ask<FORMAT>(t, p.state, cells_at<FORMAT>(k.tile[warp_of()]));
  arrived<FORMAT>(t);
#pragma unroll 1
  for (; i < stop; i++) {
    i32 row = row_behind(k.oldest, i, p.ring_rows);
    if constexpr (IS_KDA) {
      decay_columns(t, (const float *)log_at(d, row), slow_at(d, row));
    } else {
      float2 factor = factors_at(d)[row];
      decay(t, factor.x, bits_of(factor.y));
    }
    Operand key = key_operand<true>(row, norms_at(d)[row]);
    float v = from_bf16(((const u16 *)value_at(d, row))[warp_of() * TILE + lane4_of().row + dot_row()]), us[ROWS];
    of_rows(us, __fmul_rn(gates_at(d)[row].x, __fsub_rn(v, dot(t, key))));
    rank_one(t, us, key);
  }
  store_folded<FORMAT>(t, p.state);
}

template <i32 FORMAT, bool HIGH, bool IS_KDA>
DEVICE void delta(const DeltaDirectParams &params) {
  constexpr i32 VALUE_BYTES = HIGH ? 2 : 4;
  const DeltaParams &p = params.family;
  const Direct &d = params.direct;
  const State &s = p.state;
  Known &k = known();
  i32 lane = lane_index(), warp = warp_of(), last = warps_of() - 1, ring_rows = p.ring_rows;
  SharedAt memory = ptx_shared(shared_memory);
  Named named;
  Item item = item_of(p.batch, s, named);
  i32 key = key_head(p, item.head), first = first_channel(s, item), units = item.channels / 8, len = item.is_long ? 0 : (i32)item.span.len;

  // The step's tokens.
  if (is_mine(0)) bring(memory + ring_rows * KEY_STRIDE, KEY_STRIDE, span_at(item.span, p.k, 0, key), p.k.token * 2, len, UNITS);
  if (is_mine(1)) bring(memory + d.at_queries, KEY_STRIDE, span_at(item.span, p.q, 0, key), p.q.token * 2, len, UNITS);
  if (is_mine(2)) bring(memory + d.at_others, d.other_stride, span_at(item.span, p.v, 0, item.head) + first * 2, p.v.token * 2, len, units);
  if constexpr (IS_KDA) {
    if (is_mine(3)) bring_gates(p, d, memory, item, len);
  }

  resolve(p.slots, p.batch, p.place, named, item);
  if (!item.live || len == 0) {
    ptx_copies_wait();
    if (!item.live && !p.batch.keep_null_outputs) zero_outputs(p.out, s, item);
    return;
  }
  item.tile = checkpoint_of(s, p.place.layer, item.slot, item.head, item.part * s.warps + warp, 0);
  Seen<HIGH> seen;
  if constexpr (HIGH) ask_seen<FORMAT>(seen, s, item.tile);
  leave_item(item);
  Stands stands;
  if (warp == 0) stands = ask_stands(p.slots, p.batch, s, item);
  const char *keys = record_in(p.ring_k, item.ring, key, 0, ring_rows, ROW_BYTES);
  const char *values = record_in(p.ring_u, item.ring, item.head, 0, ring_rows, s.rows * VALUE_BYTES) + first * VALUE_BYTES;
  const char *logs = IS_KDA ? record_in(p.ring_g, item.ring, item.head, 0, ring_rows, LOG_BYTES) : nullptr;
  if (is_mine(2)) {
    const char *betas = record_in(p.ring_beta, item.ring, item.head, 0, ring_rows, 4), *gs = record_in(p.ring_g, item.ring, item.head, 0, ring_rows, 4);
    const char *norms = record_in(p.ring_norm, item.ring, key, 0, ring_rows, 4);
#pragma unroll 1
    for (i32 i = lane; i < ring_rows; i += WARP) {
      ptx_copy4(memory + (d.at_gates + 8 * i), betas + 4 * i);
      if (!IS_KDA) ptx_copy4(memory + (d.at_gates + 8 * i + 4), gs + 4 * i);
      ptx_copy4(memory + (d.at_norms + 4 * i), norms + 4 * i);
    }
  }
  if (d.brings_all) {
    bring_records<VALUE_BYTES>(d, memory, keys, values, s.rows * VALUE_BYTES, 0, ring_rows, ring_rows, units);
    if constexpr (IS_KDA) bring_logs(d, memory, logs, 0, ring_rows, ring_rows);
  }
  // Beside a tile of FULL there are no registers for what else is brought.
  if constexpr (IS_KDA && !HIGH) {
    prefetch_tile<FORMAT>(s, item.tile, false);
  } else if constexpr (!HIGH) {
    ask_seen<FORMAT>(seen, s, item.tile);
  }
  if (warp == last) {
    leave_gates(lane < len ? gates_of<IS_KDA>(p, item, lane) : make_float2(0.0f, 0.0f), len);
    if (IS_KDA && lane == 0) *(float *)elapsed_at(d) = gate_factor(p, item);
  }
  if (warp == 0) leave_stands(p.slots, s, item, stands, ring_rows);
  if (!d.brings_all) {
    __syncthreads();
    if (k.held > 0) {
      bring_records<VALUE_BYTES>(d, memory, keys, values, s.rows * VALUE_BYTES, k.oldest, k.held, ring_rows, units);
      if constexpr (IS_KDA) bring_logs(d, memory, logs, k.oldest, k.held, ring_rows);
    }
  }
  ptx_copies_wait();
  __syncthreads();
  if (k.held < 0) return give_up(p.slots, p.place, s, p.out);

  i32 passes = passes_of(len);
  float y[2][4] = {};
  if constexpr (IS_KDA) {
    weigh_columns<FORMAT, HIGH>(p, d, seen, len, y);
  } else {
    leave_norms(p, d, len);
    const char *columns[2] = {column_at(d, ring_rows, lane / 4, len), column_at(d, ring_rows, MAX_COLUMNS + lane / 4, len)};
    if (passes == 1) {
      const char *few[1] = {columns[0]};
      multiply_seen<FORMAT, HIGH, 1>(seen, few, y);
    } else {
      multiply_seen<FORMAT, HIGH, 2>(seen, columns, y);
    }
#pragma unroll 1
    for (i32 pass = 0; pass < passes; pass++)
      multiply_keys(d, column_at(d, ring_rows, pass * MAX_COLUMNS + lane % 8, len), products_at(d) + pass * MAX_COLUMNS * d.product_stride, MAX_COLUMNS);
    if (warp == last) weigh_records(d, ring_rows, [&](i32 row) { return norms_at(d)[row]; });
    if (k.folds) leave_factors(d, ring_rows);
    __syncthreads();

    i32 tiles = (ring_rows + TILE - 1) / TILE;
#pragma unroll 1
    for (i32 pass = 0; pass < passes; pass++)
      leave_brought<!HIGH, 2>(d, ring_rows, products_at(d) + pass * MAX_COLUMNS * d.product_stride, MAX_COLUMNS, pass * tiles);
    weigh_tokens(d, ring_rows, len);
    __syncthreads();
  }

  i32 from = k.from[warp];
  float elapsed = weight_of_checkpoint(d, from, ring_rows);
#pragma unroll
  for (i32 pass = 0; pass < 2; pass++)
#pragma unroll
    for (i32 e = 0; e < 4; e++) y[pass][e] = __fmul_rn(y[pass][e], elapsed);
  if (passes == 1)
    add_records<!HIGH, 2, 1>(d, ring_rows, from, warp * TILE * VALUE_BYTES, y);
  else
    add_records<!HIGH, 2, 2>(d, ring_rows, from, warp * TILE * VALUE_BYTES, y);
#pragma unroll
  for (i32 pass = 0; pass < 2; pass++) {
    if (pass == passes) break;
    i32 column = pass * MAX_COLUMNS + lane % 4 * 2;
    float factors[2];
#pragma unroll
    for (i32 e = 0; e < 2; e++) factors[e] = k.decays[token_of(column + e, len)] * column_norm(d, ring_rows, column + e, len);
#pragma unroll
    for (i32 e = 0; e < 4; e++) sums_at(d)[(column + e % 2) * SUM_STRIDE + lane / 4 + e / 2 * 8] = __fmul_rn(y[pass][e], factors[e % 2]);
  }
  __syncwarp();
  substitute<HIGH>(p, d);
  put_records<IS_KDA>(p, d, HIGH);
  if (!k.folds) return;
  __syncthreads();
  // Values of u are read: v comes to their place.
  const char *folded = record_in(p.ring_v, k.item.ring, k.item.head, 0, ring_rows, s.rows * 2) + first_channel(s, k.item) * 2;
#pragma unroll 1
  for (i32 half = 0; half < 2; half++)
    if (is_mine(half))
      bring_half(half, memory + d.at_values, d.value_stride, folded, s.rows * 2, k.oldest, k.held, ring_rows, k.item.channels / 8);
  if constexpr (IS_KDA) bring_logs(d, memory, (const char *)record_in(p.ring_g, k.item.ring, k.item.head, 0, ring_rows, LOG_BYTES), k.oldest, k.held, ring_rows);
  ptx_copies_wait();
  __syncthreads();
  if constexpr (IS_KDA) {
    leave_column_factors(d, ring_rows);
    __syncthreads();
  }
  fold_tile<FORMAT, IS_KDA>(p, d);
}

}  // namespace direct

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ DeltaDirectParams p) {
  if (p.family.batch.prefetch) prefetch_checkpoint(p.family.slots, p.family.batch, p.family.place, p.family.state, INSTANCE_HIGH);
  wait_for_dependency();
  direct::delta<INSTANCE_FORMAT, INSTANCE_HIGH, INSTANCE_KDA>(p);
}
