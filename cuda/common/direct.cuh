// FULL and HIGH steps of up to eight tokens a row where a block has a head (or a part of one) and a warp each of its tiles: nobody stays on a
// multiprocessor to bring anything ahead. 128 columns, bfloat16 activations, everything aligned to 16 bytes.
//
// What does not need ids is asked for first: the step's tokens. Then all that ids lead to at once: the tile into registers, and to shared memory
// positions, tags and records, before it is known which of a ring's rows hold history (or, where there are many blocks, when it is). Rows of
// records stand in shared memory as in the ring, those of the step's tokens behind them; which of them count, and what they weigh, is found from
// the position. Behind the barrier that all of that meets at, products of keys with the step's columns are made by tensor cores, a warp 16 rows;
// then each warp has its tile to itself: checkpoint and records by tensor cores, and what follows. A tile that folds is loaded once more, and takes
// records in by the serial form's arithmetic.
#pragma once
#include "products.cuh"
#include "single.cuh"

namespace direct {

using namespace single;

enum : i32 {
  MAX_TOKENS = 8,
  MAX_COLUMNS = 8,           // of a product of tensor cores
  ROW_BYTES = COLUMNS * 2,
  KEY_STRIDE = ROW_BYTES + 16,  // eight rows next to each other have no bank in common, 16 bytes of each
  STEPS = COLUMNS / 16,
  MAX_TILES = 8,                // of 16 rows of a ring
  SUM_STRIDE = TILE + 4,
};

// What all threads of a block know: registers are for tiles.
struct Known {
  Item item;
  Checkpoint tile[MAX_WARPS];
  i64 position;
  i32 held;     // records of the oldest of the block's tiles; negative: a tag cannot be trusted
  i32 folds;    // whether a tile folds
  i32 at;       // ring row of the first token
  i32 oldest;   // ring row of the oldest record
  // Of each warp's tile: the record at which its checkpoint stands, and where it will.
  i32 from[MAX_WARPS];
  i32 stop[MAX_WARPS];
  // Of 16 rows of the ring each: a bit for each row that has a record.
  u32 used[MAX_TILES];
  // Of the step's tokens: {dt, g} or {beta, g}; what has decayed behind each of them.
  float2 gates[MAX_TOKENS];
  float decays[MAX_TOKENS];
};

DEVICE Known &known() {
  static __shared__ __align__(16) Known k;
  return k;
}

// Places in shared memory.
DEVICE char *key_at(i32 row) { return shared_memory + row * KEY_STRIDE; }
DEVICE char *value_at(const Direct &d, i32 row) { return shared_memory + d.at_values + row * d.value_stride; }
DEVICE char *query_at(const Direct &d, i32 t) { return shared_memory + d.at_queries + t * KEY_STRIDE; }
// z of a token, or v.
DEVICE char *other_at(const Direct &d, i32 t) { return shared_memory + d.at_others + t * d.other_stride; }
// {dt, g} or {beta, g} of a ring's rows.
DEVICE float2 *gates_at(const Direct &d) { return (float2 *)(shared_memory + d.at_gates); }
// Of a ring's rows: what they weigh in front of the step, and what a checkpoint does that stands there.
DEVICE float2 *weights_at(const Direct &d) { return (float2 *)(shared_memory + d.at_weights); }
// Factors of decays, where records are folded.
DEVICE float2 *factors_at(const Direct &d) { return (float2 *)(shared_memory + d.at_factors); }
// Products of rows with columns, [column][row].
DEVICE float *products_at(const Direct &d) { return (float *)(shared_memory + d.at_products); }
// What 16 rows of records bring to eight columns, for each lane of a warp: pairs of words, of all lanes next to each other.
DEVICE uint2 *brought_at(const Direct &d) { return (uint2 *)(shared_memory + d.at_brought); }
// A warp's own: sums, [column][row of the tile].
DEVICE float *sums_at(const Direct &d) { return (float *)(shared_memory + d.at_sums) + warp_of() * d.columns * SUM_STRIDE; }

// ---- What is brought ----

// Parts of what warps do between them, of which each warp of a large block has one.
enum : i32 { SHARES = 4 };

// Whether one of them is this warp's.
DEVICE bool is_mine(i32 part) { return warps_of() >= SHARES ? part == warp_of() : part % warps_of() == warp_of(); }

// Brings n rows of units of 16 bytes, 16 of these at most. bytes: from one to the next, as stride. A warp's work.
DEVICE void bring(SharedAt to, i32 stride, const char *from, i64 bytes, i32 n, i32 units) {
  i32 shift = units <= 8 ? 3 : 4, row = lane_index() >> shift, unit = lane_index() & ((1 << shift) - 1), rows = WARP >> shift;
  if (unit >= units) return;
  from += row * bytes + 16 * unit;
  to += (u32)(row * stride + 16 * unit);
#pragma unroll 1
  for (; row < n; row += rows) {
    ptx_copy16(to, from);
    from += rows * bytes;
    to += (u32)(rows * stride);
  }
}

// A half of n rows of a ring from first on, which stand in shared memory as in the ring.
DEVICE void bring_half(i32 half, SharedAt to, i32 stride, const char *ring, i32 bytes, i32 first, i32 n, i32 rows, i32 units) {
  i32 before = min(n, rows - first), behind = n - before;
  i32 skip = half * (before / 2), skip_behind = half * (behind / 2);
  i32 start = first + skip;
  bring(to + (u32)(start * stride), stride, ring + start * bytes, bytes, half ? before - skip : before / 2, units);
  if (behind > 0) bring(to + (u32)(skip_behind * stride), stride, ring + skip_behind * bytes, bytes, half ? behind - skip_behind : behind / 2, units);
}

// Rows of keys and of values of a ring: half of the one or the other for each of four warps.
template <i32 VALUE_BYTES>
DEVICE void bring_records(const Direct &d, SharedAt memory, const char *keys, const char *values, i32 value_row, i32 first, i32 n, i32 rows, i32 units) {
#pragma unroll 1
  for (i32 half = 0; half < 2; half++) {
    if (is_mine(half)) bring_half(half, memory, KEY_STRIDE, keys, ROW_BYTES, first, n, rows, UNITS);
    if (!is_mine(2 + half)) continue;
    i32 all = units * VALUE_BYTES / 2;
    bring_half(half, memory + d.at_values, d.value_stride, values, value_row, first, n, rows, min(all, (i32)UNITS));
    if (all > UNITS) bring_half(half, memory + (d.at_values + 16 * UNITS), d.value_stride, values + 16 * UNITS, value_row, first, n, rows, all - UNITS);
  }
}

// ---- Where tiles stand ----

// A row's position and its head's tags, a lane each; asked for by the first warp.
struct Stands {
  i64 position;
  i64 flush_before;
  i64 tag;
  bool flush;
};

DEVICE Stands ask_stands(const Slots &slots, const Batch &batch, const State &s, const Item &item) {
  const Cursor &c = slots.cursors[item.ring];
  Stands a;
  const i64 *tags = (const i64 *)own_part(s.tags, item.slot) + (i64)item.head * s.tiles;
  a.tag = tags[lane_index() < s.tiles ? lane_index() : 0];
  a.position = c.position;
  a.flush_before = c.flush_before;
  a.flush = batch.flush ? batch.flush[item.row] : 0;
  return a;
}

// folds_of, of a tag that is valid.
DEVICE i32 folds_of_tile(const Slots &slots, const Stands &a, i64 tag, i32 tokens) {
  i64 limit = a.position - slots.keep;
  i32 foldable = (i32)(limit - tag);
  if (foldable <= 0) return 0;
  if (a.flush || (tag < a.flush_before && a.flush_before <= limit)) return foldable;
  if (slots.schedule == SCHEDULE_BY_POSITION) return max(foldable - modulo(limit, slots.window - slots.max_step_tokens + 1), 0);
  return foldable + tokens > slots.window ? foldable : 0;
}

// Leaves for all warps where tiles stand and will stand. Tags of other parts of the head may move meanwhile, from one that is valid to another.
DEVICE void leave_stands(const Slots &slots, const State &s, const Item &item, const Stands &a, i32 ring_rows) {
  Known &k = known();
  i32 lane = lane_index(), tile = lane - item.part * s.warps;
  bool bad = lane < s.tiles && !tag_is_valid(slots, a.position, a.tag), own = lane < s.tiles && (u32)tile < (u32)s.warps;
  if (__ballot_sync(0xFFFFFFFFu, bad)) {
    if (lane == 0) k.held = -1;
    return;
  }
  i32 records = own ? (i32)(a.position - a.tag) : 0, folds = own ? folds_of_tile(slots, a, a.tag, (i32)item.span.len) : 0;
  i32 held = records;
#pragma unroll
  for (i32 i = 1; i < WARP; i *= 2) held = max(held, __shfl_xor_sync(0xFFFFFFFFu, held, i));
  bool any = __ballot_sync(0xFFFFFFFFu, folds > 0) != 0;
  if ((u32)tile < (u32)s.warps) {
    k.from[tile] = held - records;
    k.stop[tile] = held - records + folds;
  }
  if (lane == 0) {
    i32 at = modulo(a.position, ring_rows);
    k.position = a.position;
    k.held = held;
    k.folds = any;
    k.at = at;
    k.oldest = at - held + (at < held ? ring_rows : 0);
  }
}

// Leaves what is known of the block's item: each warp its tile.
DEVICE void leave_item(const Item &item) {
  Known &k = known();
  if (lane_index() == 0) k.tile[warp_of()] = item.tile;
  if (threadIdx.x == 0) k.item = item;
}

// Ends an item with a tag that cannot be trusted: nothing is written but zeros.
DEVICE void give_up(const Slots &slots, const Place &place, const State &s, const Tensor &out) {
  const Item &item = known().item;
  if (threadIdx.x == 0 && item.part == 0) fault(slots, FAULT_POSITION, item.slot, item.row, place.pool, place.layer);
  zero_outputs(out, s, item);
}

// ---- A tile as a readout sees it ----

// As it came: of fp32 eight words of a block, of SPLIT32 four of the high plane and four of the low one, of 16 bits four. A lane has rows
// lane / 4 and 8 more.
template <bool HIGH>
struct Seen {
  u32 word[2][BLOCKS][HIGH ? 4 : 8];
};

DEVICE void put_four(u32 *to, const uint4 &w) { to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w; }

// Rows that there are not are the head's first.
template <i32 FORMAT, bool HIGH>
DEVICE void ask_seen(Seen<HIGH> &t, const State &s, const Checkpoint &c) {
  i32 group = lane_index() / 4, quad = lane_index() % 4;
#pragma unroll
  for (i32 h = 0; h < 2; h++) {
    i32 row = 8 * h + group < c.rows ? c.first + 8 * h + group : 0;
    const char *at = c.head + row * COLUMNS * (FORMAT == FORMAT_F32 ? 4 : 2) + 16 * quad;
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      if constexpr (FORMAT == FORMAT_F32) {
        put_four(t.word[h][j], *(const uint4 *)(at + 4 * BLOCK * j));
        put_four(t.word[h][j] + 4, *(const uint4 *)(at + 4 * BLOCK * j + 64));
      } else {
        put_four(t.word[h][j], *(const uint4 *)(at + 2 * BLOCK * j));
        if constexpr (!HIGH) put_four(t.word[h][j] + 4, *(const uint4 *)(at + (i64)s.rows * ROW_BYTES + 2 * BLOCK * j));
      }
    }
  }
}

// Products of a tile with N times eight columns, as the instruction distributes them. columns: of the lane's own ones, from their first elements on.
template <i32 FORMAT, bool HIGH, i32 N>
DEVICE void multiply_seen(const Seen<HIGH> &t, const char *const (&columns)[N], float (*y)[4]) {
  i32 quad = lane_index() % 4;
  float second[N][4] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    u32 pairs[N][4];
#pragma unroll
    for (i32 n = 0; n < N; n++) {
      const char *at = columns[n] + 2 * BLOCK * j;
      if constexpr (FORMAT == FORMAT_F32) {
        uint2 a = *(const uint2 *)(at + 8 * quad), b = *(const uint2 *)(at + 32 + 8 * quad);
        put_four(pairs[n], make_uint4(a.x, a.y, b.x, b.y));
      } else {
        put_four(pairs[n], *(const uint4 *)(at + 16 * quad));
      }
    }
    if constexpr (HIGH) {
      const u32(&a)[4] = t.word[0][j], (&b)[4] = t.word[1][j];
      u32 left[4] = {a[0], b[0], a[1], b[1]}, left_odd[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (i32 n = 0; n < N; n++) {
        u32 right[2] = {pairs[n][0], pairs[n][1]}, right_odd[2] = {pairs[n][2], pairs[n][3]};
        ptx_mma_m16n8k16_bf16(y[n], left, right, y[n]);
        ptx_mma_m16n8k16_bf16(second[n], left_odd, right_odd, second[n]);
      }
    } else {
      // Both halves of their bits, 22 in all, with columns that are exact.
#pragma unroll
      for (i32 i = 0; i < 4; i++) {
        u32 upper[4], lower[4];
#pragma unroll
        for (i32 e = 0; e < 4; e++) {
          const u32(&w)[8] = t.word[e % 2][j];
          i32 of = 2 * i + e / 2;
          float v = FORMAT == FORMAT_F32 ? from_bits(w[of])
                                         : join(e / 2 ? w[i] >> 16 : w[i] & 0xFFFFu, e / 2 ? w[4 + i] >> 16 : w[4 + i]);
          upper[e] = bits_of(v) & 0xFFFFE000u;
          lower[e] = bits_of(v - from_bits(upper[e]));
        }
#pragma unroll
        for (i32 n = 0; n < N; n++) {
          u32 right[2] = {pairs[n][i] << 16, pairs[n][i] & 0xFFFF0000u};
          ptx_mma_m16n8k8_tf32(second[n], lower, right, second[n]);
          ptx_mma_m16n8k8_tf32(y[n], upper, right, y[n]);
        }
      }
    }
  }
#pragma unroll
  for (i32 n = 0; n < N; n++)
#pragma unroll
    for (i32 i = 0; i < 4; i++) y[n][i] += second[n][i];
}

// ---- Products of keys ----

// Eight columns as right operands.
DEVICE void load_columns(const char *row, u32 (&right)[STEPS][2]) {
#pragma unroll
  for (i32 i = 0; i < STEPS / 2; i++) {
    u32 four[4];
    ptx_ldmatrix_x4<false>(four, row + (4 * i + lane_index() / 8) * 16);
    right[2 * i][0] = four[0], right[2 * i][1] = four[1];
    right[2 * i + 1][0] = four[2], right[2 * i + 1][1] = four[3];
  }
}

// Products of all rows of keys with eight columns, of which a lane brings row lane % 8: 16 rows a warp. n_columns of them are left.
DEVICE void multiply_keys(const Direct &d, const char *row, float *to, i32 n_columns) {
  i32 lane = lane_index(), group = lane / 4, column = lane % 4 * 2;
  if (warp_of() * TILE >= d.rows) return;
  u32 right[STEPS][2];
  load_columns(row, right);
#pragma unroll 1
  for (i32 first = warp_of() * TILE; first < d.rows; first += warps_of() * TILE) {
    const char *at = key_at(first + lane / 8 % 2 * 8 + lane % 8) + lane / 16 * 16;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (i32 step = 0; step < STEPS; step += 2) {
      u32 left[4];
      ptx_ldmatrix_x4<false>(left, at + 32 * step);
      ptx_mma_m16n8k16_bf16(even, left, right[step], even);
      ptx_ldmatrix_x4<false>(left, at + 32 * step + 32);
      ptx_mma_m16n8k16_bf16(odd, left, right[step + 1], odd);
    }
    float *products = to + column * d.product_stride + first + group;
#pragma unroll
    for (i32 e = 0; e < 4; e++)
      if (column + e % 2 < n_columns) products[e % 2 * d.product_stride + e / 2 * 8] = even[e] + odd[e];
  }
}

// ---- What records weigh ----

// Of each record, from the oldest on, what it weighs by the time of the step (by scale, of its row) and what a checkpoint does that stands there.
// A warp's work.
template <class Scale>
DEVICE void weigh_records(const Direct &d, i32 ring_rows, const Scale &scale) {
  const Known &k = known();
  i32 n = k.held, lane = lane_index();
  const float2 *gates = gates_at(d);
  float newer = 0.0f;
#pragma unroll 1
  for (i32 first = (n + WARP - 1) / WARP * WARP - WARP; first >= 0; first -= WARP) {
    i32 i = first + lane, row = row_behind(k.oldest, min(i, n - 1), ring_rows);
    float with, without;
    sum_later(i < n ? gates[row].y : 0.0f, with, without);
    if (i < n) weights_at(d)[row] = make_float2(__fmul_rn(fast_exp(without + newer), scale(row)), fast_exp(with + newer));
    newer += __shfl_sync(0xFFFFFFFFu, with, 0);
  }
}

// Leaves the gates of the step's tokens, a lane each; a warp's work.
DEVICE void leave_gates(float2 gates, i32 len) {
  Known &k = known();
  i32 lane = lane_index();
  float sum = 0.0f;
#pragma unroll
  for (i32 t = 0; t < MAX_TOKENS; t++) {
    float g = __shfl_sync(0xFFFFFFFFu, gates.y, t);
    sum += t <= lane && t < len ? g : 0.0f;
  }
  if (lane >= len) return;
  k.gates[lane] = gates;
  k.decays[lane] = fast_exp(sum);
}

// What is left of token i when token t has come.
DEVICE float decay_between(i32 i, i32 t) {
  float sum = 0.0f;
#pragma unroll 1
  for (i32 e = i + 1; e <= t; e++) sum += known().gates[e].y;
  return fast_exp(sum);
}

// The lane's rows of 16, in the order of its operand.
template <bool IS_F32>
DEVICE i32 operand_row(i32 e) {
  i32 quad = lane_index() % 4;
  return e / 2 * 8 + (IS_F32 ? quad + e % 2 * 4 : 2 * quad + e % 2);
}

template <bool IS_F32, i32 PARTS>
DEVICE void put_brought(const Direct &d, i32 place, const Brought<IS_F32, PARTS> &brought) {
  constexpr i32 HALF = IS_F32 ? 2 : 1;
#pragma unroll
  for (i32 p = 0; p < PARTS; p++)
#pragma unroll
    for (i32 h = 0; h < HALF; h++)
      brought_at(d)[((place * PARTS + p) * HALF + h) * WARP + lane_index()] = make_uint2(brought.part[p][2 * h], brought.part[p][2 * h + 1]);
}

template <bool IS_F32, i32 PARTS>
DEVICE Brought<IS_F32, PARTS> take_brought(const Direct &d, i32 place) {
  constexpr i32 HALF = IS_F32 ? 2 : 1;
  Brought<IS_F32, PARTS> brought;
#pragma unroll
  for (i32 p = 0; p < PARTS; p++)
#pragma unroll
    for (i32 h = 0; h < HALF; h++) {
      uint2 w = brought_at(d)[((place * PARTS + p) * HALF + h) * WARP + lane_index()];
      brought.part[p][2 * h] = w.x, brought.part[p][2 * h + 1] = w.y;
    }
  return brought;
}

// Leaves what records bring to eight columns, whose products begin at products, of those rows whose products are the warp's own; in places from
// first_place on.
template <bool IS_F32, i32 PARTS>
DEVICE void leave_brought(const Direct &d, i32 ring_rows, const float *products, i32 n_columns, i32 first_place) {
  Known &k = known();
  i32 lane = lane_index();
  const float *own = products + min(lane / 4, n_columns - 1) * d.product_stride;
#pragma unroll 1
  for (i32 tile = warp_of(); tile * TILE < ring_rows; tile += warps_of()) {
    i32 row = tile * TILE + lane, age = row - k.oldest + (row < k.oldest ? ring_rows : 0);
    u32 used = __ballot_sync(0xFFFFFFFFu, lane < TILE && row < ring_rows && age < k.held);
    if (lane == 0) k.used[tile] = used;
    float w[4];
#pragma unroll
    for (i32 e = 0; e < 4; e++) {
      i32 of = operand_row<IS_F32>(e);
      w[e] = used >> of & 1 ? __fmul_rn(weights_at(d)[tile * TILE + of].x, own[tile * TILE + of]) : 0.0f;
    }
    Brought<IS_F32, PARTS> brought;
    set_half(brought, 0, w[0], w[1]);
    set_half(brought, 1, w[2], w[3]);
    put_brought(d, first_place + tile, brought);
  }
}

// y += what 16 rows of bfloat16 values bring to N times eight columns, of which those count that used has a bit for: what others bring may be no
// number. at: the tile's first channel in the first row.
template <i32 PARTS, i32 N>
DEVICE void add_values(const char *at, i32 stride, u32 used, Brought<false, PARTS> (&brought)[N], float (*y)[4]) {
  i32 me = lane_index();
  u32 left[4];
  // Matrix m of the rows' values: rows 8 (m / 2) on, channels 8 (m % 2) on. Of eight rows the others are not looked at.
  i32 second = used >> 8 ? me / 16 * 8 : 0;
  ptx_ldmatrix_x4<true>(left, at + (second + me % 8) * stride + me / 8 % 2 * 16);
  if (used != 0xFFFFu) {
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
      u32 mask = (used >> operand_row<false>(2 * half) & 1 ? 0xFFFFu : 0) | (used >> operand_row<false>(2 * half + 1) & 1 ? 0xFFFF0000u : 0);
      left[2 * half] &= mask;
      left[2 * half + 1] &= mask;
#pragma unroll
      for (i32 n = 0; n < N; n++)
#pragma unroll
        for (i32 p = 0; p < PARTS; p++) brought[n].part[p][half] &= mask;
    }
  }
#pragma unroll
  for (i32 n = 0; n < N; n++)
#pragma unroll
    for (i32 p = 0; p < PARTS; p++) ptx_mma_m16n8k16_bf16(y[n], left, brought[n].part[p], y[n]);
}

// The same of fp32 values, of whose bits and of the columns' 22 count.
template <i32 N>
DEVICE void add_values(const char *at, i32 stride, u32 used, Brought<true, 2> (&brought)[N], float (*y)[4]) {
  constexpr u32 MASK = 0xFFFFE000u;
  i32 group = lane_index() / 4;
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    u32 upper[4], lower[4];
#pragma unroll
    for (i32 e = 0; e < 4; e++) {
      i32 row = operand_row<true>(2 * half + e / 2);
      float v = used >> row & 1 ? ((const float *)(at + row * stride))[group + e % 2 * 8] : 0.0f;
      upper[e] = bits_of(v) & MASK;
      lower[e] = bits_of(v - from_bits(upper[e]));
    }
#pragma unroll
    for (i32 n = 0; n < N; n++) {
      u32 first[2], second[2];
#pragma unroll
      for (i32 e = 0; e < 2; e++) {
        bool counts = used >> operand_row<true>(2 * half + e) & 1;
        first[e] = counts ? brought[n].part[0][2 * half + e] : 0;
        second[e] = counts ? brought[n].part[1][2 * half + e] : 0;
      }
      ptx_mma_m16n8k8_tf32(y[n], lower, first, y[n]);
      ptx_mma_m16n8k8_tf32(y[n], upper, second, y[n]);
      ptx_mma_m16n8k8_tf32(y[n], upper, first, y[n]);
    }
  }
}

// y += what records bring to N times eight columns, to a tile that stands at record from and whose values begin at a byte of each row.
template <bool IS_F32, i32 PARTS, i32 N>
DEVICE void add_records(const Direct &d, i32 ring_rows, i32 from, i32 value_byte, float (*y)[4]) {
  const Known &k = known();
  const char *at = value_at(d, 0) + value_byte;
  i32 tiles = (ring_rows + TILE - 1) / TILE;
#pragma unroll 1
  for (i32 tile = 0; tile < tiles; tile++, at += TILE * d.value_stride) {
    u32 used = k.used[tile];
    if (from > 0) {
      i32 row = tile * TILE + lane_index(), age = row - k.oldest + (row < k.oldest ? ring_rows : 0);
      used &= __ballot_sync(0xFFFFFFFFu, age >= from);
    }
    if (used == 0) continue;
    Brought<IS_F32, PARTS> brought[N];
#pragma unroll
    for (i32 n = 0; n < N; n++) brought[n] = take_brought<IS_F32, PARTS>(d, n * tiles + tile);
    add_values(at, d.value_stride, used, brought, y);
  }
}

// What a checkpoint weighs that stands at a record.
DEVICE float weight_of_checkpoint(const Direct &d, i32 from, i32 ring_rows) {
  const Known &k = known();
  return from < k.held ? weights_at(d)[row_behind(k.oldest, from, ring_rows)].y : 1.0f;
}

// ---- Folds ----

// The lane's columns of a row of keys in shared memory.
template <bool IS_SCALED>
DEVICE Operand key_operand(i32 row, float factor) {
  Operand o;
  const char *at = key_at(row) + 2 * lane4_of().column;
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    uint2 w = *(const uint2 *)(at + 2 * BLOCK * j);
    float k[WIDE] = {pair_low(w.x), pair_high(w.x), pair_low(w.y), pair_high(w.y)};
#pragma unroll
    for (i32 e = 0; e < WIDE; e++) o.v[j][e] = IS_SCALED ? __fmul_rn(k[e], factor) : k[e];
  }
  return o;
}

// Four values of the lane's rows.
DEVICE void values_of(const Direct &d, i32 row, float (&v)[ROWS]) {
  uint2 w = *(const uint2 *)(value_at(d, row) + 2 * (warp_of() * TILE + lane4_of().row));
  v[0] = pair_low(w.x), v[1] = pair_high(w.x), v[2] = pair_low(w.y), v[3] = pair_high(w.y);
}

// Factors of the decays of all records that fold.
DEVICE void leave_factors(const Direct &d, i32 ring_rows) {
  const Known &k = known();
#pragma unroll 1
  for (i32 i = threadIdx.x; i < k.held; i += blockDim.x) {
    i32 row = row_behind(k.oldest, i, ring_rows);
    Decay decay = decay_of(gates_at(d)[row].y);
    factors_at(d)[row] = make_float2(decay.factor, from_bits(decay.slow));
  }
}

// Stores the warp's tile where it stands now, and says so.
template <i32 FORMAT>
DEVICE void store_folded(Cells &t, const State &s) {
  const Known &k = known();
  const Checkpoint &c = k.tile[warp_of()];
  store<FORMAT, true>(t, s, c.head + (i64)c.first * COLUMNS * (FORMAT == FORMAT_F32 ? 4 : 2), k.item.channels);
  // Behind all lanes' bytes.
  __syncwarp();
  if (lane_index() == 0) *c.tag = k.position - k.held + k.stop[warp_of()];
}

}  // namespace direct
