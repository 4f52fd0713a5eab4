/* Sizes and trailing bytes of every descriptor; every field of what creates objects.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "misuse.h"

static const void *described; /* the descriptor that the call at hand is to use */

static replayssm_status with_context_desc(void) {
  replayssm_context *made = context;
  replayssm_status status = replayssm_context_create((const replayssm_context_desc *)described, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__FILE__, __LINE__, "context_create", "out-parameter and status disagree");
  replayssm_context_destroy(made);
  return status;
}
static replayssm_status with_slots_desc(void) {
  replayssm_slots *made = slots;
  replayssm_status status = replayssm_slots_create(context, (const replayssm_slots_desc *)described, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__FILE__, __LINE__, "slots_create", "out-parameter and status disagree");
  replayssm_slots_destroy(made);
  return status;
}
static replayssm_status create_pool(const replayssm_pool_desc *desc, const replayssm_lent *lent, int32_t n) {
  replayssm_layers *made = mamba;
  replayssm_status status = replayssm_layers_create(slots, desc, lent, n, &made);
  if ((status == REPLAYSSM_OK) != (made != NULL)) fail(__FILE__, __LINE__, "layers_create", "out-parameter and status disagree");
  replayssm_layers_destroy(made);
  return status;
}
static replayssm_status with_pool_desc(void) { return create_pool((const replayssm_pool_desc *)described, NULL, 0); }
static replayssm_status with_supports(void) {
  return replayssm_supports(context, (const replayssm_pool_desc *)described, 1);
}
static replayssm_status with_lent(void) {
  replayssm_pool_desc d = good_mamba();
  return create_pool(&d, (const replayssm_lent *)described, 1);
}
static replayssm_status with_batch(void) {
  replayssm_mamba2_args a = good_args();
  return replayssm_mamba2_step(mamba, 0, (const replayssm_batch *)described, &a, NULL);
}
static replayssm_status with_commit_batch(void) {
  return replayssm_commit(slots, (const replayssm_batch *)described, NULL, NULL);
}
static replayssm_status with_args(void) {
  replayssm_batch b = good_batch();
  return replayssm_mamba2_step(mamba, 0, &b, (const replayssm_mamba2_args *)described, NULL);
}
static replayssm_status with_conv_args(void) {
  replayssm_batch b = good_batch();
  return replayssm_conv1d_step(conv, 0, &b, (const replayssm_conv1d_args *)described, NULL);
}
static replayssm_status with_delta_args(void) {
  replayssm_batch b = good_batch();
  return replayssm_delta_step(delta, 0, &b, (const replayssm_delta_args *)described, NULL);
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
static replayssm_status with_flush_args(void) {
  replayssm_list l = good_list();
  return replayssm_flush(slots, &l, (const replayssm_flush_args *)described, NULL);
}
static replayssm_status with_copy_args(void) {
  replayssm_list src = good_list(), dst = good_list();
  src.n = dst.n = 1;
  dst.slots.data = two_slots + 1;
  return replayssm_copy(slots, &src, &dst, (const replayssm_copy_args *)described, NULL);
}
static replayssm_status with_snapshot_args(void) {
  replayssm_batch b = good_batch();
  return replayssm_snapshot(slots, &b, (const replayssm_snapshot_args *)described, NULL);
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
  CHECK(n == (status == REPLAYSSM_OK ? 5 : -1));
  return status;
}

static replayssm_status with_planned_component(void) {
  replayssm_slots_desc s = good_slots();
  replayssm_pool_desc p = good_mamba();
  int32_t n = -1;
  replayssm_status status = replayssm_plan_components(&s, &p, (replayssm_component *)(uintptr_t)described, 8, &n);
  CHECK(n == (status == REPLAYSSM_OK ? 5 : -1));
  return status;
}
static replayssm_plan_info planned = {0};
static replayssm_status with_planned_slots(void) {
  replayssm_pool_desc p = good_mamba();
  planned.struct_size = sizeof planned;
  return replayssm_plan((const replayssm_slots_desc *)described, &p, 1, NULL, &planned);
}
static replayssm_status with_planned_pool(void) {
  replayssm_slots_desc s = good_slots();
  planned.struct_size = sizeof planned;
  return replayssm_plan(&s, (const replayssm_pool_desc *)described, 1, NULL, &planned);
}
static replayssm_status with_plan_args(void) {
  replayssm_slots_desc s = good_slots();
  planned.struct_size = sizeof planned;
  return replayssm_plan(&s, NULL, 0, (const replayssm_plan_args *)described, &planned);
}
static replayssm_status with_plan_info(void) {
  replayssm_slots_desc s = good_slots();
  return replayssm_plan(&s, NULL, 0, NULL, (replayssm_plan_info *)(uintptr_t)described);
}
static unsigned char saved[1 << 20];
static replayssm_status with_saved_list(void) {
  return replayssm_save(slots, (const replayssm_list *)described, REPLAYSSM_SAVE_LIVE, saved, sizeof saved, NULL);
}
static replayssm_status with_restore_args(void) {
  replayssm_list l = good_list();
  uint64_t bytes = 0;
  l.n = 1;
  if (replayssm_save_bytes(slots, REPLAYSSM_SAVE_LIVE, &bytes) != REPLAYSSM_OK) return REPLAYSSM_ERROR_INTERNAL;
  if (replayssm_save(slots, &l, REPLAYSSM_SAVE_LIVE, saved, sizeof saved, NULL) != REPLAYSSM_OK) return REPLAYSSM_ERROR_INTERNAL;
  return replayssm_restore(slots, &l, saved, bytes, (const replayssm_restore_args *)described, NULL);
}

/* first: the size of the descriptor's first version. */
static void descriptor(const char *name, const void *good, size_t size, size_t first, bool optional, bool output,
                       replayssm_status (*call)(void)) {
  static union {
    uint64_t alignment;
    unsigned char bytes[1 << 17];
  } at;
  char field[80], offset[80];
  const uint32_t known = (uint32_t)size;
  const uint32_t wrong[] = {0, 1, 3, (uint32_t)first - 4, known - 1, known + 1, 1 << 17, UINT32_MAX};
  snprintf(field, sizeof field, "%s.struct_size", name);
#define CASE(new_size)                             \
  (memset(at.bytes, 0, sizeof at),                 \
   memcpy(at.bytes, good, size),                   \
   memcpy(at.bytes, &(uint32_t){(new_size)}, 4),   \
   described = at.bytes)
  (void)CASE(known);
  WORKS(call());
  /* An older header: what lies behind the caller's size is not looked at. */
  (void)CASE((uint32_t)first);
  memset(at.bytes + first, 0x5A, 64);
  WORKS(call());
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    (void)CASE(wrong[i]);
    FAILS(REPLAYSSM_ERROR_INVALID_ARGUMENT, field, call());
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
    if (call != with_component && call != with_planned_component) {
      for (size_t i = 0; i < 8; i++) CHECK(at.bytes[size + i] == 0);
      CHECK(at.bytes[size + 8] == 0x5A);
    }
  } else {
    for (uint32_t i = 0; i < 8; i++) {
      (void)CASE(known + 8);
      at.bytes[size + i] = 1;
      snprintf(offset, sizeof offset, "offset %" PRIu32 " of %s", known + i, name);
      FAILS(REPLAYSSM_ERROR_UNSUPPORTED, offset, call());
    }
  }
#undef CASE
  memcpy(at.bytes + 2, good, size);
  described = at.bytes + 2;
  FAILS(REPLAYSSM_ERROR_INVALID_ARGUMENT, "aligned", call());
  CHECK(strstr(replayssm_last_error_message(), name) != NULL);
  described = NULL;
  if (optional) {
    WORKS(call());
  } else {
    FAILS(REPLAYSSM_ERROR_INVALID_ARGUMENT, name, call());
  }
}

#define DESCRIPTOR(type, good, optional, call)                           \
  do {                                                                   \
    type value = good;                                                   \
    descriptor(#type, &value, sizeof value, sizeof value, (optional), false, (call));  \
  } while (0)
#define OUT_DESCRIPTOR(type, call)                                 \
  do {                                                             \
    type value = REPLAYSSM_INIT(type);                             \
    descriptor(#type, &value, sizeof value, sizeof value, false, true, (call));  \
  } while (0)

/* Memory for any one component of the test's pool. */
static _Alignas(16) unsigned char lendable[1 << 16];

static replayssm_lent good_lent(void) {
  replayssm_lent l = REPLAYSSM_INIT(replayssm_lent);
  l.kind = REPLAYSSM_COMPONENT_CHECKPOINT;
  l.base = lendable;
  return l;
}

void descriptors(void) {
  DESCRIPTOR(replayssm_context_desc, REPLAYSSM_INIT(replayssm_context_desc), true, with_context_desc);
  DESCRIPTOR(replayssm_slots_desc, good_slots(), false, with_slots_desc);
  DESCRIPTOR(replayssm_pool_desc, good_mamba(), false, with_pool_desc);
  DESCRIPTOR(replayssm_pool_desc, good_mamba(), false, with_supports);
  DESCRIPTOR(replayssm_lent, good_lent(), false, with_lent);
  DESCRIPTOR(replayssm_batch, good_batch(), false, with_batch);
  DESCRIPTOR(replayssm_batch, good_batch(), false, with_commit_batch);
  DESCRIPTOR(replayssm_mamba2_args, good_args(), false, with_args);
  DESCRIPTOR(replayssm_conv1d_args, good_conv_args(), false, with_conv_args);
  DESCRIPTOR(replayssm_pool_desc, good_delta(), false, with_pool_desc);
  DESCRIPTOR(replayssm_delta_args, good_delta_args(), false, with_delta_args);
  DESCRIPTOR(replayssm_exec, REPLAYSSM_INIT(replayssm_exec), true, with_exec);
  DESCRIPTOR(replayssm_commit_args, REPLAYSSM_INIT(replayssm_commit_args), true, with_commit_args);
  DESCRIPTOR(replayssm_list, good_list(), false, with_list);
  DESCRIPTOR(replayssm_flush_args, REPLAYSSM_INIT(replayssm_flush_args), true, with_flush_args);
  DESCRIPTOR(replayssm_copy_args, REPLAYSSM_INIT(replayssm_copy_args), true, with_copy_args);
  DESCRIPTOR(replayssm_snapshot_args, good_snapshot(), false, with_snapshot_args);
  DESCRIPTOR(replayssm_reset_args, REPLAYSSM_INIT(replayssm_reset_args), true, with_reset_args);
  DESCRIPTOR(replayssm_state, good_state(), false, with_state);
  OUT_DESCRIPTOR(replayssm_context_info, with_info);
  OUT_DESCRIPTOR(replayssm_report, with_report);
  OUT_DESCRIPTOR(replayssm_stats, with_stats);
  OUT_DESCRIPTOR(replayssm_component, with_component);
  OUT_DESCRIPTOR(replayssm_component, with_planned_component);
  DESCRIPTOR(replayssm_slots_desc, good_slots(), false, with_planned_slots);
  DESCRIPTOR(replayssm_pool_desc, good_mamba(), false, with_planned_pool);
  DESCRIPTOR(replayssm_plan_args, REPLAYSSM_INIT(replayssm_plan_args), true, with_plan_args);
  OUT_DESCRIPTOR(replayssm_plan_info, with_plan_info);
  replayssm_list one = good_list();
  one.n = 1;
  DESCRIPTOR(replayssm_list, one, false, with_saved_list);
  DESCRIPTOR(replayssm_restore_args, REPLAYSSM_INIT(replayssm_restore_args), true, with_restore_args);
}

static replayssm_status create_context(const replayssm_context_desc *d) {
  described = d;
  return with_context_desc();
}
static replayssm_status create_slots(const replayssm_slots_desc *d) {
  described = d;
  return with_slots_desc();
}

/* What a pool is refused for, replayssm_supports refuses with the same words, and what is not, it does not. */
static replayssm_status create_and_ask(const replayssm_pool_desc *d) {
  char sentence[512];
  replayssm_status created = create_pool(d, NULL, 0);
  snprintf(sentence, sizeof sentence, "%s", replayssm_last_error_message());
  replayssm_status supported = replayssm_supports(context, d, 1);
  CHECK(supported == created);
  CHECK(strcmp(sentence, replayssm_last_error_message()) == 0);
  return created;
}

#define BAD_CONTEXT(assignment, status, word) \
  SPOIL(replayssm_context_desc, REPLAYSSM_INIT(replayssm_context_desc), assignment, status, word, create_context(&d))
#define BAD_SLOTS(assignment, status, word) \
  SPOIL(replayssm_slots_desc, good_slots(), assignment, status, word, create_slots(&d))
#define BAD_MAMBA(assignment, status, word) \
  SPOIL(replayssm_pool_desc, good_mamba(), assignment, status, word, create_and_ask(&d))
#define BAD_DELTA(assignment, status, word) \
  SPOIL(replayssm_pool_desc, good_delta(), assignment, status, word, create_and_ask(&d))
#define BAD_CONV(assignment, status, word) \
  SPOIL(replayssm_pool_desc, good_conv(), assignment, status, word, create_and_ask(&d))

void creation(void) {
  BAD_CONTEXT(backend = 7, UNSUPPORTED, "context_desc.backend");
  BAD_CONTEXT(backend = -1, UNSUPPORTED, "context_desc.backend");
  BAD_CONTEXT(backend = REPLAYSSM_BACKEND_CUDA, REPLAYSSM_ERROR_NO_CUDA, "context_desc.backend");
  BAD_CONTEXT(device = 1, INVALID, "context_desc.device");
  BAD_CONTEXT(n_threads = -1, INVALID, "context_desc.n_threads");
  BAD_CONTEXT(n_threads = INT32_MAX, INVALID, "context_desc.n_threads");
  BAD_CONTEXT(flags = 1, UNSUPPORTED, "context_desc.flags");
  BAD_CONTEXT(flags = 1u << 31, UNSUPPORTED, "context_desc.flags");
  BAD_CONTEXT(reserved = 1, UNSUPPORTED, "context_desc.reserved");
  BAD_CONTEXT(log_level = -1, UNSUPPORTED, "context_desc.log_level");
  BAD_CONTEXT(log_level = 3, UNSUPPORTED, "context_desc.log_level");
  BAD_CONTEXT(log_level = REPLAYSSM_LOG_INFO, INVALID, "context_desc.log is NULL");
  BAD_CONTEXT(log_reserved = 1, UNSUPPORTED, "context_desc.log_reserved");

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
  BAD_SLOTS(flags = 2, UNSUPPORTED, "slots_desc.flags");

  BAD_MAMBA(family = 0, INVALID, "pool_desc.family");
  BAD_MAMBA(family = REPLAYSSM_FAMILY_GDN, INVALID, "pool_desc.nheads");
  BAD_MAMBA(family = REPLAYSSM_FAMILY_KDA, INVALID, "pool_desc.nheads");
  BAD_MAMBA(family = 99, UNSUPPORTED, "pool_desc.family");
  BAD_MAMBA(n_layers = 0, INVALID, "pool_desc.n_layers");
  BAD_MAMBA(n_layers = -1, INVALID, "pool_desc.n_layers");
  BAD_MAMBA(n_layers = INT32_MAX, UNSUPPORTED, "pool_desc.n_layers");
  BAD_MAMBA(io = 0, INVALID, "pool_desc.io");
  BAD_MAMBA(io = REPLAYSSM_DTYPE_I32, INVALID, "pool_desc.io");
  BAD_MAMBA(io = 4, UNSUPPORTED, "pool_desc.io");
  BAD_MAMBA(out = -1, UNSUPPORTED, "pool_desc.out");
  BAD_MAMBA(format = 5, UNSUPPORTED, "pool_desc.format");
  BAD_MAMBA(readout = 4, UNSUPPORTED, "pool_desc.readout");
  BAD_MAMBA(readout = REPLAYSSM_READOUT_HIGH, INVALID, "pool_desc.readout");
  BAD_MAMBA(stochastic_rounding = 1, INVALID, "pool_desc.stochastic_rounding");
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

  BAD_DELTA(family = REPLAYSSM_FAMILY_MAMBA2, INVALID, "pool_desc.H");
  BAD_DELTA(H = 0, INVALID, "pool_desc.H");
  BAD_DELTA(H = -1, INVALID, "pool_desc.H");
  BAD_DELTA(H = INT32_MAX, UNSUPPORTED, "pool_desc.H");
  BAD_DELTA(H = 3, INVALID, "pool_desc.HV");
  BAD_DELTA(H = 8, INVALID, "pool_desc.HV");
  BAD_DELTA(HV = 0, INVALID, "pool_desc.HV");
  BAD_DELTA(HV = 5, INVALID, "pool_desc.HV is 5; expected a multiple of H, which is 2");
  BAD_DELTA(HV = INT32_MIN, INVALID, "pool_desc.HV");
  BAD_DELTA(HV = INT32_MAX, UNSUPPORTED, "pool_desc.HV");
  BAD_DELTA(K = 0, INVALID, "pool_desc.K");
  BAD_DELTA(K = 257, UNSUPPORTED, "pool_desc.K");
  BAD_DELTA(K = INT32_MIN, INVALID, "pool_desc.K");
  BAD_DELTA(V = 0, INVALID, "pool_desc.V");
  BAD_DELTA(V = 257, UNSUPPORTED, "pool_desc.V");
  BAD_DELTA(V = INT32_MAX, UNSUPPORTED, "pool_desc.V");
  BAD_DELTA(head_map = 2, UNSUPPORTED, "pool_desc.head_map");
  BAD_DELTA(head_map = -1, UNSUPPORTED, "pool_desc.head_map");
  BAD_DELTA(u_dtype = REPLAYSSM_DTYPE_F16, UNSUPPORTED, "pool_desc.u_dtype");
  BAD_DELTA(u_dtype = REPLAYSSM_DTYPE_BF16, INVALID, "pool_desc.u_dtype");
  BAD_DELTA(u_dtype = REPLAYSSM_DTYPE_I64, INVALID, "pool_desc.u_dtype");
  BAD_DELTA(u_dtype = 99, UNSUPPORTED, "pool_desc.u_dtype");
  BAD_DELTA(io = REPLAYSSM_DTYPE_I32, INVALID, "pool_desc.io");
  BAD_DELTA(out = 4, UNSUPPORTED, "pool_desc.out");
  BAD_DELTA(format = 5, UNSUPPORTED, "pool_desc.format");
  BAD_DELTA(format = -1, UNSUPPORTED, "pool_desc.format");
  BAD_DELTA(readout = 4, UNSUPPORTED, "pool_desc.readout");
  BAD_DELTA(readout = -1, UNSUPPORTED, "pool_desc.readout");
  BAD_DELTA(readout = REPLAYSSM_READOUT_HIGH, INVALID, "pool_desc.readout");
  BAD_DELTA(readout = REPLAYSSM_READOUT_HIGH; d.format = REPLAYSSM_FORMAT_F16, INVALID, "pool_desc.readout");
  BAD_DELTA(stochastic_rounding = 1, INVALID, "pool_desc.stochastic_rounding");
  BAD_DELTA(stochastic_rounding = 2; d.format = REPLAYSSM_FORMAT_BF16, UNSUPPORTED, "pool_desc.stochastic_rounding");
  BAD_DELTA(nheads = 1, INVALID, "pool_desc.nheads");
  BAD_DELTA(headdim = 1, INVALID, "pool_desc.headdim");
  BAD_DELTA(dstate = 1, INVALID, "pool_desc.dstate");
  BAD_DELTA(ngroups = 1, INVALID, "pool_desc.ngroups");
  BAD_DELTA(channels = 1, INVALID, "pool_desc.channels");
  BAD_DELTA(width = 4, INVALID, "pool_desc.width");
  BAD_DELTA(n_sections = 1, INVALID, "pool_desc.section_channels");
  BAD_DELTA(reserved = 1, UNSUPPORTED, "pool_desc.reserved");

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
  FAILS(REPLAYSSM_ERROR_OUT_OF_MEMORY, "a pool", replayssm_layers_create(huge, &d, NULL, 0, &layers));
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
  FAILS(INVALID, "out is", replayssm_context_create(NULL, (replayssm_context **)ODD(&layers)));
}

#define BAD_LENT(assignment, status, word) \
  SPOIL(replayssm_lent, good_lent(), assignment, status, word, create_pool(&pool, &d, 1))

void lending(void) {
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
  BAD_LENT(offset_bytes = -16, INVALID, "lent[0].offset_bytes");
  BAD_LENT(offset_bytes = 8, INVALID, "lent[0].base");
  void *bases[LAYERS] = {lendable, lendable + 32768}, *same[LAYERS] = {lendable, lendable}, *none[LAYERS] = {lendable, NULL};
  BAD_LENT(layer_bases = bases, INVALID, "lent[0].base is 0x");
#define BAD_BASES(assignment, word)                      \
  do {                                                   \
    replayssm_lent l = good_lent();                      \
    l.base = NULL;                                       \
    l.layer_bases = bases;                               \
    l.assignment;                                        \
    FAILS(INVALID, word, create_pool(&pool, &l, 1));     \
  } while (0)
  BAD_BASES(layer_bases = NULL, "lent[0].base is 0x0");
  BAD_BASES(layer_bases = same, "lent[0].layer_bases");
  BAD_BASES(layer_bases = none, "lent[0].layer_bases[1] is 0x0");
  BAD_BASES(layer_bases = (void *const *)(uintptr_t)ODD(bases), "lent.layer_bases is");
  BAD_BASES(layer_stride_bytes = 1024, "lent[0].layer_stride_bytes");
  BAD_BASES(offset_bytes = 8, "lent[0].layer_bases[0]");
  FAILS(INVALID, "lent[0].kind is Checkpoint; expected a component that was lent at create",
        replayssm_layers_rebind(mamba, (replayssm_lent[]){good_lent()}, 1));
  FAILS(INVALID, "n_lent", replayssm_layers_rebind(mamba, NULL, -1));
  replayssm_lent twice[2] = {good_lent(), good_lent()};
  FAILS(INVALID, "lent[1].kind", create_pool(&pool, twice, 2));
  FAILS(INVALID, "n_lent", create_pool(&pool, twice, -1));
  FAILS(INVALID, "n_lent", create_pool(&pool, twice, INT32_MAX));
  FAILS(INVALID, "replayssm_lent", create_pool(&pool, NULL, 1));
}
