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

struct Memory {
  float b[CHUNK + 1][COLUMNS];
  float c[COLUMNS];
  float x[CHUNK + 1][CHANNELS];
  Gates gates[CHUNK + 1];
  float skip[CHANNELS];
  float gate[CHANNELS];
  char *out;
  // Of each warp's tile: where its tag is to be set, or null, and to what.
  i64 *tag_at[MAX_WARPS];
  i64 tag[MAX_WARPS];
};

DEVICE Memory &memory() {
  static __shared__ __align__(16) Memory m;
  return m;
}

// Counted once for all heads of a row.
DEVICE void tally_row(const Mamba2Params &p, const Item &item, const Stand &stand, bool extend) {
  const State &s = p.state;
  if (item.head != 0 || item.part != 0 || threadIdx.x != 0) return;
  u64 bytes = (u64)s.heads * s.rows * COLUMNS * (s.format <= FORMAT_F32 ? 4 : 2);
  u64 record = (u64)s.heads * (s.rows * 2 + 8) + (u64)(s.heads / p.heads_per_group) * COLUMNS * 2;
  tally(p.slots, !extend && stand.folds ? (u64)s.heads * s.tiles : 0, bytes, stand.folds ? bytes : 0, (u64)stand.held * record,
        extend ? 0 : record);
}

template <i32 FORMAT>
DEVICE void mamba2(const Mamba2Params &p) {
  const State &s = p.state;
  Memory &m = memory();
  bool extend = p.mode == MODE_EXTEND;
  i32 lane = lane_index(), warp = warp_of(), last = warps_of() - 1;
  Item item = item_of(p.slots, p.batch, p.place, s);
  if (!item.live || item.span.len == 0) {
    if (!item.live && !p.batch.keep_null_outputs) zero_outputs(p.out, s, item);
    return;
  }
  i32 group = item.head / p.heads_per_group, first = first_channel(s, item);
  item.tile = checkpoint_of(s, p.place.layer, item.slot, item.head, item.part * s.warps + warp, 0);
  Cells t;
  ask<FORMAT>(t, s, item.tile);

  // The token: the first warp brings B (lanes 0 .. 15) and C, the last one the gates, each lane what belongs to its own row.
  uint4 token = make_uint4(0, 0, 0, 0);
  if (warp == 0) token = ((const uint4 *)span_at(item.span, lane < UNITS ? p.b : p.c, 0, group))[lane % UNITS];
  float dt = 0.0f, g = 0.0f;
  if (warp == last) {
    dt = load_one(span_at(item.span, p.dt, 0, item.head), p.dt.dtype);
    if (p.dt_bias.data) dt = __fadd_rn(dt, load_one(tensor_at(p.dt_bias, 0, 0, item.head), p.dt_bias.dtype));
    g = load_one(tensor_at(p.a, 0, 0, item.head), p.a.dtype);
  }
  i32 own = lane4_of().row + dot_row(), channel = warp * TILE + own;
  bool writes = own < item.tile.rows && !(lane & WIDE);
  u16 x_bits = 0;
  float skip = 0.0f, z = 0.0f;
  if (writes) {
    i32 row = first + channel;
    x_bits = ((const u16 *)span_at(item.span, p.x, 0, item.head))[row];
    if (p.d_skip.data)
      skip = load_one(tensor_at(p.d_skip, 0, 0, item.head) + (p.d_per_element ? row * size_of(p.d_skip.dtype) : 0), p.d_skip.dtype);
    if (p.z.data) z = load_one(span_at(item.span, p.z, 0, item.head) + row * size_of(p.z.dtype), p.z.dtype);
  }

  Stand stand;
  if (!stand_of(p.slots, p.batch, s, item, extend, stand)) {
    if (threadIdx.x == 0) fault(p.slots, FAULT_POSITION, item.slot, item.row, p.place.pool, p.place.layer);
    zero_outputs(p.out, s, item);
    return;
  }
  tally_row(p, item, stand, extend);

  // The token to shared memory and, as a record, to its ring row, which holds no history. What the end needs goes there too.
  i32 at = 0, oldest = 0;
  if (!extend || stand.held > 0) {
    at = modulo(stand.position, p.ring_rows);
    oldest = at - stand.held + (at < stand.held ? p.ring_rows : 0);
  }
  if (threadIdx.x == 0) m.out = span_at(item.span, p.out, 0, item.head) + first * size_of(p.out.dtype);
  if (lane == 0) {
    m.tag_at[warp] = stand.stop > 0 && item.tile.rows > 0 ? item.tile.tag : nullptr;
    m.tag[warp] = stand.position - stand.held + stand.stop;
  }
  if (warp == 0) put_bf16((lane < UNITS ? m.b[OWN] : m.c) + 8 * (lane % UNITS), token);
  if (!(lane & WIDE)) {
    m.x[OWN][channel] = from_bf16(x_bits);
    m.skip[channel] = skip;
    m.gate[channel] = p.z.data ? silu(z) : 1.0f;
  }
  if (warp == last) {
    if (p.softplus) dt = softplus(dt);
    g = __fmul_rn(g, dt);
  }
  const char *dts = record_in(p.ring_dt, item.ring, item.head, 0, p.ring_rows, 8);
  // Records, a warp each: lanes 0 .. 15 bring B, the others x.
  i32 unit = lane % UNITS, record_bytes = lane < UNITS ? COLUMNS * 2 : s.rows * 2;
  const char *records = lane < UNITS ? record_in(p.ring_b, item.ring, group, 0, p.ring_rows, COLUMNS * 2)
                                     : record_in(p.ring_x, item.ring, item.head, 0, p.ring_rows, s.rows * 2) + first * 2;
  records += 16 * unit;
  bool brings = lane < UNITS || 8 * unit < item.channels;
  if (!extend) {
    if (writes) ((u16 *)record_in(p.ring_x, item.ring, item.head, at, p.ring_rows, s.rows * 2))[first + channel] = x_bits;
    if (warp == 0 && lane < UNITS && item.part == 0 && item.head % p.heads_per_group == 0)
      *(uint4 *)(records + at * record_bytes) = token;
    if (warp == last && lane == 0 && item.part == 0) *(float2 *)(dts + at * 8) = make_float2(dt, g);
  }

  float y = 0.0f;
#pragma unroll 1
  for (i32 begin = 0;; begin += CHUNK) {
    i32 n = min(stand.held - begin, (i32)CHUNK);
    if (begin > 0) __syncthreads();
#pragma unroll 1
    for (i32 i = warp; i < n; i += 2 * warps_of()) {
      uint4 w[2];
#pragma unroll
      for (i32 e = 0; e < 2; e++) {
        i32 number = min(i + e * warps_of(), n - 1);
        if (brings) w[e] = *(const uint4 *)(records + row_behind(oldest, begin + number, p.ring_rows) * record_bytes);
      }
#pragma unroll
      for (i32 e = 0; e < 2; e++) {
        i32 number = i + e * warps_of();
        if (brings && number < n) put_bf16((lane < UNITS ? m.b[number] : m.x[number]) + 8 * unit, w[e]);
      }
    }
    // Gates: a lane for each record, and one for the token.
    if (warp == last && (lane < n || lane == OWN)) {
      float2 pair = make_float2(dt, g);
      if (lane < n) pair = *(const float2 *)(dts + row_behind(oldest, begin + lane, p.ring_rows) * 8);
      Decay d = decay_of(pair.y);
      m.gates[lane] = Gates{pair.x, d.factor, d.slow, 0};
    }
    __syncthreads();
    if (begin == 0) arrived<FORMAT>(t);
    bool ends = begin + n == stand.held;
#pragma unroll 1
    for (i32 i = max(stand.from - begin, 0); i < n + ends; i++) {
      i32 r = i < n ? i : (i32)OWN;
      Gates gates = m.gates[r];
      float4 x = *(const float4 *)(m.x[r] + warp * TILE + lane4_of().row);
      float xd[ROWS] = {__fmul_rn(x.x, gates.dt), __fmul_rn(x.y, gates.dt), __fmul_rn(x.z, gates.dt), __fmul_rn(x.w, gates.dt)};
      decay(t, gates.factor, gates.slow);
      rank_one(t, xd, operand(m.b[r]));
      if (i == n) y = dot(t, operand(m.c));
      if (begin + i + 1 == stand.stop) store<FORMAT>(t, s, item.tile);
    }
    if (ends) break;
  }

  if (writes) {
    if (p.d_skip.data) y = fma(m.skip[channel], m.x[OWN][channel], y);
    if (p.z.data) y = __fmul_rn(y, m.gate[channel]);
    store_one(m.out + channel * size_of(p.out.dtype), p.out.dtype, y);
  }
  if (lane == 0 && m.tag_at[warp]) *m.tag_at[warp] = m.tag[warp];
}

}  // namespace single

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ Mamba2Params p) {
  prefetch_checkpoint(p.slots, p.batch, p.place, p.state, false);
  wait_for_dependency();
  single::mamba2<INSTANCE_FORMAT>(p);
}
