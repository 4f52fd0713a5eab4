// Delta rules: extends and EXACT steps of one token a row. The arithmetic is that of serial.cu, and so are the bytes; how the state is worked
// on is told in common/single.cuh.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_KDA: whether decays are per column. INSTANCE_BLOCKS: blocks of 256 threads on a multiprocessor.
#include "../common/single.cuh"
#include "rule.cuh"

namespace single {

// GDN's decays.
struct Gates {
  float factor;
  u32 slow;
};

// The token's own row behind those of a chunk.
enum : i32 { OWN = CHUNK };
static_assert((i32)CHANNELS == (i32)COLUMNS, "rows of k and of v are as long");

// KDA's factors of each column, bits of those that decay slowly, and the token's log decays.
struct __align__(16) ColumnDecays {
  float factor[CHUNK + 1][COLUMNS];
  u32 slow[CHUNK + 1][BLOCKS];
  float g[COLUMNS];
};
struct NoDecays {};
template <bool IS_KDA>
struct Decays : NoDecays {};
template <>
struct Decays<true> : ColumnDecays {};

// Ring row 0 of the block's records.
struct Rings {
  const char *k;
  const char *v;
  const char *norm;
  const char *beta;
  const char *g;
};

template <bool IS_KDA>
struct Memory {
  float k[CHUNK + 1][COLUMNS];
  float q[COLUMNS];
  float v[CHUNK + 1][CHANNELS];
  float beta[CHUNK + 1];
  Gates gates[CHUNK + 1];
  Decays<IS_KDA> decays;
  Kept kept;
  Rings rings;
  float g;           // of the token, GDN
  float norm;        // of its key
  const char *k_at;  // where it lies
};

template <bool IS_KDA>
DEVICE Memory<IS_KDA> &memory() {
  static __shared__ __align__(16) Memory<IS_KDA> m;
  return m;
}

// The token's record, in a ring row that holds no history. k and its norm once for all value heads that share it. Work
// of the first and of the last warp.
template <bool IS_KDA>
DEVICE void write_record(const DeltaParams &p, const Memory<IS_KDA> &m, const Where &where) {
  i32 lane = lane_index(), warp = warp_of(), key = key_head(p, where.head), row = m.kept.ring_row, rows = p.ring_rows;
  i64 ring = m.kept.ring;
  if (warp == 0 && 8 * lane < m.kept.channels) {
    char *v = record_in(p.ring_v, ring, where.head, row, rows, p.state.rows * 2) + where.part * p.state.warps * TILE * 2;
    ((uint4 *)v)[lane] = take_bf16(m.v[OWN] + 8 * lane);
  }
  if (where.part != 0) return;
  if (warp == warps_of() - 1) {
    float *g = (float *)record_in(p.ring_g, ring, where.head, row, rows, IS_KDA ? 4 * COLUMNS : 4);
    if constexpr (IS_KDA) {
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++) g[BLOCK * j + lane] = canonical(m.decays.g[BLOCK * j + lane]);
    } else {
      if (lane == 0) *g = canonical(m.g);
    }
    if (lane == 0) *(float *)record_in(p.ring_beta, ring, where.head, row, rows, 4) = canonical(m.beta[OWN]);
  }
  if (warp == 0 && leads(p, where.head)) {
    if (lane < UNITS) ((uint4 *)record_in(p.ring_k, ring, key, row, rows, COLUMNS * 2))[lane] = ((const uint4 *)m.k_at)[lane];
    if (lane == 0) *(float *)record_in(p.ring_norm, ring, key, row, rows, 4) = canonical(m.norm);
  }
}

// Counted once for all heads of a row.
DEVICE void tally_row(const DeltaParams &p, bool is_kda, const Kept &kept, bool extend) {
  const State &s = p.state;
  u64 bytes = (u64)s.heads * s.rows * COLUMNS * (s.format <= FORMAT_F32 ? 4 : 2);
  u64 keys = (u64)p.qk_heads * (COLUMNS * 2 + 4) + (u64)s.heads * 4 * (is_kda ? COLUMNS : 1);
  u64 record = keys + (u64)s.heads * (s.rows * 2 + 4);
  tally(p.slots, !extend && kept.folds ? (u64)s.heads * s.tiles : 0, bytes, kept.folds ? bytes : 0, (u64)kept.held * record,
        extend ? 0 : record);
}

// A row of bfloat16, a class of the canonical dot product in each lane.
struct Classes {
  u16 bits[BLOCKS];
};

DEVICE Classes ask_classes(const char *row) {
  Classes c;
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) c.bits[j] = ((const u16 *)row)[BLOCK * j + lane_index()];
  return c;
}

// Normalises a key or query; its reciprocal norm.
DEVICE float put_normalised(const DeltaParams &p, float *to, const Classes &c) {
  float sum = 0.0f, norm = 1.0f;
  if (p.has_norm) {
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) sum = fma(from_bf16(c.bits[j]), from_bf16(c.bits[j]), sum);
    norm = rsqrt(__fadd_rn(sum_lanes(sum), p.eps));
  }
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) to[BLOCK * j + lane_index()] = __fmul_rn(from_bf16(c.bits[j]), norm);
  return norm;
}

// Of 32 columns, a lane each, a row's factors and bits.
DEVICE void put_decays(ColumnDecays &to, i32 row, i32 j, float g) {
  Decay d = decay_of(g);
  to.factor[row][BLOCK * j + lane_index()] = d.factor;
  u32 bits = __ballot_sync(0xFFFFFFFFu, d.slow);
  if (lane_index() == 0) to.slow[row][j] = bits;
}

// Takes a record or the token in.
template <bool IS_KDA>
DEVICE void take_in(Cells &t, const Memory<IS_KDA> &m, i32 r) {
  if constexpr (IS_KDA)
    decay_columns(t, m.decays.factor[r], m.decays.slow[r]);
  else
    decay(t, m.gates[r].factor, m.gates[r].slow);
  Operand k = operand(m.k[r]);
  float u = dot(t, k), us[ROWS];
  of_rows(us, __fmul_rn(m.beta[r], __fsub_rn(m.v[r][warp_of() * TILE + lane4_of().row + dot_row()], u)));
  rank_one(t, us, k);
}

template <i32 FORMAT, bool IS_KDA>
DEVICE void delta(const DeltaParams &p) {
  constexpr i32 G_BYTES = IS_KDA ? 4 * COLUMNS : 4;
  const State &s = p.state;
  Memory<IS_KDA> &m = memory<IS_KDA>();
  bool extend = p.mode == MODE_EXTEND;
  i32 lane = lane_index(), warp = warp_of(), last = warps_of() - 1;
  Named named;
  Item item = item_of(p.batch, s, named);
  i32 key = key_head(p, item.head), first = first_channel(s, item);

  // The token: the first warp brings k, the second one q, the last one beta and GDN's gate; KDA's 32 columns each from the last one back;
  // all of them values.
  i32 channel = brought_channel(), block = last - warp;
  bool brings_v = channel < item.channels, brings_k = warp == 0, brings_q = warp == min(1, last);
  bool brings_g = IS_KDA ? block < BLOCKS : block == 0;
  Classes k_bits = {}, q_bits = {};
  u32 v_bits = 0, beta_bits = 0, g_bits = 0, bias_bits = 0, a_bits = 0;
  if (item.span.len > 0) {
    if (brings_k) k_bits = ask_classes(span_at(item.span, p.k, 0, key));
    if (brings_q) q_bits = ask_classes(span_at(item.span, p.q, 0, key));
    if (block == 0) beta_bits = ask_one(span_at(item.span, p.beta, 0, item.head), p.beta.dtype);
    if (brings_g) {
      i32 at = IS_KDA ? BLOCK * block + lane : 0;
      g_bits = ask_one(span_at(item.span, p.g, 0, item.head) + at * size_of(p.g.dtype), p.g.dtype);
      if (p.dt_bias.data) bias_bits = ask_one(tensor_at(p.dt_bias, 0, 0, item.head) + at * size_of(p.dt_bias.dtype), p.dt_bias.dtype);
      if (p.a_log.data) a_bits = ask_one(tensor_at(p.a_log, 0, 0, item.head), p.a_log.dtype);
    }
    if (brings_v) v_bits = ((const u16 *)span_at(item.span, p.v, 0, item.head))[first + channel];
  }

  resolve(p.slots, p.batch, p.place, named, item);
  if (!item.live || item.span.len == 0) {
    if (!item.live && !p.batch.keep_null_outputs) zero_outputs(p.out, s, item);
    return;
  }
  item.tile = checkpoint_of(s, p.place.layer, item.slot, item.head, item.part * s.warps + warp, 0);
  Cells t;
  ask<FORMAT>(t, s, cells_at<FORMAT>(item.tile));
  Asked asked;
  if (warp == 0) asked = ask_stand(p.slots, p.batch, s, item);

  // What does not need to know where anything stands.
  keep_item(m.kept, item, s, p.out);
  if (is_second()) {
    m.k_at = span_at(item.span, p.k, 0, key);
    m.rings.k = record_in(p.ring_k, item.ring, key, 0, p.ring_rows, COLUMNS * 2);
    m.rings.v = record_in(p.ring_v, item.ring, item.head, 0, p.ring_rows, s.rows * 2) + first * 2;
    m.rings.norm = record_in(p.ring_norm, item.ring, key, 0, p.ring_rows, 4);
    m.rings.beta = record_in(p.ring_beta, item.ring, item.head, 0, p.ring_rows, 4);
    m.rings.g = record_in(p.ring_g, item.ring, item.head, 0, p.ring_rows, G_BYTES);
  }
  if (brings_v) m.v[OWN][channel] = from_bf16((u16)v_bits);
  if (brings_k) {
    float norm = put_normalised(p, m.k[OWN], k_bits);
    if (lane == 0) m.norm = norm;
  }
  if (brings_q) put_normalised(p, m.q, q_bits);
  if (brings_g) {
    float a = p.a_log.data ? exp(from_one(a_bits, p.a_log.dtype)) : 1.0f;
#pragma unroll 1
    for (i32 j = block; j < (IS_KDA ? (i32)BLOCKS : 1); j += warps_of()) {
      if (j > block) {
        // Blocks of fewer warps.
        i32 at = BLOCK * j + lane;
        g_bits = ask_one(span_at(item.span, p.g, 0, item.head) + at * size_of(p.g.dtype), p.g.dtype);
        if (p.dt_bias.data) bias_bits = ask_one(tensor_at(p.dt_bias, 0, 0, item.head) + at * size_of(p.dt_bias.dtype), p.dt_bias.dtype);
      }
      float g = from_one(g_bits, p.g.dtype);
      if (p.dt_bias.data) g = __fadd_rn(g, from_one(bias_bits, p.dt_bias.dtype));
      g = gate_of(p, a, g);
      if constexpr (IS_KDA) {
        m.decays.g[BLOCK * j + lane] = g;
        put_decays(m.decays, OWN, j, g);
      } else {
        Decay d = decay_of(g);
        m.gates[OWN].factor = d.factor;
        m.gates[OWN].slow = d.slow;
        m.g = g;
      }
    }
    if (block == 0) {
      float beta = from_one(beta_bits, p.beta.dtype);
      m.beta[OWN] = p.beta_sigmoid ? sigmoid(beta) : beta;
    }
  }

  if (warp == 0) keep_stand(m.kept, p.slots, s, item, extend, asked, p.ring_rows);
  __syncthreads();
  if (m.kept.held < 0) return give_up(p.slots, p.place, m.kept, item.row, p.out);
  Progress &progress = m.kept.progress[warp];

#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    i32 n = min(progress.held, (i32)CHUNK), oldest = progress.oldest;
    if (n > 0) {
      if (!is_first) __syncthreads();
      // Records, a warp each: lanes 0 .. 15 bring k, the others v. Registers are short, and GDN's come one
      // after the other.
      constexpr i32 AT_ONCE = IS_KDA ? 2 : 1;
      i32 unit = lane % UNITS, bytes = lane < UNITS ? COLUMNS * 2 : s.rows * 2;
      const char *from = (lane < UNITS ? m.rings.k : m.rings.v) + 16 * unit, *norms = m.rings.norm;
      float *to = (lane < UNITS ? m.k[0] : m.v[0]) + 8 * unit;
      bool brings = lane < UNITS || 8 * unit < m.kept.channels;
#pragma unroll 1
      for (i32 i = warp; i < n; i += AT_ONCE * warps_of()) {
        uint4 w[AT_ONCE] = {};
        float norm[AT_ONCE];
#pragma unroll
        for (i32 e = 0; e < AT_ONCE; e++) {
          i32 row = row_behind(oldest, min(i + e * warps_of(), n - 1), p.ring_rows);
          if (brings) w[e] = *(const uint4 *)(from + row * bytes);
          norm[e] = lane < UNITS ? *(const float *)(norms + row * 4) : 1.0f;
        }
#pragma unroll
        for (i32 e = 0; e < AT_ONCE; e++) {
          i32 number = i + e * warps_of();
          if (brings && number < n) put_bf16(to + number * COLUMNS, w[e], norm[e]);
        }
      }
      if (warp == last && lane < n) {
        i32 row = row_behind(oldest, lane, p.ring_rows);
        m.beta[lane] = *(const float *)(m.rings.beta + row * 4);
        if (!IS_KDA) {
          float g = *(const float *)(m.rings.g + row * 4);
          Decay d = decay_of(g);
          m.gates[lane].factor = d.factor;
          m.gates[lane].slow = d.slow;
        }
      }
      if constexpr (IS_KDA) {
        enum : i32 { AT_ONCE = 4 };
#pragma unroll 1
        for (i32 i = warp; i < n * BLOCKS; i += AT_ONCE * warps_of()) {
          float g[AT_ONCE];
#pragma unroll
          for (i32 e = 0; e < AT_ONCE; e++) {
            i32 number = min(i + e * warps_of(), n * BLOCKS - 1);
            i32 row = row_behind(oldest, number / BLOCKS, p.ring_rows);
            g[e] = ((const float *)(m.rings.g + row * G_BYTES))[BLOCK * (number % BLOCKS) + lane];
          }
#pragma unroll
          for (i32 e = 0; e < AT_ONCE; e++) {
            i32 number = i + e * warps_of();
            if (number < n * BLOCKS) put_decays(m.decays, number / BLOCKS, number % BLOCKS, g[e]);
          }
        }
      }
      __syncthreads();
    }
    if (is_first) arrived<FORMAT>(t);
    // Up to where the tile is stored, and then on.
    i32 i = max(progress.from, 0), stop = progress.stop;
#pragma unroll 1
    for (i32 end = stop > i && stop < n ? stop : n;; end = n) {
#pragma unroll 1
      for (; i < end; i++) take_in(t, m, i);
      if (i == stop && n > 0) store<FORMAT, true>(t, s, m.kept);
      if (end == n) break;
    }
    if (n == progress.held) break;
    next_chunk(progress, p.ring_rows);
  }
  take_in(t, m, OWN);
  float o = dot(t, operand(m.q));
  if (progress.held + 1 == progress.stop) store<FORMAT>(t, s, m.kept, o);

  i32 own = warp * TILE + lane4_of().row + dot_row();
  if (own < m.kept.channels && !(lane & WIDE))
    store_one(m.kept.out + own * size_of(p.out.dtype), p.out.dtype, __fmul_rn(o, p.scale));
  set_tag(m.kept);
  if (warp != 0 && warp != last) return;
  Where where = where_of(s, p.batch.n_rows);
  if (!extend) write_record(p, m, where);
  if (threadIdx.x == 0 && where.head == 0 && where.part == 0) tally_row(p, IS_KDA, m.kept, extend);
}

}  // namespace single

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ DeltaParams p) {
  if (p.batch.prefetch) prefetch_checkpoint(p.slots, p.batch, p.place, p.state, false);
  wait_for_dependency();
  single::delta<INSTANCE_FORMAT, INSTANCE_KDA>(p);
}
