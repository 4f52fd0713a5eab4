/* Every allocation of every call that allocates fails, one in turn, and all from one on: a call works, or it gives OUT_OF_MEMORY and a sentence;
 * nothing aborts, nothing is left behind, and with memory everything works again. The allocator is this program's, over glibc's.
 *
 * Each case runs in a process of its own, in which the library has done nothing yet. Contexts have no threads of their own: of the few
 * bytes with which one begins, Rust's standard library lets no failure out.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "replayssm.h"

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { ARMED_ONE, ARMED_ALL };
static atomic_int armed, mode, live;
static atomic_long until; /* allocations until one fails */
static atomic_long failures;

static int fails(void) {
  if (!atomic_load(&armed)) return 0;
  long left = atomic_fetch_sub(&until, 1);
  if (left > 0 || (left < 0 && atomic_load(&mode) == ARMED_ONE)) return 0;
  atomic_fetch_add(&failures, 1);
  errno = ENOMEM;
  return 1;
}

static void *counted(void *at) {
  if (at != NULL) atomic_fetch_add(&live, 1);
  return at;
}

void *malloc(size_t bytes) { return fails() ? NULL : counted(__libc_malloc(bytes)); }
void *calloc(size_t n, size_t bytes) { return fails() ? NULL : counted(__libc_calloc(n, bytes)); }
void *realloc(void *at, size_t bytes) {
  void *to;
  if (fails()) return NULL;
  to = __libc_realloc(at, bytes);
  return at == NULL ? counted(to) : to;
}
void *memalign(size_t alignment, size_t bytes) { return fails() ? NULL : counted(__libc_memalign(alignment, bytes)); }
void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void **at, size_t alignment, size_t bytes) {
  void *block = memalign(alignment, bytes);
  if (block == NULL) return ENOMEM;
  *at = block;
  return 0;
}
void free(void *at) {
  if (at != NULL) atomic_fetch_sub(&live, 1);
  __libc_free(at);
}

static const char *problem; /* of the case */

#define MUST(condition)                                     \
  do {                                                      \
    if (!(condition) && problem == NULL) problem = #condition; \
  } while (0)

static int refused;

/* A call that may find no memory. True if it worked. */
static int may_fail(replayssm_status status) {
  if (status == REPLAYSSM_OK) return 1;
  refused++;
  MUST(status == REPLAYSSM_ERROR_OUT_OF_MEMORY);
  MUST(strstr(replayssm_last_error_message(), "could not be allocated") != NULL);
  return 0;
}

enum { LAYERS = 3, SLOTS = 40 };
static _Alignas(64) char pages[LAYERS][SLOTS * 2048];
static char blob[1 << 20];

static void line(void *user, replayssm_log_level level, const char *text) {
  (void)level;
  *(int *)user += (strstr(text, " created") != NULL) - (strstr(text, " destroyed") != NULL);
}

enum { CALLS, PLAN, LARGE, PARTS };
static int part; /* of the program: all calls but the planner, the planner, or what is larger than the library's reserve */

enum { MANY_LAYERS = 40000, MANY_SECTIONS = 65536, MANY_POOLS = 4096, MANY_SHAPES = 6000 };

static void put(char *to, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; i++) to[i] = (char)(number >> 8 * i);
}

static replayssm_pool_desc many_pools[MANY_POOLS];
static int32_t many_sections[MANY_SECTIONS];
static char many_shapes[80 + 48 * MANY_SHAPES + 4]; /* a portable blob that is whole, for shapes that there are not */

static void describe_many(void) {
  const size_t all = sizeof many_shapes - 4;
  uint32_t sum = UINT32_MAX;
  int i;
  for (i = 0; i < MANY_SECTIONS; i++) many_sections[i] = 1;
  for (i = 0; i < MANY_POOLS; i++) {
    many_pools[i] = REPLAYSSM_INIT(replayssm_pool_desc);
    many_pools[i].family = REPLAYSSM_FAMILY_CONV1D, many_pools[i].io = REPLAYSSM_DTYPE_BF16;
    many_pools[i].n_layers = 1, many_pools[i].channels = 1, many_pools[i].width = 2;
  }
  memcpy(many_shapes, "RSSMBLOB", 8);
  put(many_shapes + 8, 1, 4), put(many_shapes + 12, REPLAYSSM_SAVE_PORTABLE, 4);
  put(many_shapes + 16, sizeof many_shapes, 8), put(many_shapes + 68, MANY_SHAPES, 4);
  for (size_t bit = 0; bit < 8 * all; bit++) {
    sum = sum >> 1 ^ (0xEDB88320u & -((sum ^ (uint32_t)many_shapes[bit / 8] >> bit % 8) & 1));
  }
  put(many_shapes + all, ~sum, 4);
}

/* Lists of many layers, sections, pools and shapes. */
static void large(replayssm_slots_desc *s, replayssm_list *list) {
  static char saved[1 << 24];
  replayssm_pool_desc many = many_pools[0];
  replayssm_slots *slots = NULL;
  replayssm_layers *layers = NULL;
  replayssm_context *context = NULL;
  replayssm_plan_info plan = REPLAYSSM_INIT(replayssm_plan_info);
  replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
  uint64_t bytes = 0;
  int i;
  c.n_threads = 1;
  may_fail(replayssm_plan(s, many_pools, MANY_POOLS, NULL, &plan));
  many.channels = many.n_sections = MANY_SECTIONS, many.section_channels = many_sections;
  may_fail(replayssm_plan(s, &many, 1, NULL, &plan));
  many = many_pools[0];
  many.n_layers = MANY_LAYERS;
  s->n_slots = s->n_rings = 2;
  if (may_fail(replayssm_context_create(&c, &context)) && may_fail(replayssm_slots_create(context, s, &slots)) &&
      may_fail(replayssm_layers_create(slots, &many, NULL, 0, &layers))) {
    for (i = 0; i < 2; i++) {
      const replayssm_save_kind kind = i == 0 ? REPLAYSSM_SAVE_LIVE : REPLAYSSM_SAVE_PORTABLE;
      if (may_fail(replayssm_save_bytes(slots, kind, &bytes)) &&
          may_fail(replayssm_save(slots, list, kind, saved, sizeof saved, NULL))) {
        may_fail(replayssm_restore(slots, list, saved, bytes, NULL, NULL));
      }
    }
    const replayssm_status status = replayssm_restore(slots, list, many_shapes, sizeof many_shapes, NULL, NULL);
    MUST(strstr(replayssm_last_error_message(), "number of shapes") != NULL || !may_fail(status));
  }
  replayssm_layers_destroy(layers);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
}

/* All calls that allocate, as far as they get; whatever was created is destroyed. True if all of them worked. */
static int everything(void) {
  replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_pool_desc p[3] = {REPLAYSSM_INIT(replayssm_pool_desc), REPLAYSSM_INIT(replayssm_pool_desc), REPLAYSSM_INIT(replayssm_pool_desc)};
  replayssm_lent lent = REPLAYSSM_INIT(replayssm_lent);
  replayssm_plan_info plan = REPLAYSSM_INIT(replayssm_plan_info);
  replayssm_list list = REPLAYSSM_INIT(replayssm_list);
  replayssm_restore_args restore = REPLAYSSM_INIT(replayssm_restore_args);
  replayssm_context *context = NULL;
  replayssm_slots *slots = NULL, *none = NULL;
  replayssm_layers *pools[3] = {NULL, NULL, NULL};
  replayssm_component components[16];
  void *bases[LAYERS];
  int32_t sections[2] = {12, 8}, id = 1, n;
  uint64_t bytes = 0;
  int said = 0; /* to be there */
  char text[4000];
  int i;
  refused = 0;
  c.backend = REPLAYSSM_BACKEND_CPU;
  c.n_threads = 1;
  c.log = line;
  c.log_user = &said;
  c.log_level = REPLAYSSM_LOG_INFO;
  s.n_slots = s.n_rings = SLOTS;
  s.window = 8;
  s.max_step_tokens = 2;
  for (i = 0; i < 3; i++) p[i].n_layers = LAYERS, p[i].io = REPLAYSSM_DTYPE_BF16;
  p[0].family = REPLAYSSM_FAMILY_MAMBA2, p[0].nheads = 2, p[0].headdim = 16, p[0].dstate = 8, p[0].ngroups = 1;
  p[1].family = REPLAYSSM_FAMILY_KDA, p[1].H = p[1].HV = 2, p[1].K = p[1].V = 8;
  p[2].family = REPLAYSSM_FAMILY_CONV1D, p[2].channels = 20, p[2].width = 4, p[2].n_sections = 2, p[2].section_channels = sections;
  for (i = 0; i < LAYERS; i++) bases[i] = pages[i];
  lent.kind = REPLAYSSM_COMPONENT_CHECKPOINT;
  lent.layer_bases = bases;
  lent.slot_stride_bytes = 2048;
  list.n = 1;
  list.slots.data = list.rings.data = &id;
  list.slots.dtype = list.rings.dtype = REPLAYSSM_DTYPE_I32;
  list.slots.stride = list.rings.stride = 1;
  list.place = REPLAYSSM_WHERE_HOST;
  components[0].struct_size = sizeof components[0];

  /* The planner makes and drops a hundred thousand small blocks: apart. */
  if (part == LARGE) {
    large(&s, &list);
    return refused == 0;
  }
  if (part == PLAN) {
    may_fail(replayssm_plan(&s, p, 3, NULL, &plan));
    return refused == 0;
  }
  may_fail(replayssm_plan_components(&s, &p[1], components, 16, &n));
  if (may_fail(replayssm_context_create(&c, &context)) && may_fail(replayssm_slots_create(context, &s, &slots))) {
    /* The first one's checkpoints are lent, layer by layer. */
    for (i = 0; i < 3; i++) {
      MUST(may_fail(replayssm_layers_create(slots, &p[i], &lent, i == 0, &pools[i])) == (pools[i] != NULL));
    }
    if (pools[0] != NULL) {
      may_fail(replayssm_layers_rebind(pools[0], &lent, 1));
      may_fail(replayssm_layers_components(pools[0], components, 16, &n));
      may_fail(replayssm_explain(pools[0], 2, 1, text, sizeof text));
    }
    if (may_fail(replayssm_reset(slots, &list, NULL, NULL)) && may_fail(replayssm_save_bytes(slots, REPLAYSSM_SAVE_LIVE, &bytes)) &&
        may_fail(replayssm_save(slots, &list, REPLAYSSM_SAVE_LIVE, blob, sizeof blob, NULL))) {
      may_fail(replayssm_restore(slots, &list, blob, bytes, &restore, NULL));
    }
  }
  /* Sentences take words. */
  MUST(replayssm_slots_create(context, NULL, &none) != REPLAYSSM_OK && replayssm_last_error_message()[0] != 0);
  p[0].headdim = -7;
  MUST(replayssm_supports(context, &p[0], 1) != REPLAYSSM_OK && replayssm_last_error_message()[0] != 0);
  for (i = 0; i < 3; i++) replayssm_layers_destroy(pools[i]);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
  MUST(said == 0);
  return refused == 0;
}

/* One case: how many allocations work, and whether all behind them fail or one does. Exits with 0, or 1 once there is none left to fail. */
static void run(long k, int all) {
  int before, after, often, i;
  atomic_store(&until, k);
  atomic_store(&mode, all ? ARMED_ALL : ARMED_ONE);
  atomic_store(&armed, 1);
  MUST(everything() || atomic_load(&failures) > 0);
  atomic_store(&armed, 0);
  if (problem == NULL && atomic_load(&failures) == 0) _exit(1);
  /* Once more, with memory: what stays now stays once. */
  before = atomic_load(&live);
  MUST(everything());
  after = atomic_load(&live);
  for (often = 0; often < 3; often++) {
    MUST(everything());
    MUST(atomic_load(&live) == after);
  }
  /* And without any a second time: nothing of it stays. */
  for (i = 0; i < 3; i++) {
    atomic_store(&until, k);
    atomic_store(&armed, 1);
    everything();
    atomic_store(&armed, 0);
    MUST(atomic_load(&live) == after);
  }
  if (problem != NULL) {
    fprintf(stderr, "no memory: %s allocation %ld, %d blocks before, %d after: %s\n", all ? "from" : "at", k, before, after, problem);
    _exit(2);
  }
  _exit(0);
}

int main(void) {
  long cases = 0;
  int all, status;
  describe_many();
  for (part = 0; part < PARTS; part++)
    for (all = 0; all <= 1; all++) {
      long k;
      for (k = 0;; k += part == CALLS ? 1 : part == PLAN ? 1 + k / 4 : 1 + k, cases++) {
        pid_t child = fork();
        if (child == 0) run(k, all);
        if (child < 0 || waitpid(child, &status, 0) != child) return 3;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 1) break;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
          fprintf(stderr, "no memory: %s allocation %ld: %s %d\n", all ? "from" : "at", k,
                  WIFSIGNALED(status) ? "signal" : "status", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
          return 1;
        }
      }
      /* Not a check of nothing. */
      if (k < 30) return 4;
    }
  printf("no memory: %ld cases\n", cases);
  return 0;
}
