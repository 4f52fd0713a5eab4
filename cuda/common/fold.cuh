// Recurrent states at a held position: the checkpoint, with the records up to there taken in one by one. They go to a dense buffer
// (export), back to their slot (flush), or to another slot (snapshot, store). Mirrors src/backend/cpu/fold.rs.
//
// A family is a struct with
//   Params                                      the parameters of its kernels
//   stage(p, n)                                 brings n records from base on to shared memory
//   take_in(tile, p, i, half)                   takes record i of those into a tile
//   record_bytes(p)                             of all heads
//   choose_layer(to, p, layer)                  of components of all layers makes those of one
#pragma once
#include "block.cuh"
#include "dense.cuh"

// Eight neighbouring elements, rounded to nearest even.
DEVICE void store8_dense(char *at, i32 dtype, const float (&v)[8]) {
  if (dtype == F32) {
    ((float4 *)at)[0] = make_float4(canonical(v[0]), canonical(v[1]), canonical(v[2]), canonical(v[3]));
    ((float4 *)at)[1] = make_float4(canonical(v[4]), canonical(v[5]), canonical(v[6]), canonical(v[7]));
    return;
  }
  u32 words[4];
#pragma unroll
  for (i32 i = 0; i < 4; i++)
    words[i] = dtype == BF16 ? to_bf16(v[2 * i]) | (u32)to_bf16(v[2 * i + 1]) << 16
                             : to_f16(v[2 * i]) | (u32)to_f16(v[2 * i + 1]) << 16;
  *(uint4 *)at = make_uint4(words[0], words[1], words[2], words[3]);
}

// Writes a tile to a dense state, whose layers are counted by index.
template <i32 NC, i32 H>
DEVICE void store_dense(const Tile<NC, H> &t, const StateTensor &dst, const Checkpoint &c, i32 columns, i64 entry, i64 index,
                        i64 head, Lane lane, i32 half) {
  i64 size = size_of(dst.dtype), step = (dst.is_transposed ? dst.row : 1) * size;
#pragma unroll
  for (i32 h = 0; h < H; h++) {
    i32 row = (half + h) * 8 + lane.group;
    if (row >= c.rows) continue;
    char *at = state_at(dst, entry, index, head, c.first + row, 8 * lane.quad);
    bool is_vector = !dst.is_transposed && (u64)at % 16 == 0;
    i32 left = columns - 8 * lane.quad;
#pragma unroll
    for (i32 j = 0; j < NC; j++) {
      if (is_vector && left >= 8) {
        store8_dense(at, dst.dtype, t.v[h][j]);
      } else {
#pragma unroll
        for (i32 e = 0; e < 8; e++)
          if (e < left) store_one(at + e * step, dst.dtype, t.v[h][j][e]);
      }
      at += BLOCK * step;
      left -= BLOCK;
    }
  }
}

// The slot that gets the states of an item, with FOLD_STORE.
DEVICE i64 &target_slot() {
  static __shared__ i64 slot;
  return slot;
}

// Begins an item: entry (row) i, a layer of the pool, head, part of the head. False: there is nothing to do, or the position is not held.
// last_stop is the position that is asked for. The head's tiles are looked at by all of its blocks, since it is written as a whole or not
// at all; a flush leaves those alone that stand there already, and none can be in the way of another block.
DEVICE bool begin_fold(const Slots &slots, const Batch &batch, const List &list, const Fold &fold, const Place &place, const State &s,
                       i64 i, i32 head, i32 part) {
  Work &w = work();
  bool is_flush = fold.kind == FOLD_FLUSH;
  __syncthreads();
  if (threadIdx.x == 0) {
    bool report = part == 0;
    w.row = i;
    w.head = head;
    w.part = part;
    if (fold.is_batch) {
      Row row = resolve(slots, batch, i, place, false);
      w.slot = row.slot;
      w.ring = row.ring;
      w.live = row.live;
    } else {
      w.live = entry_of(slots, list, i, Place{place.pool, -1}, report, w.slot, w.ring);
    }
    if (w.live && fold.kind == FOLD_STORE)
      w.live = target_of(slots, fold, list, i, place.pool, report && head == 0 && place.layer == 0, target_slot());
    if (w.live) {
      const Cursor &c = slots.cursors[w.ring];
      w.position = c.position;
      w.seed = c.seed;
      i64 at = fold.is_batch ? fold.at[i] : list.has_position ? given_position(list, i) : w.position - (is_flush ? slots.keep : 0);
      // Before position 0 nothing can be asked for.
      if (is_flush && list.has_position && at < 0) at = MAX_POSITION + 1;
      w.first_stop = w.last_stop = at;
    }
  }
  __syncthreads();
  if (!w.live) return false;
  bool bad = w.last_stop > w.position;
  for (i32 t = threadIdx.x; t < s.tiles; t += blockDim.x) {
    i64 tag = tags_of(s, place.layer, w.slot, head)[t];
    bad = bad || !tag_is_valid(slots, w.position, tag) || (!is_flush && tag > w.last_stop);
    if (t / s.warps == part) w.tag[t % s.warps] = tag;
  }
  if (__syncthreads_or(bad)) {
    if (threadIdx.x == 0 && part == 0) fault(slots, FAULT_POSITION, w.slot, list.first + i, place.pool, place.layer);
    return false;
  }
  if (threadIdx.x == 0) {
    w.oldest = w.last_stop;
    // A block's last warps may have no tile: they have nothing to take in.
    for (i32 k = 0; k < warps_of(); k++) {
      if (part * s.warps + k >= s.tiles) w.tag[k] = w.last_stop;
      w.oldest = min(w.oldest, w.tag[k]);
    }
  }
  __syncthreads();
  return !is_flush || w.oldest < w.last_stop;
}

template <typename Family, i32 FORMAT, i32 NC, i32 H>
DEVICE void fold_item(const typename Family::Params &p, const List &list, const StateTensor &dst, const Fold &fold, i64 index) {
  Work &w = work();
  const State &s = p.state;
#pragma unroll 1
  for (i32 half = 0; half < 2; half += H) {
    Lane lane = lane_of(threadIdx.x);
    Tile<NC, H> tile;
    load_tile<FORMAT>(tile, s, checkpoint_of(s, p.place.layer), lane, half, false);
    __syncthreads();
    if (threadIdx.x == 0) set_base(w.oldest, p.ring_rows);
    // base is the first of the chunk at hand.
#pragma unroll 1
    while (true) {
      __syncthreads();
      if (w.base >= w.last_stop) break;
      i32 n = (i32)min((i64)CHUNK, w.last_stop - w.base);
      Family::stage(p, n);
      __syncthreads();
#pragma unroll 1
      for (i32 i = 0; i < n; i++)
        if (w.base + i >= w.tag[warp_of()]) Family::take_in(tile, p, i, half);
      __syncthreads();
      if (threadIdx.x == 0) set_base(w.base + CHUNK, p.ring_rows);
    }
    if (fold.kind == FOLD_EXPORT) {
      store_dense(tile, dst, checkpoint_of(s, p.place.layer), s.columns, w.row, index, w.head, lane, half);
    } else if (fold.kind == FOLD_STORE || w.tag[warp_of()] < w.last_stop) {
      Checkpoint c = checkpoint_of(s, p.place.layer, fold.kind == FOLD_STORE ? target_slot() : w.slot, w.head, tile_of(s), w.seed);
      store_tile<FORMAT>(tile, s, c, lane, half, w.last_stop);
      if (half + H == 2 && c.rows > 0 && lane_index() == 0) *c.tag = w.last_stop;
    }
  }
  u64 bytes = (u64)s.rows * s.columns * (s.format <= FORMAT_F32 ? 4 : 2), written = 0, flushes = 0;
  if (fold.kind == FOLD_STORE) written = s.heads * bytes;
  if (fold.kind == FOLD_FLUSH) {
    written = s.heads * bytes;
    flushes = (u64)s.heads * s.tiles;
  }
  // One block counts for all heads.
  if (w.head == 0 && w.part == 0 && threadIdx.x == 0)
    tally(p.slots, flushes, s.heads * bytes, written, (u64)(w.last_stop - w.oldest) * Family::record_bytes(p), 0);
}

// Every item of a launch. What the families' functions take for the launch's parameters is a copy in shared memory, since the layer
// differs from item to item. Of a batch hardly any row is due: each block looks at all of them, some at a time, and then takes its share
// of those that are.
template <typename Family, i32 FORMAT, i32 NC, i32 H, typename P>
DEVICE void fold_states(const P &p) {
  static __shared__ typename Family::Params family;
  static_assert(sizeof(family) % 8 == 0, "copied in words of 8 bytes");
  wait_for_dependency();
  for (i32 i = threadIdx.x; i < (i32)(sizeof(family) / 8); i += blockDim.x) ((u64 *)&family)[i] = ((const u64 *)&p.family)[i];
  const State &s = p.family.state;
  const Batch &batch = p.family.batch;
  i32 layers = p.dst.n_layers;
  i64 units = (i64)s.heads * s.parts;
  i64 first = 0;
#pragma unroll 1
  do {
    if (p.fold.is_batch) {
      find_due(p.family.slots, batch, p.fold.at, first);
    } else {
      find_named(p.list, first);
    }
#pragma unroll 1
    for (i64 item = blockIdx.x; item < n_due() * layers * units; item += gridDim.x) {
      i32 part = (i32)(item % s.parts), head = (i32)(item / s.parts % s.heads);
      i64 index = item / units % layers, i = due_row(first, (i32)(item / units / layers));
      __syncthreads();
      if (threadIdx.x == 0) {
        family.place.layer = p.dst.layer < 0 ? (i32)index : p.dst.layer;
        Family::choose_layer(family, p.family, family.place.layer);
      }
      __syncthreads();
      if (begin_fold(p.family.slots, batch, p.list, p.fold, family.place, s, i, head, part))
        fold_item<Family, FORMAT, NC, H>(family, p.list, p.dst, p.fold, index);
    }
    first += DUE_ROWS;
  } while (first < (p.fold.is_batch ? batch.n_rows : p.list.n));
}
