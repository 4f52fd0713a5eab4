/* What the misuse programs share: checks, a small library of every kind of object, and descriptors that are right.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef MISUSE_H
#define MISUSE_H

#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replayssm.h"

extern int checks;
extern bool short_run; /* for valgrind: fewer random handles, shorter races */

void fail(const char *file, int line, const char *what, const char *detail);
void failed(const char *file, int line, const char *call, replayssm_status wanted, const char *word, replayssm_status found);
void worked(const char *file, int line, const char *call, replayssm_status found);
/* Leaves a sentence that no check asks for, so that no check finds the sentence of the one before. */
void forget_message(void);

#define CHECK(condition)                                         \
  do {                                                           \
    checks++;                                                    \
    if (!(condition)) fail(__FILE__, __LINE__, #condition, "is not true"); \
  } while (0)

/* A call that must fail with this status and a sentence that contains this word. */
#define FAILS(status, word, call) failed(__FILE__, __LINE__, #call, (status), (word), (forget_message(), (call)))
#define WORKS(call) worked(__FILE__, __LINE__, #call, (call))

/* The library's objects that calls are made on. Two layers, 4 heads of 8 x 8 in 2 groups; a convolution of 20 channels;
 * KDA with the sizes of Mamba-2. */
enum { LAYERS = 2, HEADS = 4, DIM = 8, STATE = 8, GROUPS = 2, CHANNELS = 20, WIDTH = 4, SLOTS = 4, RINGS = 3 };
extern replayssm_context *context;
extern replayssm_slots *slots;
extern replayssm_layers *mamba, *conv, *delta;
void create_all(void);
void destroy_all(void);

extern float data[1 << 14];
extern float out[1 << 14];
extern const int32_t ids[300];
extern const int32_t two_slots[2]; /* 0, 1 */

/* The parts. */
void handles(void);
void destroying(void);
void destroyed_slots(const void *handle); /* a call on this handle says that it has been destroyed */
void everything_is_gone(void);
void descriptors(void);
void creation(void);
void lending(void);
void calls(void);
void delta_calls(void);
void lists(void);
void copies(void);
void device_faults(void);
void ids_and_buffers(void);
void threads(void);
int64_t position_of(int32_t ring);

/* Descriptors that are right. Each check spoils one field. */

static inline replayssm_slots_desc good_slots(void) {
  replayssm_slots_desc d = REPLAYSSM_INIT(replayssm_slots_desc);
  d.n_slots = SLOTS;
  d.n_rings = RINGS;
  d.window = 8;
  d.max_step_tokens = 4;
  d.min_rewind = 2;
  return d;
}

static inline replayssm_pool_desc good_mamba(void) {
  replayssm_pool_desc d = REPLAYSSM_INIT(replayssm_pool_desc);
  d.family = REPLAYSSM_FAMILY_MAMBA2;
  d.n_layers = LAYERS;
  d.io = REPLAYSSM_DTYPE_F32;
  d.format = REPLAYSSM_FORMAT_F32;
  d.nheads = HEADS;
  d.headdim = DIM;
  d.dstate = STATE;
  d.ngroups = GROUPS;
  return d;
}

static inline replayssm_pool_desc good_conv(void) {
  static const int32_t sections[2] = {12, 8};
  replayssm_pool_desc d = REPLAYSSM_INIT(replayssm_pool_desc);
  d.family = REPLAYSSM_FAMILY_CONV1D;
  d.n_layers = LAYERS;
  d.io = REPLAYSSM_DTYPE_F32;
  d.channels = CHANNELS;
  d.width = WIDTH;
  d.n_sections = 2;
  d.section_channels = sections;
  return d;
}

static inline replayssm_pool_desc good_delta(void) {
  replayssm_pool_desc d = REPLAYSSM_INIT(replayssm_pool_desc);
  d.family = REPLAYSSM_FAMILY_KDA;
  d.n_layers = LAYERS;
  d.io = REPLAYSSM_DTYPE_F32;
  d.format = REPLAYSSM_FORMAT_F32;
  d.H = GROUPS;
  d.HV = HEADS;
  d.K = STATE;
  d.V = DIM;
  return d;
}

static inline replayssm_ids good_ids(const int32_t *array) {
  replayssm_ids i = {array, 0, REPLAYSSM_DTYPE_I32, 0};
  return i;
}
/* Two rows of two tokens. */
static inline replayssm_batch good_batch(void) {
  replayssm_batch b = REPLAYSSM_INIT(replayssm_batch);
  b.n_rows = 2;
  b.tokens = 2;
  b.slots = good_ids(two_slots);
  return b;
}

static inline replayssm_tensor tensor(float *at, int64_t row, int64_t token, int64_t head) {
  replayssm_tensor t = {at, row, token, head, REPLAYSSM_DTYPE_F32, 0};
  return t;
}

static inline replayssm_mamba2_args good_args(void) {
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

static inline replayssm_conv1d_args good_conv_args(void) {
  replayssm_conv1d_args a = REPLAYSSM_INIT(replayssm_conv1d_args);
  a.x = tensor(data, 48, 24, 12);
  a.out = tensor(out, 48, 24, 12);
  a.weight = tensor(data + 512, 0, 0, WIDTH);
  a.bias = tensor(data + 1024, 0, 0, 1);
  return a;
}

static inline replayssm_delta_args good_delta_args(void) {
  replayssm_delta_args a = REPLAYSSM_INIT(replayssm_delta_args);
  a.q = tensor(data, 2 * GROUPS * STATE, GROUPS * STATE, STATE);
  a.k = tensor(data + 512, 2 * GROUPS * STATE, GROUPS * STATE, STATE);
  a.v = tensor(data + 1024, 2 * HEADS * DIM, HEADS * DIM, DIM);
  a.g = tensor(data + 2048, 2 * HEADS * STATE, HEADS * STATE, STATE);
  a.beta = tensor(data + 3072, 2 * HEADS, HEADS, 1);
  a.A_log = tensor(data + 3200, 0, 0, 1);
  a.dt_bias = tensor(data + 3264, 0, 0, STATE);
  a.out = tensor(out, 2 * HEADS * DIM, HEADS * DIM, DIM);
  return a;
}

static inline replayssm_list good_list(void) {
  replayssm_list l = REPLAYSSM_INIT(replayssm_list);
  l.n = 2;
  l.place = REPLAYSSM_WHERE_HOST;
  l.slots = good_ids(two_slots);
  return l;
}

/* Nothing is wanted. */
static const int64_t no_positions[2] = {-1, -1};
static inline replayssm_snapshot_args good_snapshot(void) {
  replayssm_snapshot_args a = REPLAYSSM_INIT(replayssm_snapshot_args);
  a.at = no_positions;
  a.dst = good_ids(two_slots);
  return a;
}

static inline replayssm_state good_state(void) {
  replayssm_state s = REPLAYSSM_INIT(replayssm_state);
  s.dtype = REPLAYSSM_DTYPE_F32;
  s.layer = -1;
  s.data = out;
  return s;
}

/* A descriptor with one field spoilt, and a call that says so. */
#define SPOIL(type, good, assignment, status, word, call) \
  do {                                                    \
    type d = good;                                        \
    d.assignment;                                         \
    FAILS(status, word, call);                            \
  } while (0)
#define INVALID REPLAYSSM_ERROR_INVALID_ARGUMENT
#define UNSUPPORTED REPLAYSSM_ERROR_UNSUPPORTED
#define ODD(pointer) ((void *)((char *)(pointer) + 1))

#endif
