/* A program of another version of the header, with today's library: the whole life of a request in every family, with every struct of the
 * interface. tests/abi.rs compiles it with the kept headers (an older program) and with a header whose structs have grown (a newer one, which
 * defines NEWER and has two zero words `added_later` at the end of each).
 *
 * In front of each call that works, the same call is refused: with a size below that of the oldest kept header, and, of a newer program, with
 * something in what this library cannot know.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "replayssm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* SIZE_OF_replayssm_batch and so on: sizes in the oldest kept header. */
#define STRUCT(name, size) enum { SIZE_OF_##name = (size) };
#define FIELD(name, field, offset, size)
#include "layout.inc"

static int checks;

static void require(int condition, int line, const char *what) {
  checks++;
  if (condition) return;
  fprintf(stderr, "life.c:%d: %s; the last sentence is: %s\n", line, what, replayssm_last_error_message());
  exit(1);
}
#define REQUIRE(condition) require((condition), __LINE__, #condition " is not true")
#define WORKS(call) require((call) == REPLAYSSM_OK, __LINE__, #call)
#define FAILS(status, words, call) \
  require((call) == (status) && strstr(replayssm_last_error_message(), (words)) != NULL, __LINE__, #call " is not refused")

#ifdef NEWER
#define TAIL(type, d, call)                                                                                             \
  do {                                                                                                                  \
    for (size_t word_ = 0; word_ < 2; word_++) {                                                                        \
      char words_[96];                                                                                                  \
      snprintf(words_, sizeof words_, "the byte at offset %zu of " #type, sizeof(type) - sizeof (d).added_later + 4 * word_); \
      (d).added_later[word_] = 1;                                                                                       \
      FAILS(REPLAYSSM_ERROR_UNSUPPORTED, words_, call);                                                                 \
      (d).added_later[word_] = 0;                                                                                       \
    }                                                                                                                   \
  } while (0)
/* An out-descriptor's tail becomes zero. */
#define FILL_TAIL(d) memset((d).added_later, 0x5A, sizeof (d).added_later)
#define TAIL_IS_ZERO(d) REQUIRE((d).added_later[0] == 0 && (d).added_later[1] == 0)
#else
#define TAIL(type, d, call) (void)(d)
#define FILL_TAIL(d) (void)(d)
#define TAIL_IS_ZERO(d) (void)(d)
#endif

#define SMALLER(type, d, call)                                               \
  do {                                                                       \
    const uint32_t size_ = (d).struct_size;                                  \
    (d).struct_size = SIZE_OF_##type - 4;                                    \
    FAILS(REPLAYSSM_ERROR_INVALID_ARGUMENT, #type ".struct_size is ", call); \
    (d).struct_size = size_;                                                 \
  } while (0)
/* A call, and what is refused in the descriptor `d` that it takes. */
#define WITH(type, d, call)  \
  do {                       \
    SMALLER(type, d, call);  \
    TAIL(type, d, call);     \
    WORKS(call);             \
  } while (0)
#define FILLS(type, d, call)                                         \
  do {                                                               \
    SMALLER(type, d, call);                                          \
    FILL_TAIL(d);                                                    \
    WORKS(call);                                                     \
    REQUIRE((d).struct_size == (uint32_t)sizeof(type)); \
    TAIL_IS_ZERO(d);                                                 \
  } while (0)

enum { HEADS = 4, GROUPS = 2, ROWS = 8, COLUMNS = 8, CHANNELS = 20, WIDTH = 4, SLOTS = 4, TOKENS = 2, COMPONENTS = 12 };

static float input[4096], output[2][TOKENS * HEADS * ROWS], state[2][HEADS * ROWS * COLUMNS];
static unsigned char blob[2][1 << 16];
static _Alignas(16) unsigned char lendable[1 << 16];
static replayssm_context *context;
static int lines;

static void heard(void *user, replayssm_log_level level, const char *text) {
  (void)level, (void)text;
  ++*(int *)user;
}

static replayssm_ids ids(const int32_t *array) {
  replayssm_ids i = {array, 0, REPLAYSSM_DTYPE_I32, 0};
  return i;
}
/* Values from `first` on, a head (group, section) `head` elements behind the other, `heads` of them in a token. */
static replayssm_tensor tensor(float *first, int64_t heads, int64_t head) {
  replayssm_tensor t = {first, TOKENS * heads * head, heads * head, head, REPLAYSSM_DTYPE_F32, 0};
  return t;
}
static replayssm_tensor parameter(float *first, int64_t head) {
  replayssm_tensor t = {first, 0, 0, head, REPLAYSSM_DTYPE_F32, 0};
  return t;
}

static replayssm_pool_desc pool_of(replayssm_family family) {
  static const int32_t sections[2] = {12, 8};
  replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc);
  p.family = family;
  p.n_layers = 1;
  p.io = REPLAYSSM_DTYPE_F32;
  if (family == REPLAYSSM_FAMILY_MAMBA2) {
    p.nheads = HEADS, p.headdim = ROWS, p.dstate = COLUMNS, p.ngroups = GROUPS;
  } else if (family == REPLAYSSM_FAMILY_CONV1D) {
    p.channels = CHANNELS, p.width = WIDTH, p.n_sections = 2, p.section_channels = sections;
  } else {
    p.HV = HEADS, p.V = ROWS, p.K = COLUMNS, p.H = GROUPS;
  }
  if (family != REPLAYSSM_FAMILY_CONV1D) p.readout = REPLAYSSM_READOUT_EXACT;
  return p;
}

/* A step or an extend of TOKENS tokens of one row. */
static void run(replayssm_layers *pool, replayssm_family family, replayssm_batch *batch, float *out) {
  const int extends = (batch->flags & REPLAYSSM_BATCH_EXTEND) != 0;
  replayssm_exec exec = REPLAYSSM_INIT(replayssm_exec);
  if (family == REPLAYSSM_FAMILY_MAMBA2) {
    replayssm_mamba2_args a = REPLAYSSM_INIT(replayssm_mamba2_args);
    a.x = tensor(input, HEADS, ROWS);
    a.B = tensor(input + 256, GROUPS, COLUMNS);
    a.C = tensor(input + 512, GROUPS, COLUMNS);
    a.dt = tensor(input + 768, HEADS, 1);
    a.A = parameter(input + 1024, 1);
    a.out = tensor(out, HEADS, ROWS);
    if (extends) {
      WITH(replayssm_mamba2_args, a, replayssm_mamba2_extend(pool, 0, batch, &a, &exec));
    } else {
      WITH(replayssm_mamba2_args, a, replayssm_mamba2_step(pool, 0, batch, &a, &exec));
      WITH(replayssm_exec, exec, replayssm_mamba2_step(pool, 0, batch, &a, &exec));
      WITH(replayssm_batch, *batch, replayssm_mamba2_step(pool, 0, batch, &a, &exec));
    }
  } else if (family == REPLAYSSM_FAMILY_CONV1D) {
    replayssm_conv1d_args a = REPLAYSSM_INIT(replayssm_conv1d_args);
    a.x = tensor(input, 2, 12);
    a.out = tensor(out, 2, 12);
    a.weight = parameter(input + 256, WIDTH);
    if (extends) {
      WITH(replayssm_conv1d_args, a, replayssm_conv1d_extend(pool, 0, batch, &a, &exec));
    } else {
      WITH(replayssm_conv1d_args, a, replayssm_conv1d_step(pool, 0, batch, &a, &exec));
    }
  } else {
    const int64_t gates = family == REPLAYSSM_FAMILY_KDA ? COLUMNS : 1;
    replayssm_delta_args a = REPLAYSSM_INIT(replayssm_delta_args);
    a.gate = REPLAYSSM_GATE_LOG_DECAY;
    a.q = tensor(input, GROUPS, COLUMNS);
    a.k = tensor(input + 256, GROUPS, COLUMNS);
    a.v = tensor(input + 512, HEADS, ROWS);
    a.g = tensor(input + 1024, HEADS, gates);
    a.beta = tensor(input + 768, HEADS, 1);
    a.out = tensor(out, HEADS, ROWS);
    if (extends) {
      WITH(replayssm_delta_args, a, replayssm_delta_extend(pool, 0, batch, &a, &exec));
    } else {
      WITH(replayssm_delta_args, a, replayssm_delta_step(pool, 0, batch, &a, &exec));
    }
  }
}

static replayssm_cursor cursor_of(const replayssm_slots *slots, const replayssm_list *list) {
  replayssm_cursor cursor;
  WORKS(replayssm_read_cursors(slots, list, &cursor, NULL));
  return cursor;
}
static int64_t position_of(const replayssm_slots *slots, const replayssm_list *list) { return cursor_of(slots, list).position; }

/* The life of a request in a pool of one family. */
static void live(replayssm_family family) {
  const int32_t first = 0, second = 1, third = 2;
  const int64_t at = TOKENS;
  const int32_t one = 1;
  uint64_t bytes = 0;
  int32_t n = 0, done = 0, id = -1;
  replayssm_slots *slots = NULL;
  replayssm_layers *pool = NULL;

  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  s.n_slots = SLOTS;
  s.window = 8;
  s.max_step_tokens = TOKENS;
  s.min_rewind = 2;
  replayssm_pool_desc p = pool_of(family);
  replayssm_plan_args plan = REPLAYSSM_INIT(replayssm_plan_args);
  replayssm_plan_info info = REPLAYSSM_INIT(replayssm_plan_info);
  WITH(replayssm_plan_args, plan, replayssm_plan(&s, &p, 1, &plan, &info));
  FILLS(replayssm_plan_info, info, replayssm_plan(&s, &p, 1, &plan, &info));
  REQUIRE(info.total_bytes > 0);
  WITH(replayssm_pool_desc, p, replayssm_supports(context, &p, 1));
  WITH(replayssm_slots_desc, s, replayssm_slots_create(context, &s, &slots));

  /* The first component's memory is this program's: arrays of structs, whose distance the caller's header says. */
  replayssm_component parts[COMPONENTS];
  memset(parts, 0, sizeof parts);
  parts[0].struct_size = (uint32_t)sizeof parts[0];
  WORKS(replayssm_plan_components(&s, &p, parts, COMPONENTS, &n));
  REQUIRE(n >= 2 && parts[0].kind != 0 && parts[1].kind != 0 && parts[1].bytes > 0);
  replayssm_lent lent[2];
  memset(lent, 0, sizeof lent);
  for (int i = 0; i < 2; i++) {
    lent[i].struct_size = (uint32_t)sizeof lent[i];
    lent[i].kind = parts[i].kind;
    lent[i].base = lendable + (i << 15);
    lent[i].slot_stride_bytes = (int64_t)((parts[i].bytes + 15) / 16 * 16);
    REQUIRE(lent[i].slot_stride_bytes * SLOTS <= 1 << 15);
  }
  WITH(replayssm_lent, lent[0], replayssm_layers_create(slots, &p, lent, 2, &pool));
  FILLS(replayssm_component, parts[0], replayssm_layers_components(pool, parts, COMPONENTS, &n));
  REQUIRE(parts[0].base == lendable && parts[1].base == lendable + (1 << 15));

  /* Start. */
  replayssm_list list = REPLAYSSM_INIT(replayssm_list), other = REPLAYSSM_INIT(replayssm_list);
  list.n = other.n = 1;
  list.place = other.place = REPLAYSSM_WHERE_HOST;
  list.slots = ids(&first);
  other.slots = ids(&second);
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  WITH(replayssm_list, list, replayssm_reset(slots, &list, NULL, NULL));
  WITH(replayssm_reset_args, reset, replayssm_reset(slots, &other, &reset, NULL));

  /* A prompt, and a step. */
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = 1;
  batch.tokens = TOKENS;
  batch.slots = ids(&first);
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  run(pool, family, &batch, output[0]);
  WORKS(replayssm_commit(slots, &batch, NULL, NULL));
  batch.flags = 0;
  run(pool, family, &batch, output[0]);
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  WITH(replayssm_commit_args, commit, replayssm_commit(slots, &batch, &commit, NULL));
  REQUIRE(position_of(slots, &list) == 2 * TOKENS);

  /* Behind a commit: its state in another slot. */
  const int64_t wanted = 2 * TOKENS;
  replayssm_snapshot_args snapshot = REPLAYSSM_INIT(replayssm_snapshot_args);
  snapshot.at = &wanted;
  snapshot.dst = ids(&third);
  WITH(replayssm_snapshot_args, snapshot, replayssm_snapshot(slots, &batch, &snapshot, NULL));

  /* Saved, and restored elsewhere: the same blob again, and both go on alike. */
  const uint32_t generation = cursor_of(slots, &list).generation;
  replayssm_restore_args restore = REPLAYSSM_INIT(replayssm_restore_args);
  restore.generation = &generation;
  for (replayssm_save_kind kind = REPLAYSSM_SAVE_LIVE; kind <= REPLAYSSM_SAVE_PORTABLE; kind++) {
    WORKS(replayssm_save_bytes(slots, kind, &bytes));
    REQUIRE(bytes > 0 && bytes <= sizeof blob[0]);
    WORKS(replayssm_save(slots, &list, kind, blob[0], bytes, NULL));
    WITH(replayssm_restore_args, restore, replayssm_restore(slots, &other, blob[0], bytes, &restore, NULL));
    WORKS(replayssm_save(slots, &other, kind, blob[1], bytes, NULL));
    REQUIRE(memcmp(blob[0], blob[1], bytes) == 0);
  }
  run(pool, family, &batch, output[0]);
  batch.slots = ids(&second);
  run(pool, family, &batch, output[1]);
  REQUIRE(memcmp(output[0], output[1], sizeof output[0]) == 0);

  /* Looked at, folded, taken back, copied. */
  replayssm_state dense = REPLAYSSM_INIT(replayssm_state);
  dense.dtype = REPLAYSSM_DTYPE_F32;
  dense.layer = -1;
  dense.data = state[0];
  WITH(replayssm_state, dense, replayssm_export(pool, &list, NULL, &dense, NULL));
  replayssm_flush_args flush = REPLAYSSM_INIT(replayssm_flush_args);
  WITH(replayssm_flush_args, flush, replayssm_flush(slots, &list, &flush, NULL));
  replayssm_copy_args copy = REPLAYSSM_INIT(replayssm_copy_args);
  copy.kind = REPLAYSSM_COPY_FORK;
  WITH(replayssm_copy_args, copy, replayssm_copy(slots, &list, &other, &copy, NULL));
  dense.data = state[1];
  WORKS(replayssm_export(pool, &other, NULL, &dense, NULL));
  REQUIRE(memcmp(state[0], state[1], sizeof state[0]) == 0);
  WORKS(replayssm_rewind(slots, &list, &one, &done, NULL));
  REQUIRE(done == 1 && position_of(slots, &list) == 2 * TOKENS - 1);
  WORKS(replayssm_import(pool, &list, &at, &dense, NULL));
  REQUIRE(position_of(slots, &list) == TOKENS);

  WORKS(replayssm_acquire(slots, 1, &id, NULL));
  REQUIRE(id >= 0 && id < SLOTS);
  WORKS(replayssm_release(slots, 1, &id));
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  FILLS(replayssm_report, report, replayssm_check(slots, 1, &report));
  REQUIRE(report.bits == 0);
  replayssm_stats stats = REPLAYSSM_INIT(replayssm_stats);
  FILLS(replayssm_stats, stats, replayssm_stats_read(slots, &stats));
  REQUIRE(stats.steps == 2 && stats.rows == 2);

  /* Destroyed in any order. */
  replayssm_slots_destroy(slots);
  replayssm_layers_destroy(pool);
  FAILS(REPLAYSSM_ERROR_INVALID_HANDLE, "destroyed", replayssm_stats_read(slots, &stats));
}

int main(void) {
  for (size_t i = 0; i < sizeof input / sizeof input[0]; i++) input[i] = (float)(i % 13) * 0.0625f;
  /* A, and log decays. */
  for (size_t i = 1024; i < 1024 + 256; i++) input[i] = -0.5f;
  REQUIRE(replayssm_version() >> 12 == REPLAYSSM_VERSION >> 12);
  replayssm_context_desc desc = REPLAYSSM_INIT(replayssm_context_desc);
  desc.backend = REPLAYSSM_BACKEND_CPU;
  desc.n_threads = 1;
  desc.log = heard;
  desc.log_user = &lines;
  desc.log_level = REPLAYSSM_LOG_INFO;
  WITH(replayssm_context_desc, desc, replayssm_context_create(&desc, &context));
  replayssm_context_info info = REPLAYSSM_INIT(replayssm_context_info);
  FILLS(replayssm_context_info, info, replayssm_context_query(context, &info));
  REQUIRE(info.backend == REPLAYSSM_BACKEND_CPU && info.n_threads == 1 && info.name[0] != '\0');
  for (replayssm_family family = REPLAYSSM_FAMILY_MAMBA2; family <= REPLAYSSM_FAMILY_CONV1D; family++) live(family);
  replayssm_context_destroy(context);
  REQUIRE(lines > 10 && strcmp(replayssm_status_string(REPLAYSSM_OK), "REPLAYSSM_OK") == 0);
  printf("life: %d checks of a program of %d.%d.%d\n", checks, REPLAYSSM_VERSION_MAJOR, REPLAYSSM_VERSION_MINOR,
         REPLAYSSM_VERSION_PATCH);
  return 0;
}
