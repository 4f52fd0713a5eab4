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

// Address of a channel of the record of the token at a position, which may lie before position 0.
DEVICE char *window_at(const Windows &w, i64 layer, i64 ring, i64 position, i32 channel) {
  i64 row = position % w.rows;
  if (row < 0) row += w.rows;
  return (char *)part_at(w.ring, layer, ring) + (row * w.channels + channel) * size_of(w.io);
}
