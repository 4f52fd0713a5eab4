// As serial.cu. INSTANCE_HIGH: whether the readout is HIGH rather than FULL.
#include "delta.cuh"

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ DeltaParams p) {
  delta::parallel<INSTANCE_FORMAT, INSTANCE_HIGH, INSTANCE_KDA, INSTANCE_COLUMNS / BLOCK, INSTANCE_HALVES>(p);
}
