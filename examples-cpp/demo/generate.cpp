// SPDX-License-Identifier: MIT OR Apache-2.0
#include "generate.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>

#include "noise.h"

namespace demo {
namespace {

using Clock = std::chrono::steady_clock;

double state_bytes(const replayssm_stats& s) {
  return static_cast<double>(s.checkpoint_bytes_read + s.checkpoint_bytes_written + s.ring_bytes_read +
                             s.ring_bytes_written);
}

// A request on its way. The last byte of `text` is known and not yet run through the model; `hidden` is of the one before.
struct Stream {
  std::size_t id;
  const Request* request;
  std::string text;
  std::size_t end;  // bytes of the finished text
  Sequence sequence;
  std::optional<Saved> saved;
  std::vector<float> hidden;
  std::string step;  // the known byte and its drafts

  std::size_t drafts_wanted() const { return std::min<std::size_t>(MAX_DRAFTS, end - text.size() - 1); }
};

class Generator {
 public:
  Generator(Model& model, const std::vector<Request>& requests, const Plan& plan) : model_(model), plan_(plan) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      auto stream = std::make_unique<Stream>();
      stream->id = i;
      stream->request = &requests[i];
      stream->text = requests[i].prompt;
      stream->end = requests[i].prompt.size() + requests[i].n_bytes;
      waiting_.push_back(std::move(stream));
    }
    out_.texts.resize(requests.size());
  }

  Outcome run() {
    for (long long step = 0; !waiting_.empty() || !running_.empty(); ++step) {
      admit();
      if (step == plan_.preempt_at) preempt();
      if (step == plan_.stop_at && stop()) break;
      if (step == plan_.corrupt_at && running_[0]->id == 0) {
        model_.corrupt_newest_record(running_[0]->sequence, plan_.corrupt_in);
      }
      const auto start = Clock::now();
      const double bytes = state_bytes(model_.stats());
      draft();
      verify();
      out_.state_bytes += state_bytes(model_.stats()) - bytes;
      out_.seconds += std::chrono::duration<double>(Clock::now() - start).count();
      retire();
    }
    model_.check_faults();
    return std::move(out_);
  }

 private:
  // Fills the batch; all new prompts, of any lengths, go through the model in one extend.
  void admit() {
    std::vector<Stream*> fresh;
    while (!waiting_.empty() && running_.size() < static_cast<std::size_t>(plan_.batch)) {
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
      Stream& s = *running_.back();
      if (plan_.stopped != nullptr) {
        resume(s, *plan_.stopped);
      } else if (s.saved) {
        model_.restore(s.sequence, *s.saved);
        s.saved.reset();
        out_.slot_after = s.sequence.slot;
      } else {
        if (!plan_.fork) model_.start(s.sequence);
        fresh.push_back(&s);
      }
    }
    if (fresh.empty()) return;
    if (plan_.fork) return fork(fresh);
    std::vector<Tokens> rows;
    for (Stream* s : fresh) rows.push_back(tokens(*s, s->text));
    const std::vector<float>& hidden = model_.forward(rows, Update::Plain);
    model_.commit();
    std::size_t end = 0;
    for (Stream* s : fresh) {
      end += s->text.size();
      keep_hidden(*s, hidden, end - 1);
      const std::vector<float> logits = model_.logits(s->hidden.data(), 1);
      append(*s, logits.data());
    }
  }

  // One prompt for all: run once, by extend but for its last tokens. Every request then draws its first byte from the same logits.
  void fork(const std::vector<Stream*>& fresh) {
    Stream& source = *fresh[0];
    const std::string prompt = source.text;
    const std::size_t longest = plan_.drafts == Drafts::None ? 1 : 1 + MAX_DRAFTS;
    model_.start(source.sequence);
    for (std::size_t at = 0, n = prompt.size() - std::min(FORK_TAIL, prompt.size() - 1); at < prompt.size(); at += n) {
      if (at > 0) n = std::min(longest, prompt.size() - at);
      const std::vector<float>& hidden =
          model_.forward({tokens(source, prompt.substr(at, n))}, at == 0 ? Update::Plain : plan_.update);
      model_.commit();
      keep_hidden(source, hidden, n - 1);
    }
    std::vector<Sequence*> targets;
    for (Stream* s : fresh) {
      if (s != &source) targets.push_back(&s->sequence);
    }
    model_.fork(source.sequence, targets);
    const std::vector<float> logits = model_.logits(source.hidden.data(), 1);
    for (Stream* s : fresh) {
      s->hidden = source.hidden;
      append(*s, logits.data());
    }
  }

  // Whether there was something to stop.
  bool stop() {
    if (running_.empty()) return false;
    Stream& s = *running_[0];
    for (const replayssm_save_kind kind : plan_.stop_kinds) {
      out_.stopped.push_back({s.text, s.request->prompt.size(), s.end, s.request->seed, s.hidden, model_.save_blob(s.sequence, kind)});
    }
    model_.finish(s.sequence);
    out_.texts[s.id] = s.text.substr(s.request->prompt.size());
    running_.clear();
    return true;
  }

  void resume(Stream& s, const Stopped& stopped) {
    if (stopped.hidden.size() != static_cast<std::size_t>(model_.weights().config.d_model)) {
      throw std::runtime_error("the hidden state is another model's");
    }
    s.text = stopped.text;
    s.hidden = stopped.hidden;
    model_.restore_blob(s.sequence, stopped.blob);
  }

  void preempt() {
    const auto first = std::find_if(running_.begin(), running_.end(), [](const auto& s) { return s->id == 0; });
    if (first == running_.end()) return;
    Stream& s = **first;
    s.saved = model_.save(s.sequence);
    out_.slot_before = s.sequence.slot;
    model_.finish(s.sequence);
    waiting_.push_back(std::move(*first));
    running_.erase(first);
    admit();  // another request takes the slot
  }

  void draft() {
    for (auto& s : running_) s->step.assign(1, s->text.back());
    if (plan_.drafts == Drafts::Head || plan_.drafts == Drafts::Random) draft_by_head();
    if (plan_.drafts == Drafts::Lookup) {
      for (auto& s : running_) draft_by_lookup(*s);
    }
  }

  void draft_by_head() {
    std::vector<Stream*> rows;
    std::vector<float> s, logits;
    for (auto& stream : running_) rows.push_back(stream.get());
    for (Stream* stream : rows) s.insert(s.end(), stream->hidden.begin(), stream->hidden.end());
    for (std::size_t i = 1; i <= MAX_DRAFTS; ++i) {
      std::vector<std::uint8_t> bytes;
      for (const Stream* stream : rows) bytes.push_back(static_cast<std::uint8_t>(stream->step.back()));
      logits.resize(rows.size() * VOCAB);
      draft_step(model_.weights(), rows.size(), s.data(), bytes.data(), logits.data());
      for (std::size_t r = 0; r < rows.size(); ++r) {
        Stream& stream = *rows[r];
        // A stream that wants fewer drafts stays in the head's batch; what it gets beyond them is cut off below.
        const auto position = static_cast<std::int64_t>(stream.text.size() - 1 + i);
        std::uint8_t guess =
            sample(&logits[r * VOCAB], model_.weights().temperature, stream.request->seed, position, noisy_);
        if (plan_.drafts == Drafts::Random) guess = disturbed(stream, position, guess);
        stream.step += static_cast<char>(guess);
      }
    }
    for (Stream* stream : rows) stream->step.resize(1 + stream->drafts_wanted());
  }

  static std::uint8_t disturbed(const Stream& stream, std::int64_t position, std::uint8_t guess) {
    const std::uint64_t bits = mix(stream.request->seed ^ (static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15u));
    if (bits & 1) return guess;
    return static_cast<std::uint8_t>(stream.text[static_cast<std::size_t>(bits >> 8) % stream.text.size()]);
  }

  static void draft_by_lookup(Stream& s) {
    for (std::size_t n = 8; n >= 3; --n) {
      if (s.text.size() <= n) continue;
      const std::size_t suffix = s.text.size() - n;
      const std::size_t found = s.text.rfind(s.text.substr(suffix), suffix - 1);
      if (found == std::string::npos) continue;
      s.step += s.text.substr(found + n, s.drafts_wanted());
      return;
    }
  }

  // One model step: rows of one to four tokens; then every byte up to and including the first that was not guessed.
  void verify() {
    std::vector<Tokens> rows;
    for (auto& s : running_) rows.push_back(tokens(*s, s->step));
    const std::vector<float>& hidden = model_.forward(rows, plan_.update);
    const auto d = static_cast<std::size_t>(model_.weights().config.d_model);
    const std::vector<float> logits = model_.logits(hidden.data(), hidden.size() / d);
    std::vector<std::int32_t> accepted;
    std::size_t first = 0;
    for (auto& s : running_) {
      std::size_t j = 0;
      append(*s, &logits[first * VOCAB]);
      while (j + 1 < s->step.size() && s->text.back() == s->step[j + 1]) append(*s, &logits[(first + ++j) * VOCAB]);
      keep_hidden(*s, hidden, first + j);
      accepted.push_back(static_cast<std::int32_t>(j) + 1);
      first += s->step.size();
      out_.bytes += static_cast<long long>(j) + 1;
      out_.row_steps += 1;
      out_.offered += static_cast<long long>(s->step.size()) - 1;
      out_.accepted_n[j] += 1;
    }
    model_.commit(plan_.update == Update::Replay ? &accepted : nullptr);
  }

  void retire() {
    for (std::size_t i = 0; i < running_.size();) {
      Stream& s = *running_[i];
      if (s.text.size() < s.end) {
        ++i;
        continue;
      }
      model_.finish(s.sequence);
      out_.texts[s.id] = s.text.substr(s.request->prompt.size());
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  static Tokens tokens(Stream& s, const std::string& bytes) {
    return {&s.sequence, reinterpret_cast<const std::uint8_t*>(bytes.data()), static_cast<int>(bytes.size())};
  }

  void keep_hidden(Stream& s, const std::vector<float>& hidden, std::size_t token) const {
    const auto d = static_cast<std::ptrdiff_t>(model_.weights().config.d_model);
    const auto from = hidden.begin() + static_cast<std::ptrdiff_t>(token) * d;
    s.hidden.assign(from, from + d);
  }

  void append(Stream& s, const float* logits) {
    const auto position = static_cast<std::int64_t>(s.text.size());
    const std::uint8_t byte = sample(logits, model_.weights().temperature, s.request->seed, position, noisy_);
    s.text += static_cast<char>(byte);
    if (plan_.expected != nullptr && !out_.difference.found) {
      const std::size_t at = s.text.size() - 1 - s.request->prompt.size();
      const auto expected = static_cast<std::uint8_t>((*plan_.expected)[s.id][at]);
      if (byte != expected) out_.difference = {true, s.id, at, noisy_[byte] - noisy_[expected]};
    }
  }

  Model& model_;
  const Plan& plan_;
  std::deque<std::unique_ptr<Stream>> waiting_;
  std::vector<std::unique_ptr<Stream>> running_;
  Outcome out_;
  float noisy_[VOCAB];
};

}  // namespace

long long Outcome::accepted() const {
  long long n = 0;
  for (std::size_t i = 0; i < accepted_n.size(); ++i) n += static_cast<long long>(i) * accepted_n[i];
  return n;
}

double Outcome::accepted_per_step() const {
  return row_steps == 0 ? 0 : static_cast<double>(accepted()) / static_cast<double>(row_steps);
}

Outcome generate(Model& model, const std::vector<Request>& requests, const Plan& plan) {
  return Generator(model, requests, plan).run();
}

}  // namespace demo
