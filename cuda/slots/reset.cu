// Checkpoints and tags of a reset, of one pool: a block per head (or per CONV_TILE channels) of every layer and entry. Cursors are another
// launch's. Mirrors reset in src/backend/cpu/life.rs.
#include "../common/dense.cuh"

extern __shared__ __align__(16) char shared_memory[];

// Words that a thread moves at a time, so that their loads overlap.
enum : i32 { WORDS = 4 };

DEVICE void zero_bytes(char *at, i64 bytes) {
  if ((u64)at % 16 == 0 && bytes % 16 == 0) {
    for (i64 i = threadIdx.x; i < bytes / 16; i += blockDim.x) ((uint4 *)at)[i] = make_uint4(0, 0, 0, 0);
  } else {
    for (i64 i = threadIdx.x; i < bytes / 2; i += blockDim.x) ((u16 *)at)[i] = 0;
  }
}

// Rows of a head whose fp32 values are in shared memory at a time: as many as fit, and a divisor of all of them, so that pieces are equal.
DEVICE i32 rows_at_a_time(const State &s, i32 bytes) {
  i32 n = min(s.rows, bytes / (4 * s.columns));
  while (s.rows % n != 0) n--;
  return n;
}

// Where a piece of words goes when pieces high, low, high, low, ... become all high ones and then all low ones.
DEVICE i32 destination(i32 piece, i32 pieces) { return piece % 2 * (pieces / 2) + piece / 2; }

// Moves pieces of n words to their destinations in place. Every thread carries its own words around each cycle.
DEVICE void unzip(u16 *words, i32 n, i32 pieces) {
  static __shared__ u8 leads[2 * MAX_DIM];
  // A cycle is led by its lowest piece.
  for (i32 i = threadIdx.x; i < pieces; i += blockDim.x) {
    i32 at = destination(i, pieces);
    bool moves = at != i;
    while (at > i) at = destination(at, pieces);
    leads[i] = moves && at == i;
  }
  __syncthreads();
#pragma unroll 1
  for (i32 leader = 0; leader < pieces; leader++) {
    if (!leads[leader]) continue;
#pragma unroll 1
    for (i32 first = threadIdx.x; first < n; first += WORDS * blockDim.x) {
      u16 carried[WORDS];
#pragma unroll
      for (i32 e = 0; e < WORDS; e++) {
        i32 i = first + e * blockDim.x;
        carried[e] = i < n ? words[(i64)leader * n + i] : 0;
      }
      i32 at = leader;
#pragma unroll 1
      do {
        at = destination(at, pieces);
        u16 *piece = words + (i64)at * n;
        u16 found[WORDS];
#pragma unroll
        for (i32 e = 0; e < WORDS; e++) {
          i32 i = first + e * blockDim.x;
          found[e] = i < n ? piece[i] : 0;
        }
#pragma unroll
        for (i32 e = 0; e < WORDS; e++) {
          i32 i = first + e * blockDim.x;
          if (i < n) piece[i] = carried[e];
          carried[e] = found[e];
        }
      } while (at != leader);
    }
  }
}

// Turns n fp32 values into a high plane followed by a low plane, in place.
DEVICE void split_values(u32 *values, i32 n) {
  const float *held = (const float *)shared_memory;
  for (i32 i = threadIdx.x; i < n; i += blockDim.x) ((u32 *)shared_memory)[i] = values[i];
  __syncthreads();
  if (n % 2 == 0) {
    for (i32 i = threadIdx.x; i < n / 2; i += blockDim.x) {
      float a = canonical(held[2 * i]), b = canonical(held[2 * i + 1]);
      u32 high_a = high_plane(a), high_b = high_plane(b);
      values[i] = (high_a & 0xFFFFu) | high_b << 16;
      values[n / 2 + i] = low_plane(a, high_a) | low_plane(b, high_b) << 16;
    }
  } else {
    for (i32 i = threadIdx.x; i < n; i += blockDim.x) {
      float a = canonical(held[i]);
      ((u16 *)values)[i] = (u16)high_plane(a);
      ((u16 *)values)[n + i] = (u16)low_plane(a, high_plane(a));
    }
  }
  __syncthreads();
}

// A head's fp32 values become planes in place: in one go if all of them fit into shared memory, otherwise piece by piece, and then the
// planes of the pieces are put in order.
DEVICE void to_planes(char *head, const State &s, i32 rows) {
  i32 n = rows * s.columns, pieces = s.rows / rows;
#pragma unroll 1
  for (i32 i = 0; i < pieces; i++) split_values((u32 *)head + (i64)i * n, n);
  if (pieces > 1) {
    unzip((u16 *)head, n, 2 * pieces);
    __syncthreads();
  }
}

DEVICE void reset_head(const ResetParams &p, const Entry &e, i64 layer, i32 head) {
  const State &s = p.state;
  char *at = head_of(s, layer, e.slot, head);
  if (!p.keep_checkpoint) {
    zero_bytes(at, (i64)s.rows * s.columns * (s.format <= FORMAT_F32 ? 4 : 2));
  } else if (p.convert && s.format == FORMAT_SPLIT32) {
    to_planes(at, s, rows_at_a_time(s, p.shared_bytes));
  }
  for (i32 i = threadIdx.x; i < s.tiles; i += blockDim.x) tags_of(s, layer, e.slot, head)[i] = e.position;
}

DEVICE void reset_window(const ResetParams &p, const Entry &e, i64 layer, i32 tile) {
  const Windows &w = p.windows;
  i32 first = tile * CONV_TILE, channels = min(w.channels - first, (i32)CONV_TILE);
  if (!p.keep_checkpoint)
    for (i32 back = 1; back < w.width; back++)
      zero_bytes(window_at(w, layer, e.ring, e.position - back, first), channels * size_of(w.io));
  if (threadIdx.x == 0) {
    *tag_of(w, layer, e.ring, tile) = e.position;
    *stored_tag_of(w, layer, e.slot, tile) = -1;
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) replayssm_kernel(const __grid_constant__ ResetParams p) {
  wait_for_dependency();
  i32 units = p.is_window ? conv_tiles(p.windows) : p.state.heads;
#pragma unroll 1
  for (i64 first = 0; first < p.list.n; first += DUE_ROWS) {
    find_named(p.list, first);
#pragma unroll 1
    for (i64 item = blockIdx.x; item < n_due() * p.n_layers * units; item += gridDim.x) {
      i32 unit = (i32)(item % units);
      i64 layer = item / units % p.n_layers, i = due_row(first, (i32)(item / units / p.n_layers));
      Entry e = {};
      bool live = placed_entry(p.slots, p.list, i, false, p.pool, threadIdx.x == 0, e);
      // What threads read may be moving if the caller's order is wrong; a block stays together all the same.
      if (!__syncthreads_and(live)) continue;
      if (p.is_window) {
        reset_window(p, e, layer, unit);
      } else {
        reset_head(p, e, layer, unit);
      }
    }
  }
}
