// Mamba-2: extends and EXACT steps of one token a row. The arithmetic is that of serial.cu, and so are the bytes; how the state is worked on
// is told in common/single.cuh.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_BLOCKS: blocks of 256 threads on a multiprocessor.
#include "../common/single.cuh"

namespace single {

struct Gates {
  float dt;
  float factor;
  u32 slow;
  u32 reserved;
};

// The token's own row behind those of a chunk.
enum : i32 { OWN = CHUNK };
static_assert((i32)CHANNELS == (i32)COLUMNS, "rows of B and of x are as long");

// Ring row 0 of the block's records.
struct Rings {
  const char *b;
  const char *x;
  const char *dt;
};

struct Memory {
  float b[CHUNK + 1][COLUMNS];
  float c[COLUMNS];
  float x[CHUNK + 1][CHANNELS];
  Gates gates[CHUNK + 1];
  float skip[CHANNELS];
  float gate[CHANNELS];
  Kept kept;
  Rings rings;
  float g;  // the token's log decay
};

DEVICE Memory &memory() {
  static __shared__ __align__(16) Memory m;
  return m;
}

// The token's record, in a ring row that holds no history. Work of the first and of the last warp.
DEVICE void write_record(const Mamba2Params &p, const Memory &m, const Where &where) {
  i32 lane = lane_index(), group = where.head / p.heads_per_group, row = m.kept.ring_row, rows = p.ring_rows;
  i64 ring = m.kept.ring;
  if (warp_of() == 0 && 8 * lane < m.kept.channels) {
    char *x = record_in(p.ring_x, ring, where.head, row, rows, p.state.rows * 2) + where.part * p.state.warps * TILE * 2;
    ((uint4 *)x)[lane] = take_bf16(m.x[OWN] + 8 * lane);
  }
  if (where.part != 0 || warp_of() != warps_of() - 1) return;
  if (lane < UNITS && where.head % p.heads_per_group == 0)
    ((uint4 *)record_in(p.ring_b, ring, group, row, rows, COLUMNS * 2))[lane] = take_bf16(m.b[OWN] + 8 * lane);
  if (lane == OWN) *(float2 *)record_in(p.ring_dt, ring, where.head, row, rows, 8) = make_float2(m.gates[OWN].dt, m.g);
}

// Counted once for all heads of a row.
DEVICE void tally_row(const Mamba2Params &p, const Kept &kept, bool extend) {
  const State &s = p.state;
  u64 bytes = (u64)s.heads * s.rows * COLUMNS * (s.format <= FORMAT_F32 ? 4 : 2);
  u64 record = (u64)s.heads * (s.rows * 2 + 8) + (u64)(s.heads / p.heads_per_group) * COLUMNS * 2;
  tally(p.slots, !extend && kept.folds ? (u64)s.heads * s.tiles : 0, bytes, kept.folds ? bytes : 0, (u64)kept.held * record,
        extend ? 0 : record);
}

// Takes a record or the token in.
DEVICE void take_in(Cells &t, const Memory &m, i32 r) {
  Gates gates = m.gates[r];
  float4 x = *(const float4 *)(m.x[r] + warp_of() * TILE + lane4_of().row);
  float xd[ROWS] = {__fmul_rn(x.x, gates.dt), __fmul_rn(x.y, gates.dt), __fmul_rn(x.z, gates.dt), __fmul_rn(x.w, gates.dt)};
  decay(t, gates.factor, gates.slow);
  rank_one(t, xd, operand(m.b[r]));
}

template <i32 FORMAT>
DEVICE void mamba2(const Mamba2Params &p) {
  const State &s = p.state;
  Memory &m = memory();
  bool extend = p.mode == MODE_EXTEND;
  i32 lane = lane_index(), warp = warp_of(), last = warps_of() - 1;
  Named named;
  Item item = item_of(p.batch, s, named);
  i32 group = item.head / p.heads_per_group, first = first_channel(s, item);

  // The token: the first warp brings B (lanes 0 .. 15) and C, the last one the gates, the others what belongs to rows.
  i32 channel = brought_channel();
  bool brings = channel < item.channels;
  uint4 token = make_uint4(0, 0, 0, 0);
  u32 dt_bits = 0, bias_bits = 0, a_bits = 0, x_bits = 0, skip_bits = 0, z_bits = 0;
  if (item.span.len > 0) {
    if (warp == 0) token = ((const uint4 *)span_at(item.span, lane < UNITS ? p.b : p.c, 0, group))[lane % UNITS];
    if (warp == last) {
      dt_bits = ask_one(span_at(item.span, p.dt, 0, item.head), p.dt.dtype);
      a_bits = ask_one(tensor_at(p.a, 0, 0, item.head), p.a.dtype);
      if (p.dt_bias.data) bias_bits = ask_one(tensor_at(p.dt_bias, 0, 0, item.head), p.dt_bias.dtype);
    }
    if (brings) {
      i32 row = first + channel;
      x_bits = ((const u16 *)span_at(item.span, p.x, 0, item.head))[row];
      if (p.d_skip.data)
        skip_bits = ask_one(tensor_at(p.d_skip, 0, 0, item.head) + (p.d_per_element ? row * size_of(p.d_skip.dtype) : 0), p.d_skip.dtype);
      if (p.z.data) z_bits = ask_one(span_at(item.span, p.z, 0, item.head) + row * size_of(p.z.dtype), p.z.dtype);
    }
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
    m.rings.b = record_in(p.ring_b, item.ring, group, 0, p.ring_rows, COLUMNS * 2);
    m.rings.x = record_in(p.ring_x, item.ring, item.head, 0, p.ring_rows, s.rows * 2) + first * 2;
    m.rings.dt = record_in(p.ring_dt, item.ring, item.head, 0, p.ring_rows, 8);
  }
  if (warp == 0) put_bf16((lane < UNITS ? m.b[OWN] : m.c) + 8 * (lane % UNITS), token);
  if (brings) {
    m.x[OWN][channel] = from_bf16((u16)x_bits);
    m.skip[channel] = from_one(skip_bits, p.d_skip.dtype);
    m.gate[channel] = p.z.data ? silu(from_one(z_bits, p.z.dtype)) : 1.0f;
  }
  if (warp == last) {
    float dt = from_one(dt_bits, p.dt.dtype);
    if (p.dt_bias.data) dt = __fadd_rn(dt, from_one(bias_bits, p.dt_bias.dtype));
    if (p.softplus) dt = softplus(dt);
    float g = __fmul_rn(from_one(a_bits, p.a.dtype), dt);
    Decay d = decay_of(g);
    if (lane == 0) {
      m.gates[OWN] = Gates{dt, d.factor, d.slow, 0};
      m.g = g;
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
      // Records, a warp each: lanes 0 .. 15 bring B, the others x.
      i32 unit = lane % UNITS, bytes = lane < UNITS ? COLUMNS * 2 : s.rows * 2;
      const char *from = (lane < UNITS ? m.rings.b : m.rings.x) + 16 * unit;
      float *to = (lane < UNITS ? m.b[0] : m.x[0]) + 8 * unit;
      bool is_used = lane < UNITS || 8 * unit < m.kept.channels;
#pragma unroll 1
      for (i32 i = warp; i < n; i += 2 * warps_of()) {
        uint4 w[2] = {};
#pragma unroll
        for (i32 e = 0; e < 2; e++) {
          i32 number = min(i + e * warps_of(), n - 1);
          if (is_used) w[e] = *(const uint4 *)(from + row_behind(oldest, number, p.ring_rows) * bytes);
        }
#pragma unroll
        for (i32 e = 0; e < 2; e++) {
          i32 number = i + e * warps_of();
          if (is_used && number < n) put_bf16(to + number * COLUMNS, w[e]);
        }
      }
      // Gates, a lane for each record.
      if (warp == last && lane < n) {
        float2 pair = *(const float2 *)(m.rings.dt + row_behind(oldest, lane, p.ring_rows) * 8);
        Decay d = decay_of(pair.y);
        m.gates[lane] = Gates{pair.x, d.factor, d.slow, 0};
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
  float y = dot(t, operand(m.c));
  if (progress.held + 1 == progress.stop) store<FORMAT>(t, s, m.kept, y);

  i32 own = warp * TILE + lane4_of().row + dot_row();
  if (own < m.kept.channels && !(lane & WIDE)) {
    if (p.d_skip.data) y = fma(m.skip[own], m.x[OWN][own], y);
    if (p.z.data) y = __fmul_rn(y, m.gate[own]);
    store_one(m.kept.out + own * size_of(p.out.dtype), p.out.dtype, y);
  }
  set_tag(m.kept);
  if (warp != 0 && warp != last) return;
  Where where = where_of(s, p.batch.n_rows);
  if (!extend) write_record(p, m, where);
  if (threadIdx.x == 0 && where.head == 0 && where.part == 0) tally_row(p, m.kept, extend);
}

}  // namespace single

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ Mamba2Params p) {
  if (p.batch.prefetch) prefetch_checkpoint(p.slots, p.batch, p.place, p.state, false);
  wait_for_dependency();
  single::mamba2<INSTANCE_FORMAT>(p);
}
