// The fp32 arithmetic of src/replay/numerics.rs, operation by operation: the same bytes. Compiled without contraction, so that only what
// says fma is one. Subnormals are kept.
#pragma once
#include "ptx.cuh"

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

constexpr u32 CANONICAL_NAN = 0x7FC00000u;

DEVICE bool is_nan(float x) { return x != x; }

// A NaN of any payload becomes the canonical one.
DEVICE float canonical(float x) { return is_nan(x) ? from_bits(CANONICAL_NAN) : x; }

// 2^n for -126 <= n <= 127.
DEVICE float pow2(i32 n) { return from_bits((u32)(n + 127) << 23); }

// x 2^n, rounded once, for x in [1/2, 2).
DEVICE float scale_by(float x, i32 n) {
  i32 half = n >> 1;
  return __fmul_rn(__fmul_rn(x, pow2(half)), pow2(n - half));
}

// x = n ln 2 + r and e^r - 1 - r.
struct ReducedExp {
  i32 n;
  float r;
  float q;
};

DEVICE ReducedExp reduced_exp(float x) {
  constexpr float ROUND = 12582912.0f;
  constexpr u32 ROUND_BITS = 0x4B400000u;
  float t = fma(x, from_bits(0x3FB8AA3Bu), ROUND);
  ReducedExp e;
  e.n = (i32)(bits_of(t) - ROUND_BITS);
  float k = __fsub_rn(t, ROUND);
  e.r = fma(k, -from_bits(0x35BFBE8Eu), fma(k, -from_bits(0x3F317200u), x));
  float p = fma(e.r, 1.0f / 5040.0f, 1.0f / 720.0f);
  p = fma(e.r, p, 1.0f / 120.0f);
  p = fma(e.r, p, 1.0f / 24.0f);
  p = fma(e.r, p, 1.0f / 6.0f);
  p = fma(e.r, p, 0.5f);
  e.q = __fmul_rn(__fmul_rn(e.r, e.r), p);
  return e;
}

// Comparisons are written so that a NaN passes through.
DEVICE float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

DEVICE float exp(float x) {
  ReducedExp e = reduced_exp(clamp(x, -104.0f, 89.0f));
  float head = __fadd_rn(1.0f, e.r);
  float lost = __fsub_rn(e.r, __fsub_rn(head, 1.0f));
  return scale_by(__fadd_rn(head, __fadd_rn(lost, e.q)), e.n);
}

DEVICE float expm1(float x) {
  ReducedExp e = reduced_exp(clamp(x, -20.0f, 20.0f));
  float s = pow2(e.n);
  float near = fma(s, __fadd_rn(e.r, e.q), __fsub_rn(s, 1.0f));
  return x > 20.0f ? exp(x) : near;
}

DEVICE float log1p(float y) {
  constexpr u32 SQRT_HALF_BITS = 0x3F3504F3u;
  float u = __fadd_rn(1.0f, y);
  float lost = y < 1.0f ? __fsub_rn(y, __fsub_rn(u, 1.0f)) : __fsub_rn(1.0f, __fsub_rn(u, y));
  u32 bits = bits_of(u) + (0x3F800000u - SQRT_HALF_BITS);
  float k = (float)((i32)(bits >> 23) - 127);
  float f = __fsub_rn(from_bits((bits & 0x007FFFFFu) + SQRT_HALF_BITS), 1.0f);
  float s = __fdiv_rn(f, __fadd_rn(2.0f, f));
  float z = __fmul_rn(s, s);
  float r = fma(z, 2.0f / 9.0f, 2.0f / 7.0f);
  r = fma(z, r, 2.0f / 5.0f);
  r = fma(z, r, 2.0f / 3.0f);
  r = __fmul_rn(z, r);
  float half_square = __fmul_rn(__fmul_rn(0.5f, f), f);
  float low = fma(k, from_bits(0x35BFBE8Eu), __fdiv_rn(lost, u));
  float tail = __fsub_rn(half_square, fma(s, __fadd_rn(half_square, r), low));
  float value = fma(k, from_bits(0x3F317200u), __fsub_rn(f, tail));
  if (y == from_bits(0x7F800000u)) return y;
  if (y == -1.0f) return from_bits(0xFF800000u);
  if (y < -1.0f) return from_bits(CANONICAL_NAN);
  return value;
}

DEVICE float softplus(float x) { return x > 20.0f ? x : log1p(exp(x)); }

DEVICE float sigmoid(float x) {
  float e = exp(-fabsf(x));
  float numerator = x < 0.0f ? e : 1.0f;
  float sum = __fadd_rn(1.0f, e);
  float lost = __fsub_rn(e, __fsub_rn(sum, 1.0f));
  float q = __fdiv_rn(numerator, sum);
  float rest = fma(-q, lost, fma(-q, sum, numerator));
  return __fadd_rn(q, __fdiv_rn(rest, sum));
}

DEVICE float silu(float x) { return x == from_bits(0xFF800000u) ? 0.0f : __fmul_rn(x, sigmoid(x)); }

DEVICE float rsqrt(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }

// How a state element decays: fma(S, factor, S) if slow, S factor otherwise.
struct Decay {
  float factor;
  bool slow;
};

DEVICE Decay decay_of(float g) {
  Decay d;
  d.slow = g > -1.0f;
  d.factor = d.slow ? expm1(g) : exp(g);
  return d;
}

DEVICE float decayed(float s, float factor, bool slow) { return slow ? fma(s, factor, s) : __fmul_rn(s, factor); }

// Nearest bfloat16, ties to even.
DEVICE u16 to_bf16(float x) {
  u32 bits = bits_of(x);
  return is_nan(x) ? (u16)0x7FC0 : (u16)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
DEVICE float from_bf16(u16 x) { return from_bits((u32)x << 16); }

// Nearest binary16, ties to even.
DEVICE u16 to_f16(float x) {
  return is_nan(x) ? (u16)0x7E00 : ptx_to_f16(x);
}
DEVICE float from_f16(u16 x) { return ptx_from_f16(x); }

// The planes of a SPLIT32 checkpoint.
DEVICE u32 high_plane(float x) { return (bits_of(x) + 0x8000u) >> 16; }
DEVICE u32 low_plane(float x, u32 high) { return (bits_of(x) - (high << 16)) & 0xFFFFu; }
DEVICE float join(u32 high, u32 low) { return from_bits((high << 16) + (u32)(i32)(i16)low); }

// Philox4x32-10.
struct Words {
  u32 word[4];
};

DEVICE Words philox(u64 key, u32 c0, u32 c1, u32 c2, u32 c3) {
  u32 k0 = (u32)key, k1 = (u32)(key >> 32);
#pragma unroll
  for (i32 i = 0; i < 10; i++) {
    u32 h0 = __umulhi(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
    u32 h1 = __umulhi(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

DEVICE u16 to_bf16_stochastic(float x, u32 word) {
  if (is_nan(x)) return 0x7FC0;
  u32 bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) == 0x7F800000u) return (u16)(bits >> 16);
  return (u16)((bits + (word & 0xFFFFu)) >> 16);
}

DEVICE u16 to_f16_stochastic(float x, u32 word) {
  if (is_nan(x)) return 0x7E00;
  u32 bits = bits_of(x);
  u16 sign = (u16)((bits >> 16) & 0x8000u);
  u32 magnitude = bits & 0x7FFFFFFFu;
  u32 exponent = magnitude >> 23;
  if (exponent >= 143) return sign | (u16)0x7C00;
  if (exponent >= 113) return sign | (u16)(((magnitude + (word >> 19)) >> 13) - (112u << 10));
  u32 shift = 126 - exponent;
  if (exponent == 0 || shift > 31) return sign;
  u32 mantissa = (magnitude & 0x007FFFFFu) | 0x00800000u;
  return sign | (u16)(((u64)mantissa + (u64)(word >> (32 - shift))) >> shift);
}
