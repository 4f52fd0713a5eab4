/* Handles that are none, of every function; objects destroyed in every order.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "misuse.h"

/* Every function that takes a handle, everything else being right. */

static union {
  replayssm_context_info info;
  replayssm_report report;
  replayssm_stats stats;
  replayssm_component components[8];
  replayssm_cursor cursors[2];
  int32_t ids[4];
  uint64_t bytes_needed;
  unsigned char bytes[1024];
} result;

static replayssm_status on_context_query(const void *h) {
  result.info.struct_size = sizeof result.info;
  return replayssm_context_query((const replayssm_context *)h, &result.info);
}

static replayssm_status on_supports(const void *h) {
  replayssm_pool_desc d = good_mamba();
  return replayssm_supports((const replayssm_context *)h, &d, 4);
}

static replayssm_status on_explain(const void *h) {
  static char text[4096];
  return replayssm_explain((const replayssm_layers *)h, 2, 2, text, sizeof text);
}

static replayssm_status on_slots_create(const void *h) {
  replayssm_slots_desc d = good_slots();
  replayssm_slots *made = slots;
  replayssm_status status = replayssm_slots_create((const replayssm_context *)h, &d, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__FILE__, __LINE__, "slots_create", "out-parameter and status disagree");
  replayssm_slots_destroy(made);
  return status;
}

static replayssm_status on_layers_create(const void *h) {
  replayssm_pool_desc d = good_mamba();
  replayssm_layers *made = mamba;
  replayssm_status status = replayssm_layers_create((replayssm_slots *)(uintptr_t)h, &d, NULL, 0, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__FILE__, __LINE__, "layers_create", "out-parameter and status disagree");
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

static replayssm_status on_flush(const void *h) {
  replayssm_list l = good_list();
  return replayssm_flush((const replayssm_slots *)h, &l, NULL, NULL);
}

static replayssm_status on_snapshot(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_snapshot_args a = good_snapshot();
  return replayssm_snapshot((const replayssm_slots *)h, &b, &a, NULL);
}

static replayssm_status on_copy(const void *h) {
  replayssm_list l = good_list();
  l.n = 0;
  return replayssm_copy((const replayssm_slots *)h, &l, &l, NULL, NULL);
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

/* Room for every blob of these objects. */
static unsigned char blob[1 << 20];

static replayssm_list one_entry(void) {
  replayssm_list l = good_list();
  l.n = 1;
  return l;
}

static replayssm_status on_save_bytes(const void *h) {
  return replayssm_save_bytes((const replayssm_slots *)h, REPLAYSSM_SAVE_LIVE, &result.bytes_needed);
}

static replayssm_status on_save(const void *h) {
  replayssm_list l = one_entry();
  return replayssm_save((const replayssm_slots *)h, &l, REPLAYSSM_SAVE_PORTABLE, blob, sizeof blob, NULL);
}

static replayssm_status on_rebind(const void *h) {
  return replayssm_layers_rebind((replayssm_layers *)(uintptr_t)h, NULL, 0);
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

static replayssm_status on_delta_step(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_delta_args a = good_delta_args();
  return replayssm_delta_step((const replayssm_layers *)h, 0, &b, &a, NULL);
}

static replayssm_status on_delta_extend(const void *h) {
  replayssm_batch b = good_batch();
  replayssm_delta_args a = good_delta_args();
  b.n_rows = 0;
  b.flags = REPLAYSSM_BATCH_EXTEND;
  return replayssm_delta_extend((const replayssm_layers *)h, 0, &b, &a, NULL);
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

enum kind { CONTEXT, SLOTS_HANDLE, MAMBA, CONV, DELTA };
static const struct {
  const char *name;
  enum kind kind;
  replayssm_status (*call)(const void *handle);
} functions[] = {
    {"context_query", CONTEXT, on_context_query},
    {"supports", CONTEXT, on_supports},
    {"slots_create", CONTEXT, on_slots_create},
    {"layers_create", SLOTS_HANDLE, on_layers_create},
    {"commit", SLOTS_HANDLE, on_commit},
    {"reset", SLOTS_HANDLE, on_reset},
    {"rewind", SLOTS_HANDLE, on_rewind},
    {"flush", SLOTS_HANDLE, on_flush},
    {"snapshot", SLOTS_HANDLE, on_snapshot},
    {"copy", SLOTS_HANDLE, on_copy},
    {"read_cursors", SLOTS_HANDLE, on_read_cursors},
    {"acquire", SLOTS_HANDLE, on_acquire},
    {"release", SLOTS_HANDLE, on_release},
    {"check", SLOTS_HANDLE, on_check},
    {"stats_read", SLOTS_HANDLE, on_stats_read},
    {"save_bytes", SLOTS_HANDLE, on_save_bytes},
    {"save", SLOTS_HANDLE, on_save},
    {"layers_components", MAMBA, on_components},
    {"layers_rebind", MAMBA, on_rebind},
    {"explain", MAMBA, on_explain},
    {"mamba2_step", MAMBA, on_mamba2_step},
    {"mamba2_extend", MAMBA, on_mamba2_extend},
    {"conv1d_step", CONV, on_conv1d_step},
    {"conv1d_extend", CONV, on_conv1d_extend},
    {"delta_step", DELTA, on_delta_step},
    {"delta_extend", DELTA, on_delta_extend},
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
  const void *objects[] = {context, slots, mamba, conv, delta};
  return objects[kind];
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
  failed(__FILE__, __LINE__, functions[i].name, REPLAYSSM_ERROR_INVALID_HANDLE, argument(functions[i].kind), functions[i].call(handle));
  if (strstr(replayssm_last_error_message(), reason) == NULL) {
    fail(__FILE__, __LINE__, functions[i].name, replayssm_last_error_message());
  }
  /* Nothing was written: outputs, and out-descriptors behind the size that the caller set. */
  CHECK(memcmp(result.bytes + 4, before + 4, sizeof result - 4) == 0);
  for (size_t j = 0; j < sizeof out / sizeof out[0]; j++) {
    if (memcmp(&out[j], before, sizeof out[j]) != 0) fail(__FILE__, __LINE__, functions[i].name, "an output was written");
  }
}

static bool is_live(const void *handle) {
  return handle == context || handle == slots || handle == mamba || handle == conv || handle == delta;
}

static void destroy_does_nothing(const void *handle) {
  if (is_live(handle)) return;
  replayssm_context_destroy((replayssm_context *)(uintptr_t)handle);
  replayssm_slots_destroy((replayssm_slots *)(uintptr_t)handle);
  replayssm_layers_destroy((replayssm_layers *)(uintptr_t)handle);
}

void handles(void) {
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
    for (int kind = CONTEXT; kind <= DELTA; kind++) {
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
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "layers", replayssm_mamba2_step(conv, 0, &b, &a, NULL));
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_conv1d_step(mamba, 0, &b, &v, NULL));
  replayssm_delta_args k = good_delta_args();
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_delta_step(mamba, 0, &b, &k, NULL));
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_delta_step(conv, 0, &b, &k, NULL));
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_mamba2_step(delta, 0, &b, &a, NULL));
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_conv1d_step(delta, 0, &b, &v, NULL));
  b.flags = REPLAYSSM_BATCH_EXTEND;
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_delta_extend(mamba, 0, &b, &k, NULL));
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "another family", replayssm_mamba2_extend(delta, 0, &b, &a, NULL));
}

/* Destroyed in every order, twice, and used afterwards. A child keeps its parents. */
void destroying(void) {
  static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  replayssm_context *keep_context = context;
  replayssm_slots *keep_slots = slots;
  replayssm_layers *keep_mamba = mamba, *keep_conv = conv, *keep_delta = delta;
  for (int order = 0; order < 6; order++) {
    bool alive[] = {true, true, true, true, true};
    create_all();
    const void *objects[] = {context, slots, mamba, conv, delta};
    for (int k = 0; k < 3; k++) {
      for (int twice = 0; twice < 2; twice++) {
        switch (orders[order][k]) {
          case 0: replayssm_context_destroy(context); break;
          case 1: replayssm_slots_destroy(slots); break;
          default: replayssm_layers_destroy(mamba), replayssm_layers_destroy(conv), replayssm_layers_destroy(delta); break;
        }
      }
      alive[orders[order][k]] = false;
      alive[CONV] = alive[DELTA] = alive[MAMBA];
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
    context = keep_context, slots = keep_slots, mamba = keep_mamba, conv = keep_conv, delta = keep_delta;
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

void destroyed_slots(const void *handle) {
  int i = 0;
  while (functions[i].call != on_stats_read) i++;
  bad_handle_for(i, handle, "it has been destroyed");
}

void everything_is_gone(void) {
  for (int i = 0; i < FUNCTIONS; i++) {
    /* forget_message has no slots left; the sentence is the call's own all the same. */
    CHECK(functions[i].call(live(functions[i].kind)) == REPLAYSSM_ERROR_INVALID_HANDLE);
    CHECK(strstr(replayssm_last_error_message(), "it has been destroyed") != NULL);
  }
}
