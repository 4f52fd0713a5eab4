// SPDX-License-Identifier: MIT OR Apache-2.0
#include "selective_state_update.h"

#include <limits>

namespace adapters::vllm {
namespace {

Status batch_of(const Metadata& m, replayssm_batch* batch) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (!m.state_batch_indices) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "state_batch_indices is absent; expected slot ids, 0, 1, 2 and so on where rows are slots");
  }
  if (m.cu_seqlens && m.cu_seqlens.dtype != REPLAYSSM_DTYPE_I32) {
    return refuse(REPLAYSSM_ERROR_UNSUPPORTED, "cu_seqlens is not int32");
  }
  if (m.cu_seqlens && (m.cu_seqlens.size[0] < 1 || m.cu_seqlens.stride[0] != 1)) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "cu_seqlens is empty or not contiguous; expected [rows + 1]");
  }
  const std::int64_t rows = m.cu_seqlens ? m.cu_seqlens.size[0] - 1 : m.num_tokens;
  if (rows < 0 || rows > most || m.null_block_id < -most || m.null_block_id > most) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "rows or null_block_id is not an int32");
  }
  const auto too_few = [rows](const char* name, const Tensor& tensor) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT,
                  std::string(name) + " has " + std::to_string(tensor.size[0]) + " rows; expected at least " + std::to_string(rows));
  };
  if (m.state_batch_indices.size[0] < rows) return too_few("state_batch_indices", m.state_batch_indices);
  if (m.request_indices && m.request_indices.size[0] < rows) return too_few("request_indices", m.request_indices);

  if (auto status = listed("state_batch_indices", m.state_batch_indices); !status.ok()) return status;
  if (auto status = listed("request_indices", m.request_indices); !status.ok()) return status;

  *batch = replayssm_init<replayssm_batch>();
  batch->flags = REPLAYSSM_BATCH_NULL_ID;
  batch->null_id = static_cast<std::int32_t>(m.null_block_id);
  batch->n_rows = static_cast<std::int32_t>(rows);
  batch->slots = ids(m.state_batch_indices.data, m.state_batch_indices.dtype, m.state_batch_indices.stride[0]);
  if (m.request_indices) batch->rings = ids(m.request_indices.data, m.request_indices.dtype, m.request_indices.stride[0]);
  if (m.cu_seqlens) {
    batch->cu_seqlens = static_cast<const std::int32_t*>(m.cu_seqlens.data);
    batch->n_tokens = m.num_tokens;
    batch->max_tokens = m.max_seqlen;
  } else {
    batch->tokens = 1;
  }
  return {};
}

// [tokens, heads, last]: with one token in a row, rows are tokens.
Status rows_of(const char* name, const Tensor& tensor, std::initializer_list<std::int64_t> size, replayssm_tensor* out) {
  if (auto status = expect(name, tensor, size); !status.ok()) return status;
  if (auto status = contiguous(name, tensor, 2); !status.ok()) return status;
  *out = view(tensor, tensor.stride[0], tensor.stride[0], tensor.stride[1]);
  return {};
}

}  // namespace

replayssm_slots_desc slots_desc(std::int32_t num_blocks, std::int32_t max_num_seqs, std::int32_t num_speculative_tokens) {
  auto desc = replayssm_init<replayssm_slots_desc>();
  desc.n_slots = num_blocks;
  desc.n_rings = max_num_seqs;
  desc.max_step_tokens = 1 + num_speculative_tokens;
  return desc;
}

Status start(const replayssm_slots* slots, const std::int32_t* blocks, const std::int32_t* requests, std::int32_t n,
             const std::int64_t* positions, const replayssm_exec* exec) {
  const auto list = host_list(blocks, n, requests);
  auto args = replayssm_init<replayssm_reset_args>();
  args.position = positions;
  return check(replayssm_reset(slots, &list, &args, exec));
}

Status load_states(const Layer& state, const Mamba2Shape& s, const std::int32_t* blocks, const std::int32_t* requests,
                   std::int32_t n, const Tensor& states, const replayssm_exec* exec) {
  if (auto status = expect("states", states, {n, s.nheads, s.dim, s.dstate}); !status.ok()) return status;
  if (auto status = contiguous("states", states, 3); !status.ok()) return status;
  for (int axis = 0; axis < 3; ++axis) {  // to the library a stride of 0 is: without gaps
    if (states.stride[axis] > 0 || states.size[axis] < 2) continue;
    return refuse(REPLAYSSM_ERROR_UNSUPPORTED, "states has stride " + std::to_string(states.stride[axis]) + " in axis " +
                                                   std::to_string(axis) + "; expected 1 or more");
  }
  const auto list = host_list(blocks, n, requests);
  auto source = replayssm_init<replayssm_state>();
  source.dtype = states.dtype;
  source.layer = state.index;
  source.data = states.data;
  source.stride_entry = states.stride[0];
  source.stride_head = states.stride[1];
  source.stride_row = states.stride[2];
  return check(replayssm_import(state.pool, &list, nullptr, &source, exec));
}

Status selective_state_update(const Layer& state, const Mamba2Shape& s, const Tensor& x, const Tensor& dt, const Tensor& A,
                              const Tensor& B, const Tensor& C, const Tensor& D, const Tensor& z, const Tensor& dt_bias,
                              bool dt_softplus, const Metadata& metadata, const Tensor& out, const replayssm_exec* exec) {
  replayssm_batch batch;
  if (auto status = batch_of(metadata, &batch); !status.ok()) return status;
  const std::int64_t tokens = metadata.num_tokens;
  auto args = replayssm_init<replayssm_mamba2_args>();
  if (auto status = mamba2_parameters(s, A, D, dt_bias, dt_softplus, &args); !status.ok()) return status;
  if (auto status = expect("dt", dt, {tokens, s.nheads, s.dim}); !status.ok()) return status;
  if (auto status = tied("dt", dt, 2); !status.ok()) return status;
  args.dt = view(dt, dt.stride[0], dt.stride[0], dt.stride[1]);
  if (auto status = rows_of("x", x, {tokens, s.nheads, s.dim}, &args.x); !status.ok()) return status;
  if (auto status = rows_of("B", B, {tokens, s.ngroups, s.dstate}, &args.B); !status.ok()) return status;
  if (auto status = rows_of("C", C, {tokens, s.ngroups, s.dstate}, &args.C); !status.ok()) return status;
  if (auto status = rows_of("out", out, {tokens, s.nheads, s.dim}, &args.out); !status.ok()) return status;
  if (z) {
    if (auto status = rows_of("z", z, {tokens, s.nheads, s.dim}, &args.z); !status.ok()) return status;
  }
  return check(replayssm_mamba2_step(state.pool, state.index, &batch, &args, exec));
}

Status commit(const replayssm_slots* slots, const Metadata& metadata, const Tensor& num_accepted_tokens, const replayssm_exec* exec) {
  replayssm_batch batch;
  if (auto status = batch_of(metadata, &batch); !status.ok()) return status;
  auto args = replayssm_init<replayssm_commit_args>();
  args.convention = REPLAYSSM_COUNTS_ACCEPTED;
  if (num_accepted_tokens) {
    if (num_accepted_tokens.dtype != REPLAYSSM_DTYPE_I32) return refuse(REPLAYSSM_ERROR_UNSUPPORTED, "num_accepted_tokens is not int32");
    if (num_accepted_tokens.size[0] < batch.n_rows) {
      return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "num_accepted_tokens has " + std::to_string(num_accepted_tokens.size[0]) +
                                                    " rows; expected at least " + std::to_string(batch.n_rows));
    }
    if (auto status = listed("num_accepted_tokens", num_accepted_tokens); !status.ok()) return status;
    args.counts = static_cast<const std::int32_t*>(num_accepted_tokens.data);
    args.counts_stride = num_accepted_tokens.stride[0];
  }
  return check(replayssm_commit(slots, &batch, &args, exec));
}

}  // namespace adapters::vllm
