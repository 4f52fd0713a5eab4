// The model on libreplayssm: dense layers here, the recurrent layers' states and convolution windows in the library.
//
// An engine's half of the interface in one place: which slot a sequence has (start, finish, fork, and the ways out of the library and
// back), one batch for all layers of a model step (forward), and how many of its tokens stay (commit).
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <replayssm.hpp>

#include "weights.h"

namespace demo {

enum Family { MAMBA2, GDN, KDA };
constexpr std::size_t N_FAMILIES = 3;

// What a running request owns beside its text: a slot of the library, and keys and values of the attention layers.
struct Sequence {
  std::int32_t slot = -1;
  std::uint32_t generation = 0;
  std::int64_t position = 0;     // tokens committed; the library has the same number
  std::vector<float> keys, values;  // [attention layer][row][attn_width], token p in row p mod n_rows
  std::vector<double> fp64;         // Setup::fp64_states: states of all layers, in the model's order
};

// A sequence's states outside the library, while it does not run.
struct Saved {
  std::int64_t position = 0;
  std::array<std::vector<float>, N_FAMILIES> states;            // [layer][head][row][column], exact
  std::array<std::vector<std::uint16_t>, N_FAMILIES> windows;   // [layer][channel][width - 1], bf16 as they came
};

// A sequence outside the process: the library's blob of its slot and ring, and what the attention layers still look back at.
struct Blob {
  std::int64_t position = 0;
  std::vector<char> bytes;
  std::vector<float> cache;  // [attention layer][keys, values][the last tokens, oldest first][attn_width]
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
  int window = 0;  // of the rings; 0: the library's default
  replayssm_format format = REPLAYSSM_FORMAT_SPLIT32;
  replayssm_readout readout = REPLAYSSM_READOUT_EXACT;
  bool fp64_states = false;  // state updates by the program's own fp64 recurrences instead of the library; no rollback
};

// What the library is asked for: the same on the CPU and on the GPU.
int window_of(const Setup& setup);
// Of the tokens in front of `position`, how many the next one's attention reaches.
std::int64_t cached_tokens(const Config& config, std::int64_t position);
replayssm_slots_desc slots_desc(const Setup& setup);
replayssm_pool_desc states_desc(const Weights& weights, const Setup& setup, Family family);
// The convolution in front of the layers of `states`: one packed row of x, B, C or of q, k, v.
replayssm_pool_desc windows_desc(const Weights& weights, Family family, const replayssm_pool_desc& states);

class Model {
 public:
  Model(const Weights& weights, const Setup& setup);

  const Weights& weights() const { return weights_; }

  // A free slot with an empty state.
  void start(Sequence& sequence);
  void finish(Sequence& sequence);
  Saved save(const Sequence& sequence) const;
  void restore(Sequence& sequence, const Saved& saved);
  // Free slots for the targets, which become what the source is.
  void fork(const Sequence& source, const std::vector<Sequence*>& targets);
  Blob save_blob(const Sequence& sequence, replayssm_save_kind kind) const;
  // A free slot, which becomes what was saved, maybe by another process.
  void restore_blob(Sequence& sequence, const Blob& blob);

  // Runs the rows' tokens through all layers: final hidden states [all tokens of all rows, d_model].
  const std::vector<float>& forward(const std::vector<Tokens>& rows, Update update);
  // Ends the model step: accepted[r] tokens of row r stay. Null: all, as for every plain update.
  void commit(const std::vector<std::int32_t>* accepted = nullptr);
  // [n, vocab]
  std::vector<float> logits(const float* hidden, std::size_t n) const;

  replayssm_stats stats() const { return slots_.stats(); }
  // Throws if the library found a bad id, count, length or position.
  void check_faults() const;
  // Writes garbage over the newest record of a sequence in the ring of a family's first layer: what the demo's own check
  // must notice.
  void corrupt_newest_record(const Sequence& sequence, Family family);

 private:
  // A family's layers: states and convolution windows in the library, and what one sequence has of them.
  struct Pools {
    replayssm::Layers states, windows;
    std::size_t state_elements, window_elements;  // of all layers
  };

  Pools pools(Family family);
  void clear_cache(Sequence& sequence) const;
  // Calls row(whether of values, place in keys or values, place in Blob::cache) for every cached row that will still be seen.
  template <class Row>
  void each_cached(const Sequence& sequence, Row row) const;
  void mamba(std::size_t layer, std::size_t n_tokens);
  void delta(Family family, std::size_t layer, std::size_t n_tokens);
  void attention(std::size_t layer, const std::vector<Tokens>& rows);

  // proj_ = matrix rms(h_, norm)
  void project(const std::vector<float>& norm, const Matrix& matrix, std::size_t n_tokens);
  // h_ += matrix y_
  void add_projected(const Matrix& matrix, std::size_t n_tokens);
  // packed_ = r(silu(conv(r(proj_)))) of the `channels` columns from `first` on
  void convolve(Family family, std::size_t layer, std::size_t n_tokens, int first, int channels,
                const std::vector<std::uint16_t>& weight, const std::vector<float>* bias);
  template <class Args>
  void call(const replayssm::Layers& pool, std::size_t layer, const Args& args);
  // Calls update(token, fp64 state) for every token in order; the layer has the next `elements` of each row's state.
  template <class Step>
  void in_fp64(std::size_t elements, Step update);

  const Weights& weights_;
  const Setup setup_;
  int ring_rows_;
  std::size_t kv_rows_;
  replayssm::Context context_;
  replayssm::Slots slots_;
  std::array<Pools, N_FAMILIES> pools_;

  // The batch of the model step in progress. Layers and commit read it; it lives until the commit.
  std::vector<Sequence*> sequences_;
  std::vector<std::int32_t> row_slots_, cu_seqlens_;
  std::vector<std::uint32_t> generations_;
  replayssm_batch batch_;
  std::size_t fp64_at_ = 0;  // elements of the layers before the current one

  // Activations [n_tokens, ..].
  std::vector<float> h_, normed_, proj_, decay_, y_, hidden_, scores_;
  std::vector<std::uint16_t> packed_, z_;
};

}  // namespace demo
