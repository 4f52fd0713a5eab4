// The depthwise causal convolution in front of a recurrent layer: step and extend of one layer. Mirrors src/backend/cpu/conv1d.rs.
//
//   out_t = silu(bias + sum_i w_i x_{t - width + 1 + i})      an fma chain from the bias, oldest tap first
//
// The ring keeps raw inputs, so a window at any held position is just width - 1 of its rows. A block works on the CONV_TILE channels of a
// row that share a tag, a channel per thread. x and out may be the same memory: a thread reads tokens of its channel before it writes them.
#include "../common/dense.cuh"

// Tokens whose inputs are loaded ahead of the first of their outputs.
enum : i32 { AHEAD = 4 };

// A row's work, read by one thread: what other rows do to a slot that two of them share must not part a block's threads.
struct Work {
  Row row;
  i64 position;
  i64 tag;
};

DEVICE u32 load_raw(const char *at, i32 io) { return io == F32 ? *(const u32 *)at : *(const u16 *)at; }

DEVICE void store_raw(char *at, i32 io, u32 x) {
  if (io == F32) {
    *(u32 *)at = x;
  } else {
    *(u16 *)at = (u16)x;
  }
}

DEVICE float decode(u32 x, i32 io) { return io == F32 ? from_bits(x) : io == BF16 ? from_bf16((u16)x) : from_f16((u16)x); }

// Address of a channel of a row's first token.
DEVICE char *channel_at(const ConvParams &p, const Tensor &t, const Span &span, i32 channel) {
  i32 section = 0;
#pragma unroll 1
  while (section + 1 < p.n_sections && p.section_starts[section + 1] <= channel) section++;
  return span_at(span, t, 0, section) + (channel - p.section_starts[section]) * size_of(t.dtype);
}

DEVICE void zero_outputs(const ConvParams &p, const Span &span, i32 channel) {
  if (channel >= p.windows.channels) return;
  char *out = channel_at(p, p.out, span, channel);
  i64 out_step = p.out.token * size_of(p.out.dtype);
#pragma unroll 1
  for (i64 t = 0; t < span.len; t++) store_one(out + t * out_step, p.out.dtype, 0.0f);
}

// Tokens that are older than a ring is long would be overwritten by newer ones of the same call.
DEVICE i64 first_kept(const ConvParams &p, i64 len) {
  return p.mode == MODE_EXTEND ? len - min((i64)p.windows.rows, len) : 0;
}

// All tokens of a row, one channel. Taps and window are kept at the end of their arrays: the last element belongs to the token at hand.
DEVICE void walk(const ConvParams &p, const Work &work, i32 channel) {
  const Windows &s = p.windows;
  const Span &span = work.row.span;
  i32 io = s.io, out_dtype = p.out.dtype, missing = MAX_WIDTH - s.width;
  float taps[MAX_WIDTH], window[MAX_WIDTH];
  const char *weight = tensor_at(p.weight, 0, 0, channel);
  float bias = p.bias.data ? load_one(tensor_at(p.bias, 0, 0, channel), p.bias.dtype) : 0.0f;
#pragma unroll
  for (i32 i = 0; i < MAX_WIDTH; i++) {
    taps[i] = window[i] = 0.0f;
    if (i < missing) continue;
    taps[i] = load_one(weight + (i - missing) * size_of(p.weight.dtype), p.weight.dtype);
    if (i + 1 < MAX_WIDTH)
      window[i] = decode(load_raw(window_at(s, p.place.layer, work.row.ring, work.position - (MAX_WIDTH - 1) + i, channel), io), io);
  }
  const char *x = channel_at(p, p.x, span, channel);
  char *out = channel_at(p, p.out, span, channel);
  char *ring = window_at(s, p.place.layer, work.row.ring, 0, channel);
  i64 x_step = p.x.token * size_of(io), out_step = p.out.token * size_of(out_dtype), ring_step = s.channels * size_of(io);
  i32 row = (i32)(work.position % s.rows);
  i64 kept = first_kept(p, span.len);
#pragma unroll 1
  for (i64 first = 0; first < span.len; first += AHEAD) {
    u32 raw[AHEAD];
#pragma unroll
    for (i32 e = 0; e < AHEAD; e++) raw[e] = first + e < span.len ? load_raw(x + (first + e) * x_step, io) : 0;
#pragma unroll
    for (i32 e = 0; e < AHEAD; e++) {
      i64 t = first + e;
      if (t >= span.len) break;
      if (t >= kept) store_raw(ring + row * ring_step, io, raw[e]);
      row = row + 1 == s.rows ? 0 : row + 1;
      window[MAX_WIDTH - 1] = decode(raw[e], io);
      float y = bias;
#pragma unroll
      for (i32 i = 0; i < MAX_WIDTH; i++)
        if (i >= missing) y = fma(taps[i], window[i], y);
      if (p.silu) y = silu(y);
      store_one(out + t * out_step, out_dtype, y);
#pragma unroll
      for (i32 i = 0; i + 1 < MAX_WIDTH; i++) window[i] = window[i + 1];
    }
  }
}

// The lowest position whose window the ring holds after this call.
DEVICE i64 held_from(const ConvParams &p, const Work &work) {
  i64 len = work.row.span.len, reach = p.slots.keep + p.slots.max_step_tokens;
  // An extend cannot be taken back, but for the tail, and that as far as the ring reaches.
  i64 back = p.mode == MODE_EXTEND ? min(min(p.batch.keep_tail, len), reach) : reach;
  return max(work.position + len - back, work.tag);
}

DEVICE void convolve(const ConvParams &p, i64 row, i32 tile) {
  static __shared__ Work shared;
  const Work &work = shared;
  i64 layer = p.place.layer;
  i32 channel = tile * CONV_TILE + (i32)threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.row = resolve(p.slots, p.batch, row, p.place, tile == 0);
    if (shared.row.live) {
      shared.position = p.slots.cursors[shared.row.ring].position;
      shared.tag = *tag_of(p.windows, layer, shared.row.ring, tile);
    }
  }
  __syncthreads();
  const Span &span = work.row.span;
  if (!work.row.live) {
    if (!p.batch.keep_null_outputs) zero_outputs(p, span, channel);
    return;
  }
  if (span.len == 0) return;
  if (!conv_tag_is_valid(p.slots, work.position, work.tag)) {
    if (threadIdx.x == 0) fault(p.slots, FAULT_POSITION, work.row.ring, row, p.place.pool, p.place.layer);
    zero_outputs(p, span, channel);
    return;
  }
  if (channel < p.windows.channels) walk(p, work, channel);
  if (threadIdx.x != 0) return;
  *tag_of(p.windows, layer, work.row.ring, tile) = held_from(p, work);
  if (tile == 0) {
    u64 record = (u64)p.windows.channels * size_of(p.windows.io);
    tally(p.slots, 0, 0, 0, (p.windows.width - 1) * record, (u64)(span.len - first_kept(p, span.len)) * record);
  }
}

extern "C" __global__ void __launch_bounds__(CONV_TILE) replayssm_kernel(const __grid_constant__ ConvParams p) {
  wait_for_dependency();
  i32 tiles = conv_tiles(p.windows);
#pragma unroll 1
  for (i64 i = blockIdx.x; i < p.batch.n_rows * tiles; i += gridDim.x) convolve(p, i / tiles, (i32)(i % tiles));
}
