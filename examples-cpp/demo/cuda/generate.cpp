// SPDX-License-Identifier: MIT OR Apache-2.0
#include "generate.h"

#include <algorithm>

namespace demo {
namespace cuda {
namespace {

constexpr int LOOK_EVERY = 16;  // steps with drafts between two looks at the lengths of the texts
constexpr int STEPS_TO_TIME = 100;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

double state_bytes(const replayssm_stats& s) {
  return static_cast<double>(s.checkpoint_bytes_read + s.checkpoint_bytes_written + s.ring_bytes_read +
                             s.ring_bytes_written);
}

}  // namespace

void GpuOutcome::add(const GpuOutcome& other) {
  texts.insert(texts.end(), other.texts.begin(), other.texts.end());
  margins.insert(margins.end(), other.margins.begin(), other.margins.end());
  bytes += other.bytes;
  steps += other.steps;
  row_steps += other.row_steps;
  accepted += other.accepted;
  seconds += other.seconds;
  state_bytes += other.state_bytes;
}

int Decoder::capacity_of(const std::vector<Request>& requests, int max_step_tokens) {
  std::size_t most = 0;
  for (const Request& r : requests) most = std::max(most, r.prompt.size() + r.n_bytes);
  return static_cast<int>(most) + 2 * max_step_tokens;  // drafts may go beyond the end, to be cut off
}

int Decoder::tokens_of(const std::vector<Request>& requests, int n_rows, int max_step_tokens) {
  std::vector<std::size_t> lengths;
  for (const Request& r : requests) lengths.push_back(r.prompt.size());
  std::sort(lengths.rbegin(), lengths.rend());
  std::size_t prompts = 0;
  for (std::size_t i = 0; i < std::min(lengths.size(), size(n_rows)); ++i) prompts += lengths[i];
  return std::max(static_cast<int>(prompts), n_rows * max_step_tokens);
}

Decoder::Decoder(const Device& device, const DeviceWeights& weights, const Setup& setup, Update update, Drafts drafts,
                 const std::vector<Request>& requests, int n_rows)
    : device_(device),
      update_(update),
      drafts_(drafts),
      n_rows_(n_rows),
      tokens_(setup.max_step_tokens),
      model_(device, weights, setup, n_rows, capacity_of(requests, setup.max_step_tokens),
             tokens_of(requests, n_rows, setup.max_step_tokens)),
      batch_(replayssm::init<replayssm_batch>()),
      slots_(size(n_rows)) {
  batch_.flags = update == Update::Plain ? REPLAYSSM_BATCH_EXTEND : 0u;
  batch_.n_rows = n_rows;
  batch_.tokens = tokens_;
  batch_.slots = replayssm::ids(model_.rows().slots.get());
  batch_.generation = model_.rows().generation.get();
  graph_ = std::make_unique<Graph>(device, [this] { step(); });
}

// One model step of every row, from the drafts to the commit.
void Decoder::step() {
  if (drafts_ != Drafts::None) model_.draft(drafts_ == Drafts::Random);
  model_.forward(batch_, n_rows_ * tokens_, tokens_);
  model_.sample(tokens_);
  model_.verify(tokens_);
  model_.commit(batch_, update_ == Update::Replay);
}

double Decoder::seconds_without_library() {
  model_.leave_library_out(true);
  const Graph rest(device_, [this] { step(); });
  model_.leave_library_out(false);
  const Stopwatch watch(device_);
  watch.start();
  for (int i = 0; i < STEPS_TO_TIME; ++i) rest.launch();
  return watch.stop() / STEPS_TO_TIME;
}

// Slots for the requests; their prompts, of any lengths, in one extend; the first byte of each text.
void Decoder::prompts(const Request* requests) {
  const Rows& rows = model_.rows();
  std::vector<std::uint32_t> generations(slots_.size());
  model_.slots().acquire(n_rows_, slots_.data(), generations.data());
  auto reset = replayssm::init<replayssm_reset_args>();
  reset.generation = generations.data();
  model_.slots().reset(replayssm::host_list(slots_.data(), n_rows_), &reset, &model_.exec());

  std::vector<std::uint8_t> text(rows.text.size());
  std::vector<std::int32_t> length, end, last, token_row, token_position, ends = {0};
  std::vector<unsigned long long> seed;
  for (int r = 0; r < n_rows_; ++r) {
    const Request& request = requests[r];
    const auto n = static_cast<std::int32_t>(request.prompt.size());
    std::copy(request.prompt.begin(), request.prompt.end(), text.begin() + static_cast<std::ptrdiff_t>(r) * rows.capacity);
    length.push_back(n);
    end.push_back(n + static_cast<std::int32_t>(request.n_bytes));
    seed.push_back(request.seed);
    for (std::int32_t p = 0; p < n; ++p) {
      token_row.push_back(r);
      token_position.push_back(p);
    }
    ends.push_back(ends.back() + n);
    last.push_back(ends.back() - 1);
  }
  const Buffer<std::int32_t> cu_seqlens(device_, ends);
  rows.text.write(text);
  rows.length.write(length);
  rows.end.write(end);
  rows.seed.write(seed);
  rows.slots.write(slots_);
  rows.generation.write(generations);
  rows.token_row.write(token_row);
  rows.token_position.write(token_position);
  rows.last.write(last);

  replayssm_batch batch = batch_;
  batch.flags = REPLAYSSM_BATCH_EXTEND;
  batch.tokens = 0;
  batch.n_tokens = ends.back();
  batch.cu_seqlens = cu_seqlens.get();
  model_.forward(batch, ends.back(), 0);
  model_.commit(batch, false);
  model_.last_logits();
  model_.sample(1);
  model_.verify(1, true);
  device_.wait();
}

GpuOutcome Decoder::generate(const Request* requests, int corrupt_at, Family corrupt_in) {
  const Rows& rows = model_.rows();
  prompts(requests);
  rows.accepted_n.write(std::vector<unsigned long long>(rows.accepted_n.size()));
  const std::vector<std::int32_t> end = rows.end.read();
  std::size_t longest = 0;
  for (int r = 0; r < n_rows_; ++r) longest = std::max(longest, requests[r].n_bytes);
  const double bytes_before = state_bytes(model_.slots().stats());

  GpuOutcome out;
  const Stopwatch watch(device_);
  watch.start();
  for (bool done = longest <= 1; !done;) {
    if (out.steps == corrupt_at) {
      model_.corrupt_newest_record(slots_[0], rows.length.read()[0] - 1, corrupt_in);
    }
    graph_->launch();
    ++out.steps;
    if (drafts_ == Drafts::None) {
      done = static_cast<std::size_t>(out.steps) + 1 == longest;
    } else if (out.steps % LOOK_EVERY == 0) {
      done = rows.length.read() == end;
    }
  }
  out.seconds = watch.stop();

  model_.check_faults();
  out.state_bytes = state_bytes(model_.slots().stats()) - bytes_before;
  const std::vector<unsigned long long> accepted_n = rows.accepted_n.read();
  for (std::size_t i = 0; i < size(tokens_); ++i) {
    out.row_steps += static_cast<long long>(accepted_n[i]);
    out.accepted += static_cast<long long>(i * accepted_n[i]);
    out.every_count = out.every_count && accepted_n[i] > 0;
  }
  const std::vector<std::int32_t> length = rows.length.read();
  const std::vector<std::uint8_t> text = rows.text.read();
  const std::vector<float> margins = rows.margins.read();
  const Buffer<replayssm_cursor> cursors(device_, size(n_rows_));
  model_.slots().read_cursors(replayssm::host_list(slots_.data(), n_rows_), cursors.get(), &model_.exec());
  const std::vector<replayssm_cursor> cursor = cursors.read();
  for (int r = 0; r < n_rows_; ++r) {
    if (length[size(r)] != end[size(r)] || cursor[size(r)].position != length[size(r)] - 1) {
      throw std::runtime_error("the library's position on the GPU is not the program's");
    }
    const auto from = static_cast<std::ptrdiff_t>(r) * rows.capacity + static_cast<std::ptrdiff_t>(requests[r].prompt.size());
    const auto n = static_cast<std::ptrdiff_t>(requests[r].n_bytes);
    out.texts.emplace_back(text.begin() + from, text.begin() + from + n);
    out.margins.emplace_back(margins.begin() + from, margins.begin() + from + n);
    out.bytes += n - 1;
  }
  model_.slots().release(n_rows_, slots_.data());
  return out;
}

}  // namespace cuda
}  // namespace demo
