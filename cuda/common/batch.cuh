// Which slot, ring and tokens a batch row or a list entry means, whether it may be believed, and the rule of positions. Mirrors
// src/replay/position.rs and src/backend/cpu/rows.rs.
#pragma once
#include "element.cuh"

// Records a fault; the place of the first one is kept. Bits come behind places: who reads those of a single fault sees where it was. With
// bits of several, the first one's place may still be being written, and says so. The report is in host memory, where the host clears it
// at any time. Atomics are the device's, since not every bus carries the system's: a fault at that very moment may be lost. Mirrors
// src/backend/report.rs.
static __device__ __noinline__ void fault(const Slots &slots, u32 bit, i64 id, i64 row, i32 pool, i32 layer) {
  Report *r = slots.report;
  atomicAdd(&r->count, 1ull);
  if (atomicCAS(&r->place, PLACE_NONE, PLACE_CLAIMED) == PLACE_NONE) {
    volatile Report *v = r;
    __threadfence_system();
    v->first_slot = id;
    v->first_row = row;
    v->first_pool = pool;
    v->first_layer = layer;
    __threadfence_system();
    atomicExch(&r->place, PLACE_WRITTEN);
  }
  __threadfence_system();
  atomicOr(&r->bits, bit);
}

// Tokens of a row in the caller's tensors.
struct Span {
  i64 row;
  i64 first;
  i64 len;
};

DEVICE char *span_at(const Span &span, const Tensor &t, i64 token, i64 head) {
  return tensor_at(t, span.row, span.first + token, head);
}

struct Row {
  Span span;
  i64 slot;
  i64 ring;
  bool live;
};

// Slot and ring of an entry; false if it is to be skipped.
DEVICE bool pair_of(const Slots &slots, i64 slot, i64 ring, i64 row, const Place &place, bool report) {
  if (slot < 0 || ring < 0) return false;
  bool bad_slot = slot >= slots.n_slots, bad_ring = ring >= slots.n_rings;
  if (bad_slot || bad_ring) {
    if (report) fault(slots, FAULT_ID, bad_slot ? slot : ring, row, place.pool, place.layer);
    return false;
  }
  return true;
}

// Reads a row of a batch. One thread of one of a row's blocks reports its faults.
DEVICE Row resolve(const Slots &slots, const Batch &batch, i64 row, const Place &place, bool report) {
  Row r;
  bool fine = true;
  if (batch.tokens >= 0) {
    r.span = Span{row, 0, batch.tokens};
  } else {
    i64 begin = batch.cu_seqlens[row], end = batch.cu_seqlens[row + 1];
    i64 first = min(max(begin, 0ll), batch.n_tokens);
    i64 last = min(max(end, first), batch.n_tokens);
    if (first != begin || last != end || last - first > batch.max_tokens) {
      if (report) fault(slots, FAULT_LENGTH, row, row, place.pool, place.layer);
      fine = false;
    }
    r.span = Span{0, first, last - first};
  }
  r.live = false;
  r.ring = 0;
  r.slot = id_at(batch.slots, row);
  if (r.slot < 0 || (batch.has_null_id && r.slot == batch.null_id)) return r;
  r.ring = id_at(batch.rings, row);
  r.live = pair_of(slots, r.slot, r.ring, row, place, report) && fine;
  return r;
}

// Slot and ring that a list entry names; false if it does not: lists are padded with such entries.
DEVICE bool names(const List &list, i64 i, i64 &slot, i64 &ring) {
  slot = list.which == IDS_RINGS ? 0 : list.is_inline ? list.inline_slots[i] : id_at(list.slots, i);
  if (slot < 0) return false;
  ring = list.which == IDS_SLOTS ? 0 : list.is_inline ? list.inline_rings[i] : id_at(list.rings, i);
  return ring >= 0;
}

// Slot and ring of a list entry; false if it is to be skipped.
DEVICE bool entry_of(const Slots &slots, const List &list, i64 i, const Place &place, bool report, i64 &slot, i64 &ring) {
  return names(list, i, slot, ring) && pair_of(slots, slot, ring, list.first + i, place, report);
}

// Whether a row's last commit reached the position that is asked for, and where it is. A row of another generation is another request's.
DEVICE bool is_due(const Slots &slots, const Batch &batch, const i64 *at, i64 row) {
  i64 wanted = at[row];
  if (wanted < 0) return false;
  Row r = resolve(slots, batch, row, Place{-1, -1}, false);
  if (!r.live) return false;
  const Cursor &c = slots.cursors[r.ring];
  if (batch.generation && batch.generation[row] != c.generation) return false;
  return c.position - c.committed < wanted && wanted <= c.position;
}

// A component's part of a slot (ring) of the layer that a launch works on, which base is of. Apart from part_at, whose branch costs steps
// registers that they do not have.
DEVICE i64 own_part(const Component &c, i64 index) { return (i64)c.base + index * c.stride; }

// The same of any layer.
DEVICE i64 part_at(const Component &c, i64 layer, i64 index) {
  i64 base = c.layer_stride == LAYER_TABLE ? ((const i64 *)c.base)[layer] : (i64)c.base + layer * c.layer_stride;
  return base + index * c.stride;
}

// A component of all layers as one of a layer.
DEVICE Component layer_of(const Component &c, i64 layer) { return Component{(char *)part_at(c, layer, 0), 0, c.stride}; }

DEVICE i64 floor_div(i64 a, i64 b) {
  i64 q = a / b;
  return q - (a % b < 0 ? 1 : 0);
}

DEVICE bool position_is_valid(i64 position) { return position >= 0 && position <= MAX_POSITION; }

DEVICE bool tag_is_valid(const Slots &slots, i64 position, i64 tag) {
  return position_is_valid(position) && tag <= position && tag >= max(position - slots.window - slots.keep, 0ll);
}

DEVICE bool conv_tag_is_valid(const Slots &slots, i64 position, i64 tag) {
  return position_is_valid(position) && tag <= position &&
         tag >= max(position - slots.keep - slots.max_step_tokens, 0ll);
}

// How many records a step folds before it computes.
DEVICE i64 folds_of(const Slots &slots, i64 position, i64 tag, i64 tokens, i64 flush_before, bool flush) {
  i64 limit = position - slots.keep, foldable = limit - tag;
  if (tokens == 0 || foldable <= 0) return 0;
  if (flush || (tag < flush_before && flush_before <= limit)) return foldable;
  if (slots.schedule == SCHEDULE_BY_POSITION) {
    i64 period = slots.window - slots.max_step_tokens + 1;
    i64 due = floor_div(limit, period);
    return due > floor_div(tag, period) ? due * period - tag : 0;
  }
  return foldable + tokens > slots.window ? foldable : 0;
}

// Where a request that starts at a position on a ring is to fold first; 0, which is nowhere, unless staggered.
DEVICE i64 first_fold(const Slots &slots, i64 position, i64 ring) {
  if (slots.schedule != SCHEDULE_STAGGERED) return 0;
  i64 window = slots.window, step = max(window * 618 / 1000, 1ll);
  for (;; step++) {
    i64 a = step, b = window;
    while (b != 0) {
      i64 rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) break;
  }
  return position + 1 + ring % window * step % window;
}

// Adds to the counters. One thread per row of a launch does it.
DEVICE void tally(const Slots &slots, u64 flushes, u64 read, u64 written, u64 ring_read, u64 ring_written) {
  Stats *s = slots.stats;
  if (flushes) atomicAdd(&s->flushes, flushes);
  if (read) atomicAdd(&s->checkpoint_read, read);
  if (written) atomicAdd(&s->checkpoint_written, written);
  if (ring_read) atomicAdd(&s->ring_read, ring_read);
  if (ring_written) atomicAdd(&s->ring_written, ring_written);
}

// Programmatic dependent launch: waits for what the launch depends on; without such a launch it does nothing. Kernels never trigger early:
// their dependents begin when they have ended.
DEVICE void wait_for_dependency() { ptx_wait_for_dependency(); }
