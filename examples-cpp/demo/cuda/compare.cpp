// SPDX-License-Identifier: MIT OR Apache-2.0
#include "compare.h"

#include <cstdio>
#include <memory>

#include "generate.h"

namespace demo {
namespace cuda {
namespace {

struct GpuWay {
  const char* name;
  Update update;
  Drafts drafts;
};

const GpuWay PLAIN = {"plain update", Update::Plain, Drafts::None};
const GpuWay REPLAY = {"replay", Update::Replay, Drafts::None};
const GpuWay HEAD = {"replay, draft head", Update::Replay, Drafts::Head};
const GpuWay RANDOM = {"replay, random drafts", Update::Replay, Drafts::Random};

constexpr int CORRUPT_AT = 20, FORK_CORRUPT_AT = 10;
constexpr int STOP_AT = 10;

// The first byte at which a text is not the beginning of the expected one.
struct Parting {
  bool found = false;
  std::size_t request = 0, byte = 0;
  double margin = 0;
};

class GpuComparison {
 public:
  GpuComparison(const Device& device, const GpuTask& task) : device_(device), task_(task), weights_(device, task.weights) {}

  GpuResult run() {
    std::printf("A step is one CUDA graph, from the drafts to the commit; positions, counts and texts stay on the device. us: of whole\n"
                "steps on the device's clock; `rest`: of a step without the library's calls, in simple kernels of the example's own.\n\n");
    std::printf("%-22s %-13s %5s %7s %8s %8s %7s %8s %11s %7s  %s\n", "update", "state", "batch", "tokens", "accepted", "us/step",
                "rest", "us/token", "state bytes", "plain/", "text");
    std::printf("%-22s %-13s %5s %7s %8s %8s %7s %8s %11s %7s\n", "", "", "", "", "/step", "", "", "", "per token", "this");
    reference();
    for (const GpuWay& way : {PLAIN, REPLAY, HEAD, RANDOM}) {
      for (const int batch : {1, batch_size()}) exact(way, batch);
    }
    forked();
    for (const GpuWay& way : {REPLAY, HEAD}) {
      for (const int batch : {1, batch_size()}) high(way, batch);
    }
    std::printf("\n");
    resumed();
    against_cpu();
    std::printf("%s.\n", graphs_.c_str());
    result_.ran = true;
    return result_;
  }

 private:
  int batch_size() const { return static_cast<int>(task_.requests.size()); }

  // Alone, the first request has its whole length; in a batch, all have the same.
  std::vector<Request> requests_for(int batch) const {
    std::vector<Request> out(task_.requests.begin(), task_.requests.begin() + batch);
    if (batch > 1) out[0].n_bytes = task_.batch_text;
    return out;
  }

  std::unique_ptr<Decoder> decoder(const GpuWay& way, int batch, replayssm_readout readout,
                                   const std::vector<Request>& requests) const {
    Setup setup;
    setup.n_slots = batch;
    setup.max_step_tokens = way.drafts == Drafts::None ? 1 : 1 + MAX_DRAFTS;
    setup.readout = readout;
    return std::make_unique<Decoder>(device_, weights_, setup, way.update, way.drafts, requests, batch);
  }

  // The texts that all others must equal: every request alone, by plain updates.
  void reference() {
    const auto alone = decoder(PLAIN, 1, REPLAYSSM_READOUT_EXACT, task_.requests);
    for (const Request& request : task_.requests) reference_.add(alone->generate(&request));
    plain_bytes_ = reference_.state_bytes / static_cast<double>(reference_.bytes);
    print(PLAIN, "SPLIT32", 1, reference_, alone->seconds_without_library(), "the texts to compare with");
  }

  void exact(const GpuWay& way, int batch) {
    const std::vector<Request> requests = requests_for(batch);
    const auto run = decoder(way, batch, REPLAYSSM_READOUT_EXACT, requests);
    const bool broken = task_.corrupt && way.update == Update::Replay && batch == 1;
    const GpuOutcome outcome = broken ? run->generate(requests.data(), CORRUPT_AT, static_cast<Family>(n_broken_++ % 3))
                                      : run->generate(requests.data());
    const bool same = !part(outcome.texts, reference_.texts, outcome.margins).found;
    result_.identical = result_.identical && same;
    result_.broken_same += broken && same ? 1 : 0;
    if (way.drafts == Drafts::Random) result_.exercised = result_.exercised && outcome.every_count;
    print(way, way.update == Update::Plain ? "SPLIT32" : "SPLIT32 EXACT", batch, outcome,
          run->seconds_without_library(), same ? "same" : "DIFFERS");
    if (batch == 1) {
      graphs_ += (graphs_.empty() ? "Nodes of a step's graph: " : "; ") + std::string(way.name) + ": " + std::to_string(run->nodes());
    }
  }

  // As the CPU's comparison does both.
  void forked() {
    const std::vector<Request>& requests = task_.forks;
    const auto n = static_cast<int>(requests.size());
    const auto alone = decoder(PLAIN, 1, REPLAYSSM_READOUT_EXACT, requests);
    std::vector<std::string> own;
    for (const Request& request : requests) own.push_back(alone->generate(&request).texts[0]);
    const auto run = decoder(HEAD, n, REPLAYSSM_READOUT_EXACT, requests);
    const GpuOutcome outcome = run->generate(requests.data(), task_.corrupt ? FORK_CORRUPT_AT : -1, MAMBA2, true);
    const bool source = outcome.texts[0] == own[0];
    bool targets = true;
    for (std::size_t i = 1; i < own.size(); ++i) targets = targets && outcome.texts[i] == own[i] && own[i] != own[i - 1];
    result_.fork_same = source && targets;
    result_.broken_same += task_.corrupt && (source || !targets) ? 1 : 0;
    print(HEAD, "SPLIT32 EXACT", n, outcome, run->seconds_without_library(),
          result_.fork_same ? "same, one prompt forked" : "DIFFERS after a fork");
  }

  void resumed() {
    std::vector<Request> requests = {task_.requests[0]};
    requests[0].n_bytes = task_.batch_text;
    const auto run = decoder(HEAD, 1, REPLAYSSM_READOUT_EXACT, requests);
    const std::vector<Stopped> stopped = run->stop(requests[0], STOP_AT, {REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE},
                                                   task_.corrupt ? STOP_AT - 2 : -1);
    Setup setup;
    setup.max_step_tokens = 1 + MAX_DRAFTS;
    const int window = window_of(setup), other = window - 9;
    const std::string expected = reference_.texts[0].substr(0, task_.batch_text);
    const auto same = [&](std::size_t kind, int w) {
      std::vector<std::string> arguments = {"--model", task_.model, "--window", std::to_string(w), "--gpu"};
      if (!task_.nvrtc.empty()) arguments.insert(arguments.end(), {"--nvrtc", task_.nvrtc});
      return kind < stopped.size() && resume_in_new_process(stopped[kind], arguments) == expected;
    };
    const bool live = same(0, window), portable = same(1, other);
    result_.resume_same = live && portable;
    result_.broken_same += task_.corrupt && (live || portable) ? 1 : 0;
    std::printf("Stopped after %d steps, resumed by a new process: LIVE the text is %s, PORTABLE, window %d instead of %d, %s.\n", STOP_AT,
                live ? "the same" : "NOT the same", other, window, portable ? "the same" : "NOT the same");
  }

  void high(const GpuWay& way, int batch) {
    const std::vector<Request> requests = requests_for(batch);
    const auto run = decoder(way, batch, REPLAYSSM_READOUT_HIGH, requests);
    const GpuOutcome outcome = run->generate(requests.data());
    const Parting parting = part(outcome.texts, reference_.texts, outcome.margins);
    char text[96] = "same";
    if (parting.found) {
      std::snprintf(text, sizeof text, "another draw at byte %zu of request %zu, won by %.4f", parting.byte, parting.request,
                    parting.margin);
    }
    print(way, "SPLIT32 HIGH", batch, outcome, run->seconds_without_library(), text);
  }

  void against_cpu() const {
    const Parting parting = part(reference_.texts, task_.cpu, reference_.margins);
    std::size_t bytes = 0;
    for (const std::string& text : reference_.texts) bytes += text.size();
    if (!parting.found) {
      std::printf("The GPU's %zu bytes of text are the CPU's.\n", bytes);
      return;
    }
    // Dense layers are not the library's: another libc's exp, or a processor without fused multiply-add, rounds differently.
    std::size_t same = 0;
    for (std::size_t i = 0; i < task_.cpu.size(); ++i) {
      const Parting own = part({reference_.texts[i]}, {task_.cpu[i]}, {reference_.margins[i]});
      same += own.found ? 0 : 1;
    }
    std::printf("Of %zu texts, %zu are the CPU's. The others part where dense layers round differently: request %zu at byte %zu,\n"
                "where the GPU's choice won by %.4f.\n",
                task_.cpu.size(), same, parting.request, parting.byte, parting.margin);
  }

  static Parting part(const std::vector<std::string>& texts, const std::vector<std::string>& expected,
                      const std::vector<std::vector<float>>& margins) {
    for (std::size_t r = 0; r < texts.size(); ++r) {
      for (std::size_t i = 0; i < texts[r].size(); ++i) {
        if (texts[r][i] != expected[r][i]) return {true, r, i, static_cast<double>(margins[r][i])};
      }
    }
    return {};
  }

  void print(const GpuWay& way, const char* state, int batch, const GpuOutcome& outcome, double rest,
             const char* text) const {
    const double bytes = static_cast<double>(outcome.bytes), steps = static_cast<double>(outcome.steps);
    const double per_byte = outcome.state_bytes / bytes;
    char accepted[16] = "";
    if (way.drafts != Drafts::None) {
      std::snprintf(accepted, sizeof accepted, "%.2f", static_cast<double>(outcome.accepted) / static_cast<double>(outcome.row_steps));
    }
    std::printf("%-22s %-13s %5d %7lld %8s %8.1f %7.1f %8.1f %11.0f %7.2f  %s\n", way.name, state, batch, outcome.bytes, accepted,
                1e6 * outcome.seconds / steps, 1e6 * rest, 1e6 * outcome.seconds / bytes, per_byte, plain_bytes_ / per_byte, text);
    std::fflush(stdout);
  }

  const Device& device_;
  const GpuTask& task_;
  const DeviceWeights weights_;
  GpuOutcome reference_;
  GpuResult result_;
  std::string graphs_;
  double plain_bytes_ = 0;
  unsigned n_broken_ = 0;
};

}  // namespace

GpuResult compare_on_gpu(const GpuTask& task) {
  std::unique_ptr<Device> device;
  try {
    device = std::make_unique<Device>(task.nvrtc);
    auto desc = replayssm::init<replayssm_context_desc>();
    desc.backend = REPLAYSSM_BACKEND_CUDA;
    desc.device = -1;
    replayssm_context* context = nullptr;
    const replayssm_status status = replayssm_context_create(&desc, &context);
    replayssm_context_destroy(context);
    // A library without the CUDA backend, or without kernels for this device: its sentence says so.
    if (status == REPLAYSSM_ERROR_NO_CUDA || status == REPLAYSSM_ERROR_NO_CODE_FOR_ARCH) throw Unavailable(replayssm_last_error_message());
    replayssm::check(status);
  } catch (const Unavailable& why) {
    std::printf("\nNo GPU is used: %s.\n", why.what());
    return {};
  }
  std::printf("\nThe same on the GPU: %s (the example's kernels: %s).\n", device->name().c_str(), device->built().c_str());
  return GpuComparison(*device, task).run();
}

std::string resume_on_gpu(const Weights& weights, const Setup& setup, const Stopped& stopped, const std::string& nvrtc) {
  const Device device(nvrtc);
  const DeviceWeights on_device(device, weights);
  Decoder decoder(device, on_device, setup, HEAD.update, HEAD.drafts, {stopped.request()}, 1);
  return decoder.resume(stopped);
}

}  // namespace cuda
}  // namespace demo
