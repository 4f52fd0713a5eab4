// A matrix product in front of a layer, as an engine has one: out = activations weights^T, bfloat16 with fp32 sums, by tensor cores.
//
// A block computes 16 rows of the batch by 16 columns; its warps share out hidden, 32 at a time, and their sums are added in shared memory.
// A lane loads 16 bytes of a row: eight neighbours of hidden, which become the operands of two products. Which of hidden's elements the
// tensor core takes for which k is the same on both sides, and all of them are summed. At small batches it moves its weights once, which is
// what such a product costs. A launch that depends on it may begin when all its blocks run.
#include "../common/numerics.cuh"
#include "../common/ptx.cuh"
#include "params.cuh"

enum : i32 { WARPS = 8, SIDE = 16, STEP = 32 };

DEVICE uint4 load16(const u16 *matrix, i64 row, i32 hidden, i32 k) { return *(const uint4 *)(matrix + row * hidden + k); }

extern "C" __global__ void __launch_bounds__(WARPS *WARP) replayssm_kernel(const __grid_constant__ ProductParams p) {
  ptx_trigger_dependents();
  static __shared__ float sums[WARPS][SIDE][SIDE];
  i32 warp = (i32)threadIdx.x / WARP, lane = (i32)threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
  i32 blocks = p.n / SIDE;
  i32 row = (i32)blockIdx.x / blocks * SIDE, column = (i32)blockIdx.x % blocks * SIDE;
  // Rows beyond the batch are its last one, and are not stored.
  i64 upper = min(row + group, p.batch - 1), lower = min(row + group + 8, p.batch - 1);
  float d[2][4] = {};
#pragma unroll 4
  for (i32 k = warp * STEP + 8 * quad; k < p.hidden; k += WARPS * STEP) {
    uint4 a = load16(p.activations, upper, p.hidden, k), b = load16(p.activations, lower, p.hidden, k);
    const u32 first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
      uint4 w = load16(p.weights, column + 8 * half + group, p.hidden, k);
      const u32 left[2] = {w.x, w.y}, right[2] = {w.z, w.w};
      ptx_mma_m16n8k16_bf16(d[half], first, left, d[half]);
      ptx_mma_m16n8k16_bf16(d[half], second, right, d[half]);
    }
  }
#pragma unroll
  for (i32 half = 0; half < 2; half++)
#pragma unroll
    for (i32 i = 0; i < 4; i++) sums[warp][group + i / 2 * 8][8 * half + 2 * quad + i % 2] = d[half][i];
  __syncthreads();
  i32 r = (i32)threadIdx.x / SIDE, c = (i32)threadIdx.x % SIDE;
  float sum = 0.0f;
#pragma unroll
  for (i32 w = 0; w < WARPS; w++) sum = __fadd_rn(sum, sums[w][r][c]);
  if (row + r < p.batch) p.out[(i64)(row + r) * p.n + column + c] = to_bf16(sum);
}
