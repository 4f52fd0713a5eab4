// The second launch of an extend that keeps a tail.
#include "mamba2.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) replayssm_kernel(const __grid_constant__ Mamba2Params p) { mamba2::tail(p); }
