// SPDX-License-Identifier: MIT OR Apache-2.0
#include "checkpointing_ssu.h"

#include <limits>

namespace adapters::flashinfer {
namespace {

Status batch_of(const Rows& rows, replayssm_batch* batch) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (rows.batch < 0 || rows.batch > most || rows.T < 0 || rows.T > most) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "batch or T is negative or not an int32");
  }
  if (auto status = expect("state_batch_indices", rows.state_batch_indices, {rows.batch}); !status.ok()) return status;
  *batch = replayssm_init<replayssm_batch>();
  batch->flags = REPLAYSSM_BATCH_NULL_ID;
  batch->null_id = rows.pad_slot_id;
  batch->n_rows = static_cast<std::int32_t>(rows.batch);
  if (auto status = listed("state_batch_indices", rows.state_batch_indices); !status.ok()) return status;
  batch->slots = ids(rows.state_batch_indices.data, rows.state_batch_indices.dtype, rows.state_batch_indices.stride[0]);
  if (!rows.cu_seqlens) {
    batch->tokens = static_cast<std::int32_t>(rows.T);
    return {};
  }
  if (auto status = expect("cu_seqlens", rows.cu_seqlens, {rows.batch + 1}); !status.ok()) return status;
  if (rows.cu_seqlens.dtype != REPLAYSSM_DTYPE_I32 || rows.cu_seqlens.stride[0] != 1) {
    return refuse(REPLAYSSM_ERROR_UNSUPPORTED, "cu_seqlens is not contiguous int32");
  }
  batch->cu_seqlens = static_cast<const std::int32_t*>(rows.cu_seqlens.data);
  batch->n_tokens = rows.T;
  batch->max_tokens = rows.max_seqlen;
  return {};
}

}  // namespace

replayssm_slots_desc slots_desc(std::int32_t state_cache_size, std::int32_t ring_buffer_len, std::int32_t T_max) {
  auto desc = replayssm_init<replayssm_slots_desc>();
  desc.n_slots = state_cache_size;
  // No window is left: 0 would be the library's default, which folds at other times. -1 is refused where the slots are created.
  desc.window = ring_buffer_len > T_max ? ring_buffer_len - T_max : -1;
  desc.max_step_tokens = T_max;
  desc.schedule = REPLAYSSM_SCHEDULE_NONE;
  return desc;
}

Status start(const replayssm_slots* slots, const std::int32_t* state_indices, std::int32_t n, const std::int64_t* positions,
             const std::uint64_t* seeds, const replayssm_exec* exec) {
  const auto list = host_list(state_indices, n);
  auto args = replayssm_init<replayssm_reset_args>();
  args.position = positions;
  args.seed = seeds;
  return check(replayssm_reset(slots, &list, &args, exec));
}

Status checkpointing_ssu(const Layer& state, const Mamba2Shape& s, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                         const Tensor& C, const Tensor& out, const Tensor& D, const Tensor& z, const Tensor& dt_bias, bool dt_softplus,
                         const Rows& rows, bool enable_pdl, replayssm_stream stream) {
  replayssm_batch batch;
  if (auto status = batch_of(rows, &batch); !status.ok()) return status;
  auto args = replayssm_init<replayssm_mamba2_args>();
  if (auto status = mamba2_parameters(s, A, D, dt_bias, dt_softplus, &args); !status.ok()) return status;
  const std::int64_t first = rows.cu_seqlens ? 1 : rows.batch;
  if (auto status = expect("dt", dt, {first, rows.T, s.nheads, s.dim}); !status.ok()) return status;
  if (auto status = tied("dt", dt, 3); !status.ok()) return status;
  args.dt = view(dt, dt.stride[0], dt.stride[1], dt.stride[2]);
  const auto take = [&](const char* name, const Tensor& tensor, std::int64_t heads, std::int64_t last, replayssm_tensor* to) {
    if (auto status = expect(name, tensor, {first, rows.T, heads, last}); !status.ok()) return status;
    *to = view(tensor, tensor.stride[0], tensor.stride[1], tensor.stride[2]);
    return contiguous(name, tensor, 3);
  };
  if (auto status = take("x", x, s.nheads, s.dim, &args.x); !status.ok()) return status;
  if (auto status = take("B", B, s.ngroups, s.dstate, &args.B); !status.ok()) return status;
  if (auto status = take("C", C, s.ngroups, s.dstate, &args.C); !status.ok()) return status;
  if (auto status = take("out", out, s.nheads, s.dim, &args.out); !status.ok()) return status;
  if (z) {
    if (auto status = take("z", z, s.nheads, s.dim, &args.z); !status.ok()) return status;
  }
  auto exec = replayssm_init<replayssm_exec>();
  exec.stream = stream;
  exec.flags = enable_pdl ? REPLAYSSM_EXEC_PDL : 0;
  return check(replayssm_mamba2_step(state.pool, state.index, &batch, &args, &exec));
}

Status advance(const replayssm_slots* slots, const Rows& rows, const Tensor& num_accepted, const replayssm_exec* exec) {
  replayssm_batch batch;
  if (auto status = batch_of(rows, &batch); !status.ok()) return status;
  auto args = replayssm_init<replayssm_commit_args>();
  args.convention = REPLAYSSM_COUNTS_ACCEPTED;
  if (num_accepted) {
    if (auto status = expect("num_accepted", num_accepted, {rows.batch}); !status.ok()) return status;
    if (num_accepted.dtype != REPLAYSSM_DTYPE_I32) return refuse(REPLAYSSM_ERROR_UNSUPPORTED, "num_accepted is not int32");
    if (auto status = listed("num_accepted", num_accepted); !status.ok()) return status;
    args.counts = static_cast<const std::int32_t*>(num_accepted.data);
    args.counts_stride = num_accepted.stride[0];
  }
  return check(replayssm_commit(slots, &batch, &args, exec));
}

}  // namespace adapters::flashinfer
