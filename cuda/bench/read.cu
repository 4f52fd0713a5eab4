// A stream of reads: what the memory can do, and what steps are quoted against. A tile of 32 KiB per block, all of a thread's loads under way
// at once.
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(STREAM_THREADS) replayssm_kernel(const __grid_constant__ StreamParams p) {
  const uint4 *tile = (const uint4 *)(p.data + (i64)blockIdx.x * STREAM_BYTES) + threadIdx.x;
  uint4 words[STREAM_WORDS];
#pragma unroll
  for (i32 i = 0; i < STREAM_WORDS; i++) words[i] = tile[i * STREAM_THREADS];
  u32 all = 0;
#pragma unroll
  for (i32 i = 0; i < STREAM_WORDS; i++) all |= words[i].x | words[i].y | words[i].z | words[i].w;
  // The memory is zero, which the compiler cannot know.
  if (all != 0) *p.sink = all;
}
