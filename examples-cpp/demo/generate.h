// Generation: prompts in, texts out, by plain updates or by replay, with or without speculation, in batches.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "model.h"
#include "request.h"
#include "stopped.h"

namespace demo {

constexpr int MAX_DRAFTS = 3;  // a step verifies the known byte and up to as many guesses

enum class Drafts {
  None,
  Head,    // the model's draft head
  Lookup,  // what followed the last few bytes when they occurred before
  Random,  // the head's, each replaced by a random byte of the text half of the time: every length of rollback
};

struct Plan {
  Update update = Update::Replay;
  Drafts drafts = Drafts::None;
  int batch = 1;             // requests that run at once; the others wait
  long long preempt_at = -1;  // after this many steps, the first request's state leaves the library and it queues again
  bool fork = false;          // all requests, at most `batch`, have one prompt: it is run once, and the first request forked
  long long stop_at = -1;     // after this many steps, the first request, which is alone, ends unfinished, in Outcome::stopped,
  std::vector<replayssm_save_kind> stop_kinds;  // once for each of these
  const Stopped* stopped = nullptr;             // what the first request, which is alone, goes on from
  long long corrupt_at = -1;  // after this many steps, one ring row of the first request is overwritten,
  Family corrupt_in = MAMBA2;  // in this family's first layer
  const std::vector<std::string>* expected = nullptr;  // texts of another run, to find the first byte that differs
};

struct Difference {
  bool found = false;
  std::size_t request = 0, byte = 0;  // byte of the generated text
  float margin = 0;                   // by which the chosen byte beat the expected one, noise included
};

// Counts are of generation; prompts are not in them.
struct Outcome {
  std::vector<std::string> texts;  // without prompts
  long long bytes = 0;
  long long row_steps = 0;                             // model steps, each counted once per request in it
  long long offered = 0;                               // drafts
  std::array<long long, MAX_DRAFTS + 1> accepted_n{};  // row steps by number of accepted drafts
  double seconds = 0;
  double state_bytes = 0;  // checkpoints and rings, windows included, loaded and stored by the library
  Difference difference;
  std::vector<Stopped> stopped;
  std::int32_t slot_before = -1, slot_after = -1;  // of the preempted request

  long long accepted() const;
  double accepted_per_step() const;
};

// Where a forked prompt is run as steps, not by extend, so that the fork finds tokens in the rings.
constexpr std::size_t FORK_TAIL = 10;

Outcome generate(Model& model, const std::vector<Request>& requests, const Plan& plan);

}  // namespace demo
