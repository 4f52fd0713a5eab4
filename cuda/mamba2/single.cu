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
  Kept kept;
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
  Named named;
  Item item = item_of(p.batch, s, named);
  i32 group = item.head / p.heads_per_group, first = first_channel(s, item);

  // The token: the first warp brings B (lanes 0 .. 15) and C, the last one the gates, each lane what belongs to its own row.
  i32 own = lane4_of().row + dot_row(), channel = warp * TILE + own;
  bool writes = channel < item.channels && !(lane & WIDE);
  uint4 token = make_uint4(0, 0, 0, 0);
  u32 dt_bits = 0, bias_bits = 0, a_bits = 0, x_bits = 0, skip_bits = 0, z_bits = 0;
  if (item.span.len > 0) {
    if (warp == 0) token = ((const uint4 *)span_at(item.span, lane < UNITS ? p.b : p.c, 0, group))[lane % UNITS];
    if (warp == last) {
      dt_bits = ask_one(span_at(item.span, p.dt, 0, item.head), p.dt.dtype);
      a_bits = ask_one(tensor_at(p.a, 0, 0, item.head), p.a.dtype);
      if (p.dt_bias.data) bias_bits = ask_one(tensor_at(p.dt_bias, 0, 0, item.head), p.dt_bias.dtype);
    }
    if (writes) {
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
  ask<FORMAT>(t, s, item.tile);
  Asked asked = ask_stand(p.slots, p.batch, s, item);

  // What does not need to know where anything stands.
  keep_item(m.kept, item, s, p.out);
  if (warp == 0) put_bf16((lane < UNITS ? m.b[OWN] : m.c) + 8 * (lane % UNITS), token);
  if (!(lane & WIDE)) {
    m.x[OWN][channel] = from_bf16((u16)x_bits);
    m.skip[channel] = from_one(skip_bits, p.d_skip.dtype);
    m.gate[channel] = p.z.data ? silu(from_one(z_bits, p.z.dtype)) : 1.0f;
  }
  if (warp == last) {
    float dt = from_one(dt_bits, p.dt.dtype);
    if (p.dt_bias.data) dt = __fadd_rn(dt, from_one(bias_bits, p.dt_bias.dtype));
    if (p.softplus) dt = softplus(dt);
    // In place of the factor its log decay, for now.
    if (lane == OWN) m.gates[OWN] = Gates{dt, __fmul_rn(from_one(a_bits, p.a.dtype), dt), 0, 0};
  }
  Stand stand;
  if (!stand_of(p.slots, s, item, extend, asked, stand)) {
    give_up(p.slots, p.place, m.kept, item.channels, p.out);
    return;
  }
  tally_row(p, item, stand, extend);

  keep_tag(m.kept, item, stand);
  // Records, a warp each: lanes 0 .. 15 bring B, the others x. The token's goes to a ring row that holds no history.
  i32 oldest = 0, unit = lane % UNITS, record_bytes = lane < UNITS ? COLUMNS * 2 : s.rows * 2;
  const char *dts = nullptr, *records = nullptr;
  if (!extend || stand.held > 0) {
    i32 at = modulo(stand.position, p.ring_rows);
    oldest = at - stand.held + (at < stand.held ? p.ring_rows : 0);
    dts = record_in(p.ring_dt, item.ring, item.head, 0, p.ring_rows, 8);
    records = lane < UNITS ? record_in(p.ring_b, item.ring, group, 0, p.ring_rows, COLUMNS * 2)
                           : record_in(p.ring_x, item.ring, item.head, 0, p.ring_rows, s.rows * 2) + first * 2;
    records += 16 * unit;
    if (!extend) {
      if (writes)
        ((u16 *)record_in(p.ring_x, item.ring, item.head, at, p.ring_rows, s.rows * 2))[first + channel] =
            (u16)(bits_of(m.x[OWN][channel]) >> 16);
      if (warp == 0 && lane < UNITS && item.part == 0 && item.head % p.heads_per_group == 0)
        *(uint4 *)(records + at * record_bytes) = take_bf16(m.b[OWN] + 8 * lane);
      if (warp == last && lane == OWN && item.part == 0)
        *(float2 *)(dts + at * 8) = make_float2(m.gates[OWN].dt, m.gates[OWN].factor);
    }
  }
  bool brings = lane < UNITS || 8 * unit < item.channels;

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
    if (warp == last && (lane < n || (lane == OWN && begin == 0))) {
      float2 pair = make_float2(m.gates[lane].dt, m.gates[lane].factor);
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
    store_one(m.kept.out + channel * size_of(p.out.dtype), p.out.dtype, y);
  }
  set_tag(m.kept);
}

}  // namespace single

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ Mamba2Params p) {
  if (p.batch.prefetch) prefetch_checkpoint(p.slots, p.batch, p.place, p.state, false);
  wait_for_dependency();
  single::mamba2<INSTANCE_FORMAT>(p);
}
