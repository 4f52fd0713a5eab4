// The words of CUDA C++ that kernels use, for a host compiler.
#pragma once
#include "machine.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __builtin_assume(condition) \
  do {                              \
    if (!(condition)) __builtin_unreachable(); \
  } while (0)
#define __align__(n) __attribute__((aligned(n)))
// Static shared memory of a kernel is a section, which machine.cpp fills.
#define __shared__ EMULATED_SHARED

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size

// Of the line that calls.
#define SITE \
  emulated::Site { file, line }
#define CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct __align__(8) float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
struct __align__(8) uint2 {
  unsigned x, y;
};
struct __align__(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

// ---- Arithmetic. The compiler is told not to contract. ----

template <typename To, typename From>
To emulated_bits(From from) {
  static_assert(sizeof(To) >= sizeof(From), "nothing is lost");
  To to = {};
  __builtin_memcpy(&to, &from, sizeof(From));
  return to;
}
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float fabsf(float a) { return __builtin_fabsf(a); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

// ---- Memory. Threads change only where they wait, so that nothing comes between. ----

template <typename T>
T atomicAdd(T *at, T value) {
  T old = *at;
  *at = old + value;
  return old;
}
inline unsigned atomicExch(unsigned *at, unsigned value) {
  unsigned old = *at;
  *at = value;
  return old;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

inline unsigned atomicCAS(unsigned *at, unsigned compare, unsigned value) {
  unsigned old = *at;
  if (old == compare) *at = value;
  return old;
}
inline unsigned atomicOr(unsigned *at, unsigned value) {
  unsigned old = *at;
  *at = old | value;
  return old;
}
inline void __threadfence_system() {}

// The system's are words for memory that the host works on too: here everything is in order.

// ---- Threads that wait for each other ----

inline void __syncthreads(CALLER) { emulated::wait_for_block(0, SITE); }
inline int __syncthreads_or(int value, CALLER) { return emulated::wait_for_block(value != 0, SITE); }
inline int __syncthreads_and(int value, CALLER) { return !emulated::wait_for_block(value == 0, SITE); }

inline void __syncwarp(unsigned mask = ~0u, CALLER) { emulated::wait_for_warp(mask, 0, SITE); }

template <typename T>
T __shfl_sync(unsigned mask, T value, unsigned lane, CALLER) {
  const unsigned long long *values = emulated::wait_for_warp(mask, emulated_bits<unsigned long long>(value), SITE);
  lane %= 32;
  if (lane >= emulated::lanes_of_warp()) emulated::fail("a shuffle from a lane that there is not", SITE);
  __builtin_memcpy(&value, &values[lane], sizeof(T));
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lanes, CALLER) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ lanes, file, line);
}
// Lanes behind the last have their own value.
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, CALLER) {
  unsigned lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane + lanes < 32 ? lane + lanes : lane, file, line);
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (unsigned i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return r;
}

inline unsigned __ballot_sync(unsigned mask, int value, CALLER) {
  const unsigned long long *values = emulated::wait_for_warp(mask, value != 0, SITE);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < emulated::lanes_of_warp(); lane++) bits |= (unsigned)values[lane] << lane;
  return bits;
}

// As offsetof, which kernels have no header for.
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
