/* A panic inside the library arrives as a status. Runs against a library built with the feature fault-injection, whose
 * contexts can be told to panic in a commit; with "released" as an argument, against one without it.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "replayssm.h"

static replayssm_slots *slots;

static int panics(void) {
  static const int32_t ids[1] = {0};
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = batch.tokens = 1;
  batch.slots.data = ids;
  batch.slots.dtype = REPLAYSSM_DTYPE_I32;
  for (int i = 0; i < 3; i++) {
    if (replayssm_commit(slots, &batch, NULL, NULL) != REPLAYSSM_ERROR_INTERNAL) return 0;
    if (strncmp(replayssm_last_error_message(), "internal error: ", 16) != 0) return 0;
  }
  return 1;
}

static void *other_thread(void *argument) {
  (void)argument;
  return panics() ? &slots : NULL;
}

/* A work item that panics on a thread of the library's pool, and again on the caller's thread. */
static int workers_panic(void) {
  static int32_t ids[64];
  static float tensor[64 * 64];
  const int32_t n_threads[2] = {2, 1};
  for (int i = 0; i < 2; i++) {
    replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
    replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
    replayssm_pool_desc p = REPLAYSSM_INIT(replayssm_pool_desc);
    replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
    replayssm_mamba2_args args = REPLAYSSM_INIT(replayssm_mamba2_args);
    replayssm_tensor t = {tensor, 64, 0, 0, REPLAYSSM_DTYPE_F32, 0};
    replayssm_context *context = NULL;
    replayssm_slots *many = NULL;
    replayssm_layers *layers = NULL;
    c.flags = 1u << 30;
    c.n_threads = n_threads[i];
    s.n_slots = 64;
    p.family = REPLAYSSM_FAMILY_MAMBA2;
    p.n_layers = p.nheads = p.ngroups = 1;
    p.headdim = p.dstate = 64;
    p.io = REPLAYSSM_DTYPE_F32;
    if (replayssm_context_create(&c, &context) != REPLAYSSM_OK) return 0;
    if (replayssm_slots_create(context, &s, &many) != REPLAYSSM_OK) return 0;
    if (replayssm_layers_create(many, &p, NULL, 0, &layers) != REPLAYSSM_OK) return 0;
    for (int id = 0; id < 64; id++) ids[id] = id;
    batch.n_rows = 64;
    batch.tokens = 1;
    batch.slots.data = ids;
    batch.slots.dtype = REPLAYSSM_DTYPE_I32;
    args.x = args.B = args.C = args.dt = args.A = args.out = t;
    if (replayssm_mamba2_step(layers, 0, &batch, &args, NULL) != REPLAYSSM_ERROR_INTERNAL) return 0;
    if (strncmp(replayssm_last_error_message(), "internal error: ", 16) != 0) return 0;
    replayssm_layers_destroy(layers);
    replayssm_slots_destroy(many);
    replayssm_context_destroy(context);
  }
  return 1;
}

int main(int argc, char **argv) {
  replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_slots_desc s = REPLAYSSM_INIT(replayssm_slots_desc);
  replayssm_stats stats = REPLAYSSM_INIT(replayssm_stats);
  replayssm_context *context = NULL;
  pthread_t thread;
  void *passed = NULL;
  c.flags = 1u << 31;
  s.n_slots = 1;
  if (argc > 1 && strcmp(argv[1], "released") == 0) {
    if (replayssm_context_create(&c, &context) != REPLAYSSM_ERROR_UNSUPPORTED || context != NULL) return 1;
    puts("panic: refused");
    return 0;
  }
  if (replayssm_context_create(&c, &context) != REPLAYSSM_OK) return 2;
  if (replayssm_slots_create(context, &s, &slots) != REPLAYSSM_OK) return 3;
  if (!panics()) return 4;
  if (pthread_create(&thread, NULL, other_thread, NULL) != 0 || pthread_join(thread, &passed) != 0) return 5;
  if (passed == NULL) return 6;
  /* The process and the library go on. */
  if (replayssm_stats_read(slots, &stats) != REPLAYSSM_OK || stats.steps != 0) return 7;
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
  if (replayssm_stats_read(slots, &stats) != REPLAYSSM_ERROR_INVALID_HANDLE) return 8;
  if (!workers_panic()) return 9;
  puts("panic: ok");
  return 0;
}
