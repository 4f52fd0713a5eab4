// What stands for the instructions of cuda/common/ptx.cuh, and for those of tensor cores where a kernel needs them.
#pragma once

// Launches begin when what is in front of them has ended.
inline void ptx_wait_for_dependency() {}
inline void ptx_trigger_dependents() {}

// Reads, so that an address outside of all memory is found.
inline void ptx_prefetch(const char *at) { (void)*(const volatile char *)at; }

inline int ptx_hide(int x) { return x; }

inline void ptx_reads_count(bool do_count) { emulated::races::reads_count(do_count); }

inline void ptx_scale(float &v, float f) { v = v * f; }
inline void ptx_scale_and_add(float &v, float f) { v = __builtin_fmaf(v, f, v); }

// Nearest binary16, ties to even; a NaN becomes one of them.
inline unsigned short ptx_to_f16(float x) {
  unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  // 65520 and more are infinite.
  if (magnitude >= 0x477FF000u) return (unsigned short)(sign | 0x7C00u);
  // Below 2^-14: a sum with 1/2 has the subnormal's last bit at its own, and rounds as the processor does.
  if (magnitude < 0x38800000u) {
    float sum = __uint_as_float(magnitude) + 0.5f;
    return (unsigned short)(sign | (__float_as_uint(sum) - 0x3F000000u));
  }
  unsigned odd = magnitude >> 13 & 1;
  return (unsigned short)(sign | (magnitude - (112u << 23) + 0xFFFu + odd) >> 13);
}

inline float ptx_from_f16(unsigned short x) {
  unsigned sign = (unsigned)(x & 0x8000u) << 16, magnitude = x & 0x7FFFu;
  // 2^112 times a number with the same bits.
  if (magnitude < 0x7C00u) return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
  return __uint_as_float(sign | 0x7F800000u | magnitude << 13);
}

// 2^x and 1 / x.
inline float ptx_exp2(float x) { return __builtin_exp2f(x); }
inline float ptx_exp2_flush(float x) { return x < -126.0f ? 0.0f : __builtin_exp2f(x); }
inline float ptx_reciprocal(float x) { return 1.0f / x; }

// ---- Barriers in shared memory, and copies that arrive at them ----

// In the barrier's 64 bits: announced bytes that are missing, arrivals that are missing, arrivals of a phase, phases that have ended.
struct EmulatedBarrier {
  int bytes;
  unsigned short missing;
  unsigned short count_and_phase;
};
static_assert(sizeof(EmulatedBarrier) == sizeof(unsigned long long), "in place of a barrier");

// An address in shared memory.
typedef char *SharedAt;
inline SharedAt ptx_shared(const void *at) { return (SharedAt)(unsigned long long)at; }

// Barriers and counters are no memory that others' accesses could race with.
#define EMULATED_SYNC __attribute__((no_sanitize("kernel-address")))

inline EmulatedBarrier &emulated_barrier(SharedAt at) { return *(EmulatedBarrier *)at; }

EMULATED_SYNC inline void emulated_arrive(SharedAt at, int arrivals, int bytes, bool with_copies = false) {
  emulated::races::arrive(at, arrivals > 0, arrivals == 0 || with_copies);
  EmulatedBarrier &b = emulated_barrier(at);
  b.missing = (unsigned short)(b.missing - arrivals);
  b.bytes += bytes;
  if (b.missing == 0 && b.bytes == 0) {
    b.missing = b.count_and_phase >> 1;
    emulated::races::end_phase(at, b.count_and_phase & 1u);
    b.count_and_phase ^= 1;
  }
}

EMULATED_SYNC inline void ptx_barrier_init(SharedAt at, unsigned count) {
  emulated_barrier(at) = EmulatedBarrier{0, (unsigned short)count, (unsigned short)(count << 1)};
}

inline void ptx_barrier_init_fence() {}
inline void ptx_barrier_arrive(SharedAt at) { emulated_arrive(at, 1, 0); }
inline void ptx_barrier_arrive_expect(SharedAt at, unsigned bytes) { emulated_arrive(at, 1, (int)bytes); }

EMULATED_SYNC inline bool emulated_phase_has_ended(const void *barrier, unsigned parity) {
  return (((const EmulatedBarrier *)barrier)->count_and_phase & 1u) != parity;
}
EMULATED_SYNC inline bool emulated_counter_is(const void *at, unsigned least) { return *(const unsigned *)at >= least; }

// All lanes of a warp wait together, here.
inline void ptx_barrier_wait(SharedAt at, unsigned parity, CALLER) {
  emulated::wait_until(emulated_phase_has_ended, at, parity, SITE);
  emulated::races::see_phase(at, parity);
}

EMULATED_SYNC inline void ptx_counter_set(SharedAt counter, unsigned to) {
  emulated::races::arrive(counter, true, false);
  *(unsigned *)counter = to;
}

// All lanes of a warp wait together, here, too.
inline void ptx_counter_wait(SharedAt counter, unsigned at_least, CALLER) {
  emulated::wait_until(emulated_counter_is, counter, at_least, SITE);
  emulated::races::see_counter(counter);
}

inline void ptx_bulk_copy(SharedAt to, const void *from, unsigned bytes, SharedAt at, CALLER) {
  if ((unsigned long long)to % 16 || (unsigned long long)from % 16 || bytes % 16) emulated::fail("a bulk copy that is not aligned", SITE);
  emulated::races::copy(to, from, bytes);
  emulated_arrive(at, 0, -(int)bytes);
}

inline void ptx_bulk_prefetch(const void *from, unsigned bytes, CALLER) {
  if ((unsigned long long)from % 16 || bytes % 16) emulated::fail("a bulk prefetch that is not aligned", SITE);
  for (unsigned i = 0; i < bytes; i += 16) ptx_prefetch((const char *)from + i);
}

inline void ptx_copy8(SharedAt to, const void *from, CALLER) {
  if ((unsigned long long)to % 8 || (unsigned long long)from % 8) emulated::fail("a copy of eight bytes that is not aligned", SITE);
  emulated::races::copy(to, from, 8);
}

inline void ptx_copy4(SharedAt to, const void *from, CALLER) {
  if ((unsigned long long)to % 4 || (unsigned long long)from % 4) emulated::fail("a copy of four bytes that is not aligned", SITE);
  emulated::races::copy(to, from, 4);
}

inline void ptx_copy16(SharedAt to, const void *from, CALLER) {
  if ((unsigned long long)to % 16 || (unsigned long long)from % 16) emulated::fail("a copy of sixteen bytes that is not aligned", SITE);
  emulated::races::copy(to, from, 16);
}

inline void ptx_copies_wait() { emulated::races::copies_are_done(); }

inline void ptx_copies_arrive(SharedAt at) { emulated_arrive(at, 1, 0, true); }

// ---- Tensor cores ----

inline float emulated_bf16(unsigned pair, unsigned which) { return __uint_as_float(pair >> 16 * which << 16); }

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: d = a b + c. Products are exact, their sum is rounded once; a tensor core rounds
// more often, in an order of its own.
inline void ptx_mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4], CALLER) {
  unsigned lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  double sum[4] = {c[0], c[1], c[2], c[3]};
  const emulated::Words *lanes = emulated::exchange({{a[0], a[1], a[2], a[3], b[0], b[1]}}, SITE);
  // Half of k at a time: a has rows group and group + 8, b column group, both k = 2 quad and the next.
  for (unsigned half = 0; half < 2; half++)
    for (unsigned i = 0; i < 4; i++)
      for (unsigned k = 0; k < 8; k++) {
        unsigned left = lanes[4 * group + k / 2].word[2 * half + i / 2], right = lanes[4 * (2 * quad + i % 2) + k / 2].word[4 + half];
        sum[i] += (double)emulated_bf16(left, k % 2) * (double)emulated_bf16(right, k % 2);
      }
  for (unsigned i = 0; i < 4; i++) d[i] = (float)sum[i];
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32, likewise. The lower 13 bits of operands do not count.
inline float emulated_tf32(unsigned word) { return __uint_as_float(word & 0xFFFFE000u); }

inline void ptx_mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4], CALLER) {
  unsigned lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  double sum[4] = {c[0], c[1], c[2], c[3]};
  const emulated::Words *lanes = emulated::exchange({{a[0], a[1], a[2], a[3], b[0], b[1]}}, SITE);
  // Half of k at a time: a has rows group and group + 8, b column group, both k = quad.
  for (unsigned half = 0; half < 2; half++)
    for (unsigned i = 0; i < 4; i++)
      for (unsigned k = 0; k < 4; k++)
        sum[i] += (double)emulated_tf32(lanes[4 * group + k].word[2 * half + i / 2]) *
                  (double)emulated_tf32(lanes[4 * (2 * quad + i % 2) + k].word[4 + half]);
  for (unsigned i = 0; i < 4; i++) d[i] = (float)sum[i];
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: lane l brings the address of row l % 8 of matrix l / 8. TRANSPOSED: .trans.
template <bool TRANSPOSED>
void ptx_ldmatrix_x4(unsigned (&to)[4], const void *row, CALLER) {
  unsigned lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  // With the address, whether what is read there counts, of which the lane that brought it knows.
  constexpr unsigned long long COUNTS = 1ull << 63;
  bool own = emulated::races::reads_count();
  const unsigned long long *rows = emulated::wait_for_warp(~0u, (unsigned long long)row | (own ? COUNTS : 0), SITE);
  for (unsigned i = 0; i < 4; i++) {
    unsigned short two[2];
    for (unsigned e = 0; e < 2; e++) {
      unsigned r = TRANSPOSED ? 2 * quad + e : group, column = TRANSPOSED ? group : 2 * quad + e;
      emulated::races::reads_count(rows[8 * i + r] & COUNTS);
      two[e] = ((const unsigned short *)(rows[8 * i + r] & ~COUNTS))[column];
    }
    to[i] = two[0] | (unsigned)two[1] << 16;
  }
  emulated::races::reads_count(own);
}
