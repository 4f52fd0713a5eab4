/* Snippets of docs/INTEGRATION.md: model steps, commits, rewinding. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "engine.h"

/* Tokens for three requests; no two alike, so that a mistake shows. */
static int32_t next_token = 1000;
static void sample(int32_t *tokens, int n) {
  for (int i = 0; i < n; i++) tokens[i] = next_token++;
}

int main(void) {
  engine e;
  request a, b, c;
  int32_t tokens[16];
  make_parameters();
  create(&e);
  start(&e, &a, 4, 0);
  start(&e, &b, 0, 1);
  start(&e, &c, 2, 2);

  for (int i = 0; i < 40; i++) {
    sample(tokens, 4);
    /* >>> batch */
    const int32_t row_slots[4] = {a.slot, b.slot, c.slot, -1}; /* -1: a padded row */
    const int32_t row_rings[4] = {a.ring, b.ring, c.ring, -1};
    replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
    batch.n_rows = 4;
    batch.tokens = 1; /* of every row */
    batch.slots = ids(row_slots);
    batch.rings = ids(row_rings);

    forward(&e, &batch, tokens, 4);                       /* every layer and convolution, with this one batch */
    check(replayssm_commit(e.slots, &batch, NULL, NULL)); /* once: every row moves by its tokens */
    /* <<< batch */
    for (int32_t j = 0; j < INNER; j++) REQUIRE(out[N_LAYERS - 1][3][j] == 0.0f && out[N_LAYERS - 1][0][j] != 0.0f);
    append(&a, tokens, 1);
    append(&b, tokens + 1, 1);
    append(&c, tokens + 2, 1);
  }
  expect_plain(&e, &a);
  expect_plain(&e, &b);
  expect_plain(&e, &c);

  for (int i = 0; i < 12; i++) {
    sample(tokens, 8);
    /* >>> packed */
    /* Rows of 4, 1 and 3 tokens: what was sampled last, and the drafts behind it. */
    const int32_t row_slots[3] = {a.slot, b.slot, c.slot}, row_rings[3] = {a.ring, b.ring, c.ring};
    const int32_t cu_seqlens[4] = {0, 4, 5, 8};
    replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
    batch.n_rows = 3;
    batch.slots = ids(row_slots);
    batch.rings = ids(row_rings);
    batch.cu_seqlens = cu_seqlens;
    batch.n_tokens = 8; /* token rows that your tensors have; cu_seqlens is clamped to it */

    forward(&e, &batch, tokens, 8);
    /* <<< packed */
    if (i % 4 == 0) forward(&e, &batch, tokens, 8); /* a repeated step changes nothing */
    const int32_t kept[3] = {1 + i % 4, 1, 1 + i % 3};
    if (i % 3 == 0) {
      const int32_t a_kept = kept[0], c_kept = kept[2];
      /* >>> accepted */
      const int32_t accepted[3] = {a_kept, 1, c_kept}; /* of each row, the sampled token included: 1 to its tokens */
      replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
      commit.convention = REPLAYSSM_COUNTS_ACCEPTED;
      commit.counts = accepted;
      check(replayssm_commit(e.slots, &batch, &commit, NULL));
      /* <<< accepted */
    } else if (i % 3 == 1) {
      const int32_t a_kept = kept[0], c_kept = kept[2];
      /* >>> drafts */
      const int32_t drafts[3] = {a_kept - 1, 0, c_kept - 1}; /* drafts accepted: the same less the sampled token */
      replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
      commit.convention = REPLAYSSM_COUNTS_ACCEPTED_DRAFTS;
      commit.counts = drafts;
      check(replayssm_commit(e.slots, &batch, &commit, NULL));
      /* <<< drafts */
    } else {
      const int32_t a_kept = kept[0], c_kept = kept[2];
      /* >>> rejected */
      const int32_t rejected[3] = {4 - a_kept, 0, 3 - c_kept}; /* tokens at the end of each row that are not to stay */
      replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
      commit.convention = REPLAYSSM_COUNTS_REJECTED;
      commit.counts = rejected;
      check(replayssm_commit(e.slots, &batch, &commit, NULL));
      /* <<< rejected */
    }
    append(&a, tokens, kept[0]);
    append(&b, tokens + 4, kept[1]);
    append(&c, tokens + 5, kept[2]);
  }
  expect_plain(&e, &a);
  expect_plain(&e, &b);
  expect_plain(&e, &c);

  /* Speculative outputs are those of one token after the other, by bytes: the readout is EXACT. */
  static float verified[T_MAX][INNER];
  sample(tokens, T_MAX);
  decode(&e, &a, tokens, T_MAX, 0);
  memcpy(verified, out[N_LAYERS - 1], sizeof verified);
  for (int32_t t = 0; t < T_MAX; t++) {
    decode(&e, &a, tokens + t, 1, 1);
    REQUIRE(memcmp(verified[t], out[N_LAYERS - 1][0], sizeof verified[t]) == 0);
  }

  const replayssm_list list = list_of(&a);
  int recompute = 0;
  /* >>> rewind */
  const int32_t n = 2; /* up to min_rewind tokens can always be taken back, if steps have committed them */
  const replayssm_status status = replayssm_rewind(e.slots, &list, &n, NULL, NULL);
  if (status == REPLAYSSM_ERROR_OUT_OF_RANGE) {
    recompute = 1; /* deeper than what is held: nothing has happened; begin the request again */
  } else {
    check(status);
  }
  /* <<< rewind */
  REQUIRE(!recompute);
  a.n -= n;
  expect_plain(&e, &a);
  for (int i = 0; i < 40; i++) { /* wherever the window is */
    sample(tokens, 3);
    for (int t = 0; t < 3; t++) decode(&e, &a, tokens + t, 1, 1);
    check(replayssm_rewind(e.slots, &list, &n, NULL, NULL));
    a.n -= n;
  }
  expect_plain(&e, &a);
  const int32_t too_many = a.n;
  REQUIRE(replayssm_rewind(e.slots, &list, &too_many, NULL, NULL) == REPLAYSSM_ERROR_OUT_OF_RANGE);
  expect_plain(&e, &a);

  /* One descriptor for every mix: what differs between steps is in the arrays. */
  int32_t slots_of[3] = {-1, -1, -1}, rings_of[3] = {-1, -1, -1}, ends[4] = {0, 0, 0, 0}, counts[3] = {0, 0, 0};
  /* >>> reuse */
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = 3;        /* the rows that the graph was captured with */
  batch.max_tokens = T_MAX;
  batch.n_tokens = 8;      /* the token rows that it was captured with */
  batch.slots = ids(slots_of);
  batch.rings = ids(rings_of);
  batch.cu_seqlens = ends;
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  commit.counts = counts;
  /* From here on only the contents of slots_of, rings_of, ends and counts change. */
  /* <<< reuse */
  sample(tokens, 8);
  slots_of[0] = b.slot, rings_of[0] = b.ring, ends[1] = ends[2] = ends[3] = 4, counts[0] = 3;
  forward(&e, &batch, tokens, 8);
  check(replayssm_commit(e.slots, &batch, &commit, NULL));
  append(&b, tokens, 3);
  slots_of[1] = c.slot, rings_of[1] = c.ring, ends[1] = 1, ends[2] = ends[3] = 3, counts[0] = 1, counts[1] = 2;
  forward(&e, &batch, tokens, 8);
  check(replayssm_commit(e.slots, &batch, &commit, NULL));
  append(&b, tokens, 1);
  append(&c, tokens + 1, 2);
  expect_plain(&e, &b);
  expect_plain(&e, &c);

  expect_faults(&e, 0);
  destroy(&e);
  puts("step: ok");
  return 0;
}
