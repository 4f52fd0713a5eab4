/* Snippets of docs/INTEGRATION.md: planning, blobs for preemption and for other machines. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "engine.h"

static int32_t next_token = 900;

static void run(const engine *e, request *r, int steps) {
  for (int i = 0; i < steps; i++) {
    int32_t tokens[T_MAX];
    const int32_t n = 1 + i % T_MAX, accepted = 1 + (i / 2) % n;
    for (int t = 0; t < T_MAX; t++) tokens[t] = next_token++;
    decode(e, r, tokens, n, accepted);
  }
}

/* How many requests of Qwen3.5-4B fit, with steps of one sampled token and three drafts. */
static void planning(void) {
  /* >>> plan */
  replayssm_pool_desc pools[2] = {REPLAYSSM_INIT(replayssm_pool_desc), REPLAYSSM_INIT(replayssm_pool_desc)};
  pools[0].family = REPLAYSSM_FAMILY_GDN;
  pools[0].n_layers = 24;
  pools[0].io = REPLAYSSM_DTYPE_BF16;
  pools[0].H = 16, pools[0].HV = 32, pools[0].K = 128, pools[0].V = 128;
  pools[1].family = REPLAYSSM_FAMILY_CONV1D;
  pools[1].n_layers = 24;
  pools[1].io = REPLAYSSM_DTYPE_BF16;
  pools[1].channels = 8192, pools[1].width = 4;

  replayssm_slots_desc slots = REPLAYSSM_INIT(replayssm_slots_desc);
  slots.n_slots = 1;
  slots.max_step_tokens = 4;
  replayssm_plan_args args = REPLAYSSM_INIT(replayssm_plan_args);
  args.batch = 64;
  args.budget_bytes = (uint64_t)16 << 30;
  replayssm_plan_info info = REPLAYSSM_INIT(replayssm_plan_info);
  check(replayssm_plan(&slots, pools, 2, &args, &info)); /* no context, nothing is created */
  slots.window = info.recommended_window;                /* fewest bytes per step; rings grow with it */
  check(replayssm_plan(&slots, pools, 2, &args, &info));
  slots.n_slots = (int32_t)info.slots_in_budget;
  printf("%lld requests, where a state per draft token leaves room for %lld\n", (long long)info.slots_in_budget,
         (long long)info.slots_in_budget_state_per_draft);
  /* <<< plan */
  REQUIRE(info.slots_in_budget > 3 * info.slots_in_budget_state_per_draft);
  check(replayssm_plan(&slots, pools, 2, &args, &info));
  REQUIRE(info.total_bytes <= args.budget_bytes);

  /* >>> plan_components */
  replayssm_component parts[16] = {REPLAYSSM_INIT(replayssm_component)};
  int32_t n = 0;
  check(replayssm_plan_components(&slots, &pools[0], parts, 16, &n)); /* to lay out pages before the pool exists */
  for (int32_t i = 0; i < n; i++)
    printf("component %d: %llu bytes of a layer and %s\n", (int)parts[i].kind, (unsigned long long)parts[i].bytes,
           parts[i].per_ring ? "ring" : "slot");
  /* <<< plan_components */
  REQUIRE(n == 8);
}

/* A request makes room in the middle of its window, and goes on elsewhere as if nothing had been. */
static void offload(const engine *e) {
  request r, other;
  start(e, &r, 2, 1);
  run(e, &r, 21);
  const replayssm_list list = list_of(&r);
  /* >>> offload */
  uint64_t bytes; /* the same for every request of these pools */
  check(replayssm_save_bytes(e->slots, REPLAYSSM_SAVE_LIVE, &bytes));
  void *blob = malloc(bytes);
  REQUIRE(blob != NULL);
  check(replayssm_save(e->slots, &list, REPLAYSSM_SAVE_LIVE, blob, bytes, NULL)); /* waits for the stream; never in a capture */
  /* <<< offload */
  start(e, &other, 2, 1);
  run(e, &other, 7);
  r.slot = 5, r.ring = 3, r.generation = 9;
  const replayssm_list there = list_of(&r);
  /* >>> reload */
  replayssm_restore_args args = REPLAYSSM_INIT(replayssm_restore_args);
  args.generation = &r.generation; /* late commits of the slot's last owner do nothing */
  check(replayssm_restore(e->slots, &there, blob, bytes, &args, NULL)); /* any slot and ring */
  /* <<< reload */
  free(blob);
  REQUIRE(position_of(e, &r) == r.n);
  run(e, &r, 20);
  expect_plain(e, &r);
  expect_plain(e, &other);
}

/* Another machine's engine: other slots, window, format and schedule. */
static void create_elsewhere(engine *e) {
  check(replayssm_context_create(NULL, &e->context));
  replayssm_slots_desc slots = REPLAYSSM_INIT(replayssm_slots_desc);
  slots.n_slots = N_SLOTS;
  slots.max_step_tokens = T_MAX;
  slots.window = 40;
  slots.schedule = REPLAYSSM_SCHEDULE_BY_POSITION;
  check(replayssm_slots_create(e->context, &slots, &e->slots));
  replayssm_pool_desc mamba = REPLAYSSM_INIT(replayssm_pool_desc);
  mamba.family = REPLAYSSM_FAMILY_MAMBA2;
  mamba.n_layers = N_LAYERS;
  mamba.io = REPLAYSSM_DTYPE_F32;
  mamba.format = REPLAYSSM_FORMAT_F32;
  mamba.readout = REPLAYSSM_READOUT_EXACT;
  mamba.nheads = NHEADS, mamba.headdim = HEADDIM, mamba.dstate = DSTATE, mamba.ngroups = NGROUPS;
  check(replayssm_layers_create(e->slots, &mamba, NULL, 0, &e->mamba));
  replayssm_pool_desc conv = REPLAYSSM_INIT(replayssm_pool_desc);
  conv.family = REPLAYSSM_FAMILY_CONV1D;
  conv.n_layers = N_LAYERS;
  conv.io = REPLAYSSM_DTYPE_F32;
  conv.channels = CHANNELS, conv.width = WIDTH;
  check(replayssm_layers_create(e->slots, &conv, NULL, 0, &e->conv));
}

static unsigned char wire[1 << 20];

static void hand_over(const engine *here, const engine *elsewhere) {
  request r;
  start(here, &r, 4, 2);
  run(here, &r, 13);
  const replayssm_list list = list_of(&r);
  /* >>> send */
  uint64_t bytes;
  check(replayssm_save_bytes(here->slots, REPLAYSSM_SAVE_PORTABLE, &bytes));
  REQUIRE(bytes <= sizeof wire);
  check(replayssm_save(here->slots, &list, REPLAYSSM_SAVE_PORTABLE, wire, sizeof wire, NULL));
  /* <<< send */
  wire[bytes / 2] ^= 4;
  r.slot = 1, r.ring = 6;
  const replayssm_list there = list_of(&r);
  /* >>> receive */
  replayssm_status status = replayssm_restore(elsewhere->slots, &there, wire, bytes, NULL, NULL);
  if (status == REPLAYSSM_ERROR_BAD_BLOB) { /* cut off, changed on its way, or of another model: the slot is as it was */
    puts(replayssm_last_error_message());
    /* ask for it again, or take the tokens in by an extend */
  }
  /* <<< receive */
  REQUIRE(status == REPLAYSSM_ERROR_BAD_BLOB);
  wire[bytes / 2] ^= 4;
  check(replayssm_restore(elsewhere->slots, &there, wire, bytes, NULL, NULL));
  REQUIRE(position_of(elsewhere, &r) == r.n);
  run(elsewhere, &r, 20);
  expect_plain(elsewhere, &r);
}

int main(void) {
  engine here, elsewhere;
  make_parameters();
  create(&here);
  create_elsewhere(&elsewhere);
  planning();
  offload(&here);
  hand_over(&here, &elsewhere);
  expect_faults(&here, 0);
  expect_faults(&elsewhere, 0);
  destroy(&here);
  destroy(&elsewhere);
  puts("handover: ok");
  return 0;
}
