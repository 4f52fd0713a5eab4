// Mamba-2: step and extend of one layer. The arithmetic is that of src/replay/step.rs.
//
//   serial    S = fma(dt x, B, S'), y = fma(D, x, S . C)                          fold, extend and the EXACT readout
//   parallel  y_t = e^{c_t} S0 C_t + sum_{j<=t} dt_j e^{c(j,t)} (B_j . C_t) x_j     FULL and HIGH
#pragma once
#include "../common/block.cuh"

namespace mamba2 {

// Arrays in shared memory, in floats: rows of B and C have shared.columns, rows of x shared.channels.
enum : i32 {
  AT_B = 0,          // [CHUNK]
  AT_C = 1,          // [CHUNK]
  AT_X = 2,          // [CHUNK]
  AT_GATES = 3,      // [CHUNK] of Gates
  AT_Y = 4,          // [CHUNK], like x
  AT_OWN_B = 5,      // [tokens], parallel form
  AT_OWN_X = 6,      // [tokens], parallel form
  AT_OWN_GATES = 7,  // [tokens] of Gates, parallel form
  AT_WEIGHTS = 8,    // [TOKENS][WEIGHTS], parallel form
};

// Weights of a token: of a chunk's records, then of the step's own tokens.
enum : i32 { WEIGHTS = CHUNK + MAX_PARALLEL };

struct Gates {
  float dt;
  float g;
  float factor;  // serial: of the decay; parallel: log decay between this record and the committed position
  u32 slow;
};
static_assert(sizeof(Gates) == GATES_BYTES, "gates in shared memory");

DEVICE float *floats(const Mamba2Params &p, i32 array) { return (float *)(shared_memory + p.shared.at[array]); }
DEVICE float *columns(const Mamba2Params &p, i32 array, i32 row) { return floats(p, array) + row * p.shared.columns; }
DEVICE float *channels(const Mamba2Params &p, i32 array, i32 row) { return floats(p, array) + row * p.shared.channels; }
DEVICE Gates *gates(const Mamba2Params &p, i32 array) { return (Gates *)(shared_memory + p.shared.at[array]); }

DEVICE i32 group_of(const Mamba2Params &p) { return work().head / p.heads_per_group; }

// dt and g of an input token.
DEVICE Gates token_gates(const Mamba2Params &p, i64 t) {
  const Work &w = work();
  float dt = load_one(span_at(w.span, p.dt, t, w.head), p.dt.dtype);
  if (p.dt_bias.data) dt = __fadd_rn(dt, load_one(tensor_at(p.dt_bias, 0, 0, w.head), p.dt_bias.dtype));
  if (p.softplus) dt = softplus(dt);
  Gates g = {};
  g.dt = dt;
  g.g = __fmul_rn(load_one(tensor_at(p.a, 0, 0, w.head), p.a.dtype), dt);
  return g;
}

// y = fma(D, x, y), the gate, and the store, for channel i of the block.
DEVICE void finish(const Mamba2Params &p, i64 t, i32 i, float x, float y) {
  const Work &w = work();
  i64 row = first_channel(p.state) + i;
  if (p.d_skip.data) {
    const char *d = tensor_at(p.d_skip, 0, 0, w.head) + (p.d_per_element ? row * size_of(p.d_skip.dtype) : 0);
    y = fma(load_one(d, p.d_skip.dtype), x, y);
  }
  if (p.z.data) {
    float z = load_one(span_at(w.span, p.z, t, w.head) + row * size_of(p.z.dtype), p.z.dtype);
    y = __fmul_rn(y, silu(z));
  }
  store_one(span_at(w.span, p.out, t, w.head) + row * size_of(p.out.dtype), p.out.dtype, y);
}

// Record (or token of the step) base + i.
DEVICE const char *b_of(const Mamba2Params &p, i64 i) {
  const Work &w = work();
  i64 own = w.base + i - w.position;
  if (own >= 0) return span_at(w.span, p.b, own, group_of(p));
  return held_record(p.ring_b, group_of(p), i, p.ring_rows, p.state.columns * size_of(p.io));
}

DEVICE const char *x_of(const Mamba2Params &p, i64 i) {
  const Work &w = work();
  i64 own = w.base + i - w.position, skip = first_channel(p.state) * size_of(p.io);
  if (own >= 0) return span_at(w.span, p.x, own, w.head) + skip;
  return held_record(p.ring_x, w.head, i, p.ring_rows, p.state.rows * size_of(p.io)) + skip;
}

DEVICE Gates gates_of(const Mamba2Params &p, i64 i) {
  const Work &w = work();
  i64 own = w.base + i - w.position;
  if (own >= 0) return token_gates(p, own);
  const float *pair = (const float *)held_record(p.ring_dt, w.head, i, p.ring_rows, 8);
  Gates g = {};
  g.dt = pair[0];
  g.g = pair[1];
  return g;
}

// Where records and tokens go that are decoded.
struct Stage {
  i32 b, x, gates;  // arrays, from their first rows on
  bool decays;      // with the factors of their decays
};

// Decodes B, x and gates of n records and tokens from base + first on, and C of the rows [c_from, c_to) of them, which are tokens of the step.
// Eight elements at a time, so that all loads are under way together.
DEVICE void stage_rows(const Mamba2Params &p, Stage to, i64 first, i32 n, i32 c_from, i32 c_to) {
  const Work &w = work();
  i32 of_b = blocks_of(p.state) * (BLOCK / 8), of_x = p.shared.channels / 8, each = of_b + of_x + (c_to > c_from ? of_b : 0);
  Gates mine = {};
  if ((i32)threadIdx.x < n) mine = gates_of(p, first + threadIdx.x);
#pragma unroll 2
  for (i32 unit = threadIdx.x; unit < n * each; unit += blockDim.x) {
    i32 i = unit / each, part = unit % each;
    bool is_x = part >= of_b && part < of_b + of_x, is_c = part >= of_b + of_x;
    i32 element = 8 * (is_c ? part - of_b - of_x : is_x ? part - of_b : part);
    if (is_c && (i < c_from || i >= c_to)) continue;
    const char *from = is_x   ? x_of(p, first + i)
                       : is_c ? span_at(w.span, p.c, w.base + first + i - w.position, group_of(p))
                              : b_of(p, first + i);
    float v[8];
    load8(v, from + element * size_of(p.io), p.io, (is_x ? channels_of(p.state) : p.state.columns) - element);
    put8((is_x ? channels(p, to.x, i) : columns(p, is_c ? AT_C : to.b, i)) + element, v);
  }
  if ((i32)threadIdx.x >= n) return;
  if (to.decays) {
    Decay d = decay_of(mine.g);
    mine.factor = d.factor;
    mine.slow = d.slow;
  }
  gates(p, to.gates)[threadIdx.x] = mine;
}

// Decodes C of n tokens of the step from first on.
DEVICE void stage_c(const Mamba2Params &p, i64 first, i32 n) {
  const Work &w = work();
  i32 each = blocks_of(p.state) * (BLOCK / 8);
#pragma unroll 2
  for (i32 unit = threadIdx.x; unit < n * each; unit += blockDim.x) {
    i32 i = unit / each, element = 8 * (unit % each);
    float v[8];
    load8(v, span_at(w.span, p.c, first + i, group_of(p)) + element * size_of(p.io), p.io, p.state.columns - element);
    put8(columns(p, AT_C, i) + element, v);
  }
}

// Takes record i of the chunk into a tile.
template <i32 NC, i32 H>
DEVICE void take_in(Tile<NC, H> &t, const Mamba2Params &p, i32 i, i32 half) {
  Gates g = gates(p, AT_GATES)[i];
  Lane lane = lane_of(threadIdx.x);
  const float *x = channels(p, AT_X, i) + warp_of() * TILE + half * 8 + lane.group;
  float xd[H];
#pragma unroll
  for (i32 h = 0; h < H; h++) xd[h] = __fmul_rn(x[8 * h], g.dt);
  decay_tile(t, blocks_of(p.state), g.factor, g.slow);
  rank_one(t, columns(p, AT_B, i), xd, blocks_of(p.state), lane);
  clear_padding(t, p.state.columns, lane);
}

// Writes the records of tokens [from, len): x of the block's channels, dt and g of its head, B of its group.
DEVICE void write_records(const Mamba2Params &p, i64 from) {
  const Work &w = work();
  i32 size = (i32)size_of(p.io);
  bool with_b = w.part == 0 && w.head % p.heads_per_group == 0;
  i64 skip = first_channel(p.state) * size;
#pragma unroll 1
  for (i64 t = from + warp_of(); t < w.span.len; t += warps_of()) {
    i64 at = w.position + t;
    copy_elements(record_at(p.ring_x, w.head, at, p.ring_rows, (i64)p.state.rows * size) + skip,
                  span_at(w.span, p.x, t, w.head) + skip, size, channels_of(p.state), lane_index(), WARP);
    if (w.part == 0 && lane_index() == 0) {
      Gates g = token_gates(p, t);
      float *pair = (float *)record_at(p.ring_dt, w.head, at, p.ring_rows, 8);
      pair[0] = g.dt;
      pair[1] = g.g;
    }
    if (with_b)
      copy_elements(record_at(p.ring_b, group_of(p), at, p.ring_rows, (i64)p.state.columns * size),
                    span_at(w.span, p.b, t, group_of(p)), size, p.state.columns, lane_index(), WARP);
  }
}

// What a row's step moves, counted once for all of its heads.
DEVICE void tally_row(const Mamba2Params &p, bool flushed, i64 recorded, bool high) {
  const Work &w = work();
  const State &s = p.state;
  if (w.head != 0 || w.part != 0 || threadIdx.x != 0) return;
  bool folded = w.last_stop > w.tag[0];
  u64 elements = (u64)s.heads * s.rows * s.columns, size = s.format <= FORMAT_F32 ? 4 : 2;
  u64 record = (u64)s.heads * (s.rows * size_of(p.io) + 8) + (u64)(s.heads / p.heads_per_group) * s.columns * size_of(p.io);
  tally(p.slots, flushed && folded ? (u64)s.heads * s.tiles : 0,
        high && !folded && s.format == FORMAT_SPLIT32 ? elements * 2 : elements * size, folded ? elements * size : 0,
        (u64)(w.position - w.oldest) * record, (u64)recorded * record);
}

// History and tokens one by one.
template <i32 FORMAT, i32 NC, i32 H>
DEVICE void serial_item(const Mamba2Params &p, i64 item) {
  Work &w = work();
  if (!begin(p.slots, p.batch, p.place, p.state, p.out, item)) return;
  bool extend = p.mode == MODE_EXTEND;
  if (!begin_tiles(p.slots, p.batch, p.place, p.state, p.out, extend)) return;
  if (threadIdx.x == 0) set_base(w.oldest, p.ring_rows);
  __syncthreads();
#pragma unroll 1
  for (i32 half = 0; half < 2; half += H) {
    Lane lane = lane_of(threadIdx.x);
    Tile<NC, H> tile;
    load_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, false);
#pragma unroll 1
    for (i64 first = 0; w.base + first < w.position + w.span.len; first += CHUNK) {
      i32 n = (i32)min((i64)CHUNK, w.position + w.span.len - w.base - first);
      // Tokens of the step begin here.
      i32 own = (i32)min(max(w.position - w.base - first, 0ll), (i64)n);
      __syncthreads();
      stage_rows(p, {AT_B, AT_X, AT_GATES, true}, first, n, own, n);
      __syncthreads();
#pragma unroll 1
      for (i32 i = 0; i < n; i++) {
        i64 at = w.base + first + i;
        if (at < w.tag[warp_of()]) continue;
        take_in(tile, p, i, half);
        if (i >= own) {
          float y[H];
          dot_tile(tile, columns(p, AT_C, i), blocks_of(p.state), lane, y);
          if (lane.quad < H)
            channels(p, AT_Y, i)[warp_of() * TILE + 8 * (half + lane.quad) + lane.group] = lane.quad == 0 ? y[0] : y[H - 1];
        }
        if (at + 1 == w.stop[warp_of()])
          store_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, at + 1);
      }
      __syncwarp();
      i32 rows = min(channels_of(p.state) - warp_of() * TILE, (i32)TILE);
#pragma unroll 1
      for (i32 i = lane_index(); i < (n - own) * 8 * H; i += WARP) {
        i32 t = i / (8 * H), row = half * 8 + i % (8 * H), channel = warp_of() * TILE + row;
        if (row < rows)
          finish(p, w.base + first + own + t - w.position, channel, channels(p, AT_X, own + t)[channel],
                 channels(p, AT_Y, own + t)[channel]);
      }
    }
  }
  set_tag(p.batch);
  if (!extend) write_records(p, 0);
  tally_row(p, !extend, extend ? min(p.batch.keep_tail, w.span.len) : w.span.len, false);
}

// The tail of an extend, once all of its folds are done.
DEVICE void tail_item(const Mamba2Params &p, i64 item) {
  const Work &w = work();
  if (!begin(p.slots, p.batch, p.place, p.state, p.out, item, true)) return;
  i64 from = w.span.len - min(p.batch.keep_tail, w.span.len);
  if (!is_pending(p.state, p.place, w.position + from)) return;
  write_records(p, from);
  end_pending(p.state, p.place, w.position + from);
}

// Weights of the chunk's records, and of the step's own tokens up to each one, for tokens [block, block + n): eight rows and a token at a
// time. Barriers around it are the caller's.
DEVICE void weigh(const Mamba2Params &p, i32 held, i32 own_rows, i32 block, i32 n) {
  Lane lane = lane_of(threadIdx.x);
  i32 groups = (held + 7) / 8, own_groups = (own_rows + 7) / 8;
  const Gates *own_gates = gates(p, AT_OWN_GATES);
#pragma unroll 1
  for (i32 unit = warp_of(); unit < (groups + own_groups) * n; unit += warps_of()) {
    i32 t = unit % n, g = unit / n;
    bool own = g >= groups;
    i32 j = (own ? g - groups : g) * 8 + lane.group;
    bool exists = own ? j <= block + t : j < held;
    float product = dot_rows(columns(p, own ? AT_OWN_B : AT_B, exists ? j : 0), columns(p, AT_C, t), blocks_of(p.state), lane);
    if (lane.quad != 0) continue;
    float weight = 0.0f;
    if (exists) {
      Gates from = own ? own_gates[j] : gates(p, AT_GATES)[j];
      float elapsed = own ? 0.0f : from.factor;
#pragma unroll 1
      for (i32 i = own ? j + 1 : 0; i <= block + t; i++) elapsed += own_gates[i].g;
      weight = from.dt * exp(elapsed) * product;
    }
    floats(p, AT_WEIGHTS)[t * WEIGHTS + (own ? CHUNK : 0) + j] = weight;
  }
}

// y += w x for rows [from, to) of x; lanes of a quad take every fourth.
template <i32 H>
DEVICE void add_weighted(float (&y)[TOKENS][H], const float *x, const float *weights, i32 from, i32 to, i32 stride) {
#pragma unroll 1
  for (i32 i = from + (i32)threadIdx.x % 4; i < to; i += 4) {
#pragma unroll
    for (i32 t = 0; t < TOKENS; t++)
#pragma unroll
      for (i32 h = 0; h < H; h++) y[t][h] = fma(weights[t * WEIGHTS + i], x[i * stride + 8 * h], y[t][h]);
  }
}

// The parallel form, for steps of at most MAX_PARALLEL tokens.
template <i32 FORMAT, bool HIGH, i32 NC, i32 H>
DEVICE void parallel_item(const Mamba2Params &p, i64 item) {
  Work &w = work();
  if (!begin(p.slots, p.batch, p.place, p.state, p.out, item)) return;
  if (!begin_tiles(p.slots, p.batch, p.place, p.state, p.out, false)) return;
  i32 len = (i32)w.span.len;

  // The step's own tokens. Weights of tokens that there are not are zero.
  if (threadIdx.x == 0) set_base(w.position, p.ring_rows);
  __syncthreads();
  stage_rows(p, {AT_OWN_B, AT_OWN_X, AT_OWN_GATES, false}, 0, len, 0, min(len, (i32)TOKENS));
  for (i32 i = threadIdx.x; i < TOKENS * WEIGHTS; i += blockDim.x) floats(p, AT_WEIGHTS)[i] = 0.0f;

#pragma unroll 1
  for (i32 half = 0; half < 2; half += H) {
    Lane lane = lane_of(threadIdx.x);
    // Registers are not enough for the tile and all of a readout: it is loaded once more when it is needed.
    bool folds = w.stop[warp_of()] > w.tag[warp_of()];
    if (half == 0 && !folds) prefetch_tile<FORMAT>(p.state, checkpoint_of(p.state, p.place.layer), HIGH);
    if (w.last_stop > w.oldest) {
      Tile<NC, H> tile;
      load_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, false);
      __syncthreads();
      if (threadIdx.x == 0) set_base(w.oldest, p.ring_rows);
#pragma unroll 1
      for (i64 first = 0; w.oldest + first < w.last_stop; first += CHUNK) {
        i32 n = (i32)min((i64)CHUNK, w.last_stop - w.oldest - first);
        __syncthreads();
        stage_rows(p, {AT_B, AT_X, AT_GATES, true}, first, n, 0, 0);
        __syncthreads();
#pragma unroll 1
        for (i32 i = 0; i < n; i++) {
          i64 at = w.base + first + i;
          if (at >= w.tag[warp_of()] && at < w.stop[warp_of()]) take_in(tile, p, i, half);
        }
      }
      if (folds)
        store_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, w.stop[warp_of()]);
    }

    // Readouts, a few tokens at a time.
    i32 channel = warp_of() * TILE + 8 * half + lane.group;
#pragma unroll 1
    for (i32 block = 0; block < len; block += TOKENS) {
      i32 n = min(len - block, (i32)TOKENS);
      __syncthreads();
      if (threadIdx.x == 0) set_base(w.first_stop, p.ring_rows);
      // Those of the first block came with their tokens; a second half of the tile needs them again.
      if (block > 0 || (half > 0 && len > TOKENS)) stage_c(p, block, n);
      float y[TOKENS][H] = {};
      // Log decay of all of this tile's history; of all history newer than the chunk at hand.
      float whole = 0.0f, newer = 0.0f;
      // Newest records first. The step's own tokens ride behind the first chunk.
      bool is_first = true;
      i64 end = w.position - w.first_stop;
#pragma unroll 1
      do {
        i64 first = max(end - CHUNK, 0ll);
        i32 held = (i32)(end - first);
        __syncthreads();
        stage_rows(p, {AT_B, AT_X, AT_GATES, false}, first, held, 0, 0);
        __syncthreads();
        float total = newer;
        // The chunk's first record of this tile.
        i32 from = (i32)min(max(w.stop[warp_of()] - w.base - first, 0ll), (i64)held);
#pragma unroll 1
        for (i32 i = held - 1; i >= 0; i--) {
          Gates *g = &gates(p, AT_GATES)[i];
          if (i == (i32)threadIdx.x) g->factor = total;
          total += g->g;
          if (i >= from) whole = total;
        }
        __syncthreads();
        i32 own_rows = is_first ? block + n : 0;
        weigh(p, held, own_rows, block, n);
        __syncthreads();
        add_weighted<H>(y, channels(p, AT_X, 0) + channel, floats(p, AT_WEIGHTS), from, held, p.shared.channels);
        add_weighted<H>(y, channels(p, AT_OWN_X, 0) + channel, floats(p, AT_WEIGHTS) + CHUNK, 0, own_rows, p.shared.channels);
        newer = total;
        is_first = false;
        end = first;
      } while (end > 0);
      // The sums of each quad; then, of each token, the checkpoint's part.
#pragma unroll
      for (i32 t = 0; t < TOKENS; t++)
#pragma unroll
        for (i32 h = 0; h < H; h++) {
          float sum = y[t][h];
          sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
          sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
          if (lane.quad == t % 4) channels(p, AT_Y, t)[channel + 8 * h] = sum;
        }
      __syncwarp();
      Tile<NC, H> tile;
      load_tile<FORMAT>(tile, p.state, checkpoint_of(p.state, p.place.layer), lane, half, HIGH);
      float elapsed = whole;
#pragma unroll 1
      for (i32 t = -block; t < n; t++) {
        elapsed += gates(p, AT_OWN_GATES)[block + t].g;
        if (t < 0) continue;
        float seen[H], factor = exp(elapsed);
        dot_tile(tile, columns(p, AT_C, t), blocks_of(p.state), lane, seen);
        float *to = channels(p, AT_Y, t) + channel;
        if (lane.quad < H) to[8 * lane.quad] = fma(lane.quad == 0 ? seen[0] : seen[H - 1], factor, to[8 * lane.quad]);
      }
      __syncwarp();
      i32 rows = min(channels_of(p.state) - warp_of() * TILE, (i32)TILE);
#pragma unroll 1
      for (i32 i = lane_index(); i < n * 8 * H; i += WARP) {
        i32 t = i / (8 * H), row = half * 8 + i % (8 * H), own = warp_of() * TILE + row;
        if (row < rows) finish(p, block + t, own, channels(p, AT_OWN_X, block + t)[own], channels(p, AT_Y, t)[own]);
      }
    }
  }
  set_tag(p.batch);
  write_records(p, 0);
  tally_row(p, true, len, HIGH);
}

// Every item of a launch.
template <i32 FORMAT, i32 NC, i32 H>
DEVICE void serial(const Mamba2Params &p) {
  prefetch_checkpoint(p.slots, p.batch, p.place, p.state, false);
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < items_of(p.batch, p.state); i += gridDim.x) {
    serial_item<FORMAT, NC, H>(p, i);
  }
}

DEVICE void tail(const Mamba2Params &p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < items_of(p.batch, p.state); i += gridDim.x) tail_item(p, i);
}

template <i32 FORMAT, bool HIGH, i32 NC, i32 H>
DEVICE void parallel(const Mamba2Params &p) {
  prefetch_checkpoint(p.slots, p.batch, p.place, p.state, HIGH);
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < items_of(p.batch, p.state); i += gridDim.x) parallel_item<FORMAT, HIGH, NC, H>(p, i);
}

}  // namespace mamba2
