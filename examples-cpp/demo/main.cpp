// A trained byte-level language model (Mamba-2, Gated DeltaNet, Kimi Delta Attention and attention layers) writes text
// through libreplayssm, and checks what the library promises:
//
//   - with the EXACT readout, the same request gives the same bytes by plain updates and by replay, with and without
//     speculation, in any batch, with any number of threads, in both fp32 formats, and after a preemption;
//   - one prompt forked into several requests gives the texts of requests that ran it themselves, and a request that is saved to a
//     file and restored by another process, also under another window, gives the text of an uninterrupted one;
//   - with SPLIT32 and HIGH, it moves a fraction of the state's bytes at the same bits per byte, with logits nearer to
//     those of fp64 states than a bf16 state's.
//
// Where there is a GPU, it writes the same texts there too (cuda/).
//
//   demo [--quick] [--break] [--cpu] [--model FOLDER] [--nvrtc FILE]
//     --quick  small sizes, all checks: seconds
//     --break  overwrites one ring row in some of the runs, of each family in turn: must end with identical=0, which it
//              does only if every such run gives another text
//     --cpu    leaves a GPU alone
//     --resume FILE [--window N] [--gpu]
//              goes on with a stopped request and prints its text: what the demo starts itself with, in a new process
//     --nvrtc  the compiler of the GPU's kernels, libnvrtc.so.12 or newer, if it is not where the build or the system has it
// SPDX-License-Identifier: MIT OR Apache-2.0

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/compare.h"
#include "generate.h"
#include "noise.h"

namespace demo {
namespace {

// The file's logits64 are PyTorch's fp32. Another fp32 implementation sums in another order; where a value that the model
// rounds to bf16 lies next to a tie, that turns one bf16 number into its neighbour, 2^-8 of it. PyTorch's own fp32 and fp64
// differ so by up to 2e-2 in the logits (train/README.md). A wrong formula is off by 1 and more.
constexpr double LOGITS_TOLERANCE = 5e-2;
// Of logits with F32 states from those with fp64 states, root mean square: such rounding again; a wrong formula is off by 1.
constexpr double STATE_TOLERANCE = 1e-2;
constexpr double LEAST_ACCEPTED = 1.8;
constexpr double MOST_BITS = 2.2;

struct Sizes {
  int batch = 16;
  std::size_t long_text = 1024;
  std::size_t short_text = 192;
  std::size_t bpb_bytes = 16384;
};

struct Options {
  bool quick = false, corrupt = false, cpu = false, gpu = false;
  std::string model = DEMO_MODEL_FOLDER, nvrtc, resume;
  int window = 0;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--quick") {
      options.quick = true;
    } else if (arg == "--break") {
      options.corrupt = true;
    } else if (arg == "--cpu") {
      options.cpu = true;
    } else if (arg == "--gpu") {
      options.gpu = true;
    } else if (arg == "--resume" && i + 1 < argc) {
      options.resume = argv[++i];
    } else if (arg == "--window" && i + 1 < argc) {
      options.window = std::stoi(argv[++i]);
    } else if (arg == "--nvrtc" && i + 1 < argc) {
      options.nvrtc = argv[++i];
    } else if (arg == "--model" && i + 1 < argc) {
      options.model = argv[++i];
    } else {
      throw std::runtime_error("usage: demo [--quick] [--break] [--cpu] [--model FOLDER] [--nvrtc FILE]\n"
                               "       demo --resume FILE [--window N] [--gpu] [--model FOLDER] [--nvrtc FILE]");
    }
  }
  return options;
}

// Beginnings of paragraphs of a novel that the model has never seen, each longer than the one before.
std::vector<Request> make_requests(const std::string& text, const Sizes& sizes) {
  std::vector<std::string> paragraphs;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find("\n\n", at), text.size());
    if (end - at >= 500) paragraphs.push_back(text.substr(at, end - at));
    at = end + 2;
  }
  const auto n = static_cast<std::size_t>(sizes.batch);
  if (paragraphs.size() < n) throw std::runtime_error("the text has too few long paragraphs");
  std::vector<Request> requests;
  for (std::size_t i = 0; i < n; ++i) {
    const std::string& paragraph = paragraphs[i * paragraphs.size() / n];
    const std::size_t length = paragraph.find(' ', 40 + 25 * i);
    requests.push_back({paragraph.substr(0, length), 1000 + i, i == 0 ? sizes.long_text : sizes.short_text});
  }
  return requests;
}

// The first request's prompt, as it comes and with other seeds.
std::vector<Request> make_forks(const std::vector<Request>& requests, const Sizes& sizes) {
  std::vector<Request> forks;
  for (std::uint64_t i = 0; i < 4; ++i) forks.push_back({requests[0].prompt, requests[0].seed + 100 * i, sizes.short_text});
  return forks;
}

// ---- the model is the trained model ---------------------------------------------------------------------------------

std::vector<float> logits_of(const Weights& weights, const std::string& text, Update update, int tokens) {
  Setup setup;
  setup.max_step_tokens = tokens;
  Model model(weights, setup);
  Sequence sequence;
  model.start(sequence);
  std::vector<float> out;
  for (std::size_t at = 0; at < text.size(); at += static_cast<std::size_t>(tokens)) {
    const int n = std::min(tokens, static_cast<int>(text.size() - at));
    const auto& hidden = model.forward({{&sequence, reinterpret_cast<const std::uint8_t*>(&text[at]), n}}, update);
    model.commit();
    const std::vector<float> logits = model.logits(hidden.data(), static_cast<std::size_t>(n));
    out.insert(out.end(), logits.begin(), logits.end());
  }
  model.check_faults();
  return out;
}

struct LogitsCheck {
  double difference = 0;
  bool same_bytes = true;  // by plain update of one token, of all tokens at once, and by replay
};

LogitsCheck check_logits(const Safetensors& file, const Weights& weights) {
  const std::string text = base64_decode(file.metadata("bytes64"));
  const std::string raw = base64_decode(file.metadata("logits64"));
  std::vector<float> torch(text.size() * VOCAB);
  if (raw.size() != torch.size() * sizeof(float)) throw std::runtime_error("logits64 has another size than bytes64 says");
  std::memcpy(torch.data(), raw.data(), raw.size());

  LogitsCheck check;
  const std::vector<float> plain = logits_of(weights, text, Update::Plain, 1);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    check.difference = std::max(check.difference, static_cast<double>(std::fabs(plain[i] - torch[i])));
  }
  check.same_bytes = plain == logits_of(weights, text, Update::Plain, static_cast<int>(text.size())) &&
                     plain == logits_of(weights, text, Update::Replay, 1) &&
                     plain == logits_of(weights, text, Update::Replay, 4);
  return check;
}

// A state's format and readout, and how the scored text goes through the model.
struct Scoring {
  const char* name;
  Update update;
  int tokens;  // at once
  replayssm_format format;
  replayssm_readout readout;
  bool fp64_states;
};

struct Score {
  double bits_per_byte = 0;
  std::vector<float> logits;
};

const Scoring FP64 = {"fp64 state", Update::Plain, 1, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT, true};
const Scoring F32_EXACT = {"F32 EXACT, replay", Update::Replay, 4, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT, false};
const Scoring SPLIT_HIGH = {"SPLIT32 HIGH, replay", Update::Replay, 1, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH,
                            false};
// A bf16 state as engines keep it, rounded to nearest after every token.
const Scoring BF16_PLAIN = {"BF16, plain update", Update::Plain, 1, REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_EXACT, false};
// Rounded once per window.
const Scoring BF16_HIGH = {"BF16 HIGH, replay", Update::Replay, 1, REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_HIGH, false};

// One run from an empty state: bytes 1 .. n - 1 are scored, each from the logits after the one before.
Score score(const Weights& weights, const std::string& text, const Scoring& scoring) {
  Setup setup;
  setup.max_step_tokens = scoring.tokens;
  setup.format = scoring.format;
  setup.readout = scoring.readout;
  setup.fp64_states = scoring.fp64_states;
  Model model(weights, setup);
  Sequence sequence;
  model.start(sequence);
  Score out;
  double nats = 0;
  for (std::size_t at = 0; at < text.size(); at += static_cast<std::size_t>(scoring.tokens)) {
    const std::size_t n = std::min(static_cast<std::size_t>(scoring.tokens), text.size() - at);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&text[at]);
    const auto& hidden = model.forward({{&sequence, bytes, static_cast<int>(n)}}, scoring.update);
    model.commit();
    const std::vector<float> logits = model.logits(hidden.data(), n);
    out.logits.insert(out.logits.end(), logits.begin(), logits.end());
    for (std::size_t t = 0; t < n && at + t + 1 < text.size(); ++t) {
      const float* row = &logits[t * VOCAB];
      const double largest = *std::max_element(row, row + VOCAB);
      double sum = 0;
      for (int v = 0; v < VOCAB; ++v) sum += std::exp(row[v] - largest);
      nats += largest + std::log(sum) - row[bytes[t + 1]];
    }
  }
  model.check_faults();
  out.bits_per_byte = nats / static_cast<double>(text.size() - 1) / std::log(2.0);
  return out;
}

struct LogitsError {
  double largest = 0, root_mean_square = 0;
};

LogitsError error_of(const std::vector<float>& logits, const std::vector<float>& exact) {
  LogitsError error;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double difference = static_cast<double>(std::fabs(logits[i] - exact[i]));
    error.largest = std::max(error.largest, difference);
    error.root_mean_square += difference * difference;
  }
  error.root_mean_square = std::sqrt(error.root_mean_square / static_cast<double>(logits.size()));
  return error;
}

struct Scores {
  double fp32, split, bf16;  // bits per byte
  bool right;                // by logits: fp32 is fp64's but for rounding, SPLIT32 HIGH nearer to it than a bf16 state
};

Scores print_scores(const Safetensors& file, const Weights& weights, const std::string& text) {
  std::printf("\nFirst %zu held-out bytes", text.size());
  if (std::to_string(text.size()) == file.metadata("bpb_bytes")) {
    std::printf("; PyTorch: %.4f bits per byte", std::stod(file.metadata("bpb")));
  }
  std::printf("\n\n%-22s %13s  %s\n", "state", "bits per byte", "logits - with fp64 states: largest, root mean square");
  const Scoring* const scorings[] = {&FP64, &F32_EXACT, &SPLIT_HIGH, &BF16_PLAIN, &BF16_HIGH};
  std::vector<std::future<Score>> running;
  for (const Scoring* scoring : scorings) {
    running.push_back(std::async(std::launch::async, score, std::cref(weights), std::cref(text), std::cref(*scoring)));
  }
  const Score exact = running[0].get();
  std::printf("%-22s %13.4f\n", FP64.name, exact.bits_per_byte);
  std::vector<double> bits;
  std::vector<LogitsError> errors;
  for (std::size_t i = 1; i < running.size(); ++i) {
    const Score scored = running[i].get();
    bits.push_back(scored.bits_per_byte);
    errors.push_back(error_of(scored.logits, exact.logits));
    std::printf("%-22s %13.4f  %.3f, %.1e\n", scorings[i]->name, bits.back(), errors.back().largest,
                errors.back().root_mean_square);
  }
  return {bits[0], bits[1], bits[2],
          errors[0].root_mean_square <= STATE_TOLERANCE && errors[1].root_mean_square < errors[2].root_mean_square};
}

// ---- texts -------------------------------------------------------------------------------------------------------------

struct Way {
  const char* name;
  Update update;
  Drafts drafts;
};

const Way PLAIN = {"plain update", Update::Plain, Drafts::None};
const Way REPLAY = {"replay", Update::Replay, Drafts::None};
const Way HEAD = {"replay, draft head", Update::Replay, Drafts::Head};
const Way LOOKUP = {"replay, look-up", Update::Replay, Drafts::Lookup};
const Way RANDOM = {"replay, random drafts", Update::Replay, Drafts::Random};

int step_tokens(const Way& way) { return way.drafts == Drafts::None ? 1 : 1 + MAX_DRAFTS; }

// Whether each text has the length that was asked for and is a beginning of the expected one, which may go on longer.
bool same_texts(const std::vector<std::string>& texts, const std::vector<Request>& requests,
                const std::vector<std::string>& expected) {
  if (texts.size() != requests.size()) return false;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].size() != requests[i].n_bytes || expected[i].compare(0, texts[i].size(), texts[i]) != 0) return false;
  }
  return true;
}

class Comparison {
 public:
  Comparison(const Weights& weights, std::vector<Request> requests, const Sizes& sizes, const Options& options)
      : weights_(weights), requests_(std::move(requests)), sizes_(sizes), corrupt_(options.corrupt), model_(options.model) {}

  void run() {
    std::printf("\nA token is a byte; state bytes are loaded and stored, of checkpoints and rings, all layers.\n\n");
    std::printf("%-22s %-13s %5s %7s %7s %7s %8s %9s %11s %7s  %s\n", "update", "state", "batch", "threads", "tokens",
                "drafts", "accepted", "tokens/s", "state bytes", "plain/", "text");
    std::printf("%-22s %-13s %5s %7s %7s %7s %8s %9s %11s %7s\n", "", "", "", "", "", "/step", "/step", "", "per token",
                "this");

    // The texts that all others must equal: every request alone, by plain updates, on one thread.
    const Outcome first = generate_by(PLAIN, setup_of(PLAIN, 1, 1), requests_, plan_of(PLAIN, 1));
    expected_ = first.texts;
    identical_ = same_texts(first.texts, requests_, expected_);
    plain_bytes_ = first.state_bytes / static_cast<double>(first.bytes);
    print(PLAIN, setup_of(PLAIN, 1, 1), 1, first, "the texts to compare with");

    for (const Way& way : {PLAIN, REPLAY, HEAD, LOOKUP, RANDOM}) {
      for (const int batch : {1, sizes_.batch}) {
        for (const int threads : {1, 2}) exact(way, batch, threads, REPLAYSSM_FORMAT_SPLIT32);
      }
    }
    for (const Way& way : {PLAIN, REPLAY, HEAD}) {
      for (const int batch : {1, sizes_.batch}) exact(way, batch, 1, REPLAYSSM_FORMAT_F32);
    }
    preempted();
    forked();
    resumed();
    for (const Way& way : {REPLAY, HEAD}) {
      for (const int batch : {1, sizes_.batch}) high(way, batch);
    }
  }

  // With --break, whether a broken run gave the same text.
  bool identical() const { return corrupt_ ? broken_same_ > 0 : identical_; }
  bool fork_same() const { return fork_same_; }
  bool resume_same() const { return resume_same_; }
  bool exercised() const { return exercised_; }
  double accepted_per_step() const { return static_cast<double>(head_accepted_) / static_cast<double>(head_steps_); }
  long long rejected() const { return head_offered_ - head_accepted_; }
  double bytes_ratio() const { return plain_bytes_ / high_bytes_; }
  const std::vector<std::string>& texts() const { return expected_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  Setup setup_of(const Way& way, int batch, int threads, replayssm_format format = REPLAYSSM_FORMAT_SPLIT32,
                 replayssm_readout readout = REPLAYSSM_READOUT_EXACT) const {
    Setup setup;
    setup.n_slots = batch;
    setup.n_threads = threads;
    setup.max_step_tokens = step_tokens(way);
    setup.format = format;
    setup.readout = readout;
    return setup;
  }

  Plan plan_of(const Way& way, int batch) const {
    Plan plan;
    plan.update = way.update;
    plan.drafts = way.drafts;
    plan.batch = batch;
    return plan;
  }

  // Alone, the first request has its whole length; in a batch, all have the same.
  std::vector<Request> requests_for(int batch) const {
    std::vector<Request> out(requests_.begin(), requests_.begin() + batch);
    if (batch > 1) out[0].n_bytes = sizes_.short_text;
    return out;
  }

  Outcome generate_by(const Way&, const Setup& setup, const std::vector<Request>& requests, const Plan& plan) const {
    Model model(weights_, setup);
    return generate(model, requests, plan);
  }

  void exact(const Way& way, int batch, int threads, replayssm_format format) {
    const Setup setup = setup_of(way, batch, threads, format);
    Plan plan = plan_of(way, batch);
    const bool broken = corrupt_ && way.update == Update::Replay && batch == 1;
    if (broken) {
      plan.corrupt_at = 20;
      plan.corrupt_in = static_cast<Family>(static_cast<std::size_t>(broken_++) % N_FAMILIES);
    }
    const std::vector<Request> requests = requests_for(batch);
    const Outcome outcome = generate_by(way, setup, requests, plan);
    const bool same = same_texts(outcome.texts, requests, expected_);
    identical_ = identical_ && same;
    broken_same_ += broken && same;
    print(way, setup, batch, outcome, same ? "same" : "DIFFERS");
    if (way.drafts == Drafts::Head && format == REPLAYSSM_FORMAT_SPLIT32 && threads == 1) {
      head_accepted_ += outcome.accepted();
      head_offered_ += outcome.offered;
      head_steps_ += outcome.row_steps;
    }
    if (way.drafts == Drafts::Random) {
      // Every number of drafts taken back, from all to none.
      for (const long long n : outcome.accepted_n) exercised_ = exercised_ && n > 0;
      if (batch > 1 && threads == 1) {
        std::string note = "Random drafts, batch " + std::to_string(batch) + ": steps that accepted 0, 1, 2, 3 drafts:";
        for (const long long n : outcome.accepted_n) note += " " + std::to_string(n);
        notes_.push_back(note);
      }
    }
  }

  // More requests than places: the first leaves in mid-text, another takes its place, and it resumes in another slot.
  void preempted() {
    const int batch = 3;
    std::vector<Request> requests(requests_.begin(), requests_.begin() + 4);
    for (std::size_t i = 0; i < requests.size(); ++i) requests[i].n_bytes = sizes_.short_text - 16 * i;
    const Setup setup = setup_of(HEAD, batch, 2);
    Plan plan = plan_of(HEAD, batch);
    plan.preempt_at = 10;
    const Outcome outcome = generate_by(HEAD, setup, requests, plan);
    const bool moved = outcome.slot_before >= 0 && outcome.slot_after >= 0 && outcome.slot_before != outcome.slot_after;
    const bool same = same_texts(outcome.texts, requests, expected_);
    identical_ = identical_ && same && moved;
    print(HEAD, setup, batch, outcome, same ? "same, one request preempted" : "DIFFERS after a preemption");
    notes_.push_back("Preempted after 10 steps in slot " + std::to_string(outcome.slot_before) + ", resumed in slot " +
                     std::to_string(outcome.slot_after) + ": the text is " +
                     (same && moved ? "the same." : "NOT the same."));
  }

  // One prompt, run once, for several requests with seeds of their own.
  void forked() {
    const std::vector<Request> requests = make_forks(requests_, sizes_);
    const auto n = static_cast<int>(requests.size());
    // What they write if each runs the prompt itself.
    const std::vector<std::string> own = generate_by(PLAIN, setup_of(PLAIN, 1, 1), requests, plan_of(PLAIN, 1)).texts;
    const Setup setup = setup_of(HEAD, n, 1);
    Plan plan = plan_of(HEAD, n);
    plan.fork = true;
    if (corrupt_) plan.corrupt_at = 10;  // of the source alone: the others must not see it
    const Outcome outcome = generate_by(HEAD, setup, requests, plan);
    const bool source = outcome.texts[0] == own[0];
    bool targets = true;
    for (std::size_t i = 1; i < own.size(); ++i) targets = targets && outcome.texts[i] == own[i] && own[i] != own[i - 1];
    fork_same_ = source && targets;
    broken_same_ += corrupt_ && (source || !targets);
    print(HEAD, setup, n, outcome, fork_same_ ? "same, one prompt forked" : "DIFFERS after a fork");
    notes_.push_back("Forked: a prompt of " + std::to_string(requests[0].prompt.size()) + " bytes, run once, for " + std::to_string(n) +
                     " seeds: the texts are " + (fork_same_ ? "" : "NOT ") + "those of requests that run it themselves.");
  }

  // A request that ends in mid-text, in a file, and goes on in another process, with the same window and with another one.
  void resumed() {
    std::vector<Request> requests = {requests_[0]};
    requests[0].n_bytes = sizes_.short_text;
    const Setup setup = setup_of(HEAD, 1, 1);
    const int window = window_of(setup), other = window - 9;
    Plan plan = plan_of(HEAD, 1);
    plan.stop_at = 10;
    plan.stop_kinds = {REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE};
    if (corrupt_) plan.corrupt_at = 8;
    const Outcome outcome = generate_by(HEAD, setup, requests, plan);
    const std::string expected = expected_[0].substr(0, sizes_.short_text);
    const auto same = [&](std::size_t kind, int w) {
      return kind < outcome.stopped.size() &&
             resume_in_new_process(outcome.stopped[kind], {"--model", model_, "--window", std::to_string(w)}) == expected;
    };
    const bool live = same(0, window), portable = same(1, other);
    resume_same_ = live && portable;
    broken_same_ += corrupt_ && (live || portable);
    print(HEAD, setup, 1, outcome, resume_same_ ? "same, resumed by another process" : "DIFFERS after another process resumed it");
    notes_.push_back("Stopped after " + std::to_string(outcome.bytes) + " bytes, resumed by a new process: LIVE the text is " +
                     (live ? "the same" : "NOT the same") + ", PORTABLE, window " + std::to_string(other) + " instead of " +
                     std::to_string(window) + ", " + (portable ? "the same." : "NOT the same."));
  }

  void high(const Way& way, int batch) {
    const Setup setup = setup_of(way, batch, 1, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH);
    Plan plan = plan_of(way, batch);
    plan.expected = &expected_;
    const Outcome outcome = generate_by(way, setup, requests_for(batch), plan);
    print(way, setup, batch, outcome, outcome.difference.found ? "another draw, see below" : "same");
    if (way.drafts == Drafts::None && batch == 1) high_bytes_ = outcome.state_bytes / static_cast<double>(outcome.bytes);
    char note[160];
    if (outcome.difference.found) {
      std::snprintf(note, sizeof note,
                    "HIGH, %s, batch %d: request %zu differs first at byte %zu, where its choice won by %.4f.", way.name,
                    batch, outcome.difference.request, outcome.difference.byte,
                    static_cast<double>(outcome.difference.margin));
    } else {
      std::snprintf(note, sizeof note, "HIGH, %s, batch %d: no byte differs from EXACT.", way.name, batch);
    }
    notes_.push_back(note);
  }

  void print(const Way& way, const Setup& setup, int batch, const Outcome& outcome, const char* text) const {
    const double per_byte = outcome.state_bytes / static_cast<double>(outcome.bytes);
    const double steps = static_cast<double>(outcome.row_steps);
    std::printf("%-22s %-7s %-5s %5d %7d %7lld ", way.name, setup.format == REPLAYSSM_FORMAT_F32 ? "F32" : "SPLIT32",
                way.update == Update::Plain ? "" : setup.readout == REPLAYSSM_READOUT_HIGH ? "HIGH" : "EXACT", batch,
                setup.n_threads, outcome.bytes);
    if (way.drafts == Drafts::None) {
      std::printf("%7s %8s ", "", "");
    } else {
      std::printf("%7.2f %8.2f ", static_cast<double>(outcome.offered) / steps, outcome.accepted_per_step());
    }
    std::printf("%9.0f %11.0f %7.2f  %s\n", static_cast<double>(outcome.bytes) / outcome.seconds, per_byte,
                plain_bytes_ / per_byte, text);
    std::fflush(stdout);
  }

  const Weights& weights_;
  const std::vector<Request> requests_;
  const Sizes sizes_;
  const bool corrupt_;
  const std::string model_;
  std::vector<std::string> expected_, notes_;
  double plain_bytes_ = 0, high_bytes_ = 0;
  long long head_accepted_ = 0, head_offered_ = 0, head_steps_ = 0;
  int broken_ = 0, broken_same_ = 0;
  bool identical_ = true, exercised_ = true, fork_same_ = false, resume_same_ = false;
};

// Indented, in lines of 100 columns, as far as the last whole word.
void print_wrapped(const std::string& text) {
  std::size_t column = 0;
  for (std::size_t at = 0, end = 0; at < text.size(); at = end + 1) {
    end = text.find_first_of(" \n", at);
    if (end == std::string::npos) break;
    const std::string word = text.substr(at, end - at);
    if (column > 0 && column + 1 + word.size() > 100) {
      std::printf("\n");
      column = 0;
    }
    if (!word.empty()) {
      std::printf("%s%s", column == 0 ? "    " : " ", word.c_str());
      column += (column == 0 ? 0 : 1) + word.size();
    }
    if (text[end] == '\n') {
      std::printf("\n");
      column = 0;
    }
  }
  std::printf("\n");
}

// What resume_in_new_process starts. It prints the text and nothing else.
int resume(const Options& options) {
  const Safetensors file(options.model + "/austen.safetensors");
  const Weights weights(file);
  const Stopped stopped = read_stopped(options.resume);
  Setup setup;
  setup.max_step_tokens = step_tokens(HEAD);
  setup.window = options.window;
  std::string text;
  if (options.gpu) {
    text = cuda::resume_on_gpu(weights, setup, stopped, options.nvrtc);
  } else {
    Plan plan;
    plan.drafts = HEAD.drafts;
    plan.stopped = &stopped;
    Model model(weights, setup);
    text = generate(model, {stopped.request()}, plan).texts[0];
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  return std::fflush(stdout) == 0 ? 0 : 2;
}

int run(const Options& options) {
  Sizes sizes;
  if (options.quick) sizes = {4, 384, 96, 4096};
  const auto start = std::chrono::steady_clock::now();
  const Safetensors file(options.model + "/austen.safetensors");
  const Weights weights(file);
  const std::string heldout = read_file(options.model + "/heldout.txt");
  std::printf("%s\n", replayssm_build_info());
  const Config& c = weights.config;
  std::printf("model: layers %s (M: Mamba-2, %d heads of %d x %d; G: GDN, %d and %d heads of %d x %d; K: KDA, %d heads of\n"
              "    %d x %d; A: attention), %.1f MB, temperature %.2f\n",
              c.layers.c_str(), c.nheads, c.headdim, c.dstate, c.gdn.H, c.gdn.HV, c.gdn.V, c.gdn.K, c.kda.HV, c.kda.V,
              c.kda.K, static_cast<double>(file.bytes()) / 1e6, static_cast<double>(weights.temperature));

  const LogitsCheck logits = check_logits(file, weights);
  std::printf("logits of 64 held-out bytes: largest difference to PyTorch's %.2e (up to %.0e is rounding);\n"
              "    by plain update of 1 and of 64 tokens and by replay of 1 and 4 they are %s\n",
              logits.difference, LOGITS_TOLERANCE, logits.same_bytes ? "the same bytes" : "NOT THE SAME BYTES");

  const std::vector<Request> requests = make_requests(heldout, sizes);
  Comparison comparison(weights, requests, sizes, options);
  comparison.run();
  std::printf("\nA model of this size has its states in the processor's cache: fewer state bytes do not show in tokens/s\n"
              "here. `make bench` measures states of real size in memory.\n\n");
  for (const std::string& note : comparison.notes()) std::printf("%s\n", note.c_str());
  std::printf("Draft head: %.2f drafts accepted per step, %lld rejected.\n", comparison.accepted_per_step(),
              comparison.rejected());

  cuda::GpuResult gpu;
  if (!options.cpu) {
    gpu = cuda::compare_on_gpu(
        {weights, requests, make_forks(requests, sizes), sizes.short_text, comparison.texts(), options.corrupt, options.model,
         options.nvrtc});
  }

  const Scores scores = print_scores(file, weights, heldout.substr(0, sizes.bpb_bytes));
  const std::string& prompt = requests[0].prompt;
  std::printf("\nThe first request's text; the first %zu bytes were given:\n\n", prompt.size());
  print_wrapped(prompt + comparison.texts()[0].substr(0, 1000));
  std::printf("\n%.0f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());

  // With --break, whether a broken run gave the same text.
  const bool gpu_identical = options.corrupt ? gpu.broken_same > 0 : gpu.identical;
  const bool identical = options.corrupt ? comparison.identical() || gpu_identical
                                         : comparison.identical() && logits.same_bytes && gpu_identical;
  const bool fork = comparison.fork_same() && gpu.fork_same, resume = comparison.resume_same() && gpu.resume_same;
  std::printf("RESULT demo identical=%d accepted_per_step=%.2f bytes_ratio=%.2f bpb_fp32=%.4f bpb_split=%.4f "
              "bpb_bf16=%.4f gpu=%d fork=%d resume=%d\n",
              identical ? 1 : 0, comparison.accepted_per_step(), comparison.bytes_ratio(), scores.fp32, scores.split,
              scores.bf16, gpu.ran ? 1 : 0, fork ? 1 : 0, resume ? 1 : 0);
  const bool good = identical && fork && resume && comparison.exercised() && gpu.exercised && comparison.rejected() > 0 &&
                    comparison.accepted_per_step() >= LEAST_ACCEPTED && scores.fp32 < MOST_BITS &&
                    scores.split < MOST_BITS && scores.right && logits.difference <= LOGITS_TOLERANCE;
  return good ? 0 : 1;
}

}  // namespace
}  // namespace demo

int main(int argc, char** argv) {
  try {
    const demo::Options options = demo::read_options(argc, argv);
    return options.resume.empty() ? demo::run(options) : demo::resume(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "demo: %s\n", error.what());
    return 2;
  }
}
