/* Snippets of docs/INTEGRATION.md: preemption, prefixes, forks, late commits, faults. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "engine.h"

static int32_t next_token = 5000;

/* Some steps of 1 to 4 tokens with rejected drafts. */
static void run(const engine *e, request *r, int steps) {
  for (int i = 0; i < steps; i++) {
    int32_t tokens[T_MAX];
    const int32_t n = 1 + i % T_MAX, accepted = 1 + (i / 2) % n;
    for (int t = 0; t < T_MAX; t++) tokens[t] = next_token++;
    decode(e, r, tokens, n, accepted);
  }
}

static void preemption(const engine *e) {
  request r;
  static saved parked;
  start(e, &r, 2, 1);
  run(e, &r, 20);
  save(e, &r, NULL, &parked);
  /* The slot and the ring serve another request; this one comes back elsewhere. */
  request other;
  start(e, &other, 2, 1);
  run(e, &other, 7);
  r.slot = 5, r.ring = 3, r.generation = 9;
  restore(e, &r, &parked);
  REQUIRE(position_of(e, &r) == r.n);
  run(e, &r, 20);
  expect_plain(e, &r);
  expect_plain(e, &other);
}

/* A checkpoint without a ring: the state stays in its slot while the ring serves another request. */
static void parking(const engine *e) {
  request r, other;
  const int32_t tokens[12] = {81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92};
  static saved window;
  start(e, &r, 5, 3);
  run(e, &r, 3);
  prompt(e, &r, tokens, 12); /* folds everything: the checkpoint stands at the position */
  save(e, &r, NULL, &window);
  start(e, &other, 2, 3);
  run(e, &other, 20);
  r.ring = 0, r.generation = 7;
  const replayssm_list list = list_of(&r);
  const int64_t position = window.position;
  float *last_inputs = window.windows;
  /* >>> unpark */
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.position = &position; /* where the checkpoint of the slot stands */
  reset.generation = &r.generation;
  reset.keep_checkpoint = 1;
  check(replayssm_reset(e->slots, &list, &reset, NULL)); /* the old slot with any free ring */
  replayssm_state windows = REPLAYSSM_INIT(replayssm_state);
  windows.dtype = REPLAYSSM_DTYPE_F32;
  windows.layer = -1;
  windows.data = last_inputs; /* exported when the request was parked: windows belong to the ring */
  check(replayssm_import(e->conv, &list, NULL, &windows, NULL));
  /* <<< unpark */
  run(e, &r, 20);
  expect_plain(e, &r);
  expect_plain(e, &other);
}

static void prefixes(const engine *e) {
  request r, s;
  int32_t tokens[T_MAX];
  static saved prefix;
  start(e, &r, 0, 0);
  run(e, &r, 10);
  while (position_of(e, &r) < 48) {
    const int64_t before = position_of(e, &r);
    for (int t = 0; t < T_MAX; t++) tokens[t] = next_token++;
    decode(e, &r, tokens, T_MAX, T_MAX);
    /* >>> prefix */
    /* Right after a commit, every position that it has passed is held: those from `before`, where the request stood, on. */
    const int64_t boundary = 48, after = position_of(e, &r);
    if (before < boundary && boundary <= after) {
      save(e, &r, &boundary, &prefix); /* replayssm_export with `at` in every pool */
    }
    /* <<< prefix */
    REQUIRE(after != boundary); /* it lies inside a step */
  }
  REQUIRE(prefix.position == 48);
  /* Another request with the same beginning. */
  memset(&s, 0, sizeof s);
  s.slot = 4, s.ring = 2, s.generation = 3;
  restore(e, &s, &prefix);
  append(&s, r.tokens, 48);
  expect_plain(e, &s);
  run(e, &s, 10);
  expect_plain(e, &s);
  expect_plain(e, &r);

  /* A position behind the checkpoint is not held: the export leaves the buffer alone and sets a bit. */
  const int64_t long_ago = 1;
  static saved untouched;
  untouched.states[0] = 7.0f;
  save(e, &r, &long_ago, &untouched);
  REQUIRE(untouched.states[0] == 7.0f);
  expect_faults(e, REPLAYSSM_FAULT_POSITION);
}

/* Of a real cache: 512. */
enum { BLOCK = 16 };

/* Slots of checkpoints without a ring. */
static void cached_prefixes(const engine *e) {
  request r, s;
  const int32_t cached = 6;
  start(e, &r, 0, 0);
  run(e, &r, 5);
  const int32_t first = r.n;
  while (r.n < (first / BLOCK + 1) * BLOCK) {
    int32_t tokens[T_MAX];
    const int32_t accepted = 3;
    const int64_t before = r.n;
    for (int t = 0; t < T_MAX; t++) tokens[t] = next_token++;
    replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
    batch.n_rows = 1;
    batch.tokens = T_MAX;
    batch.slots = ids(&r.slot);
    batch.rings = ids(&r.ring);
    forward(e, &batch, tokens, T_MAX);
    replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
    commit.counts = &accepted;
    /* >>> snapshot */
    check(replayssm_commit(e->slots, &batch, &commit, NULL));
    const int64_t end = (before / BLOCK + 1) * BLOCK; /* the next end of a block of tokens; -1: nothing is wanted of a row */
    replayssm_snapshot_args snapshot = REPLAYSSM_INIT(replayssm_snapshot_args);
    snapshot.at = &end;           /* [n_rows] in the context's memory */
    snapshot.dst = ids(&cached);  /* [n_rows]: a slot without a ring for each */
    check(replayssm_snapshot(e->slots, &batch, &snapshot, NULL)); /* the state there, if this commit has reached it */
    /* <<< snapshot */
    append(&r, tokens, accepted);
  }
  /* Another request with the same beginning. */
  const int64_t end = (first / BLOCK + 1) * BLOCK;
  memset(&s, 0, sizeof s);
  s.slot = 4, s.ring = 2, s.generation = 3;
  /* >>> load */
  replayssm_list from = REPLAYSSM_INIT(replayssm_list);
  from.n = 1;
  from.place = REPLAYSSM_WHERE_HOST;
  from.slots = ids(&cached); /* it stays as it is, for the next one */
  const replayssm_list to = list_of(&s);
  replayssm_copy_args load = REPLAYSSM_INIT(replayssm_copy_args);
  load.kind = REPLAYSSM_COPY_LOAD;
  load.position = &end; /* where it stands; anything else sets FAULT_POSITION */
  load.generation = &s.generation;
  check(replayssm_copy(e->slots, &from, &to, &load, NULL));
  /* <<< load */
  append(&s, r.tokens, (int32_t)end);
  expect_plain(e, &s);
  run(e, &s, 10);
  expect_plain(e, &s);
  expect_plain(e, &r);
}

/* A request that has to make room for another one: its state waits in a slot, and its ring serves the other. */
static void parking_by_copy(const engine *e) {
  request r, other;
  const int32_t parked = 5;
  start(e, &r, 2, 1);
  run(e, &r, 15);
  const replayssm_list live = list_of(&r);
  /* >>> store */
  replayssm_list slot = REPLAYSSM_INIT(replayssm_list);
  slot.n = 1;
  slot.place = REPLAYSSM_WHERE_HOST;
  slot.slots = ids(&parked);
  replayssm_copy_args store = REPLAYSSM_INIT(replayssm_copy_args);
  store.kind = REPLAYSSM_COPY_STORE; /* all committed tokens, folded; later LOAD, with the position */
  check(replayssm_copy(e->slots, &live, &slot, &store, NULL));
  /* <<< store */
  start(e, &other, 2, 1);
  run(e, &other, 9);
  const int64_t position = r.n;
  r.slot = 3, r.ring = 0;
  const replayssm_list back = list_of(&r);
  replayssm_copy_args load = REPLAYSSM_INIT(replayssm_copy_args);
  load.kind = REPLAYSSM_COPY_LOAD;
  load.position = &position;
  check(replayssm_copy(e->slots, &slot, &back, &load, NULL));
  run(e, &r, 12);
  expect_plain(e, &r);
  expect_plain(e, &other);
}

/* One prompt, several continuations. */
static void forks(const engine *e) {
  request r, beams[2];
  start(e, &r, 0, 0);
  run(e, &r, 13);
  beams[0] = beams[1] = r;
  beams[0].slot = 1, beams[0].ring = 1;
  beams[1].slot = 5, beams[1].ring = 2;
  /* >>> fork */
  const int32_t sources[2] = {r.slot, r.slot}, of_sources[2] = {r.ring, r.ring};
  const int32_t targets[2] = {beams[0].slot, beams[1].slot}, of_targets[2] = {beams[0].ring, beams[1].ring};
  replayssm_list from = REPLAYSSM_INIT(replayssm_list);
  from.n = 2;
  from.place = REPLAYSSM_WHERE_HOST;
  from.slots = ids(sources), from.rings = ids(of_sources);
  replayssm_list to = from;
  to.slots = ids(targets), to.rings = ids(of_targets);
  check(replayssm_copy(e->slots, &from, &to, NULL, NULL)); /* NULL: a fork; the source goes on too */
  /* <<< fork */
  run(e, &beams[0], 9);
  run(e, &r, 7);
  run(e, &beams[1], 8);
  expect_plain(e, &r);
  expect_plain(e, &beams[0]);
  expect_plain(e, &beams[1]);
  /* Folds: what the next steps would have to do. */
  const replayssm_list list = list_of(&r);
  /* >>> flush */
  check(replayssm_flush(e->slots, &list, NULL, NULL)); /* all but min_rewind tokens, in all layers */
  /* <<< flush */
  run(e, &r, 5);
  expect_plain(e, &r);
}

static void late_commits(const engine *e) {
  request r, newcomer;
  int32_t tokens[4] = {21, 22, 23, 24};
  start(e, &r, 3, 3);
  run(e, &r, 9);
  r.generation = 17;
  const replayssm_list list = list_of(&r);
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.generation = &r.generation;
  check(replayssm_reset(e->slots, &list, &reset, NULL));
  r.n = 0;

  const int32_t slot = r.slot, ring = r.ring;
  /* >>> generation */
  const uint32_t generation = r.generation; /* as the ring's last reset has set it */
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = 1;
  batch.tokens = 4;
  batch.slots = ids(&slot);
  batch.rings = ids(&ring);
  batch.generation = &generation; /* [n_rows]: the commit skips rows whose ring has been reset since */
  forward(e, &batch, tokens, 4);
  /* <<< generation */

  /* The request is aborted, and its places go to a newcomer, before the commit comes. */
  start(e, &newcomer, 3, 3);
  prompt(e, &newcomer, tokens, 2);
  check(replayssm_commit(e->slots, &batch, NULL, NULL));
  REQUIRE(position_of(e, &newcomer) == 2);
  run(e, &newcomer, 12);
  expect_plain(e, &newcomer);
}

static void free_list(const engine *e) {
  /* >>> acquire */
  int32_t id;
  uint32_t generation;
  const replayssm_status status = replayssm_acquire(e->slots, 1, &id, &generation);
  if (status == REPLAYSSM_ERROR_OUT_OF_RANGE) return; /* none is free */
  check(status);
  /* ... reset the slot and ring `id` with this generation, run the request, and then: */
  check(replayssm_release(e->slots, 1, &id));
  /* <<< acquire */
  int32_t all[N_RINGS + 1];
  REQUIRE(replayssm_acquire(e->slots, N_RINGS + 1, all, NULL) == REPLAYSSM_ERROR_OUT_OF_RANGE);
}

static void faults(const engine *e) {
  request r;
  int32_t tokens[2] = {31, 32};
  start(e, &r, 1, 1);
  run(e, &r, 9);
  int faulty = 0;
  /* A commit count beyond the row, which a sampler on a device might have computed. */
  const int32_t slot = r.slot, ring = r.ring, wrong = 3;
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = 1;
  batch.tokens = 2;
  batch.slots = ids(&slot);
  batch.rings = ids(&ring);
  forward(e, &batch, tokens, 2);
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  commit.counts = &wrong;
  check(replayssm_commit(e->slots, &batch, &commit, NULL));
  append(&r, tokens, 2);
  /* >>> faults */
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  check(replayssm_check(e->slots, 1, &report)); /* 1: and forget it. Does not wait for the device */
  if (report.bits != 0) {
    fprintf(stderr, "replayssm: faults %#x, %llu times; first: id %lld, row %lld, pool %d, layer %d\n", (unsigned)report.bits,
            (unsigned long long)report.count, (long long)report.first_slot, (long long)report.first_row,
            (int)report.first_pool, (int)report.first_layer);
    faulty = 1;
  }
  /* <<< faults */
  REQUIRE(faulty && report.bits == REPLAYSSM_FAULT_COUNT && report.count == 1 && report.first_slot == 1 && report.first_row == 0);
  expect_plain(e, &r); /* clamped: both tokens are in */
  expect_faults(e, 0);
}

int main(void) {
  engine e;
  make_parameters();
  create(&e);
  preemption(&e);
  parking(&e);
  prefixes(&e);
  cached_prefixes(&e);
  parking_by_copy(&e);
  forks(&e);
  late_commits(&e);
  free_list(&e);
  faults(&e);
  expect_faults(&e, 0);
  destroy(&e);
  puts("life: ok");
  return 0;
}
