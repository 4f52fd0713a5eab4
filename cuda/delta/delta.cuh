// Gated DeltaNet and Kimi Delta Attention: step and extend of one layer. The serial arithmetic is that of src/replay/step.rs, operation
// by operation; the parallel one promises bounds.
//
//   serial    kh = k rk, u = beta (v - S' . kh), S = fma(u, kh, S'), o = scale (S . qh)      fold, extend and the EXACT readout
//   parallel  u_t = beta_t (v_t - S0 (e^{G_t} kh_t) - sum_{j<t} u_j (e^{G(j,t)} kh_j) . kh_t)
//             o_t = scale (S0 (e^{G_t} qh_t) + sum_{j<=t} u_j (e^{G(j,t)} kh_j) . qh_t)        FULL and HIGH
//
// G(j,t) is a sum of the log decays between the two tokens; for KDA per column. In the parallel form of KDA, keys of history carry what
// they decay up to the committed position, keys and queries of the step what they decay from there, and the checkpoint what all of its
// history does.
#pragma once
#include "../common/block.cuh"
#include "rule.cuh"

namespace delta {

// Arrays in shared memory. Rows of columns have shared.columns floats, rows of channels shared.channels; tokens is max_tokens of the
// launch.
enum : i32 {
  AT_K = 0,           // [CHUNK] of columns: keys. Parallel, KDA: also [MAX_WARPS], what checkpoints decay by
  AT_V = 1,           // [CHUNK] of channels: v, then u in its place. Parallel: also u of history
  AT_GATES = 2,       // [CHUNK] of Gates
  AT_Q = 3,           // serial: [CHUNK] of columns. Parallel: [TOKENS]; KDA: [2 TOKENS], queries and then keys
  AT_O = 4,           // serial: [CHUNK] of channels. Parallel: [TOKENS]
  AT_DECAYS = 5,      // KDA, [CHUNK] of columns: factors. Parallel: the same place as AT_Q
  AT_SLOW = 6,        // KDA, [CHUNK][MAX_BLOCKS] of u32: bits of the columns that decay slowly
  AT_OWN_K = 7,       // parallel: [tokens] of columns
  AT_OWN_G = 8,       // parallel, KDA: [tokens] of columns
  AT_OWN_U = 9,       // parallel: [tokens] of channels: v, then u in its place
  AT_OWN_GATES = 10,  // parallel: [tokens] of Gates
  AT_PREDICTED = 11,  // parallel: [TOKENS] of channels
  AT_WEIGHTS = 12,    // parallel: [CHUNK + tokens][TOKENS] of float2, with k and with q
  AT_NEWER = 13,      // parallel, KDA: [1] of columns. GDN: [MAX_WARPS][TOKENS] of floats, what checkpoints decay by
};

static_assert(2 * TOKENS == CHUNK, "queries and keys of a block of tokens lie where a fold has its decays");
static_assert(MAX_WARPS <= CHUNK, "each warp finds a row among the keys");

struct Gates {
  float beta;
  float g;       // GDN
  float factor;  // GDN. Serial: of the decay; parallel: log decay between this record and the committed position
  u32 slow;
};
static_assert(sizeof(Gates) == GATES_BYTES, "gates in shared memory");

DEVICE float *floats(const DeltaParams &p, i32 array) { return (float *)(shared_memory + p.shared.at[array]); }
DEVICE float *columns(const DeltaParams &p, i32 array, i32 row) { return floats(p, array) + row * p.shared.columns; }
DEVICE float *channels(const DeltaParams &p, i32 array, i32 row) { return floats(p, array) + row * p.shared.channels; }
DEVICE Gates *gates(const DeltaParams &p, i32 array) { return (Gates *)(shared_memory + p.shared.at[array]); }
DEVICE u32 *slow_bits(const DeltaParams &p, i32 row) { return (u32 *)(shared_memory + p.shared.at[AT_SLOW]) + row * MAX_BLOCKS; }
// Weights of a chunk's records, then of the step's own tokens.
DEVICE float2 *weights(const DeltaParams &p, i32 row) { return (float2 *)(shared_memory + p.shared.at[AT_WEIGHTS]) + row * TOKENS; }

// GDN: what this warp's checkpoint decays by up to each token of a block.
DEVICE float *factors(const DeltaParams &p) { return floats(p, AT_NEWER) + warp_of() * TOKENS; }

DEVICE bool keeps_u(const DeltaParams &p) { return p.state.readout != READOUT_EXACT; }

DEVICE float *norm_at(const DeltaParams &p, i64 at) {
  return (float *)record_at(p.ring_norm, key_head(p, work().head), at, p.ring_rows, 4);
}
DEVICE char *k_at(const DeltaParams &p, i64 at) {
  return record_at(p.ring_k, key_head(p, work().head), at, p.ring_rows, p.state.columns * size_of(p.io));
}
// From the block's first channel on.
DEVICE char *v_at(const DeltaParams &p, i64 at) {
  i64 size = size_of(p.io);
  return record_at(p.ring_v, work().head, at, p.ring_rows, p.state.rows * size) + first_channel(p.state) * size;
}
DEVICE char *u_at(const DeltaParams &p, i64 at) {
  i64 size = size_of(p.u_dtype);
  return record_at(p.ring_u, work().head, at, p.ring_rows, p.state.rows * size) + first_channel(p.state) * size;
}
DEVICE float *g_at(const DeltaParams &p, i64 at, i32 n) {
  return (float *)record_at(p.ring_g, work().head, at, p.ring_rows, 4 * n);
}
DEVICE float *beta_at(const DeltaParams &p, i64 at) {
  return (float *)record_at(p.ring_beta, work().head, at, p.ring_rows, 4);
}
DEVICE char *out_at(const DeltaParams &p, i64 t) {
  return span_at(work().span, p.out, t, work().head) + first_channel(p.state) * size_of(p.out.dtype);
}

// A lane's elements lane, lane + 32, ... of a row of n; zeros behind its end. All loads are under way before the first is used.
template <i32 N>
DEVICE void load_lanes(float (&v)[N], const char *from, i32 dtype, i32 n) {
  u32 word[N];
  if (dtype == F32) {
#pragma unroll
    for (i32 j = 0; j < N; j++) {
      i32 i = WARP * j + lane_index();
      word[j] = i < n ? ((const u32 *)from)[i] : 0;
    }
  } else {
#pragma unroll
    for (i32 j = 0; j < N; j++) {
      i32 i = WARP * j + lane_index();
      word[j] = i < n ? ((const u16 *)from)[i] : 0;
    }
  }
#pragma unroll
  for (i32 j = 0; j < N; j++)
    v[j] = dtype == F32 ? from_bits(word[j]) : dtype == BF16 ? from_bits(word[j] << 16) : from_f16((u16)word[j]);
}

// Reciprocal norm of a row, a warp's work.
template <i32 NC>
DEVICE float norm_of(const DeltaParams &p, const float (&v)[NC]) {
  if (!p.has_norm) return 1.0f;
  float c = 0.0f;
#pragma unroll
  for (i32 j = 0; j < NC; j++) c = fma(v[j], v[j], c);
  return rsqrt(__fadd_rn(sum_lanes(c), p.eps));
}

// Decodes and normalises a key or query, a warp's work. A record brings its reciprocal norm.
template <i32 NC>
DEVICE void stage_key(const DeltaParams &p, float *to, const char *from, const float *norm) {
  float v[NC];
  i32 n = p.state.columns;
  load_lanes(v, from, p.io, n);
  float factor = norm ? *norm : norm_of(p, v);
#pragma unroll
  for (i32 j = 0; j < NC; j++) {
    i32 i = WARP * j + lane_index();
    if (j < blocks_of(p.state)) to[i] = i < n ? __fmul_rn(v[j], factor) : 0.0f;
  }
}

// Whether there is a token at a position, rather than a record. Where only the one or the other can be, the rest is not compiled.
enum Rows : i32 { RECORDS, OWN, BOTH };
template <Rows ROWS>
DEVICE bool is_own(i64 at) {
  return ROWS == OWN || (ROWS == BOTH && at >= work().position);
}

// Key of the record or token at a position.
template <Rows ROWS, i32 NC>
DEVICE void stage_k(const DeltaParams &p, float *to, i64 at) {
  const Work &w = work();
  bool own = is_own<ROWS>(at);
  stage_key<NC>(p, to, own ? span_at(w.span, p.k, at - w.position, key_head(p, work().head)) : k_at(p, at), own ? nullptr : norm_at(p, at));
}

// Query of token t.
template <i32 NC>
DEVICE void stage_q(const DeltaParams &p, float *to, i64 t) {
  stage_key<NC>(p, to, span_at(work().span, p.q, t, key_head(p, work().head)), nullptr);
}

// Decodes the block's channels of a row, a warp's work.
DEVICE void stage_channels(const DeltaParams &p, float *to, const char *from, i32 dtype) {
  float v[MAX_WARPS * TILE / WARP];
  load_lanes(v, from, dtype, channels_of(p.state));
#pragma unroll
  for (i32 j = 0; j < MAX_WARPS * TILE / WARP; j++) {
    i32 i = WARP * j + lane_index();
    if (i < p.shared.channels) to[i] = v[j];
  }
}

// Values of the record or token at a position.
template <Rows ROWS>
DEVICE void stage_v(const DeltaParams &p, float *to, i64 at) {
  const Work &w = work();
  const char *from = is_own<ROWS>(at) ? span_at(w.span, p.v, at - w.position, w.head) + first_channel(p.state) * size_of(p.io)
                                      : v_at(p, at);
  stage_channels(p, to, from, p.io);
}

DEVICE float gate_factor(const DeltaParams &p) {
  return p.a_log.data ? exp(load_one(tensor_at(p.a_log, 0, 0, work().head), p.a_log.dtype)) : 1.0f;
}

// GDN: log decay of token t.
DEVICE float token_g(const DeltaParams &p, i64 t) {
  const Work &w = work();
  float x = load_one(span_at(w.span, p.g, t, w.head), p.g.dtype);
  if (p.dt_bias.data) x = __fadd_rn(x, load_one(tensor_at(p.dt_bias, 0, 0, w.head), p.dt_bias.dtype));
  return gate_of(p, gate_factor(p), x);
}

// KDA: log decays of the record or token at a position, a warp's work. Each lane writes, and may read back at once, its own columns.
template <Rows ROWS, i32 NC>
DEVICE void stage_g(const DeltaParams &p, float *to, i64 at) {
  const Work &w = work();
  i32 n = p.state.columns;
  bool own = is_own<ROWS>(at);
  float v[NC];
  load_lanes(v, own ? span_at(w.span, p.g, at - w.position, w.head) : (const char *)g_at(p, at, n), own ? p.g.dtype : (i32)F32, n);
  if (own && p.dt_bias.data) {
    float b[NC];
    load_lanes(b, tensor_at(p.dt_bias, 0, 0, w.head), p.dt_bias.dtype, n);
#pragma unroll
    for (i32 j = 0; j < NC; j++) v[j] = __fadd_rn(v[j], b[j]);
  }
#pragma unroll
  for (i32 j = 0; j < NC; j++)
    if (j < blocks_of(p.state)) to[WARP * j + lane_index()] = v[j];
  if (!own || p.gate == GATE_LOG_DECAY) return;
  float a = gate_factor(p);
#pragma unroll 1
  for (i32 i = lane_index(); i < n; i += WARP) to[i] = gate_of(p, a, to[i]);
}

// KDA: factors of the decays in front of the record or token at a position, a warp's work.
template <Rows ROWS, i32 NC>
DEVICE void stage_column_decays(const DeltaParams &p, i32 row, i64 at) {
  float *to = columns(p, AT_DECAYS, row);
  stage_g<ROWS, NC>(p, to, at);
#pragma unroll 1
  for (i32 j = 0; j < blocks_of(p.state); j++) {
    i32 i = WARP * j + lane_index();
    bool exists = i < p.state.columns;
    Decay d = decay_of(to[i]);
    to[i] = exists ? d.factor : 0.0f;
    u32 bits = __ballot_sync(0xFFFFFFFFu, exists && d.slow);
    if (lane_index() == 0) slow_bits(p, row)[j] = bits;
  }
}

DEVICE float token_beta(const DeltaParams &p, i64 t) {
  float beta = load_one(span_at(work().span, p.beta, t, work().head), p.beta.dtype);
  return p.beta_sigmoid ? sigmoid(beta) : beta;
}

// Update strength of the record or token at a position; GDN: and its log decay.
template <Rows ROWS, bool IS_KDA>
DEVICE Gates gates_of(const DeltaParams &p, i64 at) {
  const Work &w = work();
  bool own = is_own<ROWS>(at);
  Gates g = {};
  g.beta = own ? token_beta(p, at - w.position) : *beta_at(p, at);
  if (!IS_KDA) g.g = own ? token_g(p, at - w.position) : *g_at(p, at, 1);
  return g;
}

// What the serial form needs of n records and tokens from base on.
template <Rows ROWS, bool IS_KDA, i32 NC>
DEVICE void stage_rows(const DeltaParams &p, i32 n) {
  i64 at = work().base;
#pragma unroll 1
  for (i32 i = warp_of(); i < n; i += warps_of()) {
    stage_k<ROWS, NC>(p, columns(p, AT_K, i), at + i);
    stage_v<ROWS>(p, channels(p, AT_V, i), at + i);
    if (IS_KDA) stage_column_decays<ROWS, NC>(p, i, at + i);
  }
#pragma unroll 1
  for (i32 i = threadIdx.x; i < n; i += blockDim.x) {
    Gates g = gates_of<ROWS, IS_KDA>(p, at + i);
    if (!IS_KDA) {
      Decay d = decay_of(g.g);
      g.factor = d.factor;
      g.slow = d.slow;
    }
    gates(p, AT_GATES)[i] = g;
  }
}

// KDA: fma(S, f, S) where the decay is slow; where it is fast fma(S, f, -0), which is S f to the last bit and sign.
template <i32 NC, i32 H>
DEVICE void decay_columns(Tile<NC, H> &t, const float *factors, const u32 *slow, i32 blocks, Lane lane) {
#pragma unroll
  for (i32 j = 0; j < NC; j++) {
    if (j >= blocks) break;
    float f[8];
    shared8(factors, j, lane, f);
    u32 bits = slow[j] >> (8 * lane.quad);
#pragma unroll
    for (i32 e = 0; e < 8; e++) {
      bool is_slow = (bits >> e) & 1;
#pragma unroll
      for (i32 h = 0; h < H; h++) t.v[h][j][e] = fma(t.v[h][j][e], f[e], is_slow ? t.v[h][j][e] : -0.0f);
    }
  }
}

// Takes record i of the chunk into a tile. Its u takes v's place.
template <bool IS_KDA, i32 NC, i32 H>
DEVICE void take_in(Tile<NC, H> &t, const DeltaParams &p, i32 i, i32 half) {
  Lane lane = lane_of(threadIdx.x);
  i32 blocks = blocks_of(p.state);
  if (IS_KDA)
    decay_columns(t, columns(p, AT_DECAYS, i), slow_bits(p, i), blocks, lane);
  else
    decay_tile(t, blocks, gates(p, AT_GATES)[i].factor, gates(p, AT_GATES)[i].slow);
  clear_padding(t, p.state.columns, lane);
  float *v = channels(p, AT_V, i) + warp_of() * TILE + half * 8 + lane.group;
  float u[H], beta = gates(p, AT_GATES)[i].beta;
  dot_tile(t, columns(p, AT_K, i), blocks, lane, u);
#pragma unroll
  for (i32 h = 0; h < H; h++) u[h] = __fmul_rn(beta, __fsub_rn(v[8 * h], u[h]));
  __syncwarp();
  if (lane.quad < H) v[8 * lane.quad] = lane.quad == 0 ? u[0] : u[H - 1];
  rank_one(t, columns(p, AT_K, i), u, blocks, lane);
  clear_padding(t, p.state.columns, lane);
}

// Writes the records of tokens [from, len), but for u: v, g and beta of its head, k and its norm once per key head.
template <bool IS_KDA, i32 NC>
DEVICE void write_records(const DeltaParams &p, i64 from) {
  const Work &w = work();
  enum : i32 { OF_V, OF_GATES, OF_K, KINDS };
  i32 size = (i32)size_of(p.io), n = p.state.columns;
#pragma unroll 1
  for (i64 unit = from * KINDS + warp_of(); unit < w.span.len * KINDS; unit += warps_of()) {
    i64 t = unit / KINDS, at = w.position + t;
    i32 kind = (i32)(unit % KINDS);
    if (kind == OF_V) {
      copy_elements(v_at(p, at), span_at(w.span, p.v, t, w.head) + first_channel(p.state) * size, size, channels_of(p.state),
                    lane_index(), WARP);
    } else if (w.part != 0) {
      continue;
    } else if (kind == OF_GATES) {
      if (lane_index() == 0) {
        *beta_at(p, at) = canonical(token_beta(p, t));
        if (!IS_KDA) *g_at(p, at, 1) = canonical(token_g(p, t));
      }
      if (IS_KDA) {
        float *to = g_at(p, at, n), a = gate_factor(p);
        const char *g = span_at(w.span, p.g, t, w.head), *bias = p.dt_bias.data ? tensor_at(p.dt_bias, 0, 0, w.head) : nullptr;
#pragma unroll 1
        for (i32 i = lane_index(); i < n; i += WARP) {
          float x = load_one(g + i * size_of(p.g.dtype), p.g.dtype);
          if (bias) x = __fadd_rn(x, load_one(bias + i * size_of(p.dt_bias.dtype), p.dt_bias.dtype));
          to[i] = canonical(gate_of(p, a, x));
        }
      }
    } else if (leads(p, work().head)) {
      const char *k = span_at(w.span, p.k, t, key_head(p, work().head));
      copy_elements(k_at(p, at), k, size, n, lane_index(), WARP);
      float v[NC];
      load_lanes(v, k, p.io, n);
      float norm = norm_of(p, v);
      if (lane_index() == 0) *norm_at(p, at) = canonical(norm);
    }
  }
}

// What a row's step moves, counted once for all of its heads. The parallel form reads u of history that is not folded, and the checkpoint
// (its high plane only if high) once for each block of tokens; what was just stored is not counted.
DEVICE void tally_row(const DeltaParams &p, bool is_kda, bool parallel, bool high, i64 recorded) {
  const Work &w = work();
  const State &s = p.state;
  if (w.head != 0 || w.part != 0 || threadIdx.x != 0) return;
  bool folded = w.last_stop > w.tag[0];
  u64 elements = (u64)s.heads * s.rows * s.columns, state = elements * (s.format <= FORMAT_F32 ? 4 : 2);
  u64 seen = high && s.format == FORMAT_SPLIT32 ? elements * 2 : state;
  u64 keys = (u64)p.qk_heads * (s.columns * size_of(p.io) + 4) + (u64)s.heads * 4 * (is_kda ? s.columns : 1);
  u64 values = (u64)s.heads * (s.rows * size_of(p.io) + 4);
  u64 u = keeps_u(p) ? (u64)s.heads * s.rows * size_of(p.u_dtype) : 0;
  u64 blocks = parallel ? (u64)(w.span.len + TOKENS - 1) / TOKENS : 0;
  u64 replayed = (u64)((parallel ? w.last_stop : w.position) - w.oldest), kept = blocks * (u64)(w.position - w.first_stop);
  tally(p.slots, p.mode == MODE_STEP && folded ? (u64)s.heads * s.tiles : 0,
        parallel ? (folded ? state : seen) + (blocks - 1) * seen : state, folded ? state : 0,
        replayed * (keys + values) + kept * (keys + u), (u64)recorded * (keys + values + u));
}

// Stores what the serial form has put out for tokens in rows [own, n) of the chunk, of ROWS rows of the state; and u of steps and of an
// extend's tail.
template <i32 ROWS>
DEVICE void put_out(const DeltaParams &p, i32 own, i32 n, i32 half) {
  const Work &w = work();
  i64 len = w.span.len, kept = !keeps_u(p) ? len : p.mode == MODE_EXTEND ? len - min(p.batch.keep_tail, len) : 0;
#pragma unroll 1
  for (i32 i = lane_index(); i < (n - own) * ROWS; i += WARP) {
    i32 r = own + i / ROWS, channel = warp_of() * TILE + half * 8 + i % ROWS;
    if (channel >= channels_of(p.state)) continue;
    i64 t = w.base + r - w.position;
    store_one(out_at(p, t) + channel * size_of(p.out.dtype), p.out.dtype, channels(p, AT_O, r)[channel]);
    if (t >= kept) store_one(u_at(p, w.position + t) + channel * size_of(p.u_dtype), p.u_dtype, channels(p, AT_V, r)[channel]);
  }
}

// History and tokens one by one.
template <i32 FORMAT, bool IS_KDA, i32 NC, i32 H>
DEVICE void serial_item(const DeltaParams &p, i64 item) {
  Work &w = work();
  if (!begin(p.slots, p.batch, p.place, p.state, p.out, item)) return;
  bool extend = p.mode == MODE_EXTEND;
  if (!begin_tiles(p.slots, p.batch, p.place, p.state, p.out, extend)) return;
#pragma unroll 1
  for (i32 half = 0; half < 2; half += H) {
    Lane lane = lane_of(threadIdx.x);
    Tile<NC, H> tile;
    load_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, false);
    __syncthreads();
    if (threadIdx.x == 0) w.base = w.oldest;
    // base is the first of the chunk at hand.
#pragma unroll 1
    while (true) {
      __syncthreads();
      if (w.base >= w.position + w.span.len) break;
      i32 n = (i32)min((i64)CHUNK, w.position + w.span.len - w.base);
      // Tokens of the step begin here.
      i32 own = (i32)min(max(w.position - w.base, 0ll), (i64)n);
      stage_rows<BOTH, IS_KDA, NC>(p, n);
#pragma unroll 1
      for (i32 i = own + warp_of(); i < n; i += warps_of()) stage_q<NC>(p, columns(p, AT_Q, i), w.base + i - w.position);
      __syncthreads();
#pragma unroll 1
      for (i32 i = 0; i < n; i++) {
        if (w.base + i < w.tag[warp_of()]) continue;
        take_in<IS_KDA>(tile, p, i, half);
        if (i >= own) {
          float o[H];
          dot_tile(tile, columns(p, AT_Q, i), blocks_of(p.state), lane, o);
          if (lane.quad < H)
            channels(p, AT_O, i)[warp_of() * TILE + 8 * (half + lane.quad) + lane.group] =
                __fmul_rn(lane.quad == 0 ? o[0] : o[H - 1], p.scale);
        }
        if (w.base + i + 1 == w.stop[warp_of()])
          store_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, w.base + i + 1);
      }
      __syncwarp();
      put_out<8 * H>(p, own, n, half);
      __syncthreads();
      if (threadIdx.x == 0) w.base += CHUNK;
    }
  }
  set_tag(p.batch);
  if (!extend) write_records<IS_KDA, NC>(p, 0);
  tally_row(p, IS_KDA, false, false, extend ? min(p.batch.keep_tail, w.span.len) : w.span.len);
}

// The tail of an extend, once all of its folds are done. Its u is there already.
template <bool IS_KDA, i32 NC>
DEVICE void tail_item(const DeltaParams &p, i64 item) {
  const Work &w = work();
  if (!begin(p.slots, p.batch, p.place, p.state, p.out, item, true)) return;
  i64 from = w.span.len - min(p.batch.keep_tail, w.span.len);
  if (!is_pending(p.state, p.place, w.position + from)) return;
  write_records<IS_KDA, NC>(p, from);
  end_pending(p.state, p.place, w.position + from);
}

// KDA: weights of the step's own tokens for tokens [block, block + n), a warp each, going back from the token. Then its key and query
// become what history is to be multiplied with. The last warps begin: the first ones are at decay_keys.
template <i32 NC>
DEVICE void weigh_own_columns(const DeltaParams &p, i32 block, i32 n) {
  i32 blocks = blocks_of(p.state), lane = lane_index();
#pragma unroll 1
  for (i32 t = warps_of() - 1 - warp_of(); t < n; t += warps_of()) {
    float elapsed[NC] = {}, k[NC], q[NC];
#pragma unroll
    for (i32 j = 0; j < NC; j++) {
      k[j] = j < blocks ? columns(p, AT_OWN_K, block + t)[WARP * j + lane] : 0.0f;
      q[j] = j < blocks ? columns(p, AT_Q, t)[WARP * j + lane] : 0.0f;
    }
#pragma unroll 1
    for (i32 s = block + t; s >= 0; s--) {
      const float *earlier = columns(p, AT_OWN_K, s), *g = columns(p, AT_OWN_G, s);
      float with_k = 0.0f, with_q = 0.0f;
#pragma unroll
      for (i32 j = 0; j < NC; j++) {
        if (j >= blocks) break;
        float x = earlier[WARP * j + lane] * exp(elapsed[j]);
        with_k = fma(x, k[j], with_k);
        with_q = fma(x, q[j], with_q);
        elapsed[j] += g[WARP * j + lane];
      }
      with_k = sum_lanes(with_k);
      with_q = sum_lanes(with_q);
      if (lane == 0) weights(p, CHUNK + s)[t] = make_float2(with_k, with_q);
    }
#pragma unroll
    for (i32 j = 0; j < NC; j++) {
      if (j >= blocks) break;
      float decay = exp(elapsed[j]);
      columns(p, AT_Q, t)[WARP * j + lane] = decay * q[j];
      columns(p, AT_Q, TOKENS + t)[WARP * j + lane] = decay * k[j];
    }
  }
}

// KDA: keys of a chunk of held records decay up to the committed position, a thread for each column. AT_NEWER has the log decays of all
// records that are newer than the chunk, and takes in the chunk's.
DEVICE void decay_keys(const DeltaParams &p, i32 first, i32 held) {
  enum : i32 { AT_ONCE = 8 };
  i32 n = p.state.columns, rows = p.ring_rows;
  const float *ring = g_at(p, 0, n);
  i32 newest = (i32)((work().base + first + held - 1) % rows);
#pragma unroll 1
  for (i32 c = threadIdx.x; held > 0 && c < n; c += blockDim.x) {
    float total = columns(p, AT_NEWER, 0)[c];
#pragma unroll 1
    for (i32 done = 0; done < held; done += AT_ONCE) {
      float g[AT_ONCE];
#pragma unroll
      for (i32 e = 0; e < AT_ONCE; e++) {
        i32 row = newest - done - e;
        if (row < 0) row += rows;
        g[e] = done + e < held ? ring[(i64)row * n + c] : 0.0f;
      }
#pragma unroll
      for (i32 e = 0; e < AT_ONCE; e++) {
        if (done + e >= held) break;
        float *k = columns(p, AT_K, held - 1 - done - e) + c;
        *k *= exp(total);
        total += g[e];
      }
    }
    columns(p, AT_NEWER, 0)[c] = total;
  }
}

// KDA: what this warp's checkpoint decays by, column by column, up to the committed position. Where tiles stand at different positions,
// those that are ahead of the oldest sum up their own. The chunks' keys are not needed any more.
DEVICE float *stage_whole(const DeltaParams &p) {
  const Work &w = work();
  i32 n = p.state.columns;
  i64 stop = w.stop[warp_of()];
  float *to = columns(p, AT_K, warp_of());
#pragma unroll 1
  for (i32 c = lane_index(); c < blocks_of(p.state) * BLOCK; c += WARP) {
    float total = 0.0f;
    if (c < n) {
      if (stop == w.first_stop) {
        total = columns(p, AT_NEWER, 0)[c];
      } else {
#pragma unroll 1
        for (i64 at = w.position - 1; at >= stop; at--) total += g_at(p, at, n)[c];
      }
    }
    to[c] = exp(total);
  }
  __syncwarp();
  return to;
}

template <i32 NC, i32 H>
DEVICE void scale_columns(Tile<NC, H> &t, const float *by, i32 blocks, Lane lane) {
#pragma unroll
  for (i32 j = 0; j < NC; j++) {
    if (j >= blocks) break;
    float f[8];
    shared8(by, j, lane, f);
#pragma unroll
    for (i32 h = 0; h < H; h++)
#pragma unroll
      for (i32 e = 0; e < 8; e++) t.v[h][j][e] *= f[e];
  }
}

// Canonical dot products of a row with two others.
DEVICE float2 dot_two(const float *a, const float *k, const float *q, i32 blocks, Lane lane) {
  float c[8] = {}, d[8] = {};
#pragma unroll 1
  for (i32 j = 0; j < blocks; j++) {
    float x[8], y[8];
    shared8(a, j, lane, x);
    shared8(k, j, lane, y);
#pragma unroll
    for (i32 e = 0; e < 8; e++) c[e] = fma(x[e], y[e], c[e]);
    shared8(q, j, lane, y);
#pragma unroll
    for (i32 e = 0; e < 8; e++) d[e] = fma(x[e], y[e], d[e]);
  }
  float with_k = sum_classes(c);
  return make_float2(with_k, sum_classes(d));
}

// Weights of the chunk's records, and (GDN) of the step's own tokens up to each one, for tokens [block, block + n): eight rows and a
// token at a time. Barriers around it are the caller's.
template <bool IS_KDA>
DEVICE void weigh(const DeltaParams &p, i32 held, i32 own_rows, i32 block, i32 n) {
  Lane lane = lane_of(threadIdx.x);
  i32 groups = (held + 7) / 8, own_groups = IS_KDA ? 0 : (own_rows + 7) / 8;
  const Gates *own_gates = gates(p, AT_OWN_GATES);
#pragma unroll 1
  for (i32 unit = warp_of(); unit < (groups + own_groups) * n; unit += warps_of()) {
    i32 t = unit % n, g = unit / n;
    bool own = g >= groups;
    i32 j = (own ? g - groups : g) * 8 + lane.group;
    bool exists = own ? j <= block + t : j < held;
    const float *k = IS_KDA ? columns(p, AT_Q, TOKENS + t) : columns(p, AT_OWN_K, block + t);
    float2 weight = dot_two(columns(p, own ? AT_OWN_K : AT_K, exists ? j : 0), k, columns(p, AT_Q, t), blocks_of(p.state), lane);
    if (lane.quad != 0 || !exists) continue;
    if (!IS_KDA) {
      float elapsed = own ? 0.0f : gates(p, AT_GATES)[j].factor;
#pragma unroll 1
      for (i32 i = own ? j + 1 : 0; i <= block + t; i++) elapsed += own_gates[i].g;
      float decay = exp(elapsed);
      weight.x *= decay;
      weight.y *= decay;
    }
    weights(p, (own ? CHUNK : 0) + j)[t] = weight;
  }
}

// Adds to predictions and outputs of n tokens what they see of u in rows [from, to) of a chunk; begins with zeros if is_first. A lane has
// its rows of tokens quad and quad + 4, alone.
template <i32 H>
DEVICE void add_weighted(const DeltaParams &p, i32 channel, i32 from, i32 to, i32 n, bool is_first) {
  i32 quad = threadIdx.x % 4;
#pragma unroll 1
  for (i32 t = quad; t < n; t += 4) {
    float *predicted = channels(p, AT_PREDICTED, t) + channel, *o = channels(p, AT_O, t) + channel;
    float a[H], b[H];
#pragma unroll
    for (i32 h = 0; h < H; h++) {
      a[h] = is_first ? 0.0f : predicted[8 * h];
      b[h] = is_first ? 0.0f : o[8 * h];
    }
#pragma unroll 2
    for (i32 i = from; i < to; i++) {
      float2 weight = weights(p, i)[t];
#pragma unroll
      for (i32 h = 0; h < H; h++) {
        float u = channels(p, AT_V, i)[channel + 8 * h];
        a[h] = fma(weight.x, u, a[h]);
        b[h] = fma(weight.y, u, b[h]);
      }
    }
#pragma unroll
    for (i32 h = 0; h < H; h++) {
      predicted[8 * h] = a[h];
      o[8 * h] = b[h];
    }
  }
}

// Forward substitution over tokens [block, block + n): a lane for each row and for what it predicts, another for what it puts out.
template <i32 H>
DEVICE void substitute(const DeltaParams &p, i32 block, i32 n, i32 half) {
  enum : i32 { ROWS = 8 * H, PREDICTS = 0, PUTS_OUT = 1 };
  const Work &w = work();
  i32 row = half * 8 + lane_index() % ROWS, does = lane_index() / ROWS, channel = warp_of() * TILE + row;
  bool exists = channel < channels_of(p.state);
#pragma unroll 1
  for (i32 t = 0; t < n; t++) {
    i32 token = block + t;
    float sum = channels(p, does == PREDICTS ? AT_PREDICTED : AT_O, t)[channel];
#pragma unroll 1
    for (i32 s = 0; s < token; s++) {
      float2 weight = weights(p, CHUNK + s)[t];
      sum = fma(does == PREDICTS ? weight.x : weight.y, channels(p, AT_OWN_U, s)[channel], sum);
    }
    float *own = channels(p, AT_OWN_U, token) + channel;
    // Only who writes it reads v, so that nobody else's read needs to be in front of the write.
    float u = does == PREDICTS ? gates(p, AT_OWN_GATES)[token].beta * (*own - sum) : 0.0f;
    u = __shfl_sync(0xFFFFFFFFu, u, lane_index() % ROWS);
    if (does == PREDICTS) {
      *own = u;
      if (exists) store_one(u_at(p, w.position + token) + channel * size_of(p.u_dtype), p.u_dtype, u);
    } else if (does == PUTS_OUT && exists) {
      float o = p.scale * fma(weights(p, CHUNK + token)[t].y, u, sum);
      store_one(out_at(p, token) + channel * size_of(p.out.dtype), p.out.dtype, o);
    }
    __syncwarp();
  }
}

// The checkpoint's part in predictions and outputs of n tokens: one vector at a time, for two would not fit.
template <bool IS_KDA, i32 NC, i32 H>
DEVICE void see_checkpoint(const Tile<NC, H> &tile, const DeltaParams &p, i32 channel, i32 block, i32 n) {
  Lane lane = lane_of(threadIdx.x);
#pragma unroll 1
  for (i32 i = 0; i < 2 * n; i++) {
    i32 t = i / 2;
    bool is_k = i % 2 == 0;
    const float *with = !is_k ? columns(p, AT_Q, t) : IS_KDA ? columns(p, AT_Q, TOKENS + t) : columns(p, AT_OWN_K, block + t);
    float sees[H];
    dot_tile(tile, with, blocks_of(p.state), lane, sees);
    float *to = channels(p, is_k ? AT_PREDICTED : AT_O, t) + channel;
    float factor = IS_KDA ? 1.0f : factors(p)[t];
    if (lane.quad < H) to[8 * lane.quad] = fma(lane.quad == 0 ? sees[0] : sees[H - 1], factor, to[8 * lane.quad]);
  }
}

// The parallel form, for steps of at most MAX_PARALLEL tokens.
template <i32 FORMAT, bool HIGH, bool IS_KDA, i32 NC, i32 H>
DEVICE void parallel_item(const DeltaParams &p, i64 item) {
  Work &w = work();
  if (!begin(p.slots, p.batch, p.place, p.state, p.out, item)) return;
  if (!begin_tiles(p.slots, p.batch, p.place, p.state, p.out, false)) return;

  // The step's own tokens.
#pragma unroll 1
  for (i32 t = warp_of(); t < (i32)w.span.len; t += warps_of()) {
    stage_k<OWN, NC>(p, columns(p, AT_OWN_K, t), w.position + t);
    stage_v<OWN>(p, channels(p, AT_OWN_U, t), w.position + t);
    if (IS_KDA) stage_g<OWN, NC>(p, columns(p, AT_OWN_G, t), w.position + t);
  }
#pragma unroll 1
  for (i32 t = threadIdx.x; t < (i32)w.span.len; t += blockDim.x)
    gates(p, AT_OWN_GATES)[t] = gates_of<OWN, IS_KDA>(p, w.position + t);

#pragma unroll 1
  for (i32 half = 0; half < 2; half += H) {
    Lane lane = lane_of(threadIdx.x);
    // Registers are not enough for the tile and all of a readout: it is loaded once more when it is needed.
    if (half == 0 && w.stop[warp_of()] == w.tag[warp_of()])
      prefetch_tile<FORMAT>(p.state, checkpoint_of(p.state, p.place.layer), HIGH);
    if (w.last_stop > w.oldest) {
      Tile<NC, H> tile;
      load_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, false);
      __syncthreads();
      if (threadIdx.x == 0) w.base = w.oldest;
#pragma unroll 1
      while (true) {
        __syncthreads();
        if (w.base >= w.last_stop) break;
        i32 n = (i32)min((i64)CHUNK, w.last_stop - w.base);
        stage_rows<RECORDS, IS_KDA, NC>(p, n);
        __syncthreads();
#pragma unroll 1
        for (i32 i = 0; i < n; i++) {
          i64 at = w.base + i;
          if (at >= w.tag[warp_of()] && at < w.stop[warp_of()]) take_in<IS_KDA>(tile, p, i, half);
        }
        __syncthreads();
        if (threadIdx.x == 0) w.base += CHUNK;
      }
      if (w.stop[warp_of()] > w.tag[warp_of()])
        store_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, w.stop[warp_of()]);
    }

    // Readouts, a few tokens at a time.
    i32 channel = warp_of() * TILE + 8 * half + lane.group;
#pragma unroll 1
    for (i32 block = 0; block < (i32)w.span.len; block += TOKENS) {
      i32 n = min((i32)w.span.len - block, (i32)TOKENS);
      __syncthreads();
      if (threadIdx.x == 0) w.base = w.first_stop;
#pragma unroll 1
      for (i32 t = warp_of(); t < n; t += warps_of()) stage_q<NC>(p, columns(p, AT_Q, t), block + t);
      if (IS_KDA)
        for (i32 c = threadIdx.x; c < p.state.columns; c += blockDim.x) columns(p, AT_NEWER, 0)[c] = 0.0f;
      // GDN: log decay of all of this tile's history; of all history newer than the chunk at hand.
      float whole = 0.0f, newer = 0.0f;
      // Newest records first. The step's own tokens ride with the first chunk.
      bool is_first = true;
      i32 end = (i32)(w.position - w.first_stop);
#pragma unroll 1
      do {
        i32 first = max(end - CHUNK, 0), held = end - first;
        __syncthreads();
#pragma unroll 1
        for (i32 i = warp_of(); i < held; i += warps_of()) {
          i64 at = w.base + first + i;
          stage_k<RECORDS, NC>(p, columns(p, AT_K, i), at);
          stage_channels(p, channels(p, AT_V, i), u_at(p, at), p.u_dtype);
        }
        if (!IS_KDA)
          for (i32 i = threadIdx.x; i < held; i += blockDim.x) gates(p, AT_GATES)[i].g = *g_at(p, w.base + first + i, 1);
        __syncthreads();
        // The chunk's first record of this tile.
        i32 from = (i32)min(max(w.stop[warp_of()] - w.base - first, 0ll), (i64)held);
        if (IS_KDA) {
          decay_keys(p, first, held);
          if (is_first) weigh_own_columns<NC>(p, block, n);
        } else {
          float total = newer;
#pragma unroll 1
          for (i32 i = held - 1; i >= 0; i--) {
            Gates *g = &gates(p, AT_GATES)[i];
            if (i == (i32)threadIdx.x) g->factor = total;
            total += g->g;
            if (i >= from) whole = total;
          }
          newer = total;
        }
        __syncthreads();
        weigh<IS_KDA>(p, held, is_first ? block + n : 0, block, n);
        __syncthreads();
        add_weighted<H>(p, channel, from, held, n, is_first);
        is_first = false;
        end = first;
      } while (end > 0);
      // The checkpoint's part.
      if (!IS_KDA && lane_index() < n) {
        for (i32 t = 0; t <= block + lane_index(); t++) whole += gates(p, AT_OWN_GATES)[t].g;
        factors(p)[lane_index()] = exp(whole);
      }
      Tile<NC, H> tile;
      load_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, HIGH);
      // All of the history bears on it at once, for all tokens.
      if (IS_KDA && w.stop[warp_of()] < w.position) scale_columns(tile, stage_whole(p), blocks_of(p.state), lane);
      __syncwarp();
      see_checkpoint<IS_KDA>(tile, p, channel, block, n);
      __syncwarp();
      substitute<H>(p, block, n, half);
    }
  }
  set_tag(p.batch);
  write_records<IS_KDA, NC>(p, 0);
  tally_row(p, IS_KDA, true, HIGH, w.span.len);
}

// The item of this launch that this block does next. Nobody keeps the last one's number in registers.
DEVICE i64 next_item(const DeltaParams &p) {
  const Work &w = work();
  return (w.row * p.state.heads + w.head) * p.state.parts + w.part + gridDim.x;
}

// Every item of a launch.
template <i32 FORMAT, bool IS_KDA, i32 NC, i32 H>
DEVICE void serial(const DeltaParams &p) {
  prefetch_checkpoint(p.slots, p.batch, p.place, p.state, false);
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < items_of(p.batch, p.state); i = next_item(p)) {
    serial_item<FORMAT, IS_KDA, NC, H>(p, i);
  }
}

template <bool IS_KDA, i32 NC>
DEVICE void tail(const DeltaParams &p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < items_of(p.batch, p.state); i = next_item(p)) tail_item<IS_KDA, NC>(p, i);
}

template <i32 FORMAT, bool HIGH, bool IS_KDA, i32 NC, i32 H>
DEVICE void parallel(const DeltaParams &p) {
  prefetch_checkpoint(p.slots, p.batch, p.place, p.state, HIGH);
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < items_of(p.batch, p.state); i = next_item(p)) parallel_item<FORMAT, HIGH, IS_KDA, NC, H>(p, i);
}

}  // namespace delta
