// Shows that the emulated device finds what it promises to find, and that its instructions are those of a GPU: small kernels, each with
// what must be said of it. Prints lines as a test program does.
#define REPLAYSSM_EMULATED
#define EMULATED_SHARED __attribute__((section("shared_of_checks")))
#include "device.h"
#include "ptx.h"

#include <cstdio>
#include <cstring>

extern "C" char __start_shared_of_checks[], __stop_shared_of_checks[];
extern "C" char emulated_shared_memory[];

namespace {

struct Params {
  unsigned n;
  float *out;
};

#ifdef REPLAYSSM_RACES
enum { WATCHED = 1 };
#else
enum { WATCHED = 0 };
#endif

typedef void (*Body)(const Params &);
Body body;

void call(const void *params) { body(*(const Params *)params); }

float out[4096];

bool runs(Body of, unsigned blocks, unsigned threads, unsigned shared_bytes, unsigned n = 0) {
  static emulated::Kernel kernel("a check", call, sizeof(Params), __start_shared_of_checks, __stop_shared_of_checks);
  body = of;
  Params params = {n, out};
  // What is found is said, which is not news here.
  fprintf(stderr, "expected: ");
  bool fine = emulated::run(kernel, blocks, threads, shared_bytes, &params);
  if (fine) fputc('\n', stderr);
  return fine;
}

int failures;

void check(const char *name, bool fine) {
  printf("test %s checks::%s ... %s\n", WATCHED ? "races" : "emulated", name, fine ? "ok" : "FAILED");
  failures += !fine;
}

__shared__ float words[1024];

// Sums over a block, in an order that only barriers give.
void sum(const Params &p) {
  words[threadIdx.x] = (float)(threadIdx.x + blockIdx.x);
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) words[threadIdx.x] += words[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.out[blockIdx.x] = words[0];
}

void without_a_barrier(const Params &p) {
  words[threadIdx.x] = (float)threadIdx.x;
  p.out[threadIdx.x] = words[(threadIdx.x + p.n) % blockDim.x];
}

bool sums() {
  if (!runs(sum, 7, 256, 0)) return false;
  for (unsigned b = 0; b < 7; b++)
    if (out[b] != 255 * 128 + 256 * b) return false;
  return true;
}

// A lane that reads its neighbour's word too soon finds what shared memory is before it is written.
bool races() {
  bool fine = runs(without_a_barrier, 1, 64, 0, 33);
  if (WATCHED || !fine) return WATCHED && !fine;
  int too_soon = 0;
  for (int i = 0; i < 64; i++) too_soon += __builtin_isnan(out[i]);
  return too_soon > 0;
}

void warp_words(const Params &p) {
  unsigned lane = threadIdx.x;
  unsigned odd = __ballot_sync(~0u, lane % 2), other = __shfl_xor_sync(~0u, lane, 5), third = __shfl_sync(~0u, lane, 3);
  bool some = __syncthreads_or(lane == 7), all = __syncthreads_and(lane < 31);
  p.out[lane] = odd == 0xAAAAAAAAu && other == (lane ^ 5) && third == 3 && some && !all;
}

bool warps() {
  bool fine = runs(warp_words, 1, 32, 0);
  for (int i = 0; i < 32; i++) fine = fine && out[i] == 1;
  return fine;
}

// d = a b + c of small integers, which is exact; a comes through ldmatrix, b's columns too.
void product(const Params &p) {
  unsigned lane = threadIdx.x;
  unsigned short *a = (unsigned short *)emulated_shared_memory, *b = a + 256;
  auto whole = [](int x) { return (unsigned short)(__float_as_uint((float)x) >> 16); };
  for (unsigned i = lane; i < 256; i += 32) a[i] = whole((int)(i * 7 % 23) - 11);
  for (unsigned i = lane; i < 128; i += 32) b[i] = whole((int)(i * 5 % 19) - 9);
  __syncwarp();
  unsigned of_a[4], of_b[4], first[2];
  // Matrices: rows 0-7 and 8-15 of columns 0-7, then of 8-15.
  ptx_ldmatrix_x4<false>(of_a, a + (lane % 16) * 16 + lane / 16 * 8);
  // b is [k][n]: transposed, rows 0-7 and 8-15 of k.
  ptx_ldmatrix_x4<true>(of_b, b + lane % 16 * 8);
  first[0] = of_b[0], first[1] = of_b[1];
  float c[4] = {1, 2, 3, 4}, d[4];
  ptx_mma_m16n8k16_bf16(d, of_a, first, c);
  for (int i = 0; i < 4; i++) p.out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i] - c[i];
}

bool products() {
  if (!runs(product, 1, 32, 1024)) return false;
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      int sum = 0;
      for (int k = 0; k < 16; k++) sum += ((row * 16 + k) * 7 % 23 - 11) * ((k * 8 + column) * 5 % 19 - 9);
      if (out[row * 8 + column] != (float)sum) return false;
    }
  return true;
}

// Every binary16 comes back; every 16-bit step between two of them rounds to the nearer one, ties to even.
bool halves() {
  for (unsigned h = 0; h < 0x7C00; h++) {
    for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000)
      if (ptx_to_f16(ptx_from_f16((unsigned short)(h | sign))) != (h | sign)) return false;
    double low = ptx_from_f16((unsigned short)h), high = h == 0x7BFF ? 65536.0 : ptx_from_f16((unsigned short)(h + 1));
    float middle = (float)((low + high) / 2);
    if (ptx_to_f16(middle) != h + h % 2) return false;
    if (ptx_to_f16(__builtin_nextafterf(middle, 0)) != h || ptx_to_f16(__builtin_nextafterf(middle, 1e9f)) != h + 1) return false;
  }
  return ptx_from_f16(0x0001) == 0x1p-24f && ptx_from_f16(0x7BFF) == 65504 && ptx_to_f16(1e-9f) == 0 && ptx_to_f16(__builtin_inff()) == 0x7C00 &&
         ptx_from_f16(0xFC00) == -__builtin_inff() && __builtin_isnan(ptx_from_f16(ptx_to_f16(__builtin_nanf(""))));
}

// ---- What races.h finds: warp 0 leaves words that warp 1 reads, or the other way round ----

alignas(16) unsigned source[64];

volatile unsigned *word() { return (volatile unsigned *)emulated_shared_memory; }
bool is_first() { return threadIdx.x < 32; }
unsigned lane() { return threadIdx.x % 32; }
SharedAt barrier(unsigned i) { return ptx_shared(emulated_shared_memory + 512 + 8 * i); }

void read(const Params &p) { p.out[lane()] = (float)word()[lane()]; }

void plainly(const Params &p) {
  if (is_first()) word()[lane()] = lane();
  if (p.n) __syncthreads();
  if (!is_first()) read(p);
}

void write_what_was_read(const Params &p) {
  if (!is_first()) read(p);
  if (p.n) __syncthreads();
  if (is_first()) word()[lane()] = lane();
}

void small_copies(const Params &p) {
  if (is_first() && lane() < 8) ptx_copy16(ptx_shared(emulated_shared_memory + 16 * lane()), source + 4 * lane());
  if (p.n) ptx_copies_wait();
  __syncthreads();
  if (!is_first()) read(p);
}

// n: the reader waits for the copy, and the writer for the reader before it copies again.
void bulk_copies(const Params &p) {
  if (threadIdx.x == 0) {
    ptx_barrier_init(barrier(0), 1);
    ptx_barrier_init(barrier(1), 32);
  }
  __syncthreads();
  for (unsigned turn = 0; turn < 2; turn++) {
    if (is_first()) {
      if (turn > 0 && p.n) ptx_barrier_wait(barrier(1), 0);
      if (lane() == 0) {
        ptx_barrier_arrive_expect(barrier(0), 128);
        ptx_bulk_copy(ptx_shared(emulated_shared_memory), source, 128, barrier(0));
      }
    } else {
      if (p.n) ptx_barrier_wait(barrier(0), turn);
      read(p);
      ptx_barrier_arrive(barrier(1));
    }
  }
}

void counters(const Params &p) {
  SharedAt counter = ptx_shared(emulated_shared_memory + 512);
  if (threadIdx.x == 0) ptx_counter_set(counter, 0);
  __syncthreads();
  if (is_first()) {
    word()[lane()] = lane();
    __syncwarp();
    if (lane() == 0) ptx_counter_set(counter, 1);
  } else {
    if (p.n) ptx_counter_wait(counter, 1);
    read(p);
  }
}

void lanes(const Params &p) {
  word()[threadIdx.x] = lane();
  if (p.n) __syncwarp();
  p.out[lane()] = (float)word()[threadIdx.x ^ 1];
}

// Each as it is without a race, and with one.
void check_races() {
  struct {
    const char *name;
    Body body;
    unsigned fine, racy;
  } cases[] = {
      {"a_read_behind_the_blocks_barrier", plainly, 1, 0},
      {"a_write_behind_the_blocks_barrier", write_what_was_read, 1, 0},
      {"a_copy_that_was_waited_for", small_copies, 1, 0},
      {"a_copy_behind_a_barrier_in_shared_memory", bulk_copies, 1, 0},
      {"a_read_behind_a_counter", counters, 1, 0},
      {"lanes_that_have_met", lanes, 1, 0},
  };
  for (auto &c : cases) {
    char name[100];
    snprintf(name, sizeof name, "races_are_told_from_%s", c.name);
    check(name, runs(c.body, 1, 64, 1024, c.fine) && !runs(c.body, 1, 64, 1024, c.racy));
  }
}

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  check("blocks_and_barriers_give_the_sum", sums());
  check("a_barrier_left_out_is_seen", races());
  check("votes_and_shuffles", warps());
  check("matrix_products", products());
  check("binary16_rounds_to_nearest_even", halves());
  check("barriers_at_two_places_are_found", !runs([](const Params &) {
          if (threadIdx.x < 32) {
            __syncthreads();
          } else {
            __syncthreads();
          }
        }, 1, 64, 0));
  check("a_barrier_behind_the_end_is_found", !runs([](const Params &) {
          if (threadIdx.x < 32) __syncthreads();
        }, 1, 64, 0));
  check("a_wait_that_nobody_ends_is_found", !runs([](const Params &) {
          ptx_counter_set(ptx_shared(emulated_shared_memory), 0);
          ptx_counter_wait(ptx_shared(emulated_shared_memory), 1 + threadIdx.x / 32);
        }, 1, 64, 512));
  check("a_missing_lane_is_found", !runs([](const Params &p) {
          if (threadIdx.x != 9) p.out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
        }, 1, 32, 0));
  check("a_part_of_a_warp_is_found", !runs([](const Params &) { __syncwarp(0xFFFF); }, 1, 32, 0));
  check("shared_memory_behind_the_end_is_found", !runs([](const Params &) {
          if (threadIdx.x == 5) emulated_shared_memory[512] = 1;
        }, 2, 32, 512));
  check("shared_memory_in_front_is_found", !runs([](const Params &p) {
          if (threadIdx.x == 5) emulated_shared_memory[(int)p.n] = 1;
        }, 2, 32, 512, -5u));
  check("no_memory_is_found", !runs([](const Params &p) { *(volatile float *)(unsigned long long)p.n = 1; }, 1, 32, 0, 64));
  check("shared_memory_is_nan_at_first", runs([](const Params &p) { p.out[threadIdx.x] = words[threadIdx.x]; }, 1, 32, 0) &&
                                              __builtin_isnan(out[31]));
  if (WATCHED) check_races();
  return failures != 0;
}
