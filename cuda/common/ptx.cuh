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

// And from the other side: launches that depend on this one may begin, once every block has said so or has ended.
DEVICE void ptx_trigger_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Brings a line of global memory to L2.
DEVICE void ptx_prefetch(const char *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// A number of which the compiler does not know that it has seen it: what is made of it is made again, instead of being kept.
DEVICE i32 ptx_hide(i32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Whether what the thread reads of shared memory from here on counts, which is nothing to a device: rows of a tile behind the last one may be written
// meanwhile. For tools that look for races.
DEVICE void ptx_reads_count(bool) {}

// v = v f, and v = v f + v, where v stays: left to itself, a compiler has each branch write other registers, and moves them behind.
DEVICE void ptx_scale(float &v, float f) { asm("mul.rn.f32 %0, %0, %1;" : "+f"(v) : "f"(f)); }
DEVICE void ptx_scale_and_add(float &v, float f) { asm("fma.rn.f32 %0, %0, %1, %0;" : "+f"(v) : "f"(f)); }

DEVICE u16 ptx_to_f16(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

// 2^x and 1 / x, to the last bits.
DEVICE float ptx_exp2(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x where subnormal numbers are zero: an instruction, of which the other takes four.
DEVICE float ptx_exp2_flush(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float ptx_reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// An address in shared memory.
typedef u32 SharedAt;

// Hidden, so that it is kept in a register: what stands for such an address is otherwise worked out again each time.
DEVICE SharedAt ptx_shared(const void *at) {
  u32 x = (u32)__cvta_generic_to_shared(at);
  asm volatile("" : "+r"(x));
  return x;
}

// Copies four, eight or sixteen aligned bytes to shared memory.
DEVICE void ptx_copy4(SharedAt to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void ptx_copy8(SharedAt to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void ptx_copy16(SharedAt to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Waits for this thread's copies.
DEVICE void ptx_copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- From sm_90 on: barriers in shared memory, and copies to it that arrive at them ----
#if __CUDA_ARCH__ >= 900

// A barrier whose phases end when count arrivals have come and all announced bytes.
DEVICE void ptx_barrier_init(SharedAt barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes new barriers known to copies; a barrier of the block follows.
DEVICE void ptx_barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void ptx_barrier_arrive(SharedAt barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives, and announces bytes that copies will bring.
DEVICE void ptx_barrier_arrive_expect(SharedAt barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended. The parity before the first phase counts as ended.
DEVICE void ptx_barrier_wait(SharedAt barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A counter in shared memory: set by one thread after what it has seen, and waited for before what depends on that.
DEVICE void ptx_counter_set(SharedAt counter, u32 to) { asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(counter), "r"(to) : "memory"); }

DEVICE void ptx_counter_wait(SharedAt counter, u32 at_least) {
  u32 is;
  do {
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(is) : "r"(counter) : "memory");
  } while (is < at_least);
}

// Copies bytes, a multiple of 16 between addresses aligned to 16, to shared memory; they arrive at a barrier.
DEVICE void ptx_bulk_copy(SharedAt to, const void *from, u32 bytes, SharedAt barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// The same to L2 alone.
DEVICE void ptx_bulk_prefetch(const void *from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Arrives at a barrier once this thread's small copies have; it is one of the barrier's count.
DEVICE void ptx_copies_arrive(SharedAt barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

#endif

// d = a b + c of tensor cores: a [16][16] row by row, b [16][8] column by column, as PTX distributes them over lanes.
DEVICE void ptx_mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The same of [16][8] and [8][8], fp32 values of which the upper 19 bits count.
DEVICE void ptx_mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Four matrices of 8 x 8 16-bit values: lane l brings the address of row l % 8 of matrix l / 8. TRANSPOSED: rows and columns change places.
template <bool TRANSPOSED>
DEVICE void ptx_ldmatrix_x4(u32 (&to)[4], const void *row) {
  u32 at = (u32)__cvta_generic_to_shared(row);
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  }
}

DEVICE float ptx_from_f16(u16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
  return f;
}

#endif
