// What the delta rules' kernels have in common.
#pragma once
#include "../common/block.cuh"

DEVICE i32 key_head(const DeltaParams &p, i32 head) {
  return p.is_tiled ? head % p.qk_heads : head / (p.state.heads / p.qk_heads);
}

// Whether this value head is the first of those that share its key head.
DEVICE bool leads(const DeltaParams &p, i32 head) {
  return p.is_tiled ? head < p.qk_heads : head % (p.state.heads / p.qk_heads) == 0;
}

// What a gate makes of its input, of a head with a = exp(A_log).
DEVICE float gate_of(const DeltaParams &p, float a, float x) {
  if (p.gate == GATE_SOFTPLUS) return -__fmul_rn(a, softplus(x));
  if (p.gate == GATE_LOWER_BOUND) return __fmul_rn(p.lower_bound, sigmoid(__fmul_rn(a, x)));
  return x;
}

// Sums of log decays that are kept as logarithms to base 2.
DEVICE float add_log(float sum, float g) { return fma(g, 1.44269504f, sum); }

// The lane's four of a row of 128 values.
DEVICE void load_four(const void *row, i32 dtype, float (&v)[4]) {
  if (dtype == F32) {
    float4 four = ((const float4 *)row)[lane_index()];
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else {
    uint2 two = ((const uint2 *)row)[lane_index()];
    u32 words[2] = {two.x, two.y};
#pragma unroll
    for (i32 e = 0; e < 4; e++) {
      u16 x = (u16)(words[e / 2] >> e % 2 * 16);
      v[e] = dtype == BF16 ? from_bf16(x) : from_f16(x);
    }
  }
}

// Butterflies over a warp's lanes, which hold a class of the canonical sum each.
DEVICE float sum_lanes(float c) {
  c = __fadd_rn(c, __shfl_xor_sync(0xFFFFFFFFu, c, 4));
  c = __fadd_rn(c, __shfl_xor_sync(0xFFFFFFFFu, c, 2));
  c = __fadd_rn(c, __shfl_xor_sync(0xFFFFFFFFu, c, 1));
  c = __fadd_rn(c, __shfl_xor_sync(0xFFFFFFFFu, c, 8));
  return __fadd_rn(c, __shfl_xor_sync(0xFFFFFFFFu, c, 16));
}

// Reciprocal norm of a row of 128 bfloat16 values; a warp's work.
DEVICE float norm_of(const DeltaParams &p, const char *row) {
  if (!p.has_norm) return 1.0f;
  float c = 0.0f;
#pragma unroll
  for (i32 j = 0; j < 128 / WARP; j++) {
    float v = from_bf16(((const u16 *)row)[WARP * j + lane_index()]);
    c = fma(v, v, c);
  }
  return rsqrt(__fadd_rn(sum_lanes(c), p.eps));
}
