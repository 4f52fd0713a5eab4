// Writes the checkpoints (windows) of one pool from a dense state: a block per head (or per CONV_TILE channels) of every layer and entry.
// Values round to nearest even whatever the pool does; cursors are another launch's. Mirrors import in src/backend/cpu/life.rs.
#include "../common/dense.cuh"

// Rows and columns that are turned at a time.
enum : i32 { SQUARE = 32 };

// Element i of a head.
DEVICE void store_element(const State &s, char *head, i64 i, float x) {
  if (s.format == FORMAT_F32) {
    ((float *)head)[i] = canonical(x);
  } else if (s.format == FORMAT_SPLIT32) {
    u32 high = high_plane(canonical(x));
    ((u16 *)head)[i] = (u16)high;
    ((u16 *)head)[(i64)s.rows * s.columns + i] = (u16)low_plane(canonical(x), high);
  } else {
    ((u16 *)head)[i] = s.format == FORMAT_BF16 ? to_bf16(x) : to_f16(x);
  }
}

// Elements i .. i + 7 of a head, 16 bytes at a time.
DEVICE void store8(const State &s, char *head, i64 i, const float (&v)[8]) {
  if (s.format == FORMAT_F32) {
    float4 *at = (float4 *)(head + i * 4);
    at[0] = make_float4(canonical(v[0]), canonical(v[1]), canonical(v[2]), canonical(v[3]));
    at[1] = make_float4(canonical(v[4]), canonical(v[5]), canonical(v[6]), canonical(v[7]));
    return;
  }
  u32 first[4], second[4];
#pragma unroll
  for (i32 k = 0; k < 4; k++) {
    float a = canonical(v[2 * k]), b = canonical(v[2 * k + 1]);
    u32 high_a = high_plane(a), high_b = high_plane(b);
    first[k] = s.format == FORMAT_SPLIT32 ? (high_a & 0xFFFFu) | high_b << 16
               : s.format == FORMAT_BF16  ? to_bf16(a) | (u32)to_bf16(b) << 16
                                          : to_f16(a) | (u32)to_f16(b) << 16;
    second[k] = low_plane(a, high_a) | low_plane(b, high_b) << 16;
  }
  *(uint4 *)(head + i * 2) = make_uint4(first[0], first[1], first[2], first[3]);
  if (s.format == FORMAT_SPLIT32)
    *(uint4 *)(head + (i64)s.rows * s.columns * 2 + i * 2) = make_uint4(second[0], second[1], second[2], second[3]);
}

// Rows of the source are rows of the state.
DEVICE void import_rows(const State &s, char *head, const char *from, i64 stride, i32 dtype) {
  i64 size = size_of(dtype);
  i32 n = s.rows * s.columns;
  bool is_vector = s.is_vector && (u64)from % 16 == 0 && stride * size % 16 == 0;
  if (is_vector) {
    for (i32 i = 8 * threadIdx.x; i < n; i += 8 * blockDim.x) {
      const char *at = from + (i / s.columns * stride + i % s.columns) * size;
      float v[8];
      if (dtype == F32) {
        load8_32(at, v);
      } else {
        load8_16(at, dtype == BF16, v);
      }
      store8(s, head, i, v);
    }
  } else {
    for (i32 i = threadIdx.x; i < n; i += blockDim.x)
      store_element(s, head, i, load_one(from + (i / s.columns * stride + i % s.columns) * size, dtype));
  }
}

// Rows of the source are columns of the state. They pass through shared memory, so that neighbouring threads read and write neighbours.
DEVICE void import_columns(const State &s, char *head, const char *from, i64 stride, i32 dtype) {
  static __shared__ float square[SQUARE][SQUARE + 1];
  i64 size = size_of(dtype);
  i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll 1
  for (i32 row = 0; row < s.rows; row += SQUARE)
#pragma unroll 1
    for (i32 column = 0; column < s.columns; column += SQUARE) {
      __syncthreads();
      for (i32 i = warp; i < SQUARE && column + i < s.columns; i += warps)
        if (row + lane < s.rows) square[i][lane] = load_one(from + ((column + i) * stride + row + lane) * size, dtype);
      __syncthreads();
      for (i32 i = warp; i < SQUARE && row + i < s.rows; i += warps)
        if (column + lane < s.columns) store_element(s, head, (i64)(row + i) * s.columns + column + lane, square[lane][i]);
    }
}

DEVICE void import_window(const ImportParams &p, const Entry &e, i64 i, i64 index, i64 layer, i32 tile) {
  const Windows &w = p.windows;
  i32 first = tile * CONV_TILE, end = min(first + (i32)CONV_TILE, w.channels), taps = w.width - 1;
  for (i32 channel = first + (i32)threadIdx.x; channel < end; channel += blockDim.x)
    for (i32 tap = 0; tap < taps; tap++)
      store_one(window_at(w, layer, e.ring, e.position - taps + tap, channel), w.io,
                load_one(state_at(p.src, i, index, 0, channel, tap), p.src.dtype));
  if (threadIdx.x == 0) {
    *tag_of(w, layer, e.ring, tile) = e.position;
    *stored_tag_of(w, layer, e.slot, tile) = -1;
  }
}

DEVICE void import_head(const ImportParams &p, const Entry &e, i64 i, i64 index, i64 layer, i32 head) {
  const State &s = p.state;
  char *to = head_of(s, layer, e.slot, head);
  const char *from = state_at(p.src, i, index, head, 0, 0);
  if (p.src.is_transposed) {
    import_columns(s, to, from, p.src.row, p.src.dtype);
  } else {
    import_rows(s, to, from, p.src.row, p.src.dtype);
  }
  for (i32 t = threadIdx.x; t < s.tiles; t += blockDim.x) tags_of(s, layer, e.slot, head)[t] = e.position;
  // One block counts for all heads.
  if (head == 0 && threadIdx.x == 0)
    tally(p.slots, 0, 0, (u64)s.heads * s.rows * s.columns * (s.format <= FORMAT_F32 ? 4 : 2), 0, 0);
}

extern "C" __global__ void __launch_bounds__(256, 1) replayssm_kernel(const __grid_constant__ ImportParams p) {
  wait_for_dependency();
  i32 units = p.is_window ? conv_tiles(p.windows) : p.state.heads, layers = p.src.n_layers;
#pragma unroll 1
  for (i64 first = 0; first < p.list.n; first += DUE_ROWS) {
    find_named(p.list, first);
#pragma unroll 1
    for (i64 item = blockIdx.x; item < n_due() * layers * units; item += gridDim.x) {
      i32 unit = (i32)(item % units);
      i64 index = item / units % layers, i = due_row(first, (i32)(item / units / layers));
      i64 layer = p.src.layer < 0 ? index : p.src.layer;
      Entry e;
      bool live = placed_entry(p.slots, p.list, i, true, p.pool, threadIdx.x == 0, e);
      // What threads read may be moving if the caller's order is wrong; a block stays together all the same.
      if (!__syncthreads_and(live)) continue;
      if (p.is_window) {
        import_window(p, e, i, index, layer, unit);
      } else {
        import_head(p, e, i, index, layer, unit);
      }
    }
  }
}
