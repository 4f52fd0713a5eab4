// SPDX-License-Identifier: MIT OR Apache-2.0
#include "varlen_gated_delta_net.h"

namespace adapters::genai {
namespace {

Status inside(const Interval& i) {
  if (i.slots.numbers != nullptr && (i.bank == 0 || i.bank == 1) && i.first >= 0 && i.rows >= 0 &&
      std::int64_t{i.first} + i.rows <= i.slots.capacity) {
    return {};
  }
  return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "slots " + std::to_string(i.first) + " and " + std::to_string(i.rows) +
                                                " rows in bank " + std::to_string(i.bank) + "; expected an interval of " +
                                                std::to_string(i.slots.capacity) + " slots in bank 0 or 1");
}

replayssm_ids slots_of(const Interval& i) {
  const std::int64_t first = std::int64_t{i.bank} * i.slots.capacity + i.first;
  return ids(i.slots.numbers + first, REPLAYSSM_DTYPE_I32, 1);
}

replayssm_list list_of(const Interval& i) {
  auto list = replayssm_init<replayssm_list>();
  list.n = i.rows;
  list.place = REPLAYSSM_WHERE_DEVICE;
  list.slots = slots_of(i);
  return list;
}

replayssm_batch batch_of(const Interval& i) {
  auto batch = replayssm_init<replayssm_batch>();
  batch.n_rows = i.rows;
  batch.slots = slots_of(i);
  batch.cu_seqlens = i.cu_seqlens;
  batch.n_tokens = i.num_tokens;
  return batch;
}

}  // namespace

replayssm_slots_desc slots_desc(std::int32_t n_slots, std::int32_t max_step_tokens) {
  auto desc = replayssm_init<replayssm_slots_desc>();
  desc.n_slots = n_slots;
  desc.max_step_tokens = max_step_tokens;
  return desc;
}

Status start(const replayssm_slots* handle, const Interval& interval, const replayssm_exec* exec) {
  if (auto status = inside(interval); !status.ok()) return status;
  const auto list = list_of(interval);
  return check(replayssm_reset(handle, &list, nullptr, exec));
}

Status present_from_past(const replayssm_slots* handle, const Interval& past, Interval* present, const replayssm_exec* exec) {
  if (auto status = inside(past); !status.ok()) return status;
  if (present == nullptr) return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "present is null; expected where its interval goes");
  Interval other = past;
  other.bank = 1 - past.bank;
  const auto from = list_of(past), to = list_of(other);
  auto status = check(replayssm_copy(handle, &from, &to, nullptr, exec));
  if (status.ok()) *present = other;
  return status;
}

Status varlen_gated_delta_net(const Layer& state, const Shape& s, const Interval& interval, const Node& node,
                              const replayssm_exec* exec) {
  if (auto status = inside(interval); !status.ok()) return status;
  if (interval.cu_seqlens == nullptr) return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "cu_seqlens is null; expected [rows + 1]");
  if (s.H < 1 || s.HV < 1 || s.K < 1 || s.V < 1) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "the shape has H " + std::to_string(s.H) + ", HV " + std::to_string(s.HV) + ", K " +
                                                        std::to_string(s.K) + ", V " + std::to_string(s.V) + "; expected those of the pool");
  }
  const auto batch = batch_of(interval);
  auto args = replayssm_init<replayssm_delta_args>();
  args.q = view(node.q, node.io, 0, std::int64_t{s.H} * s.K, s.K);
  args.k = view(node.k, node.io, 0, std::int64_t{s.H} * s.K, s.K);
  args.v = view(node.v, node.io, 0, std::int64_t{s.HV} * s.V, s.V);
  args.g = view(node.decay, node.gates, 0, s.HV, 1);
  args.beta = view(node.beta, node.gates, 0, s.HV, 1);
  args.A_log = view(node.A_log, REPLAYSSM_DTYPE_F32, 0, 0, 1);
  args.dt_bias = view(node.dt_bias, REPLAYSSM_DTYPE_F32, 0, 0, 1);
  args.scale = node.scale;
  args.out = view(node.out, node.out_type, 0, std::int64_t{s.HV} * s.V, s.V);
  return check(replayssm_delta_step(state.pool, state.index, &batch, &args, exec));
}

Status commit(const replayssm_slots* handle, const Interval& interval, const std::int32_t* kept, const replayssm_exec* exec) {
  if (auto status = inside(interval); !status.ok()) return status;
  if (interval.cu_seqlens == nullptr) return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "cu_seqlens is null; expected [rows + 1]");
  const auto batch = batch_of(interval);
  auto args = replayssm_init<replayssm_commit_args>();
  args.convention = REPLAYSSM_COUNTS_ACCEPTED;
  args.counts = kept;
  return check(replayssm_commit(handle, &batch, &args, exec));
}

}  // namespace adapters::genai
