// Instructions that CUDA C++ has no word for. Inline PTX stands here alone; what runs kernels without a GPU has its own (tests/emulated/ptx.h).
#pragma once
#include "types.cuh"

#ifdef REPLAYSSM_EMULATED
#include <ptx.h>
#else

// Programmatic dependent launch: waits for what the launch depends on.
DEVICE void ptx_wait_for_dependency() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings a line of global memory to L2.
DEVICE void ptx_prefetch(const char *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

DEVICE u16 ptx_to_f16(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

DEVICE float ptx_from_f16(u16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
  return f;
}

#endif
