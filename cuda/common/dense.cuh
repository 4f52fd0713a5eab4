// Dense states outside the library, and entries of lists that have a position. Mirrors src/backend/cpu/life.rs.
#pragma once
#include "batch.cuh"

// Address of element (row, column) of a head's state. layer counts the tensor's own layers.
DEVICE char *state_at(const StateTensor &t, i64 entry, i64 layer, i64 head, i64 row, i64 column) {
  i64 outer = t.is_transposed ? column : row, inner = t.is_transposed ? row : column;
  return t.data + (entry * t.entry + layer * t.layer_stride + head * t.head + outer * t.row + inner) * size_of(t.dtype);
}

// The position that is given for an entry of a list that has them.
DEVICE i64 given_position(const List &list, i64 i) { return list.is_inline ? list.inline_position[i] : list.position[i]; }

struct Entry {
  i64 slot;
  i64 ring;
  i64 position;
};

// What reset and import work on; false if it is to be skipped. own: where no position is given it is the ring's own, otherwise 0.
DEVICE bool placed_entry(const Slots &slots, const List &list, i64 i, bool own, i32 pool, bool report, Entry &e) {
  if (!entry_of(slots, list, i, Place{pool, -1}, report, e.slot, e.ring)) return false;
  e.position = list.has_position ? given_position(list, i) : own ? slots.cursors[e.ring].position : 0;
  if (position_is_valid(e.position)) return true;
  if (report) fault(slots, FAULT_POSITION, e.ring, list.first + i, pool, -1);
  return false;
}

// Tags of a head of one layer and slot.
DEVICE i64 *tags_of(const State &s, i64 layer, i64 slot, i64 head) { return (i64 *)part_at(s.tags, layer, slot) + head * s.tiles; }

// States of all layers as those of one.
DEVICE void choose_states(State &to, const State &s, i64 layer) {
  to.checkpoint = layer_of(s.checkpoint, layer);
  to.tags = layer_of(s.tags, layer);
}

// First byte of a head's state.
DEVICE char *head_of(const State &s, i64 layer, i64 slot, i64 head) {
  return (char *)part_at(s.checkpoint, layer, slot) + head * s.rows * s.columns * (s.format <= FORMAT_F32 ? 4 : 2);
}

DEVICE i32 conv_tiles(const Windows &w) { return (w.channels + CONV_TILE - 1) / CONV_TILE; }

DEVICE i64 *tag_of(const Windows &w, i64 layer, i64 ring, i32 tile) { return (i64 *)part_at(w.tags, layer, ring) + tile; }

// Tag of the window that a slot holds, and an address in it.
DEVICE i64 *stored_tag_of(const Windows &w, i64 layer, i64 slot, i32 tile) {
  return (i64 *)part_at(w.stored_tags, layer, slot) + tile;
}
DEVICE char *stored_at(const Windows &w, i64 layer, i64 slot, i32 tap, i32 channel) {
  return (char *)part_at(w.stored, layer, slot) + ((i64)tap * w.channels + channel) * size_of(w.io);
}

// Rows of a batch, or entries of a list, that are looked at at a time.
enum : i32 { DUE_ROWS = 512 };

// A bit for each of them, and how many bits there are: in shared memory, since registers that live across calls are few.
DEVICE u32 *due_bits() {
  static __shared__ u32 bits[DUE_ROWS / 32 + 1];
  return bits;
}
DEVICE i64 n_due() { return due_bits()[DUE_ROWS / 32]; }

// Begins a look at some more.
DEVICE void clear_due() {
  __syncthreads();
  for (i32 i = threadIdx.x; i <= DUE_ROWS / 32; i += blockDim.x) due_bits()[i] = 0;
  __syncthreads();
}

DEVICE void set_due(i32 i) {
  atomicOr(&due_bits()[i / 32], 1u << (i % 32));
  atomicAdd(&due_bits()[DUE_ROWS / 32], 1u);
}

// Looks which of a list's entries from first on name a slot and a ring. The others must not cost a look for each of their layers and heads.
DEVICE void find_named(const List &list, i64 first) {
  clear_due();
#pragma unroll 1
  for (i32 i = threadIdx.x; i < DUE_ROWS && first + i < list.n; i += blockDim.x) {
    i64 slot, ring;
    if (names(list, first + i, slot, ring)) set_due(i);
  }
  __syncthreads();
}

// Looks which of the rows from first on are due; all blocks find the same ones. Loads of a thread's rows wait for each other as little as they
// can: what is needed of every row is loaded first, whatever it turns out to be, and only rows that look due are looked at again.
DEVICE void find_due(const Slots &slots, const Batch &batch, const i64 *at, i64 first) {
  enum : i32 { EACH = 4 };
  clear_due();
#pragma unroll 1
  for (i32 begin = threadIdx.x; begin < DUE_ROWS && first + begin < batch.n_rows; begin += EACH * blockDim.x) {
    i64 wanted[EACH], ring[EACH];
#pragma unroll
    for (i32 k = 0; k < EACH; k++) {
      i64 row = min(first + begin + k * (i32)blockDim.x, batch.n_rows - 1);
      wanted[k] = at[row];
      ring[k] = id_at(batch.rings, row);
    }
    i64 position[EACH], committed[EACH];
#pragma unroll
    for (i32 k = 0; k < EACH; k++) {
      const Cursor &c = slots.cursors[min(max(ring[k], 0ll), slots.n_rings - 1ll)];
      position[k] = c.position;
      committed[k] = c.committed;
    }
#pragma unroll
    for (i32 k = 0; k < EACH; k++) {
      i32 i = begin + k * (i32)blockDim.x;
      bool may_be = i < DUE_ROWS && first + i < batch.n_rows && position[k] - committed[k] < wanted[k] && wanted[k] <= position[k];
      if (may_be && is_due(slots, batch, at, first + i)) set_due(i);
    }
  }
  __syncthreads();
}

// The row (entry) of the one number k.
DEVICE i64 due_row(i64 first, i32 k) {
  const u32 *bits = due_bits();
  i32 word = 0;
  for (; k >= __popc(bits[word]); word++) k -= __popc(bits[word]);
  u32 left = bits[word];
  for (; k > 0; k--) left &= left - 1;
  return first + 32 * word + __ffs(left) - 1;
}

// The slot that gets the state of a row or entry; false if there is none.
DEVICE bool target_of(const Slots &slots, const Fold &fold, const List &list, i64 i, i32 pool, bool report, i64 &slot) {
  slot = !fold.is_batch && list.is_inline ? fold.inline_slots[i] : id_at(fold.slots, i);
  if (slot < 0) return false;
  if (slot < slots.n_slots) return true;
  if (report) fault(slots, FAULT_ID, slot, list.first + i, pool, -1);
  return false;
}

// Address of a channel of the record of the token at a position, which may lie before position 0.
DEVICE char *window_at(const Windows &w, i64 layer, i64 ring, i64 position, i32 channel) {
  i64 row = position % w.rows;
  if (row < 0) row += w.rows;
  return (char *)part_at(w.ring, layer, ring) + (row * w.channels + channel) * size_of(w.io);
}
