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
      slots_(size(n_rows)),
      generations_(size(n_rows)) {
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

// Empty slots for the requests, their prompts as texts.
void Decoder::start(const Request* requests) {
  const Rows& rows = model_.rows();
  model_.slots().acquire(n_rows_, slots_.data(), generations_.data());
  auto reset = replayssm::init<replayssm_reset_args>();
  reset.generation = generations_.data();
  model_.slots().reset(replayssm::host_list(slots_.data(), n_rows_), &reset, &model_.exec());

  std::vector<std::uint8_t> text(rows.text.size());
  std::vector<std::int32_t> length, end;
  std::vector<unsigned long long> seed;
  for (int r = 0; r < n_rows_; ++r) {
    const Request& request = requests[r];
    std::copy(request.prompt.begin(), request.prompt.end(), text.begin() + static_cast<std::ptrdiff_t>(r) * rows.capacity);
    length.push_back(static_cast<std::int32_t>(request.prompt.size()));
    end.push_back(length.back() + static_cast<std::int32_t>(request.n_bytes));
    seed.push_back(request.seed);
  }
  rows.text.write(text);
  rows.length.write(length);
  rows.end.write(end);
  rows.seed.write(seed);
  rows.slots.write(slots_);
  rows.generation.write(generations_);
  device_.wait();
}

std::vector<std::int32_t> Decoder::run(const std::vector<Part>& parts, bool extend) {
  const Rows& rows = model_.rows();
  std::vector<std::int32_t> last, token_row, token_position, ends = {0};
  for (std::size_t r = 0; r < parts.size(); ++r) {
    for (std::int32_t p = parts[r].from; p < parts[r].to; ++p) {
      token_row.push_back(static_cast<std::int32_t>(r));
      token_position.push_back(p);
    }
    ends.push_back(ends.back() + parts[r].to - parts[r].from);
    last.push_back(ends.back() - 1);
  }
  const Buffer<std::int32_t> cu_seqlens(device_, ends);
  rows.token_row.write(token_row);
  rows.token_position.write(token_position);
  replayssm_batch batch = batch_;
  batch.flags = extend ? REPLAYSSM_BATCH_EXTEND : 0u;
  batch.n_rows = static_cast<std::int32_t>(parts.size());
  batch.tokens = 0;
  batch.n_tokens = ends.back();
  batch.cu_seqlens = cu_seqlens.get();
  model_.forward(batch, ends.back(), 0);
  model_.commit(batch, false);
  device_.wait();
  return last;
}

// Of any lengths, in one extend.
std::vector<std::int32_t> Decoder::run_prompts(const Request* requests) {
  std::vector<Part> parts;
  for (int r = 0; r < n_rows_; ++r) parts.push_back({0, static_cast<std::int32_t>(requests[r].prompt.size())});
  return run(parts, true);
}

// By the first row, as the CPU's generator does it, then forked into the others.
std::vector<std::int32_t> Decoder::run_forked_prompt(const std::string& prompt) {
  const auto n = static_cast<std::int32_t>(prompt.size());
  std::int32_t at = n - std::min(static_cast<std::int32_t>(FORK_TAIL), n - 1);
  std::vector<std::int32_t> last = run({{0, at}}, true);
  for (; at < n; at += tokens_) last = run({{at, std::min(n, at + tokens_)}}, false);

  const std::vector<std::int32_t> from(size(n_rows_ - 1), slots_[0]);  // one source for all
  auto args = replayssm::init<replayssm_copy_args>();
  args.kind = REPLAYSSM_COPY_FORK;
  args.generation = generations_.data() + 1;
  model_.slots().copy(replayssm::host_list(from.data(), n_rows_ - 1), replayssm::host_list(slots_.data() + 1, n_rows_ - 1), &args,
                      &model_.exec());
  const std::vector<float> cache = model_.read_cache(0, 0, n);
  for (int r = 1; r < n_rows_; ++r) model_.write_cache(r, 0, n, cache);
  device_.wait();
  return std::vector<std::int32_t>(size(n_rows_), last[0]);
}

// The first byte of each text.
void Decoder::prompts(const Request* requests, bool fork) {
  start(requests);
  const std::vector<std::int32_t> last = fork ? run_forked_prompt(requests[0].prompt) : run_prompts(requests);
  model_.rows().last.write(last);
  model_.last_logits();
  model_.sample(1);
  model_.verify(1, true);
  device_.wait();
}

std::vector<Stopped> Decoder::stop(const Request& request, int steps, const std::vector<replayssm_save_kind>& kinds, int corrupt_at) {
  const Rows& rows = model_.rows();
  prompts(&request, false);
  for (int i = 0; i < steps; ++i) {
    if (i == corrupt_at) model_.corrupt_newest_record(slots_[0], rows.length.read()[0] - 1, MAMBA2);
    graph_->launch();
  }
  model_.check_faults();
  const std::int32_t length = rows.length.read()[0];
  std::vector<Stopped> out;
  if (length < rows.end.read()[0]) {
    const std::vector<std::uint8_t> text = rows.text.read();
    const std::int64_t position = length - 1;
    const std::int64_t first = position - cached_tokens(model_.weights().host.config, position);
    Stopped stopped{std::string(text.begin(), text.begin() + length), request.prompt.size(), request.prompt.size() + request.n_bytes,
                    request.seed, rows.kept.read(), {position, {}, model_.read_cache(0, first, position)}};
    for (const replayssm_save_kind kind : kinds) {
      stopped.blob.bytes.resize(model_.slots().save_bytes(kind));
      model_.slots().save(replayssm::host_list(slots_.data(), 1), kind, stopped.blob.bytes.data(), stopped.blob.bytes.size(),
                          &model_.exec());
      out.push_back(stopped);
    }
  }
  model_.slots().release(1, slots_.data());
  return out;
}

std::string Decoder::resume(const Stopped& stopped) {
  const Rows& rows = model_.rows();
  const Request request = stopped.request();
  start(&request);
  const std::int64_t position = stopped.blob.position;
  rows.text.write(std::vector<std::uint8_t>(stopped.text.begin(), stopped.text.end()));
  rows.length.write({static_cast<std::int32_t>(stopped.text.size())});
  rows.kept.write(stopped.hidden);
  model_.write_cache(0, position - cached_tokens(model_.weights().host.config, position), position, stopped.blob.cache);
  auto args = replayssm::init<replayssm_restore_args>();
  args.generation = generations_.data();
  model_.slots().restore(replayssm::host_list(slots_.data(), 1), stopped.blob.bytes.data(), stopped.blob.bytes.size(), &args,
                         &model_.exec());
  while (rows.length.read() != rows.end.read()) {
    for (int i = 0; i < LOOK_EVERY; ++i) graph_->launch();
  }
  model_.check_faults();
  const std::vector<std::uint8_t> text = rows.text.read();
  model_.slots().release(1, slots_.data());
  return std::string(text.begin() + static_cast<std::ptrdiff_t>(stopped.prompt_bytes), text.begin() + static_cast<std::ptrdiff_t>(stopped.end));
}

GpuOutcome Decoder::generate(const Request* requests, int corrupt_at, Family corrupt_in, bool fork) {
  const Rows& rows = model_.rows();
  prompts(requests, fork);
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
