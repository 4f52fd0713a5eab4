// Mamba-2: FULL and HIGH steps of one token, or of up to eight, on aligned memory. How it is done stands in ../common/decode.cuh.
//
//   y_t = e^{c_t} S0 C_t + sum_{j<=t} dt_j e^{c(j,t)} (B_j . C_t) x_j
//
// Keys are B, queries and columns C of a group; values are x.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_HIGH: whether the readout is HIGH rather than FULL. INSTANCE_SINGLE: whether steps have one token.

// Tiles that FULL reads at a time: with more of them it needs more registers than there are on later architectures.
#define FULL_TILES (__CUDA_ARCH__ >= 1000 ? 1 : INSTANCE_FORMAT == FORMAT_F32 ? 4 : 2)
#include "../common/decode.cuh"

namespace decode {

template <i32 FORMAT_>
struct Mamba2 {
  typedef Mamba2DecodeParams Params;
  // Of a fp32 checkpoint, and on sm_120, a whole tile would need more registers than there are.
  enum : i32 {
    VALUE_BYTES = 2,
    WIDE = COLUMNS,
    FOLD_HALVES = FORMAT_ == FORMAT_F32 || __CUDA_ARCH__ >= 1200 ? 1 : 2,
    IS_SCALED = 1,
    SINGLE_COLUMNS = 1,
    WEIGHS_FIRST = 0,
    HAS_LOGS = 0,
  };

  static DEVICE bool has_z(const Params &p) { return p.family.z.data != nullptr; }
  static DEVICE i32 record_bytes(const Params &p) { return p.family.state.rows * VALUE_BYTES; }
  static DEVICE i32 token_bytes(const Params &p) { return p.family.state.rows * (has_z(p) ? 4 : 2); }
  static DEVICE i32 token_of(i32 column, i32) { return column; }
  static DEVICE i32 head_of(const Params &p, i32 item, i32 h) { return item * p.pipeline.heads_per_item + h; }
  static DEVICE i64 key_bytes(const Params &p) { return p.family.b.token * 2; }
  static DEVICE i64 query_bytes(const Params &p) { return p.family.c.token * 2; }

  // Plans one head of an item; a lane each, the heads of an item next to each other.
  static DEVICE void plan_head(const Params &params, i64 number, i32 h, bool leaves, Item &item, Head &to, float2 *gates) {
    const Mamba2Params &p = params.family;
    const Pipeline &pipeline = params.pipeline;
    const State &s = p.state;
    i32 heads = pipeline.heads_per_item;
    i64 row = quotient(max(number, 0ll), pipeline.items_per_row);
    i32 first = (i32)(number - row * pipeline.items_per_row) * heads, head = first + h;
    bool exists = number >= 0 && h < heads;
    Row r = {};
    i32 kind = NOTHING, from = 0, folds = 0;
    i64 position = 0, oldest = 0;
    if (exists) {
      r = resolve(p.slots, p.batch, row, p.place, head == 0);
      kind = r.span.len == 0 ? NOTHING : r.live ? READ : p.batch.keep_null_outputs ? NOTHING : ZERO;
      to.out = span_at(r.span, p.out, 0, head);
    }
    i64 flush_before = 0;
    i32 flush = 0;
    if (kind == READ) {
      const Cursor &cursor = p.slots.cursors[r.ring];
      position = cursor.position;
      flush_before = cursor.flush_before;
      flush = p.batch.flush ? p.batch.flush[row] : 0;
      float a = load_one(tensor_at(p.a, 0, 0, head), p.a.dtype), bias = 0.0f;
      if (p.dt_bias.data) bias = load_one(tensor_at(p.dt_bias, 0, 0, head), p.dt_bias.dtype);
      to.skip = p.d_skip.data && !p.d_per_element ? load_one(tensor_at(p.d_skip, 0, 0, head), p.d_skip.dtype) : 0.0f;
      const i64 *tags = (const i64 *)own_part(s.tags, r.slot) + (i64)head * s.tiles;
      i64 tag = tags[0];
      oldest = tag;
      bool bad = false, odd = false;
#pragma unroll 4
      for (i32 t = 0; t < s.tiles; t++) {
        i64 other = tags[t];
        bad = bad || !tag_is_valid(p.slots, position, other);
        odd = odd || other != tag;
        oldest = min(oldest, other);
      }
#pragma unroll 1
      for (i32 t = 0; t < (i32)r.span.len; t++) {
        float dt = load_one(span_at(r.span, p.dt, t, head), p.dt.dtype);
        if (p.dt_bias.data) dt = __fadd_rn(dt, bias);
        if (p.softplus) dt = softplus(dt);
        gates[t] = make_float2(dt, __fmul_rn(a, dt));
      }
      to.leads = head % p.heads_per_group == 0;
      if (bad) {
        fault(p.slots, FAULT_POSITION, r.slot, row, p.place.pool, p.place.layer);
        kind = ZERO;
        oldest = position;
      } else {
        folds = (i32)folds_of(p.slots, position, tag, r.span.len, flush_before, flush);
        kind = odd ? ODD : folds > 0 ? FOLD : READ;
        from = (i32)(position - tag);
      }
      i64 elements = (i64)s.rows * COLUMNS;
      to.checkpoint = (const char *)own_part(s.checkpoint, r.slot) + head * elements * (s.format <= FORMAT_F32 ? 4 : 2);
      to.value_ring = (char *)own_part(p.ring_x, r.ring) + (i64)head * p.ring_rows * s.rows * 2;
      to.gate_ring = (char *)own_part(p.ring_dt, r.ring) + (i64)head * p.ring_rows * 8;
      to.value = span_at(r.span, p.x, 0, head);
      to.z = p.z.data ? span_at(r.span, p.z, 0, head) : nullptr;
    }
    // The oldest of the item's heads.
    i32 records = (i32)(position - oldest);
    bool works = kind <= ODD, any = kind == FOLD || kind == ODD;
#pragma unroll
    for (i32 other = 1; other < MAX_HEADS; other *= 2) {
      records = max(records, __shfl_xor_sync(0xFFFFFFFFu, records, other));
      works = __shfl_xor_sync(0xFFFFFFFFu, (i32)works, other) || works;
      any = __shfl_xor_sync(0xFFFFFFFFu, (i32)any, other) || any;
    }
    if (!leaves) return;
    to.kind = (i16)kind;
    to.from = (i16)(records - from);
    to.folds = (i16)folds;
    if (h != 0) return;
    item.has_work = works;
    item.folds = any;
    item.head = first;
    item.step = 1;
    item.records = records;
    item.len = (i32)r.span.len;
    if (!works) return;
    // A head that cannot be worked on may be the first.
    const Cursor &cursor = p.slots.cursors[r.ring];
    i64 group = first / p.heads_per_group;
    item.slot = r.slot;
    item.position = cursor.position;
    item.flush_before = flush_before;
    item.seed = cursor.seed;
    item.flush = flush;
    item.at = (i32)(item.position - quotient(item.position, p.ring_rows) * p.ring_rows);
    item.first = item.at - records;
    if (item.first < 0) item.first += p.ring_rows;
    item.key_ring = (const char *)own_part(p.ring_b, r.ring) + group * p.ring_rows * ROW_BYTES;
    item.key = span_at(r.span, p.b, 0, group);
    item.query = span_at(r.span, p.c, 0, group);
  }

  static DEVICE void bring_norms(const Params &, const Item &, const Head &, SharedAt) {}
  static DEVICE void prefetch_records(const Params &, const Job &) {}

  static DEVICE void bring_gates(const Gates &gates, SharedAt to, i32 row) { ptx_copy8(to, gates.ring + row * 8); }

  // x of token i of the step; of those behind them z, if there is one.
  static DEVICE i32 token_copies(const Params &p, i32 len) { return has_z(p) ? 2 * len : len; }
  static DEVICE Copy copy_of_token(const Params &p, const Job &job, i32 i) {
    const Pipeline &s = p.pipeline;
    i32 len = job.item->len, t = i < len ? i : i - len;
    u32 bytes = (u32)(p.family.state.rows * 2);
    if (i < len) return Copy{job.head->value + t * p.family.x.token * 2, (u32)((job.item->records + t) * s.value_stride), bytes};
    return Copy{job.head->z + t * p.family.z.token * 2, (u32)(s.at_z + t * s.value_stride), has_z(p) && t < len ? bytes : 0};
  }

  // The lane's own eight values of C of the token that is its column; of the last one where there are fewer.
  static DEVICE const char *column_of(const Pipeline &s, const Job &job, Lane lane) {
    return job.keys + s.at_queries + min(lane.group, job.item->len - 1) * ROW_BYTES + 16 * lane.quad;
  }

  template <bool IS_SINGLE>
  static DEVICE void weigh_item(const Params &p, const Job &job) {
    weigh_keys(p.pipeline, job, column_of(p.pipeline, job, lane_of(threadIdx.x)), products_at(p.pipeline, job), IS_SINGLE ? 1 : (i32)MAX_COLUMNS);
  }

  // What record i brings to a column.
  static DEVICE float brings(const Pipeline &s, const Job &job, i32 column, i32 i) {
    return __fmul_rn(weights_at(s, job)[i], products_at(s, job)[column * s.products + i]);
  }

  template <bool IS_SINGLE>
  static DEVICE void weigh_head(const Params &p, const Job &job) {
    if constexpr (IS_SINGLE) {
      weigh_single<Mamba2>(p.pipeline, job);
    } else {
      weigh_several<Mamba2>(p.pipeline, job, MAX_COLUMNS);
    }
  }

  static DEVICE float2 gate_of_record(const Head &head, i32 row) { return ((const float2 *)head.gate_ring)[row]; }
  static DEVICE const char *values_of_record(const Params &p, const Head &head, i32 row) { return head.value_ring + row * p.family.state.rows * 2; }
  static DEVICE void scale_keys(const Item &, i32, float (&)[8]) {}
  static DEVICE void widen_more(const Params &, const Item &, const Head &, i32) {}

  // Takes a record into a part of a tile that has decayed: x dt of its rows, B.
  static DEVICE void take_in(Tile<BLOCKS, FOLD_HALVES> &t, const float *b, float, const float (&xd)[FOLD_HALVES], Lane lane) {
    rank_one(t, b, xd, BLOCKS, lane);
  }

  static DEVICE void zero(const Params &p, const Job &job) {
    const Tensor &out = p.family.out;
    for (i32 t = 0; t < job.item->len; t++)
      for (i32 i = lane_index(); i < p.family.state.rows; i += WARP)
        store_one(job.head->out + (t * out.token + i) * size_of(out.dtype), out.dtype, 0.0f);
  }

  // y = fma(D, x, y) and the gate, which there may not be.
  static DEVICE float finish(const Params &params, const Job &job, i32 channel, float x, float z, float y) {
    const Mamba2Params &p = params.family;
    float d = job.head->skip;
    if (p.d_per_element && p.d_skip.data) d = load_one(tensor_at(p.d_skip, 0, 0, job.number) + channel * size_of(p.d_skip.dtype), p.d_skip.dtype);
    if (p.d_skip.data) y = fma(d, x, y);
    return has_z(params) ? __fmul_rn(y, fast_silu(z)) : y;
  }

  // One token: the products of up to four tiles with it.
  template <i32 FORMAT, bool HIGH>
  static DEVICE void read_plane(const Params &params, const Job &job, i32 first, SharedAt half_empty, Lane lane) {
    const Pipeline &s = params.pipeline;
    if constexpr (HIGH) {
      const char *columns[1] = {job.keys + s.at_queries};
      read_high<1>(s, params.family.state.tiles, job, first, columns);
    } else {
      const char *columns[1] = {job.keys + s.at_queries + 16 * lane.quad};
      read_full<FORMAT, 1>(s, params.family.state, job, first, columns, half_empty, lane);
    }
  }

  // The rest of it, two neighbouring channels a lane.
  static DEVICE void finish_single(const Params &params, const Job &job) {
    const Mamba2Params &p = params.family;
    const Pipeline &s = params.pipeline;
    i32 n = job.item->records;
    const float *brought = weights_at(s, job);
#pragma unroll 1
    for (i32 channel = 2 * lane_index(); channel < p.state.rows; channel += 2 * WARP) {
      i32 from = folds_of_tile<Mamba2>(params, job, channel / TILE).from;
      float elapsed = elapsed_at(s, job)[from];
      float2 y = *(const float2 *)(sums_at(s) + channel);
      y.x = __fmul_rn(y.x, elapsed), y.y = __fmul_rn(y.y, elapsed);
      const char *values = values_at(s, job) + 2 * channel;
      u32 z = has_z(params) ? *(const u32 *)(job.stage + s.at_z + 2 * channel) : 0, x = 0;
#pragma unroll 4
      for (i32 i = from; i <= n; i++) {
        x = *(const u32 *)(values + i * s.value_stride);
        y.x = fma(brought[i], pair_low(x), y.x);
        y.y = fma(brought[i], pair_high(x), y.y);
      }
      y.x = finish(params, job, channel, pair_low(x), pair_low(z), y.x);
      y.y = finish(params, job, channel + 1, pair_high(x), pair_high(z), y.y);
      *(u32 *)(job.head->value_ring + (job.item->at * p.state.rows + channel) * 2) = x;
      put_pair(p.out.dtype, job.head->out + channel * (i32)size_of(p.out.dtype), y.x, y.y);
    }
  }

  // Several tokens: outputs of the tiles [first, end) of a head, and records of x.
  template <i32 FORMAT, bool HIGH>
  static DEVICE void read_tiles(const Params &params, const Job &job, i32 from, i32 first, i32 end, Lane lane) {
    const Mamba2Params &p = params.family;
    const Pipeline &s = params.pipeline;
    constexpr i32 PARTS = HIGH ? 2 : 3;
    float elapsed = elapsed_at(s, job)[from], of[2] = {elapsed, elapsed}, y[SEVERAL_TILES][4] = {};
    multiply_tiles<FORMAT, HIGH>(p.state.rows, job, first, end, column_of(s, job, lane), lane, y);
    add_records<Mamba2, false, PARTS>(s, job, 0, first, end, from, of, lane, y);
    // Hidden, so that they are not kept in registers from before.
    i32 len = ptx_hide(job.item->len), n = ptx_hide(job.item->records), rows = p.state.rows;
    float *sums = sums_at(s);
    float2 decays = *(const float2 *)(decays_at(s, job) + 2 * lane.quad);
    Brought<false, PARTS> own = brought_by_tokens<PARTS>(s, job, 0, lane);
#pragma unroll
    for (i32 i = 0; i < SEVERAL_TILES; i++) {
      if (first + i >= end) break;
#pragma unroll
      for (i32 e = 0; e < 4; e++) y[i][e] = __fmul_rn(y[i][e], e % 2 == 0 ? decays.x : decays.y);
      add_brought(values_at(s, job) + n * s.value_stride, s.value_stride, first + i, len, own, lane, y[i]);
#pragma unroll
      for (i32 e = 0; e < 4; e++) {
        i32 t = 2 * lane.quad + e % 2, channel = (first + i) * TILE + lane.group + e / 2 * 8;
        if (t < len && channel < rows) sums[t * s.sums + channel] = y[i][e];
      }
    }
    __syncwarp();
    // Two neighbouring channels a lane.
    i32 size = (i32)size_of(p.out.dtype), last = min(end * (i32)TILE, p.state.rows);
#pragma unroll 1
    for (i32 t = 0; t < len; t++) {
      i32 at = job.item->at + t;
      if (at >= p.ring_rows) at -= p.ring_rows;
#pragma unroll 1
      for (i32 channel = first * TILE + 2 * lane_index(); channel < last; channel += 2 * WARP) {
        float2 y = *(const float2 *)(sums + t * s.sums + channel);
        u32 pair = *(const u32 *)(values_at(s, job) + (n + t) * s.value_stride + 2 * channel);
        *(u32 *)(job.head->value_ring + (at * p.state.rows + channel) * 2) = pair;
        u32 z = has_z(params) ? *(const u32 *)(job.stage + s.at_z + t * s.value_stride + 2 * channel) : 0;
        y.x = finish(params, job, channel, pair_low(pair), pair_low(z), y.x);
        y.y = finish(params, job, channel + 1, pair_high(pair), pair_high(z), y.y);
        put_pair(p.out.dtype, job.head->out + (t * p.out.token + channel) * size, y.x, y.y);
      }
    }
    // Sums are written again.
    __syncwarp();
  }

  // The rest of the tokens' records: dt and g of the head; B, if it is the first of its group. Statistics, once for all heads of a row.
  static DEVICE void record_rest(const Params &params, const Job &job, bool high) {
    const Mamba2Params &p = params.family;
    const State &s = p.state;
    i32 len = job.item->len, lane = lane_index();
    if (lane < len) {
      i32 at = job.item->at + lane;
      if (at >= p.ring_rows) at -= p.ring_rows;
      ((float2 *)job.head->gate_ring)[at] = job.gates[lane];
    }
    if (job.head->leads) {
#pragma unroll 1
      for (i32 t = 0; t < len; t++) {
        i32 at = job.item->at + t;
        if (at >= p.ring_rows) at -= p.ring_rows;
        ((u64 *)(job.item->key_ring + at * ROW_BYTES))[lane] = ((const u64 *)(job.keys + (job.item->records + t) * ROW_BYTES))[lane];
      }
    }
    if (job.number != 0 || lane != 0) return;
    bool folded = job.head->kind == FOLD;
    u64 elements = (u64)s.heads * s.rows * s.columns, size = s.format <= FORMAT_F32 ? 4 : 2;
    u64 record = (u64)s.heads * (s.rows * 2 + 8) + (u64)(s.heads / p.heads_per_group) * s.columns * 2;
    tally(p.slots, folded ? (u64)s.heads * s.tiles : 0, high && !folded && s.format == FORMAT_SPLIT32 ? elements * 2 : elements * size,
          folded ? elements * size : 0, (u64)job.item->records * record, (u64)len * record);
  }
};

}  // namespace decode

extern "C" __global__ void __launch_bounds__(512, 1) replayssm_kernel(const __grid_constant__ Mamba2DecodeParams p) {
  decode::run<decode::Mamba2<INSTANCE_FORMAT>, INSTANCE_FORMAT, INSTANCE_HIGH, INSTANCE_SINGLE>(p);
}
