// Cursors of a reset or an import, once checkpoints and tags are written. A thread per entry. Mirrors src/backend/cpu/life.rs.
#include "../common/dense.cuh"

// The default key of stochastic rounding: a mix of the ring's id.
DEVICE u64 default_seed(i64 ring) {
  u64 z = (u64)ring + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

DEVICE void set_cursor(const CursorParams &p, i64 i) {
  Entry e;
  if (!placed_entry(p.slots, p.list, i, p.is_import, -1, true, e)) return;
  Cursor &cursor = p.slots.cursors[e.ring];
  cursor.position = e.position;
  cursor.flush_before = first_fold(p.slots, e.position, e.ring);
  if (p.is_import) return;
  bool is_inline = p.list.is_inline;
  cursor.seed = !p.has_seed ? default_seed(e.ring) : is_inline ? p.inline_seed[i] : p.seed[i];
  cursor.generation = !p.has_generation ? cursor.generation + 1 : is_inline ? p.inline_generation[i] : p.generation[i];
}

extern "C" __global__ void __launch_bounds__(128) replayssm_kernel(const __grid_constant__ CursorParams p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < p.list.n; i += (i64)gridDim.x * blockDim.x) set_cursor(p, i);
}
