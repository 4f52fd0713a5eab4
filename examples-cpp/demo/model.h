// The model on libreplayssm: dense layers here, the recurrent layers' states and convolution windows in the library.
//
// An engine's half of the interface in one place: which slot a sequence has (start, finish, save, restore), one batch for all
// layers of a model step (forward), and how many of its tokens stay (commit).
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <replayssm.hpp>

#include "weights.h"

namespace demo {

// What a running request owns beside its text: a slot of the library, and keys and values of the attention layers.
struct Sequence {
  std::int32_t slot = -1;
  std::uint32_t generation = 0;
  std::int64_t position = 0;     // tokens committed; the library has the same number
  std::vector<float> keys, values;  // [attention layer][row][attn_width], token p in row p mod n_rows
};

// A sequence's states outside the library, while it does not run.
struct Saved {
  std::int64_t position = 0;
  std::vector<float> states;            // [layer][head][headdim][dstate], exact
  std::vector<std::uint16_t> windows;   // [layer][channel][width - 1], bf16 as they came
};

// A sequence's next tokens: bytes at positions sequence->position and on.
struct Tokens {
  Sequence* sequence;
  const std::uint8_t* bytes;
  int n;
};

// Plain: `extend`, which rewrites the whole state for every call and cannot be undone. Replay: `step`.
enum class Update { Plain, Replay };

struct Setup {
  int n_slots = 1;
  int n_threads = 1;
  int max_step_tokens = 1;
  replayssm_format format = REPLAYSSM_FORMAT_SPLIT32;
  replayssm_readout readout = REPLAYSSM_READOUT_EXACT;
};

class Model {
 public:
  Model(const Weights& weights, const Setup& setup);

  const Weights& weights() const { return weights_; }

  // A free slot with an empty state.
  void start(Sequence& sequence);
  void finish(Sequence& sequence);
  Saved save(const Sequence& sequence) const;
  void restore(Sequence& sequence, const Saved& saved);

  // Runs the rows' tokens through all layers: final hidden states [all tokens of all rows, d_model].
  const std::vector<float>& forward(const std::vector<Tokens>& rows, Update update);
  // Ends the model step: accepted[r] tokens of row r stay. Null: all, as for every plain update.
  void commit(const std::vector<std::int32_t>* accepted = nullptr);
  // [n, vocab]
  std::vector<float> logits(const float* hidden, std::size_t n) const;

  replayssm_stats stats() const { return slots_.stats(); }
  // Throws if the library found a bad id, count, length or position.
  void check_faults() const;
  // Writes garbage over the newest record of a sequence in the first layer's ring: what the demo's own check must notice.
  void corrupt_newest_record(const Sequence& sequence);

 private:
  void mamba(std::size_t layer, std::size_t n_tokens, Update update);
  void attention(std::size_t layer, const std::vector<Tokens>& rows);

  const Weights& weights_;
  int ring_rows_;
  std::size_t kv_rows_;
  replayssm::Context context_;
  replayssm::Slots slots_;
  replayssm::Layers states_, windows_;

  // The batch of the model step in progress. Layers and commit read it; it lives until the commit.
  std::vector<Sequence*> sequences_;
  std::vector<std::int32_t> row_slots_, cu_seqlens_;
  std::vector<std::uint32_t> generations_;
  replayssm_batch batch_;

  // Activations [n_tokens, ..].
  std::vector<float> h_, normed_, proj_, y_, hidden_, scores_;
  std::vector<std::uint16_t> xbc_, z_;
};

}  // namespace demo
