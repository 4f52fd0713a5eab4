// A llama.cpp-shaped engine: a recurrent memory of cells behind sequence ids, ubatches of equal rows, worker threads of its
// own that each do a share of every operation, speculative decoding by rejected counts or by removing the tail of a
// sequence, copies of sequences, and saved sessions. f32 activations.
//
// Runs a few hundred model steps, then compares every sequence with one extend over its tokens: states, convolution windows
// and, since the pool is EXACT, all outputs by bytes.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "engine.hpp"

namespace {

using namespace engine;

// ggml's threads: all run the same graph, and meet between operations.
class thread_group {
 public:
  explicit thread_group(int n) : n_(n) {}

  void compute(const std::function<void(int ith, int nth)> &graph) {
    std::vector<std::thread> workers;
    for (int ith = 1; ith < n_; ith++) workers.emplace_back(graph, ith, n_);
    graph(0, n_);
    for (std::thread &worker : workers) worker.join();
  }

  void barrier() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t round = round_;
    if (++waiting_ == n_) {
      waiting_ = 0;
      round_++;
      condition_.notify_all();
    } else {
      condition_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  int n_, waiting_ = 0;
  int64_t round_ = 0;
  std::mutex mutex_;
  std::condition_variable condition_;
};

// Sequences that all bring the same number of tokens, as llama.cpp splits batches for recurrent models.
struct ubatch {
  int n_seq_tokens;
  std::vector<int> seqs;
  std::vector<int> tokens;  // [seqs][n_seq_tokens]
  std::vector<float> out;   // [layers][seqs][n_seq_tokens][inner]
};

class recurrent_memory {
 public:
  static constexpr int n_seq_rm_max = 5;  // tokens that seq_rm can always take back

  recurrent_memory(const model &m, int n_cells, int n_draft, int n_threads) : model_(m), threads_(n_threads) {
    auto context = REPLAYSSM_INIT(replayssm_context_desc);
    context.n_threads = 1;  // the engine brings its own
    must(replayssm_context_create(&context, &context_));
    auto slots = REPLAYSSM_INIT(replayssm_slots_desc);
    slots.n_slots = n_cells;
    slots.window = 11;
    slots.max_step_tokens = 1 + n_draft;
    slots.min_rewind = n_seq_rm_max;
    must(replayssm_slots_create(context_, &slots, &slots_));
    const auto mamba = m.mamba_pool(REPLAYSSM_DTYPE_F32, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT);
    const auto conv = m.conv_pool(REPLAYSSM_DTYPE_F32);
    must(replayssm_layers_create(slots_, &mamba, nullptr, 0, &mamba_));
    must(replayssm_layers_create(slots_, &conv, nullptr, 0, &conv_));
    for (int cell = n_cells - 1; cell >= 0; cell--) free_cells_.push_back(cell);
  }

  ~recurrent_memory() {
    replayssm_layers_destroy(conv_);
    replayssm_layers_destroy(mamba_);
    replayssm_slots_destroy(slots_);
    replayssm_context_destroy(context_);
  }

  recurrent_memory(const recurrent_memory &) = delete;
  recurrent_memory &operator=(const recurrent_memory &) = delete;

  // An empty sequence.
  void seq_new(int seq) { reset(cell_for(seq), 0); }

  // Removes the tokens [p0, end) of a sequence. False, and nothing happens, if they are too many to take back.
  bool seq_rm(int seq, int64_t p0) {
    const auto found = cells_.find(seq);
    if (found == cells_.end()) return true;
    if (p0 == 0) {
      free_cells_.push_back(found->second);
      cells_.erase(found);
      return true;
    }
    const int32_t n = static_cast<int32_t>(seq_pos_max(seq) + 1 - p0);
    const auto list = list_of(&found->second);
    const replayssm_status status = replayssm_rewind(slots_, &list, &n, nullptr, nullptr);
    if (status == REPLAYSSM_ERROR_OUT_OF_RANGE) return false;
    must(status);
    return true;
  }

  int64_t seq_pos_max(int seq) const {
    replayssm_cursor cursor;
    const auto list = list_of(&cells_.at(seq));
    must(replayssm_read_cursors(slots_, &list, &cursor, nullptr));
    return cursor.position - 1;
  }

  void seq_cp(int from, int to) { state_read(to, state_write(from)); }

  // A sequence as bytes: its position, its states, its convolution windows.
  std::vector<char> state_write(int seq) const {
    const int64_t position = seq_pos_max(seq) + 1;
    std::vector<char> blob(sizeof position + static_cast<size_t>(state_floats()) * sizeof(float));
    std::memcpy(blob.data(), &position, sizeof position);
    std::vector<float> state = dense_state(seq);
    std::memcpy(blob.data() + sizeof position, state.data(), state.size() * sizeof(float));
    return blob;
  }

  void state_read(int seq, const std::vector<char> &blob) {
    int64_t position;
    std::vector<float> state(static_cast<size_t>(state_floats()));
    require(blob.size() == sizeof position + state.size() * sizeof(float), "a session of another model");
    std::memcpy(&position, blob.data(), sizeof position);
    std::memcpy(state.data(), blob.data() + sizeof position, state.size() * sizeof(float));
    const int32_t cell = cell_for(seq);
    reset(cell, position);
    const auto list = list_of(&cell);
    auto dense = all_layers(state.data());
    must(replayssm_import(mamba_, &list, nullptr, &dense, nullptr));
    dense.data = state.data() + model_.shape.layers * model_.shape.state_size();
    must(replayssm_import(conv_, &list, nullptr, &dense, nullptr));
  }

  // States of all layers, then convolution windows of all layers.
  std::vector<float> dense_state(int seq) const {
    std::vector<float> state(static_cast<size_t>(state_floats()));
    const auto list = list_of(&cells_.at(seq));
    auto dense = all_layers(state.data());
    must(replayssm_export(mamba_, &list, nullptr, &dense, nullptr));
    dense.data = state.data() + model_.shape.layers * model_.shape.state_size();
    must(replayssm_export(conv_, &list, nullptr, &dense, nullptr));
    return state;
  }

  // Runs the model over a ubatch. Nothing has moved before accept or accept_prompt: a failed graph may be run again.
  void decode(ubatch &u) { run(u, 0, 0); }
  void accept(const ubatch &u, const std::vector<int32_t> &rejected) {
    auto counts = REPLAYSSM_INIT(replayssm_commit_args);
    counts.convention = REPLAYSSM_COUNTS_REJECTED;
    counts.counts = rejected.data();
    std::vector<int32_t> cells;
    const auto batch = batch_of(u, cells, 0, 0);
    must(replayssm_commit(slots_, &batch, &counts, nullptr));
  }

  // A prompt. The last keep_tail tokens can be taken back right away.
  void prompt(ubatch &u, int keep_tail) {
    run(u, REPLAYSSM_BATCH_EXTEND, keep_tail);
    std::vector<int32_t> cells;
    const auto batch = batch_of(u, cells, REPLAYSSM_BATCH_EXTEND, keep_tail);
    must(replayssm_commit(slots_, &batch, nullptr, nullptr));
  }

  void require_no_faults() const {
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(replayssm_check(slots_, 0, &report));
    require(report.bits == 0, "a fault bit is set");
  }

 private:
  int32_t cell_for(int seq) {
    const auto found = cells_.find(seq);
    if (found != cells_.end()) return found->second;
    require(!free_cells_.empty(), "out of cells");
    const int32_t cell = free_cells_.back();
    free_cells_.pop_back();
    return cells_[seq] = cell;
  }

  void reset(int32_t cell, int64_t position) {
    auto args = REPLAYSSM_INIT(replayssm_reset_args);
    args.position = &position;
    const auto list = list_of(&cell);
    must(replayssm_reset(slots_, &list, &args, nullptr));
  }

  static replayssm_list list_of(const int32_t *cell) {
    auto list = REPLAYSSM_INIT(replayssm_list);
    list.n = 1;
    list.place = REPLAYSSM_WHERE_HOST;
    list.slots = ids(cell);
    return list;
  }

  static replayssm_state all_layers(float *data) {
    auto state = REPLAYSSM_INIT(replayssm_state);
    state.dtype = REPLAYSSM_DTYPE_F32;
    state.layer = -1;
    state.data = data;
    return state;
  }

  int64_t state_floats() const { return model_.shape.layers * (model_.shape.state_size() + model_.shape.window_size()); }

  replayssm_batch batch_of(const ubatch &u, std::vector<int32_t> &cells, uint32_t flags, int keep_tail) const {
    for (int seq : u.seqs) cells.push_back(cells_.at(seq));
    auto batch = REPLAYSSM_INIT(replayssm_batch);
    batch.flags = flags;
    batch.n_rows = static_cast<int32_t>(cells.size());
    batch.tokens = u.n_seq_tokens;
    batch.keep_tail = keep_tail;
    batch.slots = ids(cells.data());
    return batch;
  }

  void run(ubatch &u, uint32_t flags, int keep_tail) {
    const model_shape &s = model_.shape;
    const int64_t rows = static_cast<int64_t>(u.seqs.size()), T = u.n_seq_tokens;
    const int64_t per_layer = rows * T * s.inner();
    std::vector<int32_t> cells;
    const auto batch = batch_of(u, cells, flags, keep_tail);
    // Projected rows of a layer, and the convolution's output: x, B, C.
    std::vector<float> projected(static_cast<size_t>(rows * T * s.projected()));
    std::vector<float> xBC(static_cast<size_t>(rows * T * s.channels()));
    u.out.assign(static_cast<size_t>(s.layers * per_layer), 7.0f);
    threads_.compute([&](int ith, int nth) {
      auto exec = REPLAYSSM_INIT(replayssm_exec);
      exec.part = ith;
      exec.n_parts = nth;
      for (int layer = 0; layer < s.layers; layer++) {
        const layer_weights &w = model_.layers[static_cast<size_t>(layer)];
        for (int64_t t = ith; t < rows * T; t += nth) {
          model_.project(layer, u.tokens[static_cast<size_t>(t)], projected.data() + t * s.projected());
        }
        threads_.barrier();
        auto conv = REPLAYSSM_INIT(replayssm_conv1d_args);
        conv.x = view(projected.data(), T * s.projected(), s.projected(), 0);
        conv.out = view(xBC.data(), T * s.channels(), s.channels(), s.channels());
        conv.weight = parameter(w.conv_weight, s.width);
        conv.bias = parameter(w.conv_bias);
        must(flags ? replayssm_conv1d_extend(conv_, layer, &batch, &conv, &exec)
                   : replayssm_conv1d_step(conv_, layer, &batch, &conv, &exec));
        threads_.barrier();
        auto ssm = REPLAYSSM_INIT(replayssm_mamba2_args);
        const int64_t row = T * s.channels(), token = s.channels();
        ssm.x = view(xBC.data(), row, token, s.dim);
        ssm.B = view(xBC.data() + s.inner(), row, token, s.state);
        ssm.C = view(xBC.data() + s.inner() + s.bc(), row, token, s.state);
        ssm.dt = view(projected.data() + s.channels(), T * s.projected(), s.projected(), 1);
        ssm.z = view(projected.data() + s.channels() + s.heads, T * s.projected(), s.projected(), s.dim);
        ssm.A = parameter(w.A);
        ssm.dt_bias = parameter(w.dt_bias);
        ssm.D = parameter(w.D);
        ssm.out = view(u.out.data() + layer * per_layer, T * s.inner(), s.inner(), s.dim);
        must(flags ? replayssm_mamba2_extend(mamba_, layer, &batch, &ssm, &exec)
                   : replayssm_mamba2_step(mamba_, layer, &batch, &ssm, &exec));
        threads_.barrier();
      }
    });
  }

  const model &model_;
  thread_group threads_;
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *mamba_ = nullptr, *conv_ = nullptr;
  std::map<int, int32_t> cells_;
  std::vector<int32_t> free_cells_;
};

// What the engine remembers of a sequence, for the comparison at the end.
struct sequence {
  std::vector<int> tokens;
  std::vector<std::vector<float>> out;  // of every token: [layers][inner]
  int since = 0;                        // tokens that steps committed since the last reset, import, extend or rewind
};

// The first n tokens of row r of a ubatch have become part of a sequence.
void append(const model_shape &s, sequence &seq, const ubatch &u, int r, int n) {
  const int64_t rows = static_cast<int64_t>(u.seqs.size()), T = u.n_seq_tokens;
  for (int64_t t = 0; t < n; t++) {
    seq.tokens.push_back(u.tokens[static_cast<size_t>(r * T + t)]);
    std::vector<float> out;
    for (int64_t layer = 0; layer < s.layers; layer++) {
      const float *from = u.out.data() + ((layer * rows + r) * T + t) * s.inner();
      out.insert(out.end(), from, from + s.inner());
    }
    seq.out.push_back(out);
  }
}

void truncate(sequence &seq, int n) {
  seq.tokens.resize(seq.tokens.size() - static_cast<size_t>(n));
  seq.out.resize(seq.tokens.size());
  seq.since = 0;
}

}  // namespace

int main(int argc, char **argv) {
  constexpr int n_seqs = 5, n_draft = 4, steps = 400;
  constexpr int reference = 1000;  // a sequence id of its own
  const model m({6, 20, 24, 2, 4, 2});
  recurrent_memory memory(m, n_seqs + 1, n_draft, 3);
  random_numbers r{7};
  std::map<int, sequence> live;
  int removed = 0, refused = 0, rejected_drafts = 0, sessions = 0, copies = 0, messages = 0;

  const auto start = [&](int id) {
    ubatch u{1 + r.below(40), {id}, {}, {}};
    for (int t = 0; t < u.n_seq_tokens; t++) u.tokens.push_back(r.below(256));
    memory.seq_rm(id, 0);
    memory.seq_new(id);
    const int keep_tail = r.below(4) % u.n_seq_tokens;
    memory.prompt(u, keep_tail);
    live[id] = sequence();
    append(m.shape, live[id], u, 0, u.n_seq_tokens);
    if (keep_tail > 0 && r.one_in(2)) {
      // The user edits the end of the prompt.
      require(memory.seq_rm(id, u.n_seq_tokens - keep_tail), "the tail of a prompt could not be removed");
      truncate(live[id], keep_tail);
    }
  };
  for (int id = 0; id < n_seqs; id++) start(id);

  for (int step = 0; step < steps; step++) {
    ubatch u{1 + r.below(1 + n_draft), {}, {}, {}};
    for (int id = 0; id < n_seqs; id++) {
      if (r.one_in(4)) continue;
      u.seqs.push_back(id);
      for (int t = 0; t < u.n_seq_tokens; t++) u.tokens.push_back(r.below(256));
    }
    memory.decode(u);
    if (r.one_in(10)) memory.decode(u);  // an aborted graph is computed again

    // Sampling: the first token is right, drafts are right up to some point.
    std::vector<int32_t> rejected;
    for (size_t i = 0; i < u.seqs.size(); i++) rejected.push_back(r.below(u.n_seq_tokens));
    const bool by_removal = r.one_in(4);
    memory.accept(u, by_removal ? std::vector<int32_t>(rejected.size(), 0) : rejected);
    for (size_t i = 0; i < u.seqs.size(); i++) {
      sequence &seq = live[u.seqs[i]];
      const int accepted = u.n_seq_tokens - rejected[i];
      append(m.shape, seq, u, static_cast<int>(i), accepted);
      seq.since += accepted;
      rejected_drafts += rejected[i];
      const int64_t end = static_cast<int64_t>(seq.tokens.size());
      if (by_removal && rejected[i] > 0) {
        require(memory.seq_rm(u.seqs[i], end), "rejected drafts could not be removed");
        seq.since = 0;
      }
      require(memory.seq_pos_max(u.seqs[i]) == end - 1, "a position is not the number of tokens");
    }

    // What users do between steps.
    const int id = r.below(n_seqs);
    sequence &seq = live[id];
    const int possible = seq.since < recurrent_memory::n_seq_rm_max ? seq.since : recurrent_memory::n_seq_rm_max;
    if (r.one_in(6) && possible > 0) {
      const int n = 1 + r.below(possible);
      require(memory.seq_rm(id, static_cast<int64_t>(seq.tokens.size()) - n), "a promised rewind was refused");
      truncate(seq, n);
      removed += n;
    } else if (r.one_in(10) && seq.tokens.size() > 60) {
      // Far beyond what is held: refused, and nothing happens.
      require(!memory.seq_rm(id, 1), "half a sequence was removed");
      require(memory.seq_pos_max(id) + 1 == static_cast<int64_t>(seq.tokens.size()), "a refused removal moved");
      refused++;
    } else if (r.one_in(20)) {
      const std::vector<char> session = memory.state_write(id);
      memory.seq_rm(id, 0);
      memory.state_read(id, session);
      seq.since = 0;
      sessions++;
    } else if (r.one_in(20)) {
      const int to = (id + 1) % n_seqs;
      memory.seq_cp(id, to);
      live[to] = seq;
      live[to].since = 0;
      copies++;
    } else if (r.one_in(15)) {
      // The next message of a conversation: a prompt behind what is there.
      ubatch message{1 + r.below(30), {id}, {}, {}};
      for (int t = 0; t < message.n_seq_tokens; t++) message.tokens.push_back(r.below(256));
      memory.prompt(message, r.below(4) % message.n_seq_tokens);
      append(m.shape, seq, message, 0, message.n_seq_tokens);
      seq.since = 0;
      messages++;
    } else if (r.one_in(30)) {
      start(id);
    }
  }
  memory.require_no_faults();
  require(removed > 0 && refused > 0 && rejected_drafts > 0 && sessions > 0 && copies > 0 && messages > 0, "something never happened");

  // "break" shows that the comparison compares: one token of one sequence is not the one that was decoded.
  if (argc > 1 && std::strcmp(argv[1], "break") == 0) live[n_seqs - 1].tokens.back() ^= 1;
  int64_t tokens = 0;
  for (const auto &[id, seq] : live) {
    ubatch u{static_cast<int>(seq.tokens.size()), {reference}, seq.tokens, {}};
    memory.seq_new(reference);
    memory.prompt(u, 0);
    sequence plain;
    append(m.shape, plain, u, 0, u.n_seq_tokens);
    require(same_bytes(memory.dense_state(id), memory.dense_state(reference)), "a state differs from the plain update's");
    for (size_t t = 0; t < seq.out.size(); t++) {
      require(same_bytes(seq.out[t], plain.out[t]), "an output differs from the plain update's");
    }
    memory.seq_rm(reference, 0);
    tokens += static_cast<int64_t>(seq.tokens.size());
  }
  memory.require_no_faults();
  std::printf("llama_memory: %d steps, %zu sequences of %lld tokens, %d drafts rejected, %d tokens removed, %d removals refused, "
              "%d sessions, %d copies, %d further messages: states and outputs equal by bytes\n",
              steps, live.size(), static_cast<long long>(tokens), rejected_drafts, removed, refused, sessions, copies, messages);
  return 0;
}
