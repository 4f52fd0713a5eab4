// What FULL and HIGH readouts have in common that use tensor cores. They promise bounds, not bytes.
#pragma once
#include "block.cuh"

// e^x, close to the last bits; for weights, which promise bounds.
DEVICE float fast_exp(float x) { return ptx_exp2(__fmul_rn(x, 1.44269504f)); }

DEVICE float fast_silu(float x) { return x == from_bits(0xFF800000u) ? 0.0f : __fmul_rn(x, ptx_reciprocal(__fadd_rn(1.0f, fast_exp(-x)))); }

DEVICE float pair_low(u32 pair) { return from_bits(pair << 16); }
DEVICE float pair_high(u32 pair) { return from_bits(pair & 0xFFFF0000u); }

// The upper halves of two words.
DEVICE u32 upper_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x7632); }

// What 16 rows bring to eight columns, as the right operand of products of tensor cores: a lane's share. Of bfloat16 values, PARTS bfloat16 parts;
// of fp32 values two parts as tf32 takes them.
template <bool IS_F32, i32 PARTS>
struct Brought {
  u32 part[PARTS][IS_F32 ? 4 : 2];
};

// A warp's sums of what lanes from its own on have, and of what those behind it have.
DEVICE void sum_later(float mine, float &with, float &without) {
  with = mine;
#pragma unroll
  for (i32 step = 1; step < WARP; step *= 2) {
    float later = __shfl_down_sync(0xFFFFFFFFu, with, step);
    if (lane_index() + step < WARP) with += later;
  }
  without = __shfl_down_sync(0xFFFFFFFFu, with, 1);
  if (lane_index() == WARP - 1) without = 0.0f;
}

// Two numbers as half of a share: those of records next to each other, or four apart where values are fp32.
template <bool IS_F32, i32 PARTS>
DEVICE void set_half(Brought<IS_F32, PARTS> &r, i32 half, float a, float b) {
#pragma unroll
  for (i32 p = 0; p < PARTS; p++) {
    constexpr u32 MASK = IS_F32 ? 0xFFFFE000u : 0xFFFF0000u;
    if (IS_F32) {
      r.part[p][2 * half] = p + 1 < PARTS ? bits_of(a) & MASK : bits_of(a);
      r.part[p][2 * half + 1] = p + 1 < PARTS ? bits_of(b) & MASK : bits_of(b);
    } else {
      r.part[p][half] = upper_halves(bits_of(a), bits_of(b));
    }
    a = a - from_bits(bits_of(a) & MASK);
    b = b - from_bits(bits_of(b) & MASK);
  }
}

// Outputs of two neighbouring channels.
DEVICE void put_pair(i32 dtype, char *to, float first, float second) {
  if (dtype == BF16 && (u64)to % 4 == 0) {
    *(u32 *)to = to_bf16(first) | (u32)to_bf16(second) << 16;
  } else {
    store_one(to, dtype, first);
    store_one(to + size_of(dtype), dtype, second);
  }
}
