// Cursors of a reset, an import or a copy, once checkpoints and tags are written, and of a flush that is to come. A thread per entry.
// Mirrors src/backend/cpu/life.rs, fold.rs and copy.rs.
#include "../common/dense.cuh"

// The default key of stochastic rounding: a mix of the ring's id.
DEVICE u64 default_seed(i64 ring) {
  u64 z = (u64)ring + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

DEVICE u32 next_generation(const CursorParams &p, i64 i, u32 now) {
  return !p.has_generation ? now + 1 : p.list.is_inline ? p.inline_generation[i] : p.generation[i];
}

// Of a copy: e is its target. A source without a ring is none.
DEVICE void copy_cursor(const CursorParams &p, i64 i, i32 kind, const Entry &e) {
  i64 slot, ring = e.ring;
  if (p.has_from && !entry_of(p.slots, p.from, i, Place{-1, -1}, true, slot, ring)) return;
  Cursor &to = p.slots.cursors[e.ring], &from = p.slots.cursors[ring];
  Cursor source = from, target = to;
  if (kind == COPY_SWAP) {
    from.position = target.position;
    from.flush_before = target.flush_before;
    from.seed = target.seed;
    from.committed = 0;
    to.position = source.position;
    to.flush_before = source.flush_before;
    to.seed = source.seed;
  } else {
    i64 position = kind == COPY_LOAD ? e.position : source.position;
    to.position = position;
    to.flush_before = first_fold(p.slots, position, e.ring);
    to.seed = kind == COPY_LOAD ? default_seed(e.ring) : source.seed;
  }
  if (kind == COPY_SWAP || kind == COPY_MOVE) from.generation = source.generation + 1;
  to.committed = 0;
  to.generation = next_generation(p, i, target.generation);
}

DEVICE void set_cursor(const CursorParams &p, i64 i) {
  Entry e;
  if (!placed_entry(p.slots, p.list, i, p.kind == CURSORS_IMPORT, -1, true, e)) return;
  if (p.kind >= CURSORS_COPY) return copy_cursor(p, i, p.kind - CURSORS_COPY, e);
  Cursor &cursor = p.slots.cursors[e.ring];
  if (p.kind == CURSORS_FLUSH_LATER) {
    cursor.flush_before = e.position;
    return;
  }
  cursor.position = e.position;
  cursor.committed = 0;
  cursor.flush_before = first_fold(p.slots, e.position, e.ring);
  if (p.kind == CURSORS_IMPORT) return;
  bool is_inline = p.list.is_inline;
  cursor.seed = !p.has_seed ? default_seed(e.ring) : is_inline ? p.inline_seed[i] : p.seed[i];
  cursor.generation = next_generation(p, i, cursor.generation);
}

extern "C" __global__ void __launch_bounds__(128) replayssm_kernel(const __grid_constant__ CursorParams p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < p.list.n; i += (i64)gridDim.x * blockDim.x) set_cursor(p, i);
}
