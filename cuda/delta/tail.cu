// The second launch of an extend that keeps a tail. INSTANCE_KDA and INSTANCE_COLUMNS as in serial.cu.
#include "delta.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) replayssm_kernel(const __grid_constant__ DeltaParams p) {
  delta::tail<INSTANCE_KDA, INSTANCE_COLUMNS / BLOCK>(p);
}
