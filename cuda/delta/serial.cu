// INSTANCE_FORMAT: the checkpoint's. INSTANCE_KDA: whether decays are per column. INSTANCE_COLUMNS: columns of the state at most, a multiple of 32.
// INSTANCE_HALVES: halves of a tile that are worked on at a time. INSTANCE_BLOCKS: blocks of 256 threads on a multiprocessor.
#include "delta.cuh"

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ DeltaParams p) {
  delta::serial<INSTANCE_FORMAT, INSTANCE_KDA, INSTANCE_COLUMNS / BLOCK, INSTANCE_HALVES>(p);
}
