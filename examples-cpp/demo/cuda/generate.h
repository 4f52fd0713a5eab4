// Generation on the GPU: prompts in one batch, then one captured graph per step. The host enqueues it again and again and looks at
// the texts when they are done; with drafts it looks now and then whether they are.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../generate.h"
#include "model.h"

namespace demo {
namespace cuda {

struct GpuOutcome {
  std::vector<std::string> texts;           // without prompts
  std::vector<std::vector<float>> margins;  // by which each byte of a text was chosen, noise included
  long long bytes = 0;                      // of texts, but for their first bytes, which are the prompts' last logits'
  long long steps = 0;                      // graph launches
  long long row_steps = 0, accepted = 0;    // of the rows that were not done; drafts
  bool every_count = true;                  // steps accepted every number of drafts, from none to all
  double seconds = 0;                       // of all steps, on the device's clock
  double state_bytes = 0;

  void add(const GpuOutcome& other);
};

// Texts by one way of updating: the step is captured when the decoder is made.
class Decoder {
 public:
  // Drafts: None, Head or Random. Requests come with at most n_rows at once.
  Decoder(const Device& device, const DeviceWeights& weights, const Setup& setup, Update update, Drafts drafts,
          const std::vector<Request>& requests, int n_rows);

  // n_rows requests at once. corrupt_at: after this many steps a ring row of the first is overwritten; -1: never. fork: they have one
  // prompt, which is run once, and the first request forked.
  GpuOutcome generate(const Request* requests, int corrupt_at = -1, Family corrupt_in = MAMBA2, bool fork = false);
  // One request alone, which ends after so many steps, saved once for each kind; nothing if it was done before.
  std::vector<Stopped> stop(const Request& request, int steps, const std::vector<replayssm_save_kind>& kinds, int corrupt_at = -1);
  // Its whole text, without the prompt.
  std::string resume(const Stopped& stopped);
  // A step's time without the library's calls, to take from the whole; after `generate`, whose last positions it uses.
  double seconds_without_library();
  std::size_t nodes() const { return graph_->nodes(); }

 private:
  static int capacity_of(const std::vector<Request>& requests, int max_step_tokens);
  static int tokens_of(const std::vector<Request>& requests, int n_rows, int max_step_tokens);
  void start(const Request* requests);
  // A batch of tokens `from` .. `to` - 1 of each of the first rows; where the last token of each stands in it.
  struct Part {
    std::int32_t from, to;
  };
  std::vector<std::int32_t> run(const std::vector<Part>& parts, bool extend);
  std::vector<std::int32_t> run_prompts(const Request* requests);
  std::vector<std::int32_t> run_forked_prompt(const std::string& prompt);
  void prompts(const Request* requests, bool fork);
  void step();

  const Device& device_;
  const Update update_;
  const Drafts drafts_;
  const int n_rows_, tokens_;
  GpuModel model_;
  replayssm_batch batch_;
  std::vector<std::int32_t> slots_;
  std::vector<std::uint32_t> generations_;
  std::unique_ptr<Graph> graph_;
};

}  // namespace cuda
}  // namespace demo
