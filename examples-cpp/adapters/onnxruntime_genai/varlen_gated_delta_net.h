// ONNX Runtime GenAI's packed Gated DeltaNet node with its fixed states over libreplayssm: a batch is an interval of slots, past and
// present are two banks. SPDX-License-Identifier: MIT OR Apache-2.0
//
// Every function returns the library's status and sentence; INVALID_ARGUMENT with a sentence of its own where an interval is wrong, and
// nothing is done then. All pointers are the caller's and lie in the context's memory (device pointers on CUDA); they stay as they are
// until the step's commit has run. exec carries the stream; null: the default one.
#pragma once

#include "../common.h"

namespace adapters::genai {

// Numbers 0 to 2 * capacity - 1 in the context's memory, made once: an interval of slots is a pointer into it.
struct SlotNumbers {
  const std::int32_t* numbers = nullptr;
  std::int32_t capacity = 0;  // slots of a bank
};

// Rows of a model step: slots first .. first + rows - 1 of one bank. cu_seqlens: int32 [rows + 1], as the node has it.
struct Interval {
  SlotNumbers slots;
  std::int32_t bank = 0;  // 0 or 1
  std::int32_t first = 0, rows = 0;
  const std::int32_t* cu_seqlens = nullptr;
  std::int64_t num_tokens = 0;
};

// Sizes of a layer.
struct Shape {
  std::int32_t H = 0, HV = 0, K = 0, V = 0;  // query and key heads, value heads, columns and rows of a state
};

// The node's tensors, packed and contiguous: q, k [num_tokens, H, K], v [num_tokens, HV, V] of the pool's io; decay (raw a) and beta
// (raw b) [num_tokens, HV] of type gates; A_log, dt_bias fp32 [HV]; out [num_tokens, HV, V] of the pool's out.
struct Node {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *decay = nullptr, *beta = nullptr;
  const float *A_log = nullptr, *dt_bias = nullptr;
  void* out = nullptr;
  replayssm_dtype io = REPLAYSSM_DTYPE_BF16, out_type = REPLAYSSM_DTYPE_BF16, gates = REPLAYSSM_DTYPE_F32;
  float scale = 0;  // 0: 1 / sqrt(K)
};

// n_slots is both banks: 2 * capacity. With one bank (see README.md), capacity is enough.
replayssm_slots_desc slots_desc(std::int32_t n_slots, std::int32_t max_step_tokens);

// Requests begin empty in slots first .. first + rows - 1 of the interval's bank.
// Threads: any, on disjoint slots. Capture: enqueues.
Status start(const replayssm_slots* handle, const Interval& interval, const replayssm_exec* exec);

// For two banks, once before the layers of a step: the other bank's slots become what the interval's are; past stays as it is. present
// gets the interval to give to the nodes and to commit. To discard a step, go on with past. Copies checkpoint and ring of each row.
// Threads: any, on disjoint slots. Capture: enqueues.
Status present_from_past(const replayssm_slots* handle, const Interval& past, Interval* present, const replayssm_exec* exec);

// One layer of a model step on an interval. Nothing moves until the commit.
// Threads: any, at the same time on disjoint slots. Capture: enqueues.
Status varlen_gated_delta_net(const Layer& state, const Shape& shape, const Interval& interval, const Node& node,
                              const replayssm_exec* exec);

// Once a model step. kept: int32 [rows], the tokens of each row that stay; null: all. Rows that keep a prefix need no replay.
// Threads: any, at the same time on disjoint slots. Capture: enqueues.
Status commit(const replayssm_slots* handle, const Interval& interval, const std::int32_t* kept, const replayssm_exec* exec);

}  // namespace adapters::genai
