// A request that was stopped in mid-text, in a file, for another process: the library's blob, and what the library does not keep.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"
#include "request.h"

namespace demo {

struct Stopped {
  std::string text;            // the prompt and what follows; the last byte has not run through the model
  std::uint64_t prompt_bytes = 0, end = 0;  // of the text when it is finished
  std::uint64_t seed = 0;      // all that there is of a sampler's state: a draw is a function of seed and position
  std::vector<float> hidden;   // behind the last byte that was run, for the draft head
  Blob blob;

  Request request() const { return {text.substr(0, prompt_bytes), seed, end - prompt_bytes}; }
};

void write_stopped(const std::string& path, const Stopped& stopped);
Stopped read_stopped(const std::string& path);

// Writes a file, starts this program anew with `--resume FILE` and these arguments, and gives what that process prints, or
// nothing if it fails.
std::string resume_in_new_process(const Stopped& stopped, const std::vector<std::string>& arguments);

}  // namespace demo
