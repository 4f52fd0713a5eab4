/* Engines like to flush subnormals to zero in their threads. The library's results do not depend on that, and the
 * thread's control word is as it was when a call returns.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <stdint.h>
#else
#include <pmmintrin.h>
#endif

#include "replayssm.h"

enum { HEADS = 2, DIM = 24, STATE = 16, TOKENS = 4, STEPS = 12, CHANNELS = 32, WIDTH = 4 };

typedef struct results {
  float out[STEPS][TOKENS][HEADS * DIM];
  float extended[STEPS * TOKENS][HEADS * DIM];
  float convolved[STEPS][TOKENS][CHANNELS];
  float read[STEPS][TOKENS][HEADS * DIM];
  float state[2][HEADS * DIM * STATE];
  float imported[HEADS * DIM * STATE];
} results;

/* The thread's control word, and what engines leave in it: flush to zero, the same for inputs (on aarch64 one switch does both,
 * and NaNs without their payload are another), both, rounding towards zero and upwards, and exceptions that trap. */
enum { MODES = 6 };
#if defined(__aarch64__)
static const unsigned modes[MODES] = {1u << 24, 1u << 25, 3u << 24, 3u << 22, 1u << 22, 0x1F00u};
static unsigned control(void) {
  uint64_t word;
  __asm__ volatile("mrs %0, fpcr" : "=r"(word));
  return (unsigned)word;
}
static void set_control(unsigned mode) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode) : "memory"); }
#else
static const unsigned modes[MODES] = {_MM_FLUSH_ZERO_ON, _MM_DENORMALS_ZERO_ON, _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON,
                                      _MM_ROUND_TOWARD_ZERO, _MM_ROUND_UP, _MM_MASK_MASK};
static unsigned control(void) { return _mm_getcsr() & ~0x3Fu; /* without the sticky exception flags */ }
static void set_control(unsigned mode) { _mm_setcsr(0x1F80u ^ mode); }
#endif

static void must(replayssm_status status) {
  if (status != REPLAYSSM_OK) {
    fprintf(stderr, "ftz: %s\n", replayssm_last_error_message());
    exit(1);
  }
}

static replayssm_tensor tensor(const float *data, int64_t token, int64_t head) {
  replayssm_tensor t = {(void *)(uintptr_t)data, 0, token, head, REPLAYSSM_DTYPE_F32, 0};
  return t;
}

/* Everything a request does, on data whose products and states are subnormal. The bits are written as integers, so that
 * this thread's own arithmetic cannot flush them. */
static void run(int32_t format, int32_t readout, int32_t n_parts, unsigned mode, results *r) {
  static uint32_t x[STEPS * TOKENS][HEADS * DIM], bc[STEPS * TOKENS][STATE], dt[STEPS * TOKENS][HEADS], a[HEADS];
  static uint32_t weight[CHANNELS][WIDTH], normal[STEPS * TOKENS][HEADS * DIM];
  static const int32_t step_slot[1] = {0}, extend_slot[1] = {1};
  uint32_t seed = 1;
  for (int t = 0; t < STEPS * TOKENS; t++) {
    for (int i = 0; i < HEADS * DIM; i++) x[t][i] = (seed = seed * 1664525u + 1013904223u) >> (i % 2 ? 10 : 3) & 0x83FFFFFFu;
    for (int i = 0; i < STATE; i++) bc[t][i] = 0x3C000000u | ((seed = seed * 1664525u + 1013904223u) & 0x80FFFFFFu);
    for (int i = 0; i < HEADS; i++) dt[t][i] = 0x3D800000u;
    for (int i = 0; i < HEADS * DIM; i++) normal[t][i] = 0x3F000000u | (seed = seed * 1664525u + 1013904223u) >> 9;
  }
  for (int i = 0; i < HEADS; i++) a[i] = 0xBF800000u;
  for (int i = 0; i < CHANNELS; i++) {
    for (int j = 0; j < WIDTH; j++) weight[i][j] = 0x3F000000u;
  }

  replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc), v = REPLAYSSM_INIT(replayssm_pool_desc), d = p;
  replayssm_context *context = NULL;
  replayssm_slots *slots = NULL;
  replayssm_layers *pool = NULL, *conv = NULL, *delta = NULL;
  c.n_threads = n_parts == 0 ? 2 : 1;
  s.n_slots = 2;
  s.window = 8;
  s.max_step_tokens = TOKENS;
  p.family = REPLAYSSM_FAMILY_MAMBA2;
  p.n_layers = 1;
  p.io = REPLAYSSM_DTYPE_F32;
  p.format = format;
  p.readout = readout;
  p.nheads = HEADS, p.headdim = DIM, p.dstate = STATE, p.ngroups = 1;
  v.family = REPLAYSSM_FAMILY_CONV1D;
  v.n_layers = 1;
  v.io = REPLAYSSM_DTYPE_F32;
  v.channels = CHANNELS, v.width = WIDTH;
  d.family = REPLAYSSM_FAMILY_GDN;
  d.n_layers = 1;
  d.io = REPLAYSSM_DTYPE_F32;
  d.format = format;
  d.readout = readout;
  d.H = d.HV = HEADS, d.K = d.V = DIM; /* a scale, 1 / sqrt(K), that is rounded */

  set_control(mode);
  const unsigned before = control();
  must(replayssm_context_create(&c, &context));
  must(replayssm_slots_create(context, &s, &slots));
  must(replayssm_layers_create(slots, &p, NULL, 0, &pool));
  must(replayssm_layers_create(slots, &v, NULL, 0, &conv));
  must(replayssm_layers_create(slots, &d, NULL, 0, &delta));

  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  replayssm_mamba2_args args = REPLAYSSM_INIT(replayssm_mamba2_args);
  replayssm_conv1d_args conv_args = REPLAYSSM_INIT(replayssm_conv1d_args);
  replayssm_delta_args delta_args = REPLAYSSM_INIT(replayssm_delta_args);
  replayssm_exec exec = REPLAYSSM_INIT(replayssm_exec);
  batch.n_rows = 1;
  batch.tokens = TOKENS;
  batch.slots.data = step_slot;
  batch.slots.dtype = REPLAYSSM_DTYPE_I32;
  args.no_softplus = 1;
  args.A = tensor((float *)a, 0, 1);
  conv_args.weight = tensor((float *)weight, 0, WIDTH);
  delta_args.A_log = tensor((float *)a, 0, 1);
  exec.n_parts = n_parts;
#define INPUTS(t)                                        \
  args.x = tensor((float *)x[t], HEADS * DIM, DIM);      \
  args.B = args.C = tensor((float *)bc[t], STATE, STATE); \
  args.dt = tensor((float *)dt[t], HEADS, 1);            \
  conv_args.x = tensor((float *)x[t], HEADS * DIM, CHANNELS)
#define PARTS(call) \
  for (exec.part = 0; exec.part < (n_parts ? n_parts : 1); exec.part++) must(call)
  for (int step = 0; step < STEPS; step++) {
    INPUTS(step * TOKENS);
    args.out = tensor(r->out[step][0], HEADS * DIM, DIM);
    conv_args.out = tensor(r->convolved[step][0], CHANNELS, CHANNELS);
    delta_args.q = delta_args.k = delta_args.v = tensor((float *)normal[step * TOKENS], HEADS * DIM, DIM);
    delta_args.g = delta_args.beta = args.dt;
    delta_args.out = tensor(r->read[step][0], HEADS * DIM, DIM);
    PARTS(replayssm_conv1d_step(conv, 0, &batch, &conv_args, &exec));
    PARTS(replayssm_mamba2_step(pool, 0, &batch, &args, &exec));
    PARTS(replayssm_delta_step(delta, 0, &batch, &delta_args, &exec));
    exec.part = 0;
    must(replayssm_commit(slots, &batch, NULL, NULL));
  }
  batch.slots.data = extend_slot;
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  batch.tokens = STEPS * TOKENS;
  INPUTS(0);
  args.out = tensor(r->extended[0], HEADS * DIM, DIM);
  PARTS(replayssm_mamba2_extend(pool, 0, &batch, &args, &exec));
  must(replayssm_commit(slots, &batch, NULL, NULL));

  static const int32_t both[2] = {0, 1};
  replayssm_list list = REPLAYSSM_INIT(replayssm_list);
  replayssm_state state = REPLAYSSM_INIT(replayssm_state);
  list.n = 2;
  list.place = REPLAYSSM_WHERE_HOST;
  list.slots.data = both;
  list.slots.dtype = REPLAYSSM_DTYPE_I32;
  state.dtype = REPLAYSSM_DTYPE_F32;
  state.data = r->state;
  must(replayssm_export(pool, &list, NULL, &state, NULL));
  list.n = 1;
  must(replayssm_import(pool, &list, NULL, &state, NULL));
  state.data = r->imported;
  must(replayssm_export(pool, &list, NULL, &state, NULL));
  if (control() != before) {
    fprintf(stderr, "ftz: the control word was %#x and is %#x\n", before, control());
    exit(1);
  }
  set_control(0);
  replayssm_layers_destroy(delta);
  replayssm_layers_destroy(conv);
  replayssm_layers_destroy(pool);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
}

static size_t subnormals(const float *values, size_t n) {
  size_t count = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], 4);
    count += (bits & 0x7FFFFFFF) != 0 && (bits & 0x7F800000) == 0;
  }
  return count;
}

int main(void) {
  static results plain, flushed;
  static const int32_t formats[2] = {REPLAYSSM_FORMAT_F32, REPLAYSSM_FORMAT_SPLIT32};
  static const int32_t readouts[3] = {REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_HIGH};
  int compared = 0;
  for (int f = 0; f < 2; f++) {
    for (int o = 0; o < 2 + f; o++) {
      for (int n_parts = 0; n_parts < 4; n_parts += 3) {
        memset(&plain, 0, sizeof plain);
        run(formats[f], readouts[o], n_parts, 0, &plain);
        if (subnormals(plain.state[0], HEADS * DIM * STATE) < 20 || subnormals(plain.out[0][0], HEADS * DIM) == 0 ||
            subnormals(plain.convolved[0][0], TOKENS * CHANNELS) == 0) {
          fprintf(stderr, "ftz: the data has too few subnormals to tell\n");
          return 1;
        }
        if (memcmp(plain.state[0], plain.state[1], sizeof plain.state[0]) != 0) return 2;
        if (memcmp(plain.state[0], plain.imported, sizeof plain.imported) != 0) return 3;
        for (int m = 0; m < MODES; m++, compared++) {
          memset(&flushed, 0, sizeof flushed);
          run(formats[f], readouts[o], n_parts, modes[m], &flushed);
          if (memcmp(&plain, &flushed, sizeof plain) != 0) {
            fprintf(stderr, "ftz: format %d, readout %d, mode %#x give other bytes\n", formats[f], readouts[o], modes[m]);
            return 4;
          }
        }
      }
    }
  }
  printf("ftz: %d runs with equal bytes\n", compared);
  return 0;
}
