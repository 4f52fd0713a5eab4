// A stream that reads, changes and writes back in place, as the plain update does with a state. Otherwise as read.cu.
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(STREAM_THREADS) replayssm_kernel(const __grid_constant__ StreamParams p) {
  uint4 *tile = (uint4 *)(p.data + (i64)blockIdx.x * STREAM_BYTES) + threadIdx.x;
  uint4 words[STREAM_WORDS];
#pragma unroll
  for (i32 i = 0; i < STREAM_WORDS; i++) words[i] = tile[i * STREAM_THREADS];
#pragma unroll
  for (i32 i = 0; i < STREAM_WORDS; i++) {
    words[i].x += 1;
    words[i].y += 2;
    words[i].z += 3;
    words[i].w += 4;
    tile[i * STREAM_THREADS] = words[i];
  }
}
