// Copies the cursors of listed rings; skipped entries are zero. The destination may be pinned host memory, aligned to 8 bytes: threads
// write 8 bytes each, neighbours side by side. Mirrors read_cursors in src/backend/cpu/life.rs.
#include "../common/batch.cuh"

enum : i32 { PARTS = sizeof(Cursor) / 8 };

extern "C" __global__ void __launch_bounds__(128) replayssm_kernel(const __grid_constant__ ReadParams p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x; k < p.list.n * PARTS; k += (i64)gridDim.x * blockDim.x) {
    i64 i = k / PARTS, part = k % PARTS, slot, ring;
    bool live = entry_of(p.slots, p.list, i, Place{-1, -1}, part == 0, slot, ring);
    ((u64 *)p.dst)[k] = live ? ((const u64 *)&p.slots.cursors[ring])[part] : 0;
  }
}
