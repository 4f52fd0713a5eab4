// Copies the memory of slots and rings of one pool: a block per chunk of a component, of every layer and entry. Cursors are another launch's.
// Mirrors src/backend/cpu/copy.rs.
#include "../common/dense.cuh"

// Words that a thread moves at a time, so that their loads overlap.
enum : i32 { WORDS = 4 };

DEVICE void move_words(char *from, char *to, i32 n, bool swap) {
#pragma unroll 1
  for (i32 first = threadIdx.x; first < n; first += WORDS * blockDim.x) {
    uint4 a[WORDS], b[WORDS];
#pragma unroll
    for (i32 k = 0; k < WORDS; k++) {
      i32 i = first + k * blockDim.x;
      a[k] = b[k] = make_uint4(0, 0, 0, 0);
      if (i < n) a[k] = ((const uint4 *)from)[i];
      if (i < n && swap) b[k] = ((const uint4 *)to)[i];
    }
#pragma unroll
    for (i32 k = 0; k < WORDS; k++) {
      i32 i = first + k * blockDim.x;
      if (i < n) ((uint4 *)to)[i] = a[k];
      if (i < n && swap) ((uint4 *)from)[i] = b[k];
    }
  }
}

// Elements are of two bytes at least.
DEVICE void move_bytes(char *from, char *to, i32 bytes, bool swap) {
  i32 whole = ((u64)from | (u64)to) % 16 == 0 ? bytes / 16 * 16 : 0;
  move_words(from, to, whole / 16, swap);
  for (i32 i = whole / 2 + (i32)threadIdx.x; i < bytes / 2; i += blockDim.x) {
    u16 moved = ((const u16 *)from)[i];
    if (swap) ((u16 *)from)[i] = ((const u16 *)to)[i];
    ((u16 *)to)[i] = moved;
  }
}

// Tags of a checkpoint that is to stand at a position. True: one of a thread's does not.
DEVICE bool load_tags(const i64 *from, i64 *to, i32 n, i64 position) {
  bool bad = false;
  for (i32 i = threadIdx.x; i < n; i += blockDim.x) {
    bool stands = from[i] == position;
    to[i] = stands ? position : -1;
    bad = bad || !stands;
  }
  return bad;
}

// Puts stored windows into a ring. True: one of them does not stand at the position.
DEVICE bool load_window(const Windows &w, i64 layer, i64 from, const Entry &to, i32 tile) {
  bool stands = *stored_tag_of(w, layer, from, tile) == to.position;
  i32 first = tile * CONV_TILE, channels = min(w.channels - first, (i32)CONV_TILE), taps = w.width - 1;
  for (i32 tap = 0; tap < taps && stands; tap++)
    for (i32 i = threadIdx.x; i < channels * (i32)size_of(w.io) / 2; i += blockDim.x)
      ((u16 *)window_at(w, layer, to.ring, to.position - taps + tap, first))[i] = ((const u16 *)stored_at(w, layer, from, tap, first))[i];
  if (threadIdx.x == 0) {
    *tag_of(w, layer, to.ring, tile) = stands ? to.position : -1;
    *stored_tag_of(w, layer, to.slot, tile) = -1;
  }
  return !stands;
}

// A part of a slot without a ring becomes one of a live slot. True: it does not stand at the position.
DEVICE bool load_part(const CopyParams &p, const CopiedComponent &c, i64 layer, i64 begin, i64 from_slot, const Entry &to, char *from,
                      char *at, i32 bytes) {
  bool bad = false;
  if (p.is_window) {
    if (c.kind != COMPONENT_WINDOW_TAGS) return false;
    for (i32 k = 0; k < bytes / 8; k++) bad = load_window(p.windows, layer, from_slot, to, (i32)(begin / 8) + k) || bad;
  } else if (c.kind == COMPONENT_TAGS) {
    bad = load_tags((const i64 *)from, (i64 *)at, bytes / 8, to.position);
  } else {
    move_bytes(from, at, bytes, false);
  }
  return bad;
}

// Whether a live source's tags cannot be trusted, which makes a target that cannot be trusted either.
DEVICE bool are_bad(const CopyParams &p, const i64 *tags, i32 n, i64 ring) {
  i64 position = p.slots.cursors[ring].position;
  bool bad = false;
  for (i32 i = threadIdx.x; i < n; i += blockDim.x)
    bad = bad || !(p.is_window ? conv_tag_is_valid(p.slots, position, tags[i]) : tag_is_valid(p.slots, position, tags[i]));
  return bad;
}

DEVICE void copy_part(const CopyParams &p, i64 i, i64 layer, i64 chunk) {
  i32 k = 0;
  while (k + 1 < p.n_components && chunk >= p.components[k + 1].first_chunk) k++;
  const CopiedComponent &c = p.components[k];
  bool report = chunk == 0 && layer == 0 && threadIdx.x == 0;
  i64 from_slot = 0, from_ring = 0;
  Entry to;
  bool live = entry_of(p.slots, p.from, i, Place{p.pool, -1}, report, from_slot, from_ring) &&
              placed_entry(p.slots, p.to, i, false, p.pool, report, to);
  i64 source = 0, target = 0;
  if (live) {
    source = c.per_ring ? from_ring : from_slot;
    target = c.per_ring ? to.ring : to.slot;
    live = source != target && !(c.per_ring && p.kind >= COPY_LOAD);
  }
  // What threads read may be moving if the caller's order is wrong; a block stays together all the same.
  if (!__syncthreads_and(live)) return;
  i64 begin = (chunk - c.first_chunk) * COPY_BYTES;
  i32 bytes = (i32)min((i64)COPY_BYTES, c.bytes - begin);
  char *from = (char *)part_at(c.at, layer, source) + begin, *at = (char *)part_at(c.at, layer, target) + begin;
  bool bad = false;
  if (p.kind == COPY_LOAD) {
    bad = load_part(p, c, layer, begin, from_slot, to, from, at, bytes);
  } else {
    if (c.kind == COMPONENT_TAGS && p.kind <= COPY_MOVE) bad = are_bad(p, (const i64 *)from, bytes / 8, from_ring);
    move_bytes(from, at, bytes, p.kind == COPY_SWAP);
  }
  if (__syncthreads_or(bad) && threadIdx.x == 0)
    fault(p.slots, FAULT_POSITION, p.kind == COPY_LOAD ? to.slot : from_slot, p.to.first + i, p.pool, (i32)layer);
}

extern "C" __global__ void __launch_bounds__(256, 1) replayssm_kernel(const __grid_constant__ CopyParams p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 first = 0; first < p.to.n; first += DUE_ROWS) {
    find_named(p.to, first);
#pragma unroll 1
    for (i64 item = blockIdx.x; item < n_due() * p.n_layers * p.n_chunks; item += gridDim.x)
      copy_part(p, due_row(first, (i32)(item / p.n_chunks / p.n_layers)), item / p.n_chunks % p.n_layers, item % p.n_chunks);
  }
}
