// Kimi Delta Attention in direct.cu: Gated DeltaNet with a decay per column, so that
//
//   what a record brings to a column is (e^{L_j} * k_j) . (e^{G_t} * k_t), or with q_t: L_j are the log decays behind the record, G_t those of the
//   step up to its token
//   the checkpoint is read with e^{G_t + L} * k_t and e^{G_t + L} * q_t, L being the log decays behind it
//
// Keys of records decay in shared memory, in place of their log decays, two columns a lane: from the newest record on, so that no sum is ever taken
// from another. They and the columns are fp32: FULL keeps them so, for products of tf32 in which 22 of their bits count, HIGH as two bfloat16
// parts. Log decays are summed as logarithms to base 2.

namespace direct {

enum : i32 {
  LOG_BYTES = COLUMNS * 4,
  LOG_STRIDE = LOG_BYTES + 16,  // as KEY_STRIDE
  OF_LANE = COLUMNS / WARP,
};

// Log decays of a ring's rows, and those of the step's tokens behind them.
DEVICE char *log_at(const Direct &d, i32 row) { return shared_memory + d.at_logs + row * LOG_STRIDE; }
// What lies between the step and the checkpoints, for each column.
DEVICE float2 *elapsed_at(const Direct &d) { return (float2 *)(shared_memory + d.at_elapsed); }
// A bit for each column that decays slowly, of a ring's rows.
DEVICE u32 *slow_at(const Direct &d, i32 row) { return (u32 *)(shared_memory + d.at_factors) + row * BLOCKS; }
// A column that has decayed: k of all tokens in front of q.
DEVICE char *decayed_at(i32 at, i32 column, i32 len) {
  return shared_memory + at + ((is_query(column, len) ? len : 0) + token_of(column, len)) * LOG_STRIDE;
}

// ---- What is brought ----

// Inputs of the gates of the step's tokens to where their log decays will be, and the head's dt_bias to where columns will be.
DEVICE void bring_gates(const DeltaParams &p, const Direct &d, SharedAt memory, const Item &item, i32 len) {
  SharedAt logs = memory + (d.at_logs + p.ring_rows * LOG_STRIDE);
  const char *from = span_at(item.span, p.g, 0, item.head), *bias = p.dt_bias.data ? tensor_at(p.dt_bias, 0, 0, item.head) : nullptr;
  i64 bytes = p.g.token * size_of(p.g.dtype);
  bring(logs, LOG_STRIDE, from, bytes, len, UNITS);
  if (p.g.dtype == F32) bring(logs + 16 * UNITS, LOG_STRIDE, from + 16 * UNITS, bytes, len, UNITS);
  if (!bias) return;
  bring(memory + d.at_columns, 0, bias, 0, 1, UNITS);
  if (p.dt_bias.dtype == F32) bring(memory + (d.at_columns + 16 * UNITS), 0, bias + 16 * UNITS, 0, 1, UNITS);
}

// Log decays of n rows of a ring from first on: half of the rows and half of the columns for each of four warps, the last ones of a block.
DEVICE void bring_logs(const Direct &d, SharedAt memory, const char *logs, i32 first, i32 n, i32 rows) {
#pragma unroll 1
  for (i32 part = 0; part < SHARES; part++) {
    i32 at = part / 2 * 16 * UNITS;
    if (warps_of() >= 2 * SHARES ? part + SHARES == warp_of() : is_mine(part)) bring_half(part % 2, memory + (d.at_logs + at), LOG_STRIDE, logs + at, LOG_BYTES, first, n, rows, UNITS);
  }
}

// ---- What decays ----

// Log decays of the step's tokens, in place of the gates' inputs: a warp each, from the first one on, which has no log decays of newer records to sum
// up. a: exp(A_log).
DEVICE void leave_logs(const DeltaParams &p, const Direct &d, float a, i32 len) {
#pragma unroll 1
  for (i32 t = warp_of(); t < len; t += warps_of()) {
    char *row = log_at(d, p.ring_rows + t);
    float x[OF_LANE], bias[OF_LANE];
    load_four(row, p.g.dtype, x);
    if (p.dt_bias.data) {
      load_four(shared_memory + d.at_columns, p.dt_bias.dtype, bias);
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) x[e] = __fadd_rn(x[e], bias[e]);
    }
#pragma unroll
    for (i32 e = 0; e < OF_LANE; e++) x[e] = gate_of(p, a, x[e]);
    // Rows of 16 bits lie where others' fp32 goes.
    __syncwarp();
    ((float4 *)row)[lane_index()] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

DEVICE void elapse(float2 &sum, float2 g) {
  sum.x = add_log(sum.x, g.x);
  sum.y = add_log(sum.y, g.y);
}

// Leaves two columns of a row, by what has elapsed. Of HIGH, 16 bytes of upper parts and as many of lower ones take turns.
template <bool HIGH>
DEVICE void put_decayed(char *row, i32 pair, u32 bits, float2 elapsed) {
  float a = __fmul_rn(pair_low(bits), ptx_exp2_flush(elapsed.x)), b = __fmul_rn(pair_high(bits), ptx_exp2_flush(elapsed.y));
  if constexpr (HIGH) {
    char *at = row + pair / 4 * 32 + pair % 4 * 4;
    *(u32 *)at = upper_halves(bits_of(a), bits_of(b));
    a = a - from_bits(bits_of(a) & 0xFFFF0000u);
    b = b - from_bits(bits_of(b) & 0xFFFF0000u);
    *(u32 *)(at + 16) = upper_halves(bits_of(a), bits_of(b));
  } else {
    ((float2 *)row)[pair] = make_float2(a, b);
  }
}

// Records are dealt to pairs of warps, of which each has half of the columns: the newest to the first.
struct Dealt {
  i32 first;
  i32 end;
};
DEVICE i32 dealers() { return max(warps_of() / 2, 1); }
DEVICE Dealt records_of(i32 pair) {
  i32 n = known().held, all = dealers();
  return Dealt{n - n * (pair + 1) / all, n - n * pair / all};
}

// What lies between the warp's newest record and the step.
DEVICE float2 newer_logs(const Direct &d, i32 ring_rows) {
  const Known &k = known();
  float2 sum = make_float2(0.0f, 0.0f);
  if (warp_of() >= 2 * dealers()) return sum;
  i32 end = records_of(warp_of() / 2).end, pair = warp_of() % 2 * WARP + lane_index();
#pragma unroll 4
  for (i32 i = k.held - 1; i >= end; i--) elapse(sum, ((const float2 *)log_at(d, row_behind(k.oldest, i, ring_rows)))[pair]);
  return sum;
}

// Keys of records take the place of their log decays; what lies in front of the oldest is left. newer: of the warp's records.
template <bool HIGH>
DEVICE void decay_keys(const Direct &d, i32 ring_rows, float2 newer) {
  const Known &k = known();
  // A warp that is alone has both halves of the columns.
#pragma unroll 1
  for (i32 part = warp_of(); part < 2 * dealers(); part += warps_of()) {
    Dealt dealt = records_of(part / 2);
    i32 pair = part % 2 * WARP + lane_index();
    float2 elapsed = newer;
#pragma unroll 2
    for (i32 i = dealt.end - 1; i >= dealt.first; i--) {
      i32 row = row_behind(k.oldest, i, ring_rows);
      char *at = log_at(d, row);
      float2 g = ((const float2 *)at)[pair];
      // Four lanes' log decays lie where they leave their parts.
      __syncwarp();
      put_decayed<HIGH>(at, pair, ((const u32 *)key_at(row))[pair], elapsed);
      elapse(elapsed, g);
    }
    if (dealt.first == 0 && part / 2 == dealers() - 1) elapsed_at(d)[pair] = elapsed;
  }
}

// The same for checkpoints that stand at a record, from the ring itself: where tiles of a block stand apart.
DEVICE void elapse_from(const DeltaParams &p, const Direct &d, i32 from) {
  const Known &k = known();
#pragma unroll 1
  for (i32 pair = threadIdx.x; pair < COLUMNS / 2; pair += blockDim.x) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (i32 i = k.held - 1; i >= from; i--)
      elapse(sum, ((const float2 *)record_in(p.ring_g, k.item.ring, k.item.head, row_behind(k.oldest, i, p.ring_rows), p.ring_rows, LOG_BYTES))[pair]);
    elapsed_at(d)[pair] = sum;
  }
}

// Leaves the step's columns as they have decayed from its beginning, or from the checkpoints on: a warp half of those of a token.
template <bool HIGH>
DEVICE void put_columns(const Direct &d, i32 at, bool from_checkpoints, i32 ring_rows, i32 len) {
#pragma unroll 1
  for (i32 part = warp_of(); part < 2 * len; part += warps_of()) {
    i32 pair = part % 2 * WARP + lane_index(), t = part / 2;
    float2 sum = make_float2(0.0f, 0.0f);
    if (from_checkpoints) sum = elapsed_at(d)[pair];
#pragma unroll 4
    for (i32 i = 0; i <= t; i++) elapse(sum, ((const float2 *)log_at(d, ring_rows + i))[pair]);
    char *to = shared_memory + at + t * LOG_STRIDE;
    put_decayed<HIGH>(to, pair, ((const u32 *)key_at(ring_rows + t))[pair], sum);
    put_decayed<HIGH>(to + len * LOG_STRIDE, pair, ((const u32 *)query_at(d, t))[pair], sum);
  }
}

// ---- Products ----

// y += products of a block of fp32 with N times eight columns. value: of a half of the rows, a column of the lane's eight. IS_APART: whether four of
// those are in the block's other half.
template <i32 N, bool IS_APART, class Value>
DEVICE void multiply_block(const Value &value, const char *const (&columns)[N], i32 j, float (*y)[4], float (*second)[4]) {
  constexpr u32 MASK = 0xFFFFE000u;
  i32 at = 4 * BLOCK * j + (IS_APART ? 16 : 32) * (lane_index() % 4);
  u32 column[N][8];
#pragma unroll
  for (i32 i = 0; i < 4; i++) {
    u32 upper[4], lower[4];
#pragma unroll
    for (i32 e = 0; e < 4; e++) {
      float v = value(e % 2, 2 * i + e / 2);
      upper[e] = bits_of(v) & MASK;
      lower[e] = bits_of(v - from_bits(upper[e]));
    }
#pragma unroll
    for (i32 n = 0; n < N; n++) {
      if (!IS_APART) {
        // Two at a time: registers are short where planes are joined.
        uint2 two = *(const uint2 *)(columns[n] + at + 8 * i);
        column[n][2 * i] = two.x, column[n][2 * i + 1] = two.y;
      } else if (i % 2 == 0) {
        put_four(column[n] + 2 * i, *(const uint4 *)(columns[n] + at + i / 2 * 64));
      }
      u32 right[2], rest[2];
#pragma unroll
      for (i32 e = 0; e < 2; e++) {
        right[e] = column[n][2 * i + e] & MASK;
        rest[e] = bits_of(from_bits(column[n][2 * i + e]) - from_bits(right[e]));
      }
      ptx_mma_m16n8k8_tf32(second[n], lower, right, second[n]);
      ptx_mma_m16n8k8_tf32(second[n], upper, rest, second[n]);
      ptx_mma_m16n8k8_tf32(y[n], upper, right, y[n]);
    }
  }
}

// Products of a tile with N times eight columns that have decayed, of which the lane has one each as in multiply_seen.
template <i32 FORMAT, bool HIGH, i32 N>
DEVICE void multiply_decayed(const Seen<HIGH> &t, const char *const (&columns)[N], float (*y)[4]) {
  float second[N][4] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    if constexpr (HIGH) {
      const u32(&a)[4] = t.word[0][j], (&b)[4] = t.word[1][j];
      u32 left[4] = {a[0], b[0], a[1], b[1]}, left_odd[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (i32 n = 0; n < N; n++) {
        const uint4 *at = (const uint4 *)(columns[n] + 4 * BLOCK * j + 32 * (lane_index() % 4));
        uint4 upper = at[0], lower = at[1];
        u32 right[2] = {upper.x, upper.y}, right_odd[2] = {upper.z, upper.w}, rest[2] = {lower.x, lower.y}, rest_odd[2] = {lower.z, lower.w};
        ptx_mma_m16n8k16_bf16(second[n], left, rest, second[n]);
        ptx_mma_m16n8k16_bf16(y[n], left, right, y[n]);
        ptx_mma_m16n8k16_bf16(second[n], left_odd, rest_odd, second[n]);
        ptx_mma_m16n8k16_bf16(y[n], left_odd, right_odd, y[n]);
      }
    } else {
      auto value = [&](i32 h, i32 of) {
        const u32(&w)[8] = t.word[h][j];
        if (FORMAT == FORMAT_F32) return from_bits(w[of]);
        return join(of % 2 ? w[of / 2] >> 16 : w[of / 2] & 0xFFFFu, of % 2 ? w[4 + of / 2] >> 16 : w[4 + of / 2]);
      };
      multiply_block<N, FORMAT == FORMAT_F32>(value, columns, j, y, second);
    }
  }
#pragma unroll
  for (i32 n = 0; n < N; n++)
#pragma unroll
    for (i32 i = 0; i < 4; i++) y[n][i] += second[n][i];
}

// Eight columns' parts as right operands. row: of the lane's lane % 8.
DEVICE void load_parts(const char *row, u32 (&right)[STEPS][2]) {
#pragma unroll
  for (i32 i = 0; i < STEPS / 2; i++) {
    u32 four[4];
    ptx_ldmatrix_x4<false>(four, row + (4 * i + lane_index() / 8) * 32);
    right[2 * i][0] = four[0], right[2 * i][1] = four[1];
    right[2 * i + 1][0] = four[2], right[2 * i + 1][1] = four[3];
  }
}

// Products of all rows of keys that have decayed with the eight columns of a pass: 16 rows a warp.
template <bool HIGH>
DEVICE void multiply_decayed_keys(const Direct &d, i32 ring_rows, i32 pass, i32 len) {
  i32 lane = lane_index(), group = lane / 4, quad = lane % 4, column = 2 * quad;
  float *to = products_at(d) + pass * MAX_COLUMNS * d.product_stride;
  if (warp_of() * TILE >= ring_rows) return;
  const char *row = decayed_at(d.at_columns, pass * MAX_COLUMNS + (HIGH ? lane % 8 : group), len);
  u32 right[STEPS][2], rest[STEPS][2];
  if constexpr (HIGH) {
    load_parts(row, right);
    load_parts(row + 16, rest);
  }
#pragma unroll 1
  for (i32 first = warp_of() * TILE; first < ring_rows; first += warps_of() * TILE) {
    float y[1][4] = {}, second[1][4] = {};
    if constexpr (HIGH) {
      const char *at = log_at(d, first + lane / 8 % 2 * 8 + lane % 8) + lane / 16 * 32;
#pragma unroll
      for (i32 step = 0; step < STEPS; step++) {
        u32 upper[4], lower[4];
        ptx_ldmatrix_x4<false>(upper, at + 64 * step);
        ptx_ldmatrix_x4<false>(lower, at + 64 * step + 16);
        ptx_mma_m16n8k16_bf16(second[0], lower, right[step], second[0]);
        ptx_mma_m16n8k16_bf16(y[0], upper, right[step], y[0]);
        ptx_mma_m16n8k16_bf16(second[0], upper, rest[step], second[0]);
      }
    } else {
      const char *columns[1] = {row}, *at = log_at(d, first + group) + 16 * quad;
#pragma unroll 1
      for (i32 j = 0; j < BLOCKS; j++) {
        float v[2][8];
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
          float4 w = *(const float4 *)(at + i / 2 * 8 * LOG_STRIDE + 4 * BLOCK * j + i % 2 * 64);
          v[i / 2][i % 2 * 4] = w.x, v[i / 2][i % 2 * 4 + 1] = w.y, v[i / 2][i % 2 * 4 + 2] = w.z, v[i / 2][i % 2 * 4 + 3] = w.w;
        }
        multiply_block<1, true>([&](i32 h, i32 of) { return v[h][of]; }, columns, j, y, second);
      }
    }
    float *products = to + column * d.product_stride + first + group;
#pragma unroll
    for (i32 e = 0; e < 4; e++) products[e % 2 * d.product_stride + e / 2 * 8] = y[0][e] + second[0][e];
  }
}

// What the step's tokens bring to each column: a token a warp. The last warp, which mostly has no keys to multiply, has the first, which brings the most.
DEVICE void weigh_own(const Direct &d, i32 ring_rows, i32 len) {
  i32 queries = first_query(len);
#pragma unroll 1
  for (i32 i = warps_of() - 1 - warp_of(); i < len; i += warps_of()) {
    float own[OF_LANE], elapsed[OF_LANE] = {};
    load_four(key_at(ring_rows + i), BF16, own);
#pragma unroll 1
    for (i32 t = i; t < len; t++) {
      float g[OF_LANE], k[OF_LANE], q[OF_LANE], with_k = 0.0f, with_q = 0.0f;
      load_four(log_at(d, ring_rows + t), F32, g);
      load_four(key_at(ring_rows + t), BF16, k);
      load_four(query_at(d, t), BF16, q);
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) {
        elapsed[e] = t > i ? add_log(elapsed[e], g[e]) : 0.0f;
        float x = __fmul_rn(own[e], ptx_exp2_flush(elapsed[e]));
        with_k = fma(x, k[e], with_k);
        with_q = fma(x, q[e], with_q);
      }
      // The upper half of the lanes sums up what is with q.
      bool upper = lane_index() & (WARP / 2);
      float sum = __fadd_rn(upper ? with_q : with_k, __shfl_xor_sync(0xFFFFFFFFu, upper ? with_k : with_q, WARP / 2));
#pragma unroll
      for (i32 step = WARP / 4; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, step));
      i32 column = upper ? queries + t : t;
      if (lane_index() % (WARP / 2) == 0)
        own_at(d)[column * MAX_TOKENS + i] = __fmul_rn(sum, __fmul_rn(norms_at(d)[ring_rows + i], column_norm(d, ring_rows, column, len)));
    }
  }
}

// ---- What records and checkpoint bring ----

// Whether tiles of the block stand apart.
DEVICE bool stand_apart(const State &s) {
  const Known &k = known();
  i32 lane = lane_index();
  bool exists = lane < warps_of() && k.item.part * s.warps + lane < s.tiles;
  return __ballot_sync(0xFFFFFFFFu, exists && k.from[lane] != 0) != 0;
}

// Leaves what records and tokens bring to all columns, and makes the tile's products with them. y: of each pass.
template <i32 FORMAT, bool HIGH>
DEVICE void weigh_columns(const DeltaParams &p, const Direct &d, Seen<HIGH> &seen, i32 len, float (&y)[2][4]) {
  // Where planes are joined there are no registers for products with more than eight columns: the tile is asked for once for each eight.
  constexpr bool JOINS = !HIGH && FORMAT == FORMAT_SPLIT32;
  const Known &k = known();
  i32 ring_rows = p.ring_rows, lane = lane_index(), passes = passes_of(len), tiles = (ring_rows + TILE - 1) / TILE;
  float2 newer = newer_logs(d, ring_rows);
  leave_norms(p, d, len);
  leave_logs(p, d, ((const float *)elapsed_at(d))[0], len);
  // Decays are in the keys and in the columns.
#pragma unroll 1
  for (i32 i = threadIdx.x; i < ring_rows; i += blockDim.x) weights_at(d)[i] = make_float2(norms_at(d)[i], 1.0f);
  __syncthreads();
  decay_keys<HIGH>(d, ring_rows, newer);
  put_columns<HIGH>(d, d.at_columns, false, ring_rows, len);
  __syncthreads();
#pragma unroll 1
  for (i32 pass = 0; pass < passes; pass++) {
    multiply_decayed_keys<HIGH>(d, ring_rows, pass, len);
    __syncwarp();
    leave_brought<!HIGH, 2>(d, ring_rows, products_at(d) + pass * MAX_COLUMNS * d.product_stride, MAX_COLUMNS, pass * tiles);
  }
  weigh_own(d, ring_rows, len);
  bool apart = stand_apart(p.state);
  if (apart) elapse_from(p, d, k.from[0]);
  if (apart || d.at_reached == d.at_columns) __syncthreads();
#pragma unroll 1
  for (i32 warp = 0;;) {
    put_columns<HIGH>(d, d.at_reached, true, ring_rows, len);
    if constexpr (!HIGH && !JOINS) ask_seen<FORMAT>(seen, p.state, k.tile[warp_of()]);
    __syncthreads();
    if (!apart || warp == warp_of()) {
      if constexpr (JOINS) {
#pragma unroll 1
        for (i32 pass = passes - 1; pass >= 0; pass--) {
          ask_seen<FORMAT>(seen, p.state, k.tile[warp_of()]);
#pragma unroll
          for (i32 e = 0; e < 4; e++) y[1][e] = y[0][e], y[0][e] = 0.0f;
          const char *one[1] = {decayed_at(d.at_reached, pass * MAX_COLUMNS + lane / 4, len)};
          multiply_decayed<FORMAT, HIGH, 1>(seen, one, y);
        }
      } else if (passes == 1) {
        const char *few[1] = {decayed_at(d.at_reached, lane / 4, len)};
        multiply_decayed<FORMAT, HIGH, 1>(seen, few, y);
      } else {
        const char *columns[2] = {decayed_at(d.at_reached, lane / 4, len), decayed_at(d.at_reached, MAX_COLUMNS + lane / 4, len)};
        multiply_decayed<FORMAT, HIGH, 2>(seen, columns, y);
      }
    }
    if (!apart || ++warp == warps_of()) break;
    __syncthreads();
    elapse_from(p, d, k.from[warp]);
    __syncthreads();
  }
}

// The step's log decays, as records.
DEVICE void put_logs(const DeltaParams &p, const Direct &d) {
  const Known &k = known();
  i32 len = (i32)k.item.span.len;
#pragma unroll 1
  for (i32 i = threadIdx.x; i < len * WARP; i += blockDim.x) {
    i32 t = i / WARP;
    float4 g = ((const float4 *)log_at(d, p.ring_rows + t))[i % WARP];
    char *to = record_in(p.ring_g, k.item.ring, k.item.head, row_behind(k.at, t, p.ring_rows), p.ring_rows, LOG_BYTES);
    ((float4 *)to)[i % WARP] = make_float4(canonical(g.x), canonical(g.y), canonical(g.z), canonical(g.w));
  }
}

// ---- Folds ----

// Factors of the decays of all records, in place of their log decays: 32 columns a warp.
DEVICE void leave_column_factors(const Direct &d, i32 ring_rows) {
  const Known &k = known();
#pragma unroll 1
  for (i32 i = warp_of(); i < k.held * BLOCKS; i += warps_of()) {
    i32 row = row_behind(k.oldest, i / BLOCKS, ring_rows), j = i % BLOCKS;
    float *at = (float *)log_at(d, row) + BLOCK * j + lane_index();
    Decay decay = decay_of(*at);
    *at = decay.factor;
    u32 slow = __ballot_sync(0xFFFFFFFFu, decay.slow);
    if (lane_index() == 0) slow_at(d, row)[j] = slow;
  }
}

}  // namespace direct
