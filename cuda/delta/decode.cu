// Delta rules: FULL and HIGH steps of one token, or of up to eight (Kimi Delta Attention: four), on aligned memory. How it is done stands in
// ../common/decode.cuh, and what is different with Kimi Delta Attention in decode_kda.cuh.
//
//   u_t = beta_t (v_t - S0 (e^{G_t} kh_t) - sum_{j<t} u_j (e^{G(j,t)} kh_j) . kh_t)
//   o_t = scale (S0 (e^{G_t} qh_t) + sum_{j<=t} u_j (e^{G(j,t)} kh_j) . qh_t)
//
// Keys are k of a key head; queries its q; columns both of them, raw, and scaled by their norms afterwards; values are u, and where records are
// folded v.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_HIGH: whether the readout is HIGH rather than FULL. INSTANCE_SINGLE: whether steps have one token.
// INSTANCE_KDA: whether decays are per column.

// Tiles that FULL reads at a time: with more of them it needs more registers than there are on later architectures.
#define FULL_TILES (__CUDA_ARCH__ >= 1000 ? 1 : INSTANCE_FORMAT == FORMAT_F32 ? 4 : 2)
#include "../common/decode.cuh"
#include "rule.cuh"

namespace decode {

template <i32 FORMAT_, bool HIGH_, bool IS_KDA>
struct Delta {
  typedef DeltaDecodeParams Params;
  // u is as precise as the readout.
  enum : i32 {
    VALUE_BYTES = HIGH_ ? 2 : 4,
    WIDE = COLUMNS,
    FOLD_HALVES = 1,
    IS_SCALED = 0,
    SINGLE_COLUMNS = 2,
    WEIGHS_FIRST = IS_KDA,
    HAS_LOGS = IS_KDA,
    FEW = MAX_COLUMNS / 2,
  };

  static DEVICE i32 record_bytes(const Params &p) { return p.pipeline.channels * VALUE_BYTES; }
  static DEVICE i32 token_bytes(const Params &p) { return p.pipeline.channels * 2; }
  static DEVICE i64 key_bytes(const Params &p) { return p.family.k.token * 2; }
  static DEVICE i64 query_bytes(const Params &p) { return p.family.q.token * 2; }

  // Columns: k and q of one token next to each other; of up to FEW tokens k in front of q; of more k in eight, q in the next eight.
  static DEVICE i32 token_of(i32 column, i32 len) { return column % (len <= FEW ? FEW : (i32)MAX_TOKENS); }

  // Items of a row: parts of the value heads of a key head, one key head after the other.
  static DEVICE i32 key_head(const Params &p, i32 item) { return item / (p.pipeline.items_per_row / p.family.qk_heads); }
  static DEVICE i32 head_of(const Params &p, i32 item, i32 h) {
    i32 key = key_head(p, item), each = p.family.state.heads / p.family.qk_heads;
    i32 within = (item % (p.pipeline.items_per_row / p.family.qk_heads) * p.pipeline.heads_per_item + h) / parts_of(p.pipeline);
    return p.family.is_tiled ? key + within * p.family.qk_heads : key * each + within;
  }

  // Plans one head of an item; a lane each, the heads of an item next to each other.
  static DEVICE void plan_head(const Params &params, i64 number, i32 h, bool leaves, Item &item, Head &to, float2 *gates) {
    const DeltaParams &p = params.family;
    const Pipeline &pipeline = params.pipeline;
    const State &s = p.state;
    i64 row = quotient(max(number, 0ll), pipeline.items_per_row);
    i32 within = (i32)(number - row * pipeline.items_per_row);
    bool exists = number >= 0 && h < pipeline.heads_per_item;
    i32 first = exists ? head_of(params, within, 0) : 0, head = exists ? head_of(params, within, h) : 0;
    Row r = {};
    i32 kind = NOTHING, from = 0, folds = 0, part = (within * pipeline.heads_per_item + h) % parts_of(pipeline);
    i32 channel = part * pipeline.channels;
    i64 position = 0, oldest = 0;
    if (exists) {
      r = resolve(p.slots, p.batch, row, p.place, head == 0 && part == 0);
      kind = r.span.len == 0 ? NOTHING : r.live ? READ : p.batch.keep_null_outputs ? NOTHING : ZERO;
      to.out = span_at(r.span, p.out, 0, head) + channel * (i32)size_of(p.out.dtype);
    }
    i64 flush_before = 0;
    i32 flush = 0;
    if (kind == READ) {
      const Cursor &cursor = p.slots.cursors[r.ring];
      position = cursor.position;
      flush_before = cursor.flush_before;
      flush = p.batch.flush ? p.batch.flush[row] : 0;
      float a = 1.0f, bias = 0.0f;
      if (p.a_log.data) a = load_one(tensor_at(p.a_log, 0, 0, head), p.a_log.dtype);
      if (!IS_KDA && p.dt_bias.data) bias = load_one(tensor_at(p.dt_bias, 0, 0, head), p.dt_bias.dtype);
      const i64 *tags = (const i64 *)own_part(s.tags, r.slot) + (i64)head * s.tiles;
      // Tags of other parts may move meanwhile, from one that is valid to another.
      i32 first_tile = part * pipeline.tiles;
      i64 tag = tags[first_tile];
      oldest = tag;
      bool bad = false, odd = false;
#pragma unroll 4
      for (i32 t = 0; t < s.tiles; t++) {
        i64 other = tags[t];
        bool is_own = (u32)(t - first_tile) < (u32)pipeline.tiles;
        bad = bad || !tag_is_valid(p.slots, position, other);
        odd = odd || (is_own && other != tag);
        oldest = is_own ? min(oldest, other) : oldest;
      }
      if (p.a_log.data) a = exp(a);
#pragma unroll 1
      for (i32 t = 0; t < (i32)r.span.len; t++) {
        float beta = load_one(span_at(r.span, p.beta, t, head), p.beta.dtype), g = a;
        if (!IS_KDA) {
          float x = load_one(span_at(r.span, p.g, t, head), p.g.dtype);
          if (p.dt_bias.data) x = __fadd_rn(x, bias);
          g = gate_of(p, a, x);
        }
        gates[t] = make_float2(p.beta_sigmoid ? sigmoid(beta) : beta, g);
      }
      to.leads = leads(p, head);
      to.part = (i16)part;
      if (bad) {
        if (part == 0) fault(p.slots, FAULT_POSITION, r.slot, row, p.place.pool, p.place.layer);
        kind = ZERO;
        oldest = position;
      } else {
        folds = (i32)folds_of(p.slots, position, tag, r.span.len, flush_before, flush);
        kind = odd ? ODD : folds > 0 ? FOLD : READ;
        from = (i32)(position - tag);
      }
      i64 elements = (i64)s.rows * COLUMNS, record = (i64)head * p.ring_rows;
      to.checkpoint = (const char *)own_part(s.checkpoint, r.slot) + head * elements * (s.format <= FORMAT_F32 ? 4 : 2) +
                      channel * COLUMNS * (s.format == FORMAT_F32 ? 4 : 2);
      to.value_ring = (char *)own_part(p.ring_u, r.ring) + (record * s.rows + channel) * VALUE_BYTES;
      to.raw_ring = (char *)own_part(p.ring_v, r.ring) + (record * s.rows + channel) * 2;
      to.gate_ring = (char *)own_part(p.ring_g, r.ring) + record * (IS_KDA ? COLUMNS * 4 : 4);
      to.beta_ring = (char *)own_part(p.ring_beta, r.ring) + record * 4;
      to.value = span_at(r.span, p.v, 0, head) + channel * 2;
      if (IS_KDA) to.z = span_at(r.span, p.g, 0, head);
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
    item.step = p.is_tiled ? p.qk_heads : 1;
    item.records = records;
    item.len = (i32)r.span.len;
    if (!works) return;
    // A head that cannot be worked on may be the first.
    const Cursor &cursor = p.slots.cursors[r.ring];
    i64 key = key_head(params, within);
    item.slot = r.slot;
    item.position = cursor.position;
    item.flush_before = flush_before;
    item.seed = cursor.seed;
    item.flush = flush;
    item.at = (i32)(item.position - quotient(item.position, p.ring_rows) * p.ring_rows);
    item.first = item.at - records;
    if (item.first < 0) item.first += p.ring_rows;
    item.key_ring = (const char *)own_part(p.ring_k, r.ring) + key * p.ring_rows * ROW_BYTES;
    item.norm_ring = (char *)own_part(p.ring_norm, r.ring) + key * p.ring_rows * 4;
    item.key = span_at(r.span, p.k, 0, key);
    item.query = span_at(r.span, p.q, 0, key);
  }

  // Reciprocal norms: of records and tokens, then of queries.
  static DEVICE float *norms_at(const Pipeline &s, char *keys) { return (float *)(keys + s.at_norms); }

  static DEVICE void bring_norms(const Params &p, const Item &item, const Head &, SharedAt to) {
#pragma unroll 1
    for (i32 i = lane_index(); i < item.records; i += WARP) {
      i32 row = item.first + i;
      if (row >= p.family.ring_rows) row -= p.family.ring_rows;
      ptx_copy4(to + (p.pipeline.at_norms + 4 * i), item.norm_ring + row * 4);
    }
  }

  // v of records that a head takes in: of all of its parts.
  static DEVICE void prefetch_records(const Params &p, const Job &job) {
    if (job.head->part != 0) return;
    i32 rows = p.family.ring_rows, bytes = p.family.state.rows * 2, first = job.item->first, n = job.item->records;
    i32 before = min(n, rows - first);
    if (before > 0) ptx_bulk_prefetch(job.head->raw_ring + first * bytes, (u32)(before * bytes));
    if (n > before) ptx_bulk_prefetch(job.head->raw_ring, (u32)((n - before) * bytes));
  }

  static DEVICE void bring_gates(const Gates &gates, SharedAt to, i32 row) {
    ptx_copy4(to, gates.beta + row * 4);
    ptx_copy4(to + 4, gates.ring + row * 4);
  }

  static DEVICE const u16 *own_v(const Pipeline &s, const Job &job, i32 t) { return (const u16 *)(job.stage + s.at_z + t * s.value_stride); }

  // v of token i of the step.
  static DEVICE i32 token_copies(const Params &, i32 len) { return len; }
  static DEVICE Copy copy_of_token(const Params &p, const Job &job, i32 i) {
    return Copy{job.head->value + i * p.family.v.token * 2, (u32)(p.pipeline.at_z + i * p.pipeline.value_stride),
                i < job.item->len ? (u32)token_bytes(p) : 0};
  }

  // The lane's own eight values of the column of a pass that it has; of some token where there is no such column.
  template <bool IS_SINGLE>
  static DEVICE const char *column_of(const Pipeline &s, const Job &job, i32 pass, Lane lane) {
    i32 len = job.item->len, c = lane.group;
    bool is_q = IS_SINGLE ? c % 2 != 0 : len <= FEW ? c >= FEW : pass != 0;
    i32 t = IS_SINGLE ? 0 : min(token_of(c, len), len - 1);
    return job.keys + (is_q ? s.at_queries + t * ROW_BYTES : (job.item->records + t) * ROW_BYTES) + 16 * lane.quad;
  }

  static DEVICE i32 passes_of(i32 len) { return len <= FEW ? 1 : 2; }

  // Reciprocal norms of the step's keys and queries.
  static DEVICE void weigh_norms(const Params &p, const Job &job) {
    const Pipeline &s = p.pipeline;
    i32 len = job.item->len, n = job.item->records;
    float *norms = norms_at(s, job.keys);
#pragma unroll 1
    for (i32 t = 0; t < len; t++) {
      float of_k = norm_of(p.family, job.keys + (n + t) * ROW_BYTES), of_q = norm_of(p.family, job.keys + s.at_queries + t * ROW_BYTES);
      if (lane_index() == 0) {
        norms[n + t] = of_k;
        norms[s.history + t] = of_q;
      }
    }
  }

  template <bool IS_SINGLE>
  static DEVICE void weigh_item(const Params &p, const Job &job) {
    const Pipeline &s = p.pipeline;
    Lane lane = lane_of(threadIdx.x);
    i32 len = job.item->len, n = job.item->records;
    const float *norms = norms_at(s, job.keys);
    weigh_norms(p, job);
#pragma unroll 1
    for (i32 pass = 0; pass < passes_of(len); pass++)
      weigh_keys(s, job, column_of<IS_SINGLE>(s, job, pass, lane), products_at(s, job) + pass * MAX_COLUMNS * s.products,
                 IS_SINGLE ? (i32)SINGLE_COLUMNS : (i32)MAX_COLUMNS);
    __syncwarp();
    // Of normalised keys and queries.
    i32 columns = IS_SINGLE ? (i32)SINGLE_COLUMNS : passes_of(len) * MAX_COLUMNS;
#pragma unroll 1
    for (i32 c = 0; c < columns; c++) {
      float factor = column_norm<IS_SINGLE>(s, job, c);
#pragma unroll 1
      for (i32 i = lane_index(); i < n + len; i += WARP) products_at(s, job)[c * s.products + i] *= norms[i] * factor;
    }
  }

  template <bool IS_SINGLE>
  static DEVICE float column_norm(const Pipeline &s, const Job &job, i32 column) {
    i32 len = job.item->len, t = IS_SINGLE ? 0 : min(token_of(column, len), len - 1);
    bool is_q = IS_SINGLE ? column % 2 != 0 : column >= (len <= FEW ? (i32)FEW : (i32)MAX_COLUMNS);
    return norms_at(s, job.keys)[is_q ? s.history + t : job.item->records + t];
  }

  // What record i brings to a column.
  static DEVICE float brings(const Pipeline &s, const Job &job, i32 column, i32 i) {
    return __fmul_rn(weights_at(s, job)[i], products_at(s, job)[column * s.products + i]);
  }

  template <bool IS_SINGLE>
  static DEVICE void weigh_head(const Params &p, const Job &job) {
    if constexpr (IS_SINGLE) {
      weigh_single<Delta>(p.pipeline, job);
    } else {
      weigh_several<Delta>(p.pipeline, job, passes_of(job.item->len) * MAX_COLUMNS);
    }
  }

  static DEVICE float2 gate_of_record(const Head &head, i32 row) {
    return make_float2(((const float *)head.beta_ring)[row], ((const float *)head.gate_ring)[row]);
  }
  static DEVICE const char *values_of_record(const Params &p, const Head &head, i32 row) { return head.raw_ring + row * p.family.state.rows * 2; }
  static DEVICE void scale_keys(const Item &item, i32 row, float (&k)[8]) {
    float norm = ((const float *)item.norm_ring)[row];
#pragma unroll
    for (i32 e = 0; e < 8; e++) k[e] = __fmul_rn(k[e], norm);
  }
  static DEVICE void widen_more(const Params &, const Item &, const Head &, i32) {}

  // Takes a record into a part of a tile that has decayed: its key, beta, v of the rows.
  static DEVICE void take_in(Tile<BLOCKS, FOLD_HALVES> &t, const float *key, float beta, const float (&v)[FOLD_HALVES], Lane lane) {
    float classes[FOLD_HALVES][8] = {}, k[BLOCKS][8], u[FOLD_HALVES];
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      shared8(key, j, lane, k[j]);
#pragma unroll
      for (i32 h = 0; h < FOLD_HALVES; h++)
#pragma unroll
        for (i32 e = 0; e < 8; e++) classes[h][e] = fma(t.v[h][j][e], k[j][e], classes[h][e]);
    }
#pragma unroll
    for (i32 h = 0; h < FOLD_HALVES; h++) u[h] = __fmul_rn(beta, __fsub_rn(v[h], sum_fold_classes(classes[h])));
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
      for (i32 h = 0; h < FOLD_HALVES; h++)
#pragma unroll
        for (i32 e = 0; e < 8; e++) t.v[h][j][e] = fma(u[h], k[j][e], t.v[h][j][e]);
  }

  static DEVICE void zero(const Params &p, const Job &job) {
    const Tensor &out = p.family.out;
    for (i32 t = 0; t < job.item->len; t++)
      for (i32 i = lane_index(); i < p.pipeline.channels; i += WARP)
        store_one(job.head->out + (t * out.token + i) * size_of(out.dtype), out.dtype, 0.0f);
  }

  // Output and records of token t at a channel.
  static DEVICE void put(const Params &params, const Job &job, i32 t, i32 channel, u16 v, float u, float o) {
    const DeltaParams &p = params.family;
    i32 at = job.item->at + t;
    if (at >= p.ring_rows) at -= p.ring_rows;
    i32 record = at * p.state.rows + channel;
    ((u16 *)job.head->raw_ring)[record] = v;
    if (HIGH_) {
      ((u16 *)job.head->value_ring)[record] = to_bf16(u);
    } else {
      ((float *)job.head->value_ring)[record] = canonical(u);
    }
    store_one(job.head->out + (t * p.out.token + channel) * size_of(p.out.dtype), p.out.dtype, __fmul_rn(p.scale, o));
  }

  // One token: the products of up to four tiles with k and q.
  template <i32 FORMAT, bool HIGH>
  static DEVICE void read_plane(const Params &params, const Job &job, i32 first, SharedAt half_empty, Lane lane) {
    const Pipeline &s = params.pipeline;
    i32 of_lane = HIGH ? 0 : 16 * lane.quad;
    const char *columns[2] = {job.keys + job.item->records * ROW_BYTES + of_lane, job.keys + s.at_queries + of_lane};
    if constexpr (HIGH) {
      read_high<2>(s, params.family.state.tiles, job, first, columns);
    } else {
      read_full<FORMAT, 2>(s, params.family.state, job, first, columns, half_empty, lane);
    }
  }

  // The rest of it, two neighbouring channels a lane.
  static DEVICE void finish_single(const Params &params, const Job &job) {
    const Pipeline &s = params.pipeline;
    float of_k = column_norm<true>(s, job, 0), of_q = column_norm<true>(s, job, 1);
#pragma unroll 1
    for (i32 channel = 2 * lane_index(); channel < params.family.state.rows; channel += 2 * WARP) {
      i32 from = folds_of_tile<Delta>(params, job, channel / TILE).from;
      float elapsed = elapsed_at(s, job)[from];
      finish_channels(params, job, channel, from, of_k * elapsed, of_q * elapsed);
    }
  }

  // Two channels from what the checkpoint brings on, which counts by factors of k and q.
  static DEVICE void finish_channels(const Params &params, const Job &job, i32 channel, i32 from, float of_k, float of_q) {
    const DeltaParams &p = params.family;
    const Pipeline &s = params.pipeline;
    i32 n = job.item->records;
    const float2 *brought = (const float2 *)weights_at(s, job);
    const char *values = values_at(s, job) + channel * VALUE_BYTES;
    float2 seen = *(const float2 *)(sums_at(s) + channel), o = *(const float2 *)(sums_at(s) + s.sums + channel);
    float y[4] = {seen.x * of_k, o.x * of_q, seen.y * of_k, o.y * of_q};
#pragma unroll 4
    for (i32 i = from; i < n; i++) {
      float u[2];
      if (HIGH_) {
        u32 pair = *(const u32 *)(values + i * s.value_stride);
        u[0] = pair_low(pair), u[1] = pair_high(pair);
      } else {
        float2 pair = *(const float2 *)(values + i * s.value_stride);
        u[0] = pair.x, u[1] = pair.y;
      }
      float2 weight = brought[i];
      y[0] = fma(weight.x, u[0], y[0]);
      y[1] = fma(weight.y, u[0], y[1]);
      y[2] = fma(weight.x, u[1], y[2]);
      y[3] = fma(weight.y, u[1], y[3]);
    }
    float beta = job.gates[0].x, own = brought[n].y;
    u32 v = *(const u32 *)(own_v(s, job, 0) + channel);
    float u[2] = {beta * (pair_low(v) - y[0]), beta * (pair_high(v) - y[2])};
    i32 record = job.item->at * p.state.rows + channel;
    *(u32 *)((u16 *)job.head->raw_ring + record) = v;
    if (HIGH_) {
      *(u32 *)((u16 *)job.head->value_ring + record) = to_bf16(u[0]) | (u32)to_bf16(u[1]) << 16;
    } else {
      *(float2 *)((float *)job.head->value_ring + record) = make_float2(canonical(u[0]), canonical(u[1]));
    }
    put_pair(p.out.dtype, job.head->out + channel * (i32)size_of(p.out.dtype), __fmul_rn(p.scale, fma(own, u[0], y[1])),
             __fmul_rn(p.scale, fma(own, u[1], y[3])));
  }

  // What token i of the step brings to a column.
  static DEVICE float own_weight(const Pipeline &s, const Job &job, i32 column, i32 i) { return own_at(s, job)[column * MAX_TOKENS + i]; }

  // Several tokens: outputs of the tiles [first, end) of a head, and records of v and u.
  template <i32 FORMAT, bool HIGH>
  static DEVICE void read_tiles(const Params &params, const Job &job, i32 from, i32 first, i32 end, Lane lane) {
    const Pipeline &s = params.pipeline;
    i32 len = job.item->len, passes = passes_of(len);
    float elapsed = elapsed_at(s, job)[from], *sums = sums_at(s);
#pragma unroll 1
    for (i32 pass = 0; pass < passes; pass++) {
      i32 c = pass * MAX_COLUMNS + 2 * lane.quad;
      float of[2], decays[2], y[SEVERAL_TILES][4] = {};
#pragma unroll
      for (i32 i = 0; i < 2; i++) {
        of[i] = elapsed * column_norm<false>(s, job, c + i);
        decays[i] = decays_at(s, job)[min(token_of(c + i, len), len - 1)];
      }
      multiply_tiles<FORMAT, HIGH_>(s.channels, job, first, end, column_of<false>(s, job, pass, lane), lane, y);
      add_records<Delta, !HIGH_, 2>(s, job, pass, first, end, from, of, lane, y);
#pragma unroll
      for (i32 i = 0; i < SEVERAL_TILES; i++)
#pragma unroll
        for (i32 e = 0; e < 4; e++) y[i][e] *= decays[e % 2];
      put_sums(params, sums + c * s.sums, first, end, lane, y);
    }
    substitute(params, job, first, end);
  }

  // Leaves the sums of two columns.
  static DEVICE void put_sums(const Params &p, float *to, i32 first, i32 end, Lane lane, const float (&y)[SEVERAL_TILES][4]) {
#pragma unroll
    for (i32 i = 0; i < SEVERAL_TILES; i++)
#pragma unroll
      for (i32 e = 0; e < 4; e++) {
        i32 channel = (first + i) * TILE + lane.group + e / 2 * 8;
        if (first + i < end && channel < p.pipeline.channels) to[e % 2 * p.pipeline.sums + channel] = y[i][e];
      }
  }

  // From sums to outputs: by forward substitution, a channel a lane.
  static DEVICE void substitute(const Params &params, const Job &job, i32 first, i32 end) {
    const Pipeline &s = params.pipeline;
    constexpr i32 MOST = IS_KDA ? (i32)FEW : (i32)MAX_TOKENS;
    const float *sums = sums_at(s);
    i32 len = job.item->len;
    __syncwarp();
    i32 last = min(end * (i32)TILE, s.channels), queries = len <= FEW ? (i32)FEW : (i32)MAX_COLUMNS;
#pragma unroll 1
    for (i32 channel = first * TILE + lane_index(); channel < last; channel += WARP) {
      float u[MOST];
#pragma unroll
      for (i32 t = 0; t < MOST; t++) {
        if (t >= len) break;
        float seen = sums[t * s.sums + channel], o = sums[(queries + t) * s.sums + channel];
#pragma unroll
        for (i32 i = 0; i < t; i++) {
          seen = fma(own_weight(s, job, t, i), u[i], seen);
          o = fma(own_weight(s, job, queries + t, i), u[i], o);
        }
        u16 v = own_v(s, job, t)[channel];
        u[t] = job.gates[t].x * (from_bf16(v) - seen);
        put(params, job, t, channel, v, u[t], fma(own_weight(s, job, queries + t, t), u[t], o));
      }
    }
    // Sums are written again.
    __syncwarp();
  }

  // The rest of the tokens' records: g and beta of the head; k and its norm, if it is the first of its key head. Statistics, once for all heads
  // of a row.
  static DEVICE void record_rest(const Params &params, const Job &job, bool high) {
    const DeltaParams &p = params.family;
    const State &s = p.state;
    i32 len = job.item->len, lane = lane_index(), n = job.item->records;
    if (job.head->part != 0) return;
    bool leads = job.head->leads;
    if (lane < len) {
      i32 at = job.item->at + lane;
      if (at >= p.ring_rows) at -= p.ring_rows;
      ((float *)job.head->beta_ring)[at] = canonical(job.gates[lane].x);
      if (!IS_KDA) ((float *)job.head->gate_ring)[at] = canonical(job.gates[lane].y);
      if (leads) ((float *)job.item->norm_ring)[at] = canonical(norms_at(params.pipeline, job.keys)[n + lane]);
    }
    if (leads) {
#pragma unroll 1
      for (i32 t = 0; t < len; t++) {
        i32 at = job.item->at + t;
        if (at >= p.ring_rows) at -= p.ring_rows;
        ((u64 *)(job.item->key_ring + at * ROW_BYTES))[lane] = ((const u64 *)(job.keys + (n + t) * ROW_BYTES))[lane];
      }
    }
    if (job.number != 0 || lane != 0) return;
    bool folded = job.head->kind == FOLD;
    u64 elements = (u64)s.heads * s.rows * s.columns, state = elements * (s.format <= FORMAT_F32 ? 4 : 2);
    u64 keys = (u64)p.qk_heads * (s.columns * 2 + 4) + (u64)s.heads * 4 * (IS_KDA ? s.columns : 1), values = (u64)s.heads * (s.rows * 2 + 4);
    u64 u = (u64)s.heads * s.rows * VALUE_BYTES, folds = (u64)(folded ? job.head->folds : 0);
    tally(p.slots, folded ? (u64)s.heads * s.tiles : 0, high && !folded && s.format == FORMAT_SPLIT32 ? elements * 2 : state,
          folded ? state : 0, folds * (keys + values) + ((u64)n - folds) * (keys + u), (u64)len * (keys + values + u));
  }
};

}  // namespace decode

#if INSTANCE_KDA
#include "decode_kda.cuh"
typedef decode::Kda<INSTANCE_FORMAT, INSTANCE_HIGH> Rule;
#else
typedef decode::Delta<INSTANCE_FORMAT, INSTANCE_HIGH, false> Rule;
#endif

extern "C" __global__ void __launch_bounds__(512, 1) replayssm_kernel(const __grid_constant__ DeltaDecodeParams p) {
  decode::run<Rule, INSTANCE_FORMAT, INSTANCE_HIGH, INSTANCE_SINGLE>(p);
}
