/* Every wrong way to call the library that one can think of: each gives a status and a sentence that names the field, writes
 * nothing, and leaves the library usable. Run plain, under sanitizers and under valgrind ("short" as an argument runs
 * fewer random handles and shorter races).
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replayssm.h"

static int checks;
static bool short_run;

static void fail(int line, const char *what, const char *detail) {
  fprintf(stderr, "misuse.c:%d: %s: %s\n", line, what, detail);
  exit(1);
}

#define CHECK(condition)                                         \
  do {                                                           \
    checks++;                                                    \
    if (!(condition)) fail(__LINE__, #condition, "is not true"); \
  } while (0)

/* A call that must fail with this status and a sentence that contains this word. */
#define FAILS(status, word, call) failed(__LINE__, #call, (status), (word), (forget_message(), (call)))
#define WORKS(call) worked(__LINE__, #call, (call))

/* The library's objects that calls are made on. Two layers, 4 heads of 8 x 8 in 2 groups; a convolution of 20 channels. */
enum { LAYERS = 2, HEADS = 4, DIM = 8, STATE = 8, GROUPS = 2, CHANNELS = 20, WIDTH = 4, SLOTS = 4, RINGS = 3 };
static replayssm_context *context;
static replayssm_slots *slots;
static replayssm_layers *mamba, *conv;

static float data[1 << 14];
static float out[1 << 14];
static const int32_t ids[300];

/* Leaves a sentence that no check asks for, so that no check finds the sentence of the one before. */
static void forget_message(void) {
  if (replayssm_acquire(slots, -77, NULL, NULL) != REPLAYSSM_INVALID_ARGUMENT) fail(__LINE__, "acquire(-77)", "accepted");
}

static void failed(int line, const char *call, replayssm_status wanted, const char *word, replayssm_status found) {
  const char *message = replayssm_last_error_message();
  char detail[512];
  checks++;
  snprintf(detail, sizeof detail, "%s, \"%s\"; expected %s and \"%s\"", replayssm_status_string(found), message,
           replayssm_status_string(wanted), word);
  if (found != wanted || strstr(message, word) == NULL || strstr(message, "-77") != NULL) fail(line, call, detail);
}

static void worked(int line, const char *call, replayssm_status found) {
  checks++;
  if (found != REPLAYSSM_OK) fail(line, call, replayssm_last_error_message());
}

/* Descriptors that are right. Each check spoils one field. */

static replayssm_slots_desc good_slots(void) {
  replayssm_slots_desc d = REPLAYSSM_INIT(replayssm_slots_desc);
  d.n_slots = SLOTS;
  d.n_rings = RINGS;
  d.window = 8;
  d.max_step_tokens = 4;
  d.min_rewind = 2;
  return d;
}

static replayssm_pool_desc good_mamba(void) {
  replayssm_pool_desc d = REPLAYSSM_INIT(replayssm_pool_desc);
  d.family = REPLAYSSM_MAMBA2;
  d.n_layers = LAYERS;
  d.io = REPLAYSSM_F32;
  d.format = REPLAYSSM_FORMAT_F32;
  d.nheads = HEADS;
  d.headdim = DIM;
  d.dstate = STATE;
  d.ngroups = GROUPS;
  return d;
}

static replayssm_pool_desc good_conv(void) {
  static const int32_t sections[2] = {12, 8};
  replayssm_pool_desc d = REPLAYSSM_INIT(replayssm_pool_desc);
  d.family = REPLAYSSM_CONV1D;
  d.n_layers = LAYERS;
  d.io = REPLAYSSM_F32;
  d.channels = CHANNELS;
  d.width = WIDTH;
  d.n_sections = 2;
  d.section_channels = sections;
  return d;
}

static replayssm_ids good_ids(const int32_t *array) {
  replayssm_ids i = {array, 0, REPLAYSSM_I32, 0};
  return i;
}

static const int32_t two_slots[2] = {0, 1};

/* Two rows of two tokens. */
static replayssm_batch good_batch(void) {
  replayssm_batch b = REPLAYSSM_INIT(replayssm_batch);
  b.n_rows = 2;
  b.tokens = 2;
  b.slots = good_ids(two_slots);
  return b;
}

static replayssm_tensor tensor(float *at, int64_t row, int64_t token, int64_t head) {
  replayssm_tensor t = {at, row, token, head, REPLAYSSM_F32, 0};
  return t;
}

static replayssm_mamba2_args good_args(void) {
  replayssm_mamba2_args a = REPLAYSSM_INIT(replayssm_mamba2_args);
  a.x = tensor(data, 2 * HEADS * DIM, HEADS * DIM, DIM);
  a.B = tensor(data + 512, 2 * GROUPS * STATE, GROUPS * STATE, STATE);
  a.C = tensor(data + 1024, 2 * GROUPS * STATE, GROUPS * STATE, STATE);
  a.dt = tensor(data + 1536, 2 * HEADS, HEADS, 1);
  a.A = tensor(data + 2048, 0, 0, 1);
  a.dt_bias = tensor(data + 2064, 0, 0, 1);
  a.D = tensor(data + 2080, 0, 0, 1);
  a.z = tensor(data + 2560, 2 * HEADS * DIM, HEADS * DIM, DIM);
  a.out = tensor(out, 2 * HEADS * DIM, HEADS * DIM, DIM);
  return a;
}

static replayssm_conv1d_args good_conv_args(void) {
  replayssm_conv1d_args a = REPLAYSSM_INIT(replayssm_conv1d_args);
  a.x = tensor(data, 48, 24, 12);
  a.out = tensor(out, 48, 24, 12);
  a.weight = tensor(data + 512, 0, 0, WIDTH);
  a.bias = tensor(data + 1024, 0, 0, 1);
  return a;
}

static replayssm_list good_list(void) {
  replayssm_list l = REPLAYSSM_INIT(replayssm_list);
  l.n = 2;
  l.place = REPLAYSSM_HOST;
  l.slots = good_ids(two_slots);
  return l;
}

static replayssm_state good_state(void) {
  replayssm_state s = REPLAYSSM_INIT(replayssm_state);
  s.dtype = REPLAYSSM_F32;
  s.layer = -1;
  s.data = out;
  return s;
}

static replayssm_status step(const replayssm_batch *batch, const replayssm_mamba2_args *args) {
  return replayssm_mamba2_step(mamba, 0, batch, args, NULL);
}

static replayssm_status conv_step(const replayssm_batch *batch, const replayssm_conv1d_args *args) {
  return replayssm_conv1d_step(conv, 0, batch, args, NULL);
}

static void create_all(void) {
  replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_slots_desc s = good_slots();
  replayssm_pool_desc m = good_mamba(), v = good_conv();
  c.n_threads = 2;
  WORKS(replayssm_context_create(&c, &context));
  WORKS(replayssm_slots_create(context, &s, &slots));
  WORKS(replayssm_layers_create(slots, &m, NULL, 0, &mamba));
  WORKS(replayssm_layers_create(slots, &v, NULL, 0, &conv));
  for (int i = 0; i < 1 << 14; i++) data[i] = (float)(i % 13 - 6) * 0.125f;
}

static void destroy_all(void) {
  replayssm_layers_destroy(conv);
  replayssm_layers_destroy(mamba);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
}

/* ---- Handles ---- */

/* Every function that takes a handle, everything else being right. */

static union {
  replayssm_context_info info;
  replayssm_report report;
  replayssm_stats stats;
  replayssm_component components[8];
  replayssm_cursor cursors[2];
  int32_t ids[4];
  unsigned char bytes[1024];
} result;

static replayssm_status on_context_query(const void *h) {
  result.info.struct_size = sizeof result.info;
  return replayssm_context_query((const replayssm_context *)h, &result.info);
}

static replayssm_status on_slots_create(const void *h) {
  replayssm_slots_desc d = good_slots();
  replayssm_slots *made = slots;
  replayssm_status status = replayssm_slots_create((const replayssm_context *)h, &d, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__LINE__, "slots_create", "out-parameter and status disagree");
  replayssm_slots_destroy(made);
  return status;
}

static replayssm_status on_layers_create(const void *h) {
  replayssm_pool_desc d = good_mamba();
  replayssm_layers *made = mamba;
  replayssm_status status = replayssm_layers_create((replayssm_slots *)(uintptr_t)h, &d, NULL, 0, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__LINE__, "layers_create", "out-parameter and status disagree");
  replayssm_layers_destroy(made);
  return status;
}

static replayssm_status on_commit(const void *h) {
  replayssm_batch b = good_batch();
  b.tokens = 0;
  return replayssm_commit((const replayssm_slots *)h, &b, NULL, NULL);
}

static replayssm_status on_reset(const void *h) {
  replayssm_list l = good_list();
  return replayssm_reset((const replayssm_slots *)h, &l, NULL, NULL);
}

static replayssm_status on_rewind(const void *h) {
  replayssm_list l = good_list();
  int32_t n[2] = {0, 0};
  return replayssm_rewind((const replayssm_slots *)h, &l, n, NULL, NULL);
}

static replayssm_status on_read_cursors(const void *h) {
  replayssm_list l = good_list();
  return replayssm_read_cursors((const replayssm_slots *)h, &l, result.cursors, NULL);
}

static replayssm_status on_acquire(const void *h) {
  return replayssm_acquire((replayssm_slots *)(uintptr_t)h, 0, result.ids, NULL);
}

static replayssm_status on_release(const void *h) {
  return replayssm_release((replayssm_slots *)(uintptr_t)h, 0, NULL);
}

static replayssm_status on_check(const void *h) {
  result.report.struct_size = sizeof result.report;
  return replayssm_check((const replayssm_slots *)h, 0, &result.report);
}

static replayssm_status on_stats_read(const void *h) {
  result.stats.struct_size = sizeof result.stats;
  return replayssm_stats_read((const replayssm_slots *)h, &result.stats);
}

static replayssm_status on_components(const void *h) {
  int32_t n = 0;
  result.components[0].struct_size = sizeof result.components[0];
  return replayssm_layers_components((const replayssm_layers *)h, result.components, 8, &n);
}

static replayssm_status on_mamba2_step(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_mamba2_args a = good_args();
  return replayssm_mamba2_step((const replayssm_layers *)h, 0, &b, &a, NULL);
}

static replayssm_status on_mamba2_extend(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_mamba2_args a = good_args();
  b.n_rows = 0;
  b.flags = REPLAYSSM_BATCH_EXTEND;
  return replayssm_mamba2_extend((const replayssm_layers *)h, 0, &b, &a, NULL);
}

static replayssm_status on_conv1d_step(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_conv1d_args a = good_conv_args();
  return replayssm_conv1d_step((const replayssm_layers *)h, 0, &b, &a, NULL);
}

static replayssm_status on_conv1d_extend(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_conv1d_args a = good_conv_args();
  b.n_rows = 0;
  b.flags = REPLAYSSM_BATCH_EXTEND;
  return replayssm_conv1d_extend((const replayssm_layers *)h, 0, &b, &a, NULL);
}

static replayssm_status on_import(const void *h) {
  replayssm_list l = good_list();
  replayssm_state s = good_state();
  s.data = data;
  return replayssm_import((const replayssm_layers *)h, &l, NULL, &s, NULL);
}

static replayssm_status on_export(const void *h) {
  replayssm_list l = good_list();
  replayssm_state s = good_state();
  return replayssm_export((const replayssm_layers *)h, &l, NULL, &s, NULL);
}

enum kind { CONTEXT, SLOTS_HANDLE, MAMBA, CONV };
static const struct {
  const char *name;
  enum kind kind;
  replayssm_status (*call)(const void *handle);
} functions[] = {
    {"context_query", CONTEXT, on_context_query},
    {"slots_create", CONTEXT, on_slots_create},
    {"layers_create", SLOTS_HANDLE, on_layers_create},
    {"commit", SLOTS_HANDLE, on_commit},
    {"reset", SLOTS_HANDLE, on_reset},
    {"rewind", SLOTS_HANDLE, on_rewind},
    {"read_cursors", SLOTS_HANDLE, on_read_cursors},
    {"acquire", SLOTS_HANDLE, on_acquire},
    {"release", SLOTS_HANDLE, on_release},
    {"check", SLOTS_HANDLE, on_check},
    {"stats_read", SLOTS_HANDLE, on_stats_read},
    {"layers_components", MAMBA, on_components},
    {"mamba2_step", MAMBA, on_mamba2_step},
    {"mamba2_extend", MAMBA, on_mamba2_extend},
    {"conv1d_step", CONV, on_conv1d_step},
    {"conv1d_extend", CONV, on_conv1d_extend},
    {"import", MAMBA, on_import},
    {"export", MAMBA, on_export},
};
enum { FUNCTIONS = sizeof functions / sizeof functions[0] };

static const char *argument(enum kind kind) {
  return kind == CONTEXT ? "context is not a live replayssm_context"
                         : kind == SLOTS_HANDLE ? "slots is not a live replayssm_slots"
                                                : "layers is not a live replayssm_layers";
}

static const void *live(enum kind kind) {
  return kind == CONTEXT ? (const void *)context
                         : kind == SLOTS_HANDLE ? (const void *)slots : kind == MAMBA ? (const void *)mamba : conv;
}

static uint64_t random_state = 12345;
static uint64_t random_bits(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

/* One bad handle for one function, or for all of its kind. */
static void bad_handle_for(int i, const void *handle, const char *reason) {
  unsigned char before[sizeof result];
  memset(&result, 0x5A, sizeof result);
  memset(out, 0x5A, sizeof out);
  memcpy(before, &result, sizeof result);
  forget_message();
  failed(__LINE__, functions[i].name, REPLAYSSM_INVALID_HANDLE, argument(functions[i].kind), functions[i].call(handle));
  if (strstr(replayssm_last_error_message(), reason) == NULL) {
    fail(__LINE__, functions[i].name, replayssm_last_error_message());
  }
  /* Nothing was written: outputs, and out-descriptors behind the size that the caller set. */
  CHECK(memcmp(result.bytes + 4, before + 4, sizeof result - 4) == 0);
  for (size_t j = 0; j < sizeof out / sizeof out[0]; j++) {
    if (memcmp(&out[j], before, sizeof out[j]) != 0) fail(__LINE__, functions[i].name, "an output was written");
  }
}

static bool is_live(const void *handle) {
  return handle == context || handle == slots || handle == mamba || handle == conv;
}

static void destroy_does_nothing(const void *handle) {
  if (is_live(handle)) return;
  replayssm_context_destroy((replayssm_context *)(uintptr_t)handle);
  replayssm_slots_destroy((replayssm_slots *)(uintptr_t)handle);
  replayssm_layers_destroy((replayssm_layers *)(uintptr_t)handle);
}

static void handles(void) {
  int local = 0;
  void *heap = malloc(64);
  const void *foreign[] = {&local, heap,         (const void *)(uintptr_t)1,  (const void *)(uintptr_t)8,
                           functions, &context, (const void *)UINTPTR_MAX, (const void *)(uintptr_t)0xA5};
  for (int i = 0; i < FUNCTIONS; i++) {
    /* The call itself is right, so that what fails below is the handle. */
    WORKS(functions[i].call(live(functions[i].kind)));
    bad_handle_for(i, NULL, "it is NULL");
    for (size_t j = 0; j < sizeof foreign / sizeof foreign[0]; j++) {
      bad_handle_for(i, foreign[j], "it was not made by this library");
      destroy_does_nothing(foreign[j]);
    }
    for (int kind = CONTEXT; kind <= CONV; kind++) {
      bool same = kind == (int)functions[i].kind || (kind >= MAMBA && functions[i].kind >= MAMBA);
      if (!same) bad_handle_for(i, live((enum kind)kind), "it is a handle of another type");
    }
    /* A handle with one bit turned over. */
    for (int bit = 0; bit < 64; bit++) {
      const void *near = (const void *)((uintptr_t)live(functions[i].kind) ^ (uintptr_t)1 << bit);
      if (!is_live(near)) bad_handle_for(i, near, "it ");
    }
    for (int n = 0; n < (short_run ? 20 : 400); n++) {
      uint64_t bits = random_bits();
      /* Half of them look like handles at first sight. */
      if (n % 2) bits = (bits & 0x0FFFFFFFFFFFFFFF & (n % 4 == 1 ? ~(uint64_t)0xFF000 : UINT64_MAX)) | (uint64_t)0xA << 60;
      bad_handle_for(i, (const void *)(uintptr_t)bits, "it ");
      destroy_does_nothing((const void *)(uintptr_t)bits);
    }
  }
  free(heap);
  destroy_does_nothing(NULL);
  /* A pool of the other family is a handle of another type, too. */
  replayssm_batch b = good_batch();
  replayssm_mamba2_args a = good_args();
  replayssm_conv1d_args v = good_conv_args();
  FAILS(REPLAYSSM_INVALID_HANDLE, "layers", replayssm_mamba2_step(conv, 0, &b, &a, NULL));
  FAILS(REPLAYSSM_INVALID_HANDLE, "another family", replayssm_conv1d_step(mamba, 0, &b, &v, NULL));
}

/* Destroyed in every order, twice, and used afterwards. A child keeps its parents. */
static void destroying(void) {
  static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  replayssm_context *keep_context = context;
  replayssm_slots *keep_slots = slots;
  replayssm_layers *keep_mamba = mamba, *keep_conv = conv;
  for (int order = 0; order < 6; order++) {
    bool alive[4] = {true, true, true, true};
    create_all();
    const void *objects[4] = {context, slots, mamba, conv};
    for (int k = 0; k < 3; k++) {
      for (int twice = 0; twice < 2; twice++) {
        switch (orders[order][k]) {
          case 0: replayssm_context_destroy(context); break;
          case 1: replayssm_slots_destroy(slots); break;
          default: replayssm_layers_destroy(mamba), replayssm_layers_destroy(conv); break;
        }
      }
      alive[orders[order][k]] = false;
      alive[CONV] = alive[MAMBA];
      for (int i = 0; i < FUNCTIONS; i++) {
        enum kind kind = functions[i].kind;
        if (alive[kind]) {
          WORKS(functions[i].call(objects[kind]));
        } else {
          /* forget_message needs slots that live. */
          replayssm_slots *stale = slots;
          slots = keep_slots;
          bad_handle_for(i, objects[kind], "it has been destroyed");
          slots = stale;
        }
      }
    }
    context = keep_context, slots = keep_slots, mamba = keep_mamba, conv = keep_conv;
  }
  /* The places of destroyed objects are used again, under other handles. */
  replayssm_context *first = NULL, *second = NULL;
  WORKS(replayssm_context_create(NULL, &first));
  replayssm_context_destroy(first);
  WORKS(replayssm_context_create(NULL, &second));
  CHECK(first != second);
  bad_handle_for(0, first, "it has been destroyed");
  WORKS(on_context_query(second));
  replayssm_context_destroy(second);
}

/* ---- Descriptors: sizes and trailing bytes ---- */

static const void *described; /* the descriptor that the call at hand is to use */

static replayssm_status with_context_desc(void) {
  replayssm_context *made = context;
  replayssm_status status = replayssm_context_create((const replayssm_context_desc *)described, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__LINE__, "context_create", "out-parameter and status disagree");
  replayssm_context_destroy(made);
  return status;
}
static replayssm_status with_slots_desc(void) {
  replayssm_slots *made = slots;
  replayssm_status status = replayssm_slots_create(context, (const replayssm_slots_desc *)described, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__LINE__, "slots_create", "out-parameter and status disagree");
  replayssm_slots_destroy(made);
  return status;
}
static replayssm_status create_pool(const replayssm_pool_desc *desc, const replayssm_lent *lent, int32_t n) {
  replayssm_layers *made = mamba;
  replayssm_status status = replayssm_layers_create(slots, desc, lent, n, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__LINE__, "layers_create", "out-parameter and status disagree");
  replayssm_layers_destroy(made);
  return status;
}
static replayssm_status with_pool_desc(void) { return create_pool((const replayssm_pool_desc *)described, NULL, 0); }
static replayssm_status with_lent(void) {
  replayssm_pool_desc d = good_mamba();
  return create_pool(&d, (const replayssm_lent *)described, 1);
}
static replayssm_status with_batch(void) {
  replayssm_mamba2_args a = good_args();
  return step((const replayssm_batch *)described, &a);
}
static replayssm_status with_commit_batch(void) {
  return replayssm_commit(slots, (const replayssm_batch *)described, NULL, NULL);
}
static replayssm_status with_args(void) {
  replayssm_batch b = good_batch();
  return step(&b, (const replayssm_mamba2_args *)described);
}
static replayssm_status with_conv_args(void) {
  replayssm_batch b = good_batch();
  return conv_step(&b, (const replayssm_conv1d_args *)described);
}
static replayssm_status with_exec(void) {
  replayssm_batch b = good_batch();
  b.tokens = 0;
  return replayssm_commit(slots, &b, NULL, (const replayssm_exec *)described);
}
static replayssm_status with_commit_args(void) {
  replayssm_batch b = good_batch();
  b.tokens = 0;
  return replayssm_commit(slots, &b, (const replayssm_commit_args *)described, NULL);
}
static replayssm_status with_list(void) {
  return replayssm_reset(slots, (const replayssm_list *)described, NULL, NULL);
}
static replayssm_status with_reset_args(void) {
  replayssm_list l = good_list();
  return replayssm_reset(slots, &l, (const replayssm_reset_args *)described, NULL);
}
static replayssm_status with_state(void) {
  replayssm_list l = good_list();
  return replayssm_export(mamba, &l, NULL, (const replayssm_state *)described, NULL);
}
static replayssm_status with_info(void) {
  return replayssm_context_query(context, (replayssm_context_info *)(uintptr_t)described);
}
static replayssm_status with_report(void) {
  return replayssm_check(slots, 0, (replayssm_report *)(uintptr_t)described);
}
static replayssm_status with_stats(void) {
  return replayssm_stats_read(slots, (replayssm_stats *)(uintptr_t)described);
}
static replayssm_status with_component(void) {
  int32_t n = -1;
  replayssm_status status =
      replayssm_layers_components(mamba, (replayssm_component *)(uintptr_t)described, 8, &n);
  CHECK(n == 5);
  return status;
}

static void descriptor(const char *name, const void *good, size_t size, bool optional, bool output,
                       replayssm_status (*call)(void)) {
  static union {
    uint64_t alignment;
    unsigned char bytes[1 << 17];
  } at;
  char field[80], offset[80];
  const uint32_t known = (uint32_t)size;
  const uint32_t wrong[] = {0, 1, 3, known - 4, known - 1, known + 1, 1 << 17, UINT32_MAX};
  snprintf(field, sizeof field, "%s.struct_size", name);
#define CASE(new_size)                             \
  (memset(at.bytes, 0, sizeof at),                 \
   memcpy(at.bytes, good, size),                   \
   memcpy(at.bytes, &(uint32_t){(new_size)}, 4),   \
   described = at.bytes)
  (void)CASE(known);
  WORKS(call());
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    (void)CASE(wrong[i]);
    FAILS(REPLAYSSM_INVALID_ARGUMENT, field, call());
  }
  /* A newer header: more bytes, all zero. */
  (void)CASE(known + 8);
  WORKS(call());
  if (output) {
    /* What the library does not know becomes zero, and not a byte behind that; the caller's size stays. */
    (void)CASE(known + 8);
    memset(at.bytes + size, 0x5A, 64);
    WORKS(call());
    uint32_t kept;
    memcpy(&kept, at.bytes, 4);
    CHECK(kept == known + 8);
    if (call != with_component) {
      for (size_t i = 0; i < 8; i++) CHECK(at.bytes[size + i] == 0);
      CHECK(at.bytes[size + 8] == 0x5A);
    }
  } else {
    for (uint32_t i = 0; i < 8; i++) {
      (void)CASE(known + 8);
      at.bytes[size + i] = 1;
      snprintf(offset, sizeof offset, "offset %" PRIu32 " of %s", known + i, name);
      FAILS(REPLAYSSM_UNSUPPORTED, offset, call());
    }
  }
#undef CASE
  memcpy(at.bytes + 2, good, size);
  described = at.bytes + 2;
  FAILS(REPLAYSSM_INVALID_ARGUMENT, "aligned", call());
  CHECK(strstr(replayssm_last_error_message(), name) != NULL);
  described = NULL;
  if (optional) {
    WORKS(call());
  } else {
    FAILS(REPLAYSSM_INVALID_ARGUMENT, name, call());
  }
}

#define DESCRIPTOR(type, good, optional, call)                           \
  do {                                                                   \
    type value = good;                                                   \
    descriptor(#type, &value, sizeof value, (optional), false, (call));  \
  } while (0)
#define OUT_DESCRIPTOR(type, call)                                 \
  do {                                                             \
    type value = REPLAYSSM_INIT(type);                             \
    descriptor(#type, &value, sizeof value, false, true, (call));  \
  } while (0)

/* Memory for any one component of the test's pool. */
static _Alignas(16) unsigned char lendable[1 << 16];

static replayssm_lent good_lent(void) {
  replayssm_lent l = REPLAYSSM_INIT(replayssm_lent);
  l.kind = REPLAYSSM_COMPONENT_CHECKPOINT;
  l.base = lendable;
  return l;
}

static void descriptors(void) {
  DESCRIPTOR(replayssm_context_desc, REPLAYSSM_INIT(replayssm_context_desc), true, with_context_desc);
  DESCRIPTOR(replayssm_slots_desc, good_slots(), false, with_slots_desc);
  DESCRIPTOR(replayssm_pool_desc, good_mamba(), false, with_pool_desc);
  DESCRIPTOR(replayssm_lent, good_lent(), false, with_lent);
  DESCRIPTOR(replayssm_batch, good_batch(), false, with_batch);
  DESCRIPTOR(replayssm_batch, good_batch(), false, with_commit_batch);
  DESCRIPTOR(replayssm_mamba2_args, good_args(), false, with_args);
  DESCRIPTOR(replayssm_conv1d_args, good_conv_args(), false, with_conv_args);
  DESCRIPTOR(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), true, with_exec);
  DESCRIPTOR(replayssm_commit_args, REPLAYSSM_INIT(replayssm_commit_args), true, with_commit_args);
  DESCRIPTOR(replayssm_list, good_list(), false, with_list);
  DESCRIPTOR(replayssm_reset_args, REPLAYSSM_INIT(replayssm_reset_args), true, with_reset_args);
  DESCRIPTOR(replayssm_state, good_state(), false, with_state);
  OUT_DESCRIPTOR(replayssm_context_info, with_info);
  OUT_DESCRIPTOR(replayssm_report, with_report);
  OUT_DESCRIPTOR(replayssm_stats, with_stats);
  OUT_DESCRIPTOR(replayssm_component, with_component);
}

/* ---- Fields ---- */

#define SPOIL(type, good, assignment, status, word, call) \
  do {                                                    \
    type d = good;                                        \
    d.assignment;                                         \
    FAILS(status, word, call);                            \
  } while (0)

static replayssm_status create_context(const replayssm_context_desc *d) {
  described = d;
  return with_context_desc();
}
static replayssm_status create_slots(const replayssm_slots_desc *d) {
  described = d;
  return with_slots_desc();
}

#define INVALID REPLAYSSM_INVALID_ARGUMENT
#define UNSUPPORTED REPLAYSSM_UNSUPPORTED
#define BAD_CONTEXT(assignment, status, word) \
  SPOIL(replayssm_context_desc, REPLAYSSM_INIT(replayssm_context_desc), assignment, status, word, create_context(&d))
#define BAD_SLOTS(assignment, status, word) \
  SPOIL(replayssm_slots_desc, good_slots(), assignment, status, word, create_slots(&d))
#define BAD_MAMBA(assignment, status, word) \
  SPOIL(replayssm_pool_desc, good_mamba(), assignment, status, word, create_pool(&d, NULL, 0))
#define BAD_CONV(assignment, status, word) \
  SPOIL(replayssm_pool_desc, good_conv(), assignment, status, word, create_pool(&d, NULL, 0))

static void creation(void) {
  BAD_CONTEXT(backend = 7, UNSUPPORTED, "context_desc.backend");
  BAD_CONTEXT(backend = -1, UNSUPPORTED, "context_desc.backend");
  BAD_CONTEXT(backend = REPLAYSSM_BACKEND_CUDA, REPLAYSSM_NO_CUDA, "context_desc.backend");
  BAD_CONTEXT(device = 1, INVALID, "context_desc.device");
  BAD_CONTEXT(n_threads = -1, INVALID, "context_desc.n_threads");
  BAD_CONTEXT(n_threads = INT32_MAX, INVALID, "context_desc.n_threads");
  BAD_CONTEXT(flags = 1, UNSUPPORTED, "context_desc.flags");
  BAD_CONTEXT(flags = 1u << 31, UNSUPPORTED, "context_desc.flags");
  BAD_CONTEXT(reserved = 1, UNSUPPORTED, "context_desc.reserved");

  BAD_SLOTS(n_slots = 0, INVALID, "slots_desc.n_slots");
  BAD_SLOTS(n_slots = -1, INVALID, "slots_desc.n_slots");
  BAD_SLOTS(n_slots = INT32_MIN, INVALID, "slots_desc.n_slots");
  BAD_SLOTS(n_rings = -1, INVALID, "slots_desc.n_rings");
  BAD_SLOTS(n_rings = INT32_MAX, UNSUPPORTED, "slots_desc.n_rings");
  BAD_SLOTS(window = -1, INVALID, "slots_desc.window");
  BAD_SLOTS(window = 257, UNSUPPORTED, "slots_desc.window");
  BAD_SLOTS(window = INT32_MAX, UNSUPPORTED, "slots_desc.window");
  BAD_SLOTS(window = 3, INVALID, "slots_desc.window");
  BAD_SLOTS(max_step_tokens = -1, INVALID, "slots_desc.max_step_tokens");
  BAD_SLOTS(max_step_tokens = INT32_MAX, UNSUPPORTED, "slots_desc.max_step_tokens");
  BAD_SLOTS(max_step_tokens = 9, INVALID, "slots_desc.window");
  BAD_SLOTS(min_rewind = -1, INVALID, "slots_desc.min_rewind");
  BAD_SLOTS(min_rewind = INT32_MAX, UNSUPPORTED, "slots_desc.min_rewind");
  BAD_SLOTS(schedule = 3, UNSUPPORTED, "slots_desc.schedule");
  BAD_SLOTS(schedule = -1, UNSUPPORTED, "slots_desc.schedule");
  BAD_SLOTS(flags = 1, UNSUPPORTED, "slots_desc.flags");

  BAD_MAMBA(family = 0, UNSUPPORTED, "pool_desc.family");
  BAD_MAMBA(family = REPLAYSSM_GDN, UNSUPPORTED, "pool_desc.family");
  BAD_MAMBA(family = REPLAYSSM_KDA, UNSUPPORTED, "pool_desc.family");
  BAD_MAMBA(family = 99, UNSUPPORTED, "pool_desc.family");
  BAD_MAMBA(n_layers = 0, INVALID, "pool_desc.n_layers");
  BAD_MAMBA(n_layers = -1, INVALID, "pool_desc.n_layers");
  BAD_MAMBA(n_layers = INT32_MAX, UNSUPPORTED, "pool_desc.n_layers");
  BAD_MAMBA(io = 0, INVALID, "pool_desc.io");
  BAD_MAMBA(io = REPLAYSSM_I32, INVALID, "pool_desc.io");
  BAD_MAMBA(io = 4, UNSUPPORTED, "pool_desc.io");
  BAD_MAMBA(out = -1, UNSUPPORTED, "pool_desc.out");
  BAD_MAMBA(format = 3, UNSUPPORTED, "pool_desc.format");
  BAD_MAMBA(readout = 4, UNSUPPORTED, "pool_desc.readout");
  BAD_MAMBA(readout = REPLAYSSM_READOUT_HIGH, INVALID, "pool_desc.readout");
  BAD_MAMBA(stochastic_rounding = 1, UNSUPPORTED, "pool_desc.stochastic_rounding");
  BAD_MAMBA(nheads = 0, INVALID, "pool_desc.nheads");
  BAD_MAMBA(nheads = -4, INVALID, "pool_desc.nheads");
  BAD_MAMBA(nheads = INT32_MAX, UNSUPPORTED, "pool_desc.nheads");
  BAD_MAMBA(headdim = 0, INVALID, "pool_desc.headdim");
  BAD_MAMBA(headdim = INT32_MIN, INVALID, "pool_desc.headdim");
  BAD_MAMBA(headdim = 257, UNSUPPORTED, "pool_desc.headdim");
  BAD_MAMBA(headdim = INT32_MAX, UNSUPPORTED, "pool_desc.headdim");
  BAD_MAMBA(dstate = 0, INVALID, "pool_desc.dstate");
  BAD_MAMBA(dstate = -1, INVALID, "pool_desc.dstate");
  BAD_MAMBA(dstate = INT32_MAX, UNSUPPORTED, "pool_desc.dstate");
  BAD_MAMBA(ngroups = 0, INVALID, "pool_desc.ngroups");
  BAD_MAMBA(ngroups = 3, INVALID, "pool_desc.ngroups");
  BAD_MAMBA(ngroups = 8, INVALID, "pool_desc.ngroups");
  BAD_MAMBA(ngroups = INT32_MAX, UNSUPPORTED, "pool_desc.ngroups");
  BAD_MAMBA(H = 1, INVALID, "pool_desc.H");
  BAD_MAMBA(HV = 1, INVALID, "pool_desc.HV");
  BAD_MAMBA(K = 1, INVALID, "pool_desc.K");
  BAD_MAMBA(V = 1, INVALID, "pool_desc.V");
  BAD_MAMBA(head_map = 1, INVALID, "pool_desc.head_map");
  BAD_MAMBA(u_dtype = 1, INVALID, "pool_desc.u_dtype");
  BAD_MAMBA(channels = 1, INVALID, "pool_desc.channels");
  BAD_MAMBA(width = 4, INVALID, "pool_desc.width");
  BAD_MAMBA(n_sections = 1, INVALID, "pool_desc.section_channels");
  BAD_MAMBA(n_sections = -1, INVALID, "pool_desc.n_sections");
  BAD_MAMBA(reserved = 1, UNSUPPORTED, "pool_desc.reserved");

  BAD_CONV(channels = 0, INVALID, "pool_desc.channels");
  BAD_CONV(channels = INT32_MAX, UNSUPPORTED, "pool_desc.channels");
  BAD_CONV(channels = 19, INVALID, "pool_desc.channels");
  BAD_CONV(width = 1, INVALID, "pool_desc.width");
  BAD_CONV(width = 5, UNSUPPORTED, "pool_desc.width");
  BAD_CONV(width = INT32_MIN, INVALID, "pool_desc.width");
  BAD_CONV(n_sections = INT32_MAX, INVALID, "pool_desc.n_sections");
  BAD_CONV(section_channels = NULL, INVALID, "pool_desc.section_channels");
  BAD_CONV(section_channels = (const int32_t *)((const char *)two_slots + 1), INVALID, "pool_desc.section_channels");
  BAD_CONV(section_channels = two_slots, INVALID, "pool_desc.section_channels[0]");
  BAD_CONV(nheads = 1, INVALID, "pool_desc.nheads");
  BAD_CONV(headdim = 1, INVALID, "pool_desc.headdim");
  BAD_CONV(dstate = 1, INVALID, "pool_desc.dstate");
  BAD_CONV(ngroups = 1, INVALID, "pool_desc.ngroups");
  BAD_CONV(K = 1, INVALID, "pool_desc.K");
  BAD_CONV(format = REPLAYSSM_FORMAT_F32, INVALID, "pool_desc.format");
  BAD_CONV(readout = REPLAYSSM_READOUT_EXACT, INVALID, "pool_desc.readout");

  /* Sizes that no machine has: 2^51 bytes, and more than 64 bits can say. */
  replayssm_slots_desc many = good_slots();
  replayssm_slots *huge = NULL;
  replayssm_pool_desc d = good_mamba();
  replayssm_layers *layers = mamba;
  many.n_slots = INT32_MAX;
  WORKS(replayssm_slots_create(context, &many, &huge));
  d.headdim = d.dstate = 256;
  FAILS(REPLAYSSM_OUT_OF_MEMORY, "a pool", replayssm_layers_create(huge, &d, NULL, 0, &layers));
  CHECK(layers == NULL);
  d.nheads = d.n_layers = 1 << 20;
  layers = mamba;
  FAILS(UNSUPPORTED, "Checkpoint", replayssm_layers_create(huge, &d, NULL, 0, &layers));
  CHECK(layers == NULL);
  replayssm_slots_destroy(huge);
  many.n_rings = 0;
  FAILS(UNSUPPORTED, "slots_desc.n_rings", create_slots(&many));

  /* Out-parameters. */
  d = good_mamba();
  many = good_slots();
  FAILS(INVALID, "out is NULL", replayssm_context_create(NULL, NULL));
  FAILS(INVALID, "out is NULL", replayssm_slots_create(context, &many, NULL));
  FAILS(INVALID, "out is NULL", replayssm_layers_create(slots, &d, NULL, 0, NULL));
  FAILS(INVALID, "out is", replayssm_context_create(NULL, (replayssm_context **)(void *)((char *)&result + 1)));
}

#define BAD_LENT(assignment, status, word) \
  SPOIL(replayssm_lent, good_lent(), assignment, status, word, create_pool(&pool, &d, 1))

static void lending(void) {
  replayssm_pool_desc pool = good_mamba();
  BAD_LENT(kind = 0, UNSUPPORTED, "lent.kind");
  BAD_LENT(kind = 99, UNSUPPORTED, "lent.kind");
  BAD_LENT(kind = REPLAYSSM_COMPONENT_CONV, INVALID, "lent[0].kind");
  BAD_LENT(base = NULL, INVALID, "lent[0].base");
  BAD_LENT(base = lendable + 8, INVALID, "lent[0].base");
  BAD_LENT(slot_stride_bytes = 16, INVALID, "lent[0].slot_stride_bytes");
  BAD_LENT(slot_stride_bytes = 1032, INVALID, "lent[0].slot_stride_bytes");
  BAD_LENT(slot_stride_bytes = -1024, INVALID, "lent[0].slot_stride_bytes");
  BAD_LENT(slot_stride_bytes = INT64_MAX - 15, INVALID, "lent[0].slot_stride_bytes");
  BAD_LENT(layer_stride_bytes = 16, INVALID, "lent[0].layer_stride_bytes");
  BAD_LENT(layer_stride_bytes = INT64_MIN, INVALID, "lent[0].layer_stride_bytes");
  replayssm_lent twice[2] = {good_lent(), good_lent()};
  FAILS(INVALID, "lent[1].kind", create_pool(&pool, twice, 2));
  FAILS(INVALID, "n_lent", create_pool(&pool, twice, -1));
  FAILS(INVALID, "n_lent", create_pool(&pool, twice, INT32_MAX));
  FAILS(INVALID, "replayssm_lent", create_pool(&pool, NULL, 1));
}

#define BAD_BATCH(assignment, status, word) SPOIL(replayssm_batch, good_batch(), assignment, status, word, step(&d, &args))
#define BAD_ARGS(assignment, status, word) SPOIL(replayssm_mamba2_args, good_args(), assignment, status, word, step(&batch, &d))
#define BAD_CONV_ARGS(assignment, status, word) \
  SPOIL(replayssm_conv1d_args, good_conv_args(), assignment, status, word, conv_step(&batch, &d))
#define BAD_EXEC(assignment, status, word)                                                    \
  do {                                                                                        \
    SPOIL(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), assignment, status, word,           \
          replayssm_mamba2_step(mamba, 0, &batch, &args, &d));                                \
    SPOIL(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), assignment, status, word,           \
          replayssm_commit(slots, &batch, NULL, &d));                                         \
    SPOIL(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), assignment, status, word,           \
          replayssm_reset(slots, &list, NULL, &d));                                           \
  } while (0)
#define BAD_COMMIT(assignment, status, word)                                                                   \
  SPOIL(replayssm_commit_args, REPLAYSSM_INIT(replayssm_commit_args), assignment, status, word, \
        replayssm_commit(slots, &batch, &d, NULL))
#define ODD(pointer) ((void *)((char *)(pointer) + 1))
/* What is wrong with a tensor is wrong in every tensor. */
#define BAD_TENSOR(BAD, field)                                               \
  do {                                                                       \
    BAD(field.dtype = 0, INVALID, "args." #field);                           \
    BAD(field.dtype = REPLAYSSM_I64, INVALID, "args." #field);               \
    BAD(field.dtype = 77, UNSUPPORTED, "args." #field);                      \
    BAD(field.reserved = 1, UNSUPPORTED, "args." #field);                    \
    BAD(field.data = ODD(data), INVALID, "args." #field ".data");            \
    BAD(field.stride_head = INT64_MAX, INVALID, "args." #field ".stride");   \
    BAD(field.stride_head = INT64_MIN, INVALID, "args." #field ".stride");   \
    BAD(field.stride_head = INT64_MAX / 4, INVALID, "args." #field ".stride"); \
  } while (0)
#define BAD_INPUT(BAD, field)                                                \
  do {                                                                       \
    BAD_TENSOR(BAD, field);                                                  \
    BAD(field.stride_row = INT64_MAX, INVALID, "args." #field ".stride");    \
    BAD(field.stride_token = INT64_MIN, INVALID, "args." #field ".stride");  \
    BAD(field.stride_token = INT64_MAX, INVALID, "args." #field ".stride");  \
  } while (0)

static void calls(void) {
  replayssm_batch batch = good_batch();
  replayssm_mamba2_args args = good_args();
  replayssm_list list = good_list();
  static const int32_t cu_seqlens[3] = {0, 1, 2};
  WORKS(step(&batch, &args));

  FAILS(INVALID, "layer", replayssm_mamba2_step(mamba, LAYERS, &batch, &args, NULL));
  FAILS(INVALID, "layer", replayssm_mamba2_step(mamba, -1, &batch, &args, NULL));
  FAILS(INVALID, "layer", replayssm_mamba2_step(mamba, INT32_MAX, &batch, &args, NULL));

  BAD_BATCH(flags = 8, UNSUPPORTED, "batch.flags");
  BAD_BATCH(flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.flags");
  FAILS(INVALID, "batch.flags", replayssm_mamba2_extend(mamba, 0, &batch, &args, NULL));
  BAD_BATCH(n_rows = -1, INVALID, "batch.n_rows");
  BAD_BATCH(n_rows = INT32_MIN, INVALID, "batch.n_rows");
  BAD_BATCH(tokens = 5, INVALID, "batch.tokens");
  BAD_BATCH(tokens = -1, INVALID, "batch.tokens");
  BAD_BATCH(tokens = INT32_MAX, INVALID, "batch.tokens");
  BAD_BATCH(max_tokens = 1, INVALID, "batch.max_tokens");
  BAD_BATCH(max_tokens = -1, INVALID, "batch.max_tokens");
  BAD_BATCH(keep_tail = 1, INVALID, "batch.keep_tail");
  BAD_BATCH(reserved = 1, UNSUPPORTED, "batch.reserved");
  BAD_BATCH(cu_seqlens = cu_seqlens, INVALID, "batch.tokens");
  BAD_BATCH(cu_seqlens = ODD(cu_seqlens), INVALID, "batch.cu_seqlens");
  BAD_BATCH(generation = ODD(ids), INVALID, "batch.generation");
  BAD_BATCH(slots.data = NULL, INVALID, "batch.slots");
  BAD_BATCH(slots.data = ODD(ids), INVALID, "batch.slots");
  BAD_BATCH(slots.dtype = 0, INVALID, "batch.slots");
  BAD_BATCH(slots.dtype = REPLAYSSM_F32, INVALID, "batch.slots");
  BAD_BATCH(slots.dtype = 99, UNSUPPORTED, "batch.slots");
  BAD_BATCH(slots.stride = INT64_MAX, INVALID, "batch.slots");
  BAD_BATCH(slots.stride = INT64_MIN, INVALID, "batch.slots");
  BAD_BATCH(slots.reserved = 1, UNSUPPORTED, "batch.slots");
  batch.rings = good_ids(two_slots);
#define BAD_RINGS(assignment, status) SPOIL(replayssm_batch, batch, assignment, status, "batch.rings", step(&d, &args))
  BAD_RINGS(rings.data = ODD(ids), INVALID);
  BAD_RINGS(rings.dtype = REPLAYSSM_BF16, INVALID);
  BAD_RINGS(rings.dtype = -1, UNSUPPORTED);
  BAD_RINGS(rings.stride = INT64_MAX / 2, INVALID);
  batch = good_batch();
#define BAD_PACKED(assignment, word)                                                                                    \
  do {                                                                                                                  \
    replayssm_batch d = good_batch();                                                                                   \
    d.tokens = 0, d.cu_seqlens = cu_seqlens, d.n_tokens = 2;                                                            \
    d.assignment;                                                                                                       \
    FAILS(INVALID, word, step(&d, &args));                                                                              \
  } while (0)
  BAD_PACKED(n_tokens = -1, "batch.n_tokens");
  BAD_PACKED(max_tokens = 5, "batch.max_tokens");
  BAD_PACKED(max_tokens = -1, "batch.max_tokens");
  BAD_PACKED(n_tokens = INT64_MAX, "args.");
  SPOIL(replayssm_batch, good_batch(), keep_tail = 9; d.flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.keep_tail",
        replayssm_mamba2_extend(mamba, 0, &d, &args, NULL));
  SPOIL(replayssm_batch, good_batch(), keep_tail = -1; d.flags = REPLAYSSM_BATCH_EXTEND, INVALID, "batch.keep_tail",
        replayssm_mamba2_extend(mamba, 0, &d, &args, NULL));

  BAD_INPUT(BAD_ARGS, x);
  BAD_INPUT(BAD_ARGS, B);
  BAD_INPUT(BAD_ARGS, C);
  BAD_INPUT(BAD_ARGS, dt);
  BAD_INPUT(BAD_ARGS, z);
  BAD_INPUT(BAD_ARGS, out);
  BAD_TENSOR(BAD_ARGS, A);
  BAD_TENSOR(BAD_ARGS, dt_bias);
  BAD_TENSOR(BAD_ARGS, D);
  BAD_ARGS(x.data = NULL, INVALID, "args.x");
  BAD_ARGS(B.data = NULL, INVALID, "args.B");
  BAD_ARGS(C.data = NULL, INVALID, "args.C");
  BAD_ARGS(dt.data = NULL, INVALID, "args.dt");
  BAD_ARGS(A.data = NULL, INVALID, "args.A");
  BAD_ARGS(out.data = NULL, INVALID, "args.out");
  BAD_ARGS(x.dtype = REPLAYSSM_BF16, INVALID, "args.x.dtype");
  BAD_ARGS(B.dtype = REPLAYSSM_F16, INVALID, "args.B.dtype");
  BAD_ARGS(z.dtype = REPLAYSSM_BF16, INVALID, "args.z.dtype");
  BAD_ARGS(out.dtype = REPLAYSSM_BF16, INVALID, "args.out.dtype");
  BAD_ARGS(out.stride_head = 0, INVALID, "args.out.stride_head");
  BAD_ARGS(out.stride_token = DIM - 1, INVALID, "args.out.stride_token");
  BAD_ARGS(out.stride_row = 0, INVALID, "args.out.stride_row");
  BAD_ARGS(dt_softplus = 1, UNSUPPORTED, "args.dt_softplus");
  BAD_ARGS(D_per_element = 2, UNSUPPORTED, "args.D_per_element");
  BAD_ARGS(D_per_element = -1, UNSUPPORTED, "args.D_per_element");
  BAD_ARGS(reserved = 1, UNSUPPORTED, "args.reserved");

  BAD_INPUT(BAD_CONV_ARGS, x);
  BAD_INPUT(BAD_CONV_ARGS, out);
  BAD_TENSOR(BAD_CONV_ARGS, weight);
  BAD_TENSOR(BAD_CONV_ARGS, bias);
  BAD_CONV_ARGS(x.data = NULL, INVALID, "args.x");
  BAD_CONV_ARGS(out.data = NULL, INVALID, "args.out");
  BAD_CONV_ARGS(weight.data = NULL, INVALID, "args.weight");
  BAD_CONV_ARGS(out.stride_token = 0, INVALID, "args.out.stride_token");
  BAD_CONV_ARGS(no_silu = 2, UNSUPPORTED, "args.no_silu");

  BAD_EXEC(flags = 1, UNSUPPORTED, "exec.flags");
  BAD_EXEC(stream = (replayssm_stream)(uintptr_t)64, REPLAYSSM_WRONG_STREAM, "exec.stream");
  BAD_EXEC(n_parts = -1, INVALID, "exec.n_parts");
  BAD_EXEC(part = 1, INVALID, "exec.part");
  BAD_EXEC(part = -1, INVALID, "exec.part");
  BAD_EXEC(part = 3; d.n_parts = 3, INVALID, "exec.part");
  BAD_EXEC(part = INT32_MAX, INVALID, "exec.part");

  BAD_COMMIT(convention = 3, UNSUPPORTED, "commit_args.convention");
  BAD_COMMIT(convention = -1, UNSUPPORTED, "commit_args.convention");
  BAD_COMMIT(counts = ODD(ids), INVALID, "commit_args.counts");
  BAD_COMMIT(counts = ids; d.counts_stride = INT64_MAX, INVALID, "commit_args.counts_stride");
  BAD_COMMIT(counts = ids; d.counts_stride = INT64_MIN, INVALID, "commit_args.counts_stride");
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  BAD_COMMIT(counts = ids, INVALID, "commit_args.counts");
}

#define BAD_LIST(assignment, status, word) \
  SPOIL(replayssm_list, good_list(), assignment, status, word, replayssm_reset(slots, &d, NULL, NULL))
#define BAD_RESET(assignment, status, word)                                                                  \
  SPOIL(replayssm_reset_args, REPLAYSSM_INIT(replayssm_reset_args), assignment, status, word, \
        replayssm_reset(slots, &list, &d, NULL))
#define BAD_STATE(assignment, status, word)                                                                          \
  do {                                                                                                               \
    SPOIL(replayssm_state, good_state(), assignment, status, word, replayssm_export(mamba, &list, NULL, &d, NULL));  \
    SPOIL(replayssm_state, good_state(), assignment, status, word, replayssm_import(conv, &list, NULL, &d, NULL));   \
  } while (0)

static int64_t position_of(int32_t ring) {
  replayssm_list l = good_list();
  replayssm_cursor cursor;
  l.n = 1;
  l.slots = good_ids(&ring);
  WORKS(replayssm_read_cursors(slots, &l, &cursor, NULL));
  return cursor.position;
}

static void lists(void) {
  replayssm_list list = good_list();
  replayssm_state state = good_state();
  replayssm_cursor cursors[2];
  static const int32_t beyond_slots[2] = {0, SLOTS}, beyond_rings[2] = {0, RINGS}, skipped[2] = {-1, INT32_MIN};
  static const int64_t positions[2] = {5, 6}, negative[2] = {0, -1}, too_large[2] = {0, ((int64_t)1 << 60) + 1};
  BAD_LIST(n = -1, INVALID, "list.n");
  BAD_LIST(n = 257; d.slots.data = ids, INVALID, "list.n");
  BAD_LIST(n = INT32_MAX; d.slots.data = ids, INVALID, "list.n");
  BAD_LIST(place = 2, UNSUPPORTED, "list.place");
  BAD_LIST(reserved = 1, UNSUPPORTED, "list.reserved");
  BAD_LIST(slots.data = NULL, INVALID, "list.slots");
  BAD_LIST(slots.data = ODD(ids), INVALID, "list.slots");
  BAD_LIST(slots.dtype = REPLAYSSM_F32, INVALID, "list.slots");
  BAD_LIST(slots.data = beyond_slots, INVALID, "list.slots[1]");
  BAD_LIST(rings = good_ids(beyond_rings), INVALID, "list.rings[1]");
  BAD_LIST(slots = good_ids(beyond_rings), INVALID, "list.rings[1]");

  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  BAD_RESET(keep_checkpoint = 2, UNSUPPORTED, "reset_args.keep_checkpoint");
  BAD_RESET(convert = 1, INVALID, "reset_args.convert");
  BAD_RESET(convert = 5; d.keep_checkpoint = 1, UNSUPPORTED, "reset_args.convert");
  BAD_RESET(reserved = 1, UNSUPPORTED, "reset_args.reserved");
  BAD_RESET(position = ODD(positions), INVALID, "reset_args.position");
  BAD_RESET(position = negative, INVALID, "reset_args.position[1]");
  BAD_RESET(position = too_large, INVALID, "reset_args.position[1]");
  BAD_RESET(generation = ODD(ids), INVALID, "reset_args.generation");
  BAD_RESET(seed = ODD(positions), INVALID, "reset_args.seed");
  /* Nothing happened to entry 0, which was right. */
  CHECK(position_of(0) == 0);

  BAD_STATE(dtype = 0, INVALID, "state.dtype");
  BAD_STATE(dtype = 50, UNSUPPORTED, "state.dtype");
  BAD_STATE(orientation = 2, UNSUPPORTED, "state.orientation");
  BAD_STATE(layer = LAYERS, INVALID, "state.layer");
  BAD_STATE(layer = -2, INVALID, "state.layer");
  BAD_STATE(data = NULL, INVALID, "state.data");
  BAD_STATE(data = ODD(out), INVALID, "state.data");
  BAD_STATE(stride_row = -1, INVALID, "state.stride_row");
  BAD_STATE(stride_row = 1, INVALID, "state.stride_row");
  BAD_STATE(stride_row = INT64_MAX, INVALID, "state.stride_row");
  BAD_STATE(stride_head = INT64_MAX, INVALID, "state.stride_head");
  BAD_STATE(stride_head = -8, INVALID, "state.stride_head");
  BAD_STATE(stride_layer = INT64_MAX / 2, INVALID, "state.stride_layer");
  BAD_STATE(stride_entry = INT64_MIN, INVALID, "state.stride_entry");
  BAD_STATE(stride_entry = 1, INVALID, "state.stride_entry");
  FAILS(INVALID, "position[1]", replayssm_import(mamba, &list, negative, &state, NULL));
  FAILS(INVALID, "position is", replayssm_import(mamba, &list, (const int64_t *)ODD(positions), &state, NULL));
  FAILS(INVALID, "at is", replayssm_export(mamba, &list, (const int64_t *)ODD(positions), &state, NULL));

  memset(cursors, 0x5A, sizeof cursors);
  FAILS(INVALID, "dst is NULL", replayssm_read_cursors(slots, &list, NULL, NULL));
  FAILS(INVALID, "dst is", replayssm_read_cursors(slots, &list, (replayssm_cursor *)ODD(cursors), NULL));
  list.slots.data = beyond_rings;
  FAILS(INVALID, "list.rings[1]", replayssm_read_cursors(slots, &list, cursors, NULL));
  for (size_t i = 0; i < sizeof cursors; i++) CHECK(((unsigned char *)cursors)[i] == 0x5A);
  list.slots.data = skipped;
  WORKS(replayssm_read_cursors(slots, &list, cursors, NULL));
  for (size_t i = 0; i < sizeof cursors; i++) CHECK(((unsigned char *)cursors)[i] == 0);
  list = good_list();

  /* Rewinding: three tokens are committed and one may be taken back. */
  int32_t n[2] = {0, 4}, done[2] = {77, 77};
  const int32_t below[2] = {0, -1};
  replayssm_batch batch = good_batch();
  replayssm_mamba2_args args = good_args();
  replayssm_conv1d_args conv_args = good_conv_args();
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  WORKS(step(&batch, &args));
  WORKS(replayssm_mamba2_step(mamba, 1, &batch, &args, NULL));
  WORKS(conv_step(&batch, &conv_args));
  WORKS(replayssm_conv1d_step(conv, 1, &batch, &conv_args, NULL));
  WORKS(replayssm_commit(slots, &batch, NULL, NULL));
  CHECK(position_of(0) == 2 && position_of(1) == 2);
  FAILS(REPLAYSSM_OUT_OF_RANGE, "n[1] is 4", replayssm_rewind(slots, &list, n, NULL, NULL));
  FAILS(INVALID, "n[1]", replayssm_rewind(slots, &list, below, done, NULL));
  FAILS(INVALID, "n is NULL", replayssm_rewind(slots, &list, NULL, done, NULL));
  FAILS(INVALID, "n is", replayssm_rewind(slots, &list, (const int32_t *)ODD(n), done, NULL));
  FAILS(INVALID, "done", replayssm_rewind(slots, &list, n, (int32_t *)ODD(done), NULL));
  CHECK(done[0] == 77 && done[1] == 77 && position_of(0) == 2 && position_of(1) == 2);
  n[0] = 1;
  WORKS(replayssm_rewind(slots, &list, n, done, NULL));
  CHECK(done[0] == 1 && done[1] == 0 && position_of(0) == 1 && position_of(1) == 2);
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_REWIND && report.count == 1 && report.first_row == 1);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
}

/* What the host cannot see: bits that are read afterwards, and no slot is harmed. */
static void device_faults(void) {
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  replayssm_batch batch = good_batch();
  replayssm_mamba2_args args = good_args();
  replayssm_list list = good_list();
  replayssm_state state = good_state();
  static const int32_t beyond[2] = {0, SLOTS}, huge[2] = {INT32_MAX, 1}, negative[2] = {-1, -5};
  static const int64_t huge64[2] = {INT64_MAX, INT64_MIN};
  static const int32_t falling[3] = {2, 1, 4}, outside[3] = {0, 2, 40}, long_row[3] = {0, 4, 4};
  static const int32_t counts[2] = {3, -1};
  static const int64_t not_held[2] = {1, -1}, bad_position[2] = {-4, INT64_MAX};

  WORKS(replayssm_check(slots, 1, &report));
#define FAULT(wanted, times, id, row)                                                                     \
  do {                                                                                                    \
    WORKS(replayssm_check(slots, 1, &report));                                                            \
    CHECK(report.bits == (wanted));                                                                       \
    CHECK(report.count == (times) && report.first_slot == (id) && report.first_row == (row));             \
    CHECK(position_of(0) == 0 && position_of(1) == 0);                                                    \
    WORKS(replayssm_check(slots, 0, &report));                                                            \
    CHECK(report.bits == 0 && report.count == 0);                                                         \
  } while (0)

  batch.slots = good_ids(beyond);
  batch.tokens = 1;
  memset(out, 0x5A, sizeof out);
  WORKS(step(&batch, &args));
  CHECK(out[2 * HEADS * DIM] == 0.0f); /* the faulty row's output is zero */
  FAULT(REPLAYSSM_FAULT_ID, 2, SLOTS, 1); /* as slot and as ring */
  batch.slots = good_ids(huge);
  WORKS(step(&batch, &args));
  FAULT(REPLAYSSM_FAULT_ID, 2, INT32_MAX, 0);
  batch.slots.data = huge64;
  batch.slots.dtype = REPLAYSSM_I64;
  WORKS(step(&batch, &args));
  FAULT(REPLAYSSM_FAULT_ID, 2, INT64_MAX, 0);
  batch.slots = good_ids(negative);
  WORKS(step(&batch, &args));
  WORKS(replayssm_commit(slots, &batch, NULL, NULL));
  FAULT(0, 0, report.first_slot, report.first_row); /* padding is no fault */

  batch = good_batch();
  batch.tokens = 0;
  batch.n_tokens = 4;
  batch.max_tokens = 3;
  const int32_t *lengths[3] = {falling, outside, long_row};
  const int64_t rows[3] = {0, 1, 0};
  for (int i = 0; i < 3; i++) {
    batch.cu_seqlens = lengths[i];
    WORKS(step(&batch, &args));
    FAULT(REPLAYSSM_FAULT_LENGTH, 1, rows[i], rows[i]);
  }

  /* Counts are clamped: 3 of 1 token, -1 of 1 token. */
  batch = good_batch();
  batch.tokens = 1;
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  commit.counts = counts;
  WORKS(step(&batch, &args));
  WORKS(replayssm_mamba2_step(mamba, 1, &batch, &args, NULL));
  WORKS(replayssm_commit(slots, &batch, &commit, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_COUNT && report.count == 2);
  CHECK(position_of(0) == 1 && position_of(1) == 0);

  /* A position that is not held leaves its part of the buffer alone. */
  memset(out, 0x5A, sizeof out);
  WORKS(replayssm_export(mamba, &list, not_held, &state, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_POSITION && report.first_row == 1);
  float poison;
  memset(&poison, 0x5A, sizeof poison);
  CHECK(out[0] != poison && out[LAYERS * HEADS * DIM * STATE] == poison);

  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  list.place = REPLAYSSM_DEVICE;
  list.slots = good_ids(beyond);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK((report.bits & REPLAYSSM_FAULT_ID) && report.first_slot == SLOTS && report.first_row == 1);
  list.slots = good_ids(two_slots);
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.position = bad_position;
  WORKS(replayssm_reset(slots, &list, &reset, NULL));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_POSITION);
  CHECK(position_of(0) == 0 && position_of(1) == 0);

  /* A list of 257 is welcome on the device. */
  list.n = 257;
  list.slots = good_ids(ids);
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  /* An extend that is not committed: any other call on the slot is a fault, and a reset heals it. */
  batch = good_batch();
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  WORKS(replayssm_mamba2_extend(mamba, 0, &batch, &args, NULL));
  batch.flags = 0;
  WORKS(step(&batch, &args));
  CHECK(out[0] == 0.0f);
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == REPLAYSSM_FAULT_POSITION && report.first_layer == 0);
  list = good_list();
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  WORKS(step(&batch, &args));
  WORKS(replayssm_check(slots, 1, &report));
  CHECK(report.bits == 0);
}

static void ids_and_buffers(void) {
  int32_t taken[4] = {77, 77, 77, 77}, again[2];
  uint32_t generations[4] = {77, 77, 77, 77};
  int32_t n = 77;
  replayssm_component components[8];
  FAILS(REPLAYSSM_OUT_OF_RANGE, "n is 4", replayssm_acquire(slots, 4, taken, generations));
  FAILS(REPLAYSSM_OUT_OF_RANGE, "n is 2147483647", replayssm_acquire(slots, INT32_MAX, taken, generations));
  FAILS(INVALID, "n is -1", replayssm_acquire(slots, -1, taken, generations));
  FAILS(INVALID, "ids is NULL", replayssm_acquire(slots, 1, NULL, generations));
  FAILS(INVALID, "ids is", replayssm_acquire(slots, 1, (int32_t *)ODD(taken), generations));
  FAILS(INVALID, "generations is", replayssm_acquire(slots, 1, taken, (uint32_t *)ODD(generations)));
  for (int i = 0; i < 4; i++) CHECK(taken[i] == 77 && generations[i] == 77);
  WORKS(replayssm_acquire(slots, RINGS, taken, generations));
  CHECK(taken[0] == 0 && taken[1] == 1 && taken[2] == 2 && generations[0] == 1 && taken[3] == 77);
  FAILS(REPLAYSSM_OUT_OF_RANGE, "0 free ids", replayssm_acquire(slots, 1, again, NULL));
  again[0] = again[1] = 1;
  FAILS(INVALID, "ids[1]", replayssm_release(slots, 2, again));
  again[0] = 1, again[1] = -1;
  FAILS(INVALID, "ids[1] is -1", replayssm_release(slots, 2, again));
  again[1] = INT32_MAX;
  FAILS(INVALID, "ids[1] is 2147483647", replayssm_release(slots, 2, again));
  FAILS(INVALID, "n is -1", replayssm_release(slots, -1, again));
  FAILS(INVALID, "ids is NULL", replayssm_release(slots, 1, NULL));
  FAILS(INVALID, "ids is", replayssm_release(slots, 1, (const int32_t *)ODD(again)));
  WORKS(replayssm_release(slots, RINGS, taken));
  FAILS(INVALID, "ids[0]", replayssm_release(slots, 1, taken));

  memset(components, 0x5A, sizeof components);
  FAILS(REPLAYSSM_BUFFER_TOO_SMALL, "capacity is 4; at least 5",
        replayssm_layers_components(mamba, components, 4, &n));
  CHECK(n == 5);
  FAILS(REPLAYSSM_BUFFER_TOO_SMALL, "capacity is 0", replayssm_layers_components(conv, NULL, 0, &n));
  CHECK(n == 2);
  FAILS(REPLAYSSM_BUFFER_TOO_SMALL, "capacity", replayssm_layers_components(conv, components, INT32_MIN, &n));
  FAILS(INVALID, "replayssm_component", replayssm_layers_components(conv, NULL, 8, &n));
  FAILS(INVALID, "n is NULL", replayssm_layers_components(mamba, components, 8, NULL));
  FAILS(INVALID, "n is", replayssm_layers_components(mamba, components, 8, (int32_t *)ODD(&n)));
  for (size_t i = 0; i < sizeof components; i++) CHECK(((unsigned char *)components)[i] == 0x5A);
  CHECK(strcmp(replayssm_status_string(12345), "unknown status") == 0);
  CHECK(strcmp(replayssm_status_string(REPLAYSSM_OK), "REPLAYSSM_OK") == 0);
}

/* ---- Threads ---- */

/* Two threads on one context: each creates, works and destroys on its own, and on slots of their own of shared handles. */
static void *worker(void *argument) {
  const int me = *(int *)argument;
  const int32_t slot = me;
  float x[HEADS * DIM], y[HEADS * DIM], gates[64];
  for (int i = 0; i < HEADS * DIM; i++) x[i] = (float)(i % 5) * 0.25f;
  for (int i = 0; i < 64; i++) gates[i] = -0.5f;
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  replayssm_mamba2_args args = REPLAYSSM_INIT(replayssm_mamba2_args);
  batch.n_rows = batch.tokens = 1;
  batch.slots = good_ids(&slot);
  args.x = tensor(x, 0, 0, DIM);
  args.B = args.C = tensor(x, 0, 0, STATE);
  args.dt = args.A = tensor(gates, 0, 0, 1);
  args.out = tensor(y, 0, 0, DIM);
  long failures = 0;
  for (int round = 0; round < (short_run ? 5 : 60); round++) {
    replayssm_slots *own_slots = NULL;
    replayssm_layers *own = NULL;
    replayssm_slots_desc s = good_slots();
    replayssm_pool_desc p = good_mamba();
    failures += replayssm_slots_create(context, &s, &own_slots) != REPLAYSSM_OK;
    failures += replayssm_layers_create(own_slots, &p, NULL, 0, &own) != REPLAYSSM_OK;
    for (int i = 0; i < 4; i++) {
      failures += replayssm_mamba2_step(own, i % LAYERS, &batch, &args, NULL) != REPLAYSSM_OK;
      failures += replayssm_commit(own_slots, &batch, NULL, NULL) != REPLAYSSM_OK;
      for (int layer = 0; layer < LAYERS; layer++) {
        failures += replayssm_mamba2_step(mamba, layer, &batch, &args, NULL) != REPLAYSSM_OK;
      }
      failures += replayssm_commit(slots, &batch, NULL, NULL) != REPLAYSSM_OK;
    }
    /* Its own sentence, whatever the other thread does. */
    batch.n_rows = -1 - me;
    failures += replayssm_commit(slots, &batch, NULL, NULL) != REPLAYSSM_INVALID_ARGUMENT;
    char wanted[32];
    snprintf(wanted, sizeof wanted, "batch.n_rows is %d", -1 - me);
    failures += strstr(replayssm_last_error_message(), wanted) == NULL;
    batch.n_rows = 1;
    replayssm_slots_destroy(own_slots);
    replayssm_layers_destroy(own);
  }
  return (void *)failures;
}

/* Calls that race with the destruction of their own handle work or say that it has been destroyed. */
static replayssm_slots *contested;
static pthread_barrier_t ready;

static void *user(void *argument) {
  long unexpected = 0;
  replayssm_list list = good_list();
  (void)argument;
  pthread_barrier_wait(&ready);
  for (int i = 0; i < 200; i++) {
    replayssm_stats stats = REPLAYSSM_INIT(replayssm_stats);
    replayssm_pool_desc p = good_mamba();
    replayssm_layers *made = NULL;
    replayssm_status status[3];
    status[0] = replayssm_stats_read(contested, &stats);
    status[1] = replayssm_reset(contested, &list, NULL, NULL);
    status[2] = i % 50 ? REPLAYSSM_OK : replayssm_layers_create(contested, &p, NULL, 0, &made);
    replayssm_layers_destroy(made);
    for (int j = 0; j < 3; j++) unexpected += status[j] != REPLAYSSM_OK && status[j] != REPLAYSSM_INVALID_HANDLE;
  }
  return (void *)unexpected;
}

static void *destroyer(void *argument) {
  pthread_barrier_wait(&ready);
  for (int i = 0; i < *(int *)argument; i++) (void)replayssm_version();
  replayssm_slots_destroy(contested);
  return NULL;
}

static void threads(void) {
  pthread_t thread[2];
  int number[2] = {0, 1};
  void *failures = NULL;
  replayssm_list list = good_list();
  WORKS(replayssm_reset(slots, &list, NULL, NULL));
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread[i], NULL, worker, &number[i]) == 0);
  for (int i = 0; i < 2; i++) {
    CHECK(pthread_join(thread[i], &failures) == 0);
    CHECK(failures == NULL);
  }
  CHECK(position_of(0) == (short_run ? 20 : 240) && position_of(1) == position_of(0));
  CHECK(pthread_barrier_init(&ready, NULL, 2) == 0);
  for (int round = 0; round < (short_run ? 10 : 200); round++) {
    replayssm_slots_desc s = good_slots();
    int delay = round * 50;
    WORKS(replayssm_slots_create(context, &s, &contested));
    CHECK(pthread_create(&thread[0], NULL, user, NULL) == 0);
    CHECK(pthread_create(&thread[1], NULL, destroyer, &delay) == 0);
    CHECK(pthread_join(thread[0], &failures) == 0 && failures == NULL);
    CHECK(pthread_join(thread[1], NULL) == 0);
    int i = 0;
    while (functions[i].call != on_stats_read) i++;
    bad_handle_for(i, contested, "it has been destroyed");
  }
  pthread_barrier_destroy(&ready);
}

int main(int argc, char **argv) {
  short_run = argc > 1 && strcmp(argv[1], "short") == 0;
  CHECK(strcmp(replayssm_last_error_message(), "") == 0);
  CHECK(replayssm_version() == REPLAYSSM_VERSION);
  create_all();
  handles();
  destroying();
  descriptors();
  creation();
  lending();
  calls();
  lists();
  device_faults();
  ids_and_buffers();
  threads();
  destroy_all();
  for (int i = 0; i < FUNCTIONS; i++) {
    /* forget_message has no slots left; the sentence is the call's own all the same. */
    if (functions[i].call(live(functions[i].kind)) != REPLAYSSM_INVALID_HANDLE) fail(__LINE__, functions[i].name, "lives");
    checks++;
  }
  printf("misuse: %d checks passed\n", checks);
  return 0;
}
