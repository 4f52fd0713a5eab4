// The demo's comparison on the GPU: its texts by plain updates, by replay and with speculation must be the same bytes; beside them, how
// far they are those of the CPU.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "../generate.h"
#include "../weights.h"

namespace demo {
namespace cuda {

struct GpuResult {
  bool ran = false;       // whether there is a GPU to use
  bool identical = true;  // the texts on the GPU; nothing ran: true
  bool fork_same = true, resume_same = true;  // the texts of one prompt forked, and of a request that another process resumed
  bool exercised = true;  // random drafts were taken back by every number
  int broken_same = 0;    // runs with a ring row overwritten that gave the same text all the same
};

struct GpuTask {
  const Weights& weights;
  const std::vector<Request>& requests;     // each alone, with its whole length
  const std::vector<Request> forks;         // of one prompt
  std::size_t batch_text;                   // length of texts in a batch of all of them
  const std::vector<std::string>& cpu;      // the CPU's texts of the requests
  bool corrupt;                             // as --break
  std::string model;                        // the folder, for other processes
  std::string nvrtc;                        // the compiler's file; empty: it is looked for
};

GpuResult compare_on_gpu(const GpuTask& task);
// The whole text, without the prompt.
std::string resume_on_gpu(const Weights& weights, const Setup& setup, const Stopped& stopped, const std::string& nvrtc);

}  // namespace cuda
}  // namespace demo
