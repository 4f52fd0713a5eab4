/* What the snippets of docs/INTEGRATION.md take for granted: a toy model with a convolution and a Mamba-2 mixer in each layer,
 * and a comparison with the plain update. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Text between ">>> name" and "<<< name" stands in a document; tests/docs.rs compares. */
#ifndef SNIPPETS_ENGINE_H
#define SNIPPETS_ENGINE_H

#include <replayssm.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* >>> check */
static inline void check(replayssm_status status) {
  if (status == REPLAYSSM_OK) return;
  fprintf(stderr, "%s: %s\n", replayssm_status_string(status), replayssm_last_error_message());
  exit(1);
}
/* <<< check */

#define REQUIRE(condition) require((condition), #condition, __FILE__, __LINE__)
static inline void require(int condition, const char *what, const char *file, int line) {
  if (condition) return;
  fprintf(stderr, "%s:%d: %s is not true\n", file, line, what);
  exit(1);
}

enum {
  N_LAYERS = 2, NHEADS = 4, HEADDIM = 20, DSTATE = 32, NGROUPS = 2, WIDTH = 4,
  INNER = NHEADS * HEADDIM,
  BC = NGROUPS * DSTATE,
  CHANNELS = INNER + 2 * BC,
  PROJECTED = CHANNELS + NHEADS + INNER, /* x, B, C, dt, z of a token */
  STATE_SIZE = INNER * DSTATE,
  WINDOW_SIZE = CHANNELS * (WIDTH - 1),
  N_SLOTS = 8, N_RINGS = 5, T_MAX = 4, MIN_REWIND = 2,
  REFERENCE_SLOT = N_SLOTS - 1, REFERENCE_RING = N_RINGS - 1,
  MAX_TOKENS = 256
};

typedef struct engine {
  replayssm_context *context;
  replayssm_slots *slots;
  replayssm_layers *mamba, *conv;
} engine;

/* A request of the engine: its tokens, and where its state is. */
typedef struct request {
  int32_t slot, ring;
  uint32_t generation;
  int32_t n;
  int32_t tokens[MAX_TOKENS];
} request;

/* The state of a request outside the library: all layers. */
typedef struct saved {
  int64_t position;
  float states[N_LAYERS * STATE_SIZE], windows[N_LAYERS * WINDOW_SIZE];
} saved;

/* Activations, and the parameters of each layer. */
static float projected[MAX_TOKENS][PROJECTED], xBC[MAX_TOKENS][CHANNELS], out[N_LAYERS][MAX_TOKENS][INNER];
static float A[N_LAYERS][NHEADS], dt_bias[N_LAYERS][NHEADS], D[N_LAYERS][NHEADS];
static float conv_weight[N_LAYERS][CHANNELS][WIDTH], conv_bias[N_LAYERS][CHANNELS];

static inline float number(uint32_t *seed, float low, float high) {
  *seed = *seed * 1664525u + 1013904223u;
  return low + (high - low) * (float)(*seed >> 8) * (1.0f / 16777216.0f);
}

static inline void make_parameters(void) {
  uint32_t seed = 1;
  for (int layer = 0; layer < N_LAYERS; layer++) {
    for (int h = 0; h < NHEADS; h++) {
      A[layer][h] = number(&seed, -8.0f, -0.5f);
      dt_bias[layer][h] = number(&seed, -4.0f, -1.0f);
      D[layer][h] = number(&seed, -1.0f, 1.0f);
    }
    for (int c = 0; c < CHANNELS; c++) {
      conv_bias[layer][c] = number(&seed, -0.1f, 0.1f);
      for (int i = 0; i < WIDTH; i++) conv_weight[layer][c][i] = number(&seed, -0.7f, 0.7f);
    }
  }
}

/* Stands for a layer's in-projection: what a token becomes depends on the token alone. */
static inline void project(int32_t layer, const int32_t *tokens, int32_t n) {
  for (int32_t t = 0; t < n; t++) {
    uint32_t seed = (uint32_t)tokens[t] * 2654435761u + (uint32_t)layer;
    for (int i = 0; i < PROJECTED; i++) projected[t][i] = number(&seed, -2.0f, 2.0f);
  }
}

/* >>> views */
/* Strides are in elements: from row to row of the batch, from token to token, from head (or group) to head. */
static inline replayssm_tensor view(float *data, int64_t row, int64_t token, int64_t head) {
  replayssm_tensor tensor = {data, row, token, head, REPLAYSSM_DTYPE_F32, 0};
  return tensor;
}
static inline replayssm_tensor parameter(float *data, int64_t head) { return view(data, 0, 0, head); }

static inline replayssm_ids ids(const int32_t *data) {
  replayssm_ids array = {data, 1, REPLAYSSM_DTYPE_I32, 0};
  return array;
}
/* <<< views */

static inline void create(engine *e) {
  /* >>> create */
  check(replayssm_context_create(NULL, &e->context)); /* CUDA on this thread's current context, or the CPU */

  replayssm_slots_desc slots = REPLAYSSM_INIT(replayssm_slots_desc);
  slots.n_slots = N_SLOTS;        /* checkpoints: of running requests, and of what you keep for later */
  slots.n_rings = N_RINGS;        /* requests that run at once; 0 = n_slots */
  slots.max_step_tokens = T_MAX;  /* the longest step: one sampled token and three drafts */
  slots.min_rewind = MIN_REWIND;  /* committed tokens that can always be taken back */
  check(replayssm_slots_create(e->context, &slots, &e->slots));

  replayssm_pool_desc mamba = REPLAYSSM_INIT(replayssm_pool_desc);
  mamba.family = REPLAYSSM_FAMILY_MAMBA2;
  mamba.n_layers = N_LAYERS; /* equal layers; a model has as many pools as it has kinds of layers */
  mamba.io = REPLAYSSM_DTYPE_F32;  /* of x, B, C, z; gates and parameters carry their own dtype */
  mamba.readout = REPLAYSSM_READOUT_EXACT;
  mamba.nheads = NHEADS, mamba.headdim = HEADDIM, mamba.dstate = DSTATE, mamba.ngroups = NGROUPS;
  check(replayssm_layers_create(e->slots, &mamba, NULL, 0, &e->mamba));

  replayssm_pool_desc conv = REPLAYSSM_INIT(replayssm_pool_desc);
  conv.family = REPLAYSSM_FAMILY_CONV1D;
  conv.n_layers = N_LAYERS;
  conv.io = REPLAYSSM_DTYPE_F32;
  conv.channels = CHANNELS, conv.width = WIDTH;
  check(replayssm_layers_create(e->slots, &conv, NULL, 0, &e->conv));
  /* <<< create */
}

static inline void destroy(engine *e) {
  /* >>> destroy */
  replayssm_context_destroy(e->context); /* in any order: children keep their parents */
  replayssm_slots_destroy(e->slots);
  replayssm_layers_destroy(e->mamba); /* frees its memory: no call may be inside it */
  replayssm_layers_destroy(e->conv);
  /* <<< destroy */
}

/* Runs every recurrent layer over the batch's n tokens, which lie one behind the other. */
static inline void forward(const engine *e, const replayssm_batch *batch, const int32_t *tokens, int32_t n) {
  const int extend = (batch->flags & REPLAYSSM_BATCH_EXTEND) != 0;
  /* >>> layers */
  for (int32_t layer = 0; layer < N_LAYERS; layer++) {
    project(layer, tokens, n); /* your matrix product leaves x | B | C | dt | z of a token side by side */
    const int64_t T = batch->tokens, wide = PROJECTED, narrow = CHANNELS; /* with cu_seqlens, row strides are not read */

    replayssm_conv1d_args conv = REPLAYSSM_INIT(replayssm_conv1d_args);
    conv.x = view(projected[0], T * wide, wide, 0);
    conv.out = view(xBC[0], T * narrow, narrow, 0);
    conv.weight = parameter(conv_weight[layer][0], WIDTH);
    conv.bias = parameter(conv_bias[layer], 1);
    check((extend ? replayssm_conv1d_extend : replayssm_conv1d_step)(e->conv, layer, batch, &conv, NULL));

    replayssm_mamba2_args ssm = REPLAYSSM_INIT(replayssm_mamba2_args);
    ssm.x = view(xBC[0], T * narrow, narrow, HEADDIM);
    ssm.B = view(xBC[0] + INNER, T * narrow, narrow, DSTATE);
    ssm.C = view(xBC[0] + INNER + BC, T * narrow, narrow, DSTATE);
    ssm.dt = view(projected[0] + CHANNELS, T * wide, wide, 1); /* one element per head */
    ssm.z = view(projected[0] + CHANNELS + NHEADS, T * wide, wide, HEADDIM);
    ssm.A = parameter(A[layer], 1);
    ssm.dt_bias = parameter(dt_bias[layer], 1);
    ssm.D = parameter(D[layer], 1);
    ssm.out = view(out[layer][0], T * INNER, INNER, HEADDIM);
    check((extend ? replayssm_mamba2_extend : replayssm_mamba2_step)(e->mamba, layer, batch, &ssm, NULL));
  }
  /* <<< layers */
}

static inline replayssm_list list_of(const request *r) {
  /* >>> list */
  replayssm_list list = REPLAYSSM_INIT(replayssm_list);
  list.n = 1;
  list.place = REPLAYSSM_WHERE_HOST; /* ids and all per-entry arrays are read before the call returns */
  list.slots = ids(&r->slot);
  list.rings = ids(&r->ring);
  /* <<< list */
  return list;
}

/* Reads the state of a request, at its position or (at) at another one that is held. */
static inline void save(const engine *e, const request *r, const int64_t *at, saved *to) {
  const replayssm_list list = list_of(r);
  /* >>> save */
  replayssm_cursor cursor;
  check(replayssm_read_cursors(e->slots, &list, &cursor, NULL));
  to->position = at ? *at : cursor.position;

  replayssm_state state = REPLAYSSM_INIT(replayssm_state);
  state.dtype = REPLAYSSM_DTYPE_F32;
  state.layer = -1; /* all layers; every pool in a call of its own, convolutions too */
  state.data = to->states;
  check(replayssm_export(e->mamba, &list, at, &state, NULL));
  state.data = to->windows;
  check(replayssm_export(e->conv, &list, at, &state, NULL));
  /* <<< save */
}

/* Begins a request with a saved state. */
static inline void restore(const engine *e, const request *r, saved *from) {
  const replayssm_list list = list_of(r);
  /* >>> restore */
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.position = &from->position;
  reset.generation = &r->generation;
  check(replayssm_reset(e->slots, &list, &reset, NULL)); /* first the reset, which empties every pool's part */

  replayssm_state state = REPLAYSSM_INIT(replayssm_state);
  state.dtype = REPLAYSSM_DTYPE_F32;
  state.layer = -1;
  state.data = from->states;
  check(replayssm_import(e->mamba, &list, NULL, &state, NULL)); /* NULL: at the position that the reset has set */
  state.data = from->windows;
  check(replayssm_import(e->conv, &list, NULL, &state, NULL));
  /* <<< restore */
}

static inline int64_t position_of(const engine *e, const request *r) {
  const replayssm_list list = list_of(r);
  replayssm_cursor cursor;
  check(replayssm_read_cursors(e->slots, &list, &cursor, NULL));
  return cursor.position;
}

/* Begins an empty request. */
static inline void start(const engine *e, request *r, int32_t slot, int32_t ring) {
  memset(r, 0, sizeof *r);
  r->slot = slot, r->ring = ring, r->generation = 1;
  const replayssm_list list = list_of(r);
  replayssm_reset_args reset = REPLAYSSM_INIT(replayssm_reset_args);
  reset.generation = &r->generation;
  check(replayssm_reset(e->slots, &list, &reset, NULL));
}

static inline void append(request *r, const int32_t *tokens, int32_t n) {
  REQUIRE(r->n + n <= MAX_TOKENS);
  memcpy(r->tokens + r->n, tokens, (size_t)n * sizeof *tokens);
  r->n += n;
}

/* Takes a prompt in, chunk for chunk. */
static inline void prompt(const engine *e, request *r, const int32_t *tokens, int32_t n) {
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  batch.n_rows = 1;
  batch.tokens = n;
  batch.slots = ids(&r->slot);
  batch.rings = ids(&r->ring);
  forward(e, &batch, tokens, n);
  check(replayssm_commit(e->slots, &batch, NULL, NULL));
  append(r, tokens, n);
}

/* One row of n tokens, of which the first `accepted` are committed. */
static inline void decode(const engine *e, request *r, const int32_t *tokens, int32_t n, int32_t accepted) {
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  batch.n_rows = 1;
  batch.tokens = n;
  batch.slots = ids(&r->slot);
  batch.rings = ids(&r->ring);
  forward(e, &batch, tokens, n);
  replayssm_commit_args commit = REPLAYSSM_INIT(replayssm_commit_args);
  commit.counts = &accepted;
  check(replayssm_commit(e->slots, &batch, &commit, NULL));
  append(r, tokens, accepted);
}

/* A request's position, states and windows are those of one extend over its tokens, by bytes. Overwrites `out`. */
static inline void expect_plain(const engine *e, const request *r) {
  static saved found, wanted;
  request plain;
  start(e, &plain, REFERENCE_SLOT, REFERENCE_RING);
  if (r->n > 0) prompt(e, &plain, r->tokens, r->n);
  save(e, r, NULL, &found);
  save(e, &plain, NULL, &wanted);
  REQUIRE(found.position == r->n && wanted.position == r->n);
  REQUIRE(memcmp(found.states, wanted.states, sizeof wanted.states) == 0);
  REQUIRE(memcmp(found.windows, wanted.windows, sizeof wanted.windows) == 0);
}

static inline void expect_faults(const engine *e, uint32_t bits) {
  replayssm_report report = REPLAYSSM_INIT(replayssm_report);
  check(replayssm_check(e->slots, 1, &report));
  REQUIRE(report.bits == bits);
}

#endif
