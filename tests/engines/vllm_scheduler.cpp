// A vLLM-shaped engine: a scheduler over state blocks and a persistent batch. bf16 activations, the default format and
// readout.
//
// - State blocks (slots) come from a block table, int64 in every second column; block 0 is the null block.
// - Positions in the persistent batch are rings, int32, fewer than blocks.
// - Decode batches are padded to fixed sizes, as captured graphs want it; verify batches are packed (query_start_loc).
// - Prompts go through extend in chunks; a shared system prompt is computed once and restored from its state.
// - Acceptance is late: a step's commit comes after the next prompts have been computed and requests have been aborted, whose
//   places may already serve others. Generations keep such a commit from touching them.
// - Preempted requests come back by recomputation or from a swapped-out state.
//
// Runs a few hundred steps, then compares the state of every live request with one extend over its tokens, by bytes.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <algorithm>
#include <deque>
#include <memory>

#include "engine.hpp"

namespace {

using namespace engine;

constexpr int n_blocks = 16, n_seats = 6, n_draft = 3, chunk = 24;
constexpr int n_rings = n_seats + 1;                                      // the last one is for the comparison
constexpr int64_t null_block = 0, reference_block = n_blocks - 1;
constexpr int32_t reference_seat = n_seats;

struct request {
  std::vector<int> tokens;     // the prompt, and what has been accepted
  size_t computed = 0;         // tokens that the state holds
  size_t prompt = 0;
  int64_t block = null_block;  // state block while running
  int32_t seat = -1;           // place in the persistent batch while running
  uint32_t generation = 0;
  std::vector<float> swapped;  // the state while swapped out
};

// A batch of a model step in the runner's buffers. They stay as they are until its commit.
struct model_input {
  std::vector<int64_t> block_table;  // [rows][2]: the state block, and a column of no interest here
  std::vector<int32_t> seats, query_start_loc;
  std::vector<uint32_t> generations;
  std::vector<int> tokens;  // packed, padding included
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);

  void add_row(const request &r) {
    block_table.insert(block_table.end(), {r.block, -99});
    seats.push_back(r.seat);
    generations.push_back(r.generation);
  }
  void add_padding() {
    block_table.insert(block_table.end(), {null_block, -99});
    seats.push_back(0);  // any seat: the block says that the row is padding
    generations.push_back(0);
  }
  void finish() {
    batch.flags |= REPLAYSSM_BATCH_NULL_ID;
    batch.null_id = static_cast<int32_t>(null_block);
    batch.n_rows = static_cast<int32_t>(seats.size());
    batch.slots = ids(block_table.data(), 2);
    batch.rings = ids(seats.data());
    batch.generation = generations.data();
    if (!query_start_loc.empty()) {
      batch.cu_seqlens = query_start_loc.data();
      batch.n_tokens = static_cast<int64_t>(tokens.size());
    }
  }
};

class model_runner {
 public:
  explicit model_runner(const model &m) : model_(m) {
    must(replayssm_context_create(nullptr, &context_));
    auto slots = REPLAYSSM_INIT(replayssm_slots_desc);
    slots.n_slots = n_blocks;
    slots.n_rings = n_rings;
    slots.max_step_tokens = 1 + n_draft;
    must(replayssm_slots_create(context_, &slots, &slots_));
    const auto mamba = m.mamba_pool(REPLAYSSM_DTYPE_BF16, REPLAYSSM_FORMAT_DEFAULT, REPLAYSSM_READOUT_DEFAULT);
    const auto conv = m.conv_pool(REPLAYSSM_DTYPE_BF16);
    must(replayssm_layers_create(slots_, &mamba, nullptr, 0, &mamba_));
    must(replayssm_layers_create(slots_, &conv, nullptr, 0, &conv_));
  }

  ~model_runner() {
    // Any order: children keep their parents.
    replayssm_context_destroy(context_);
    replayssm_slots_destroy(slots_);
    replayssm_layers_destroy(mamba_);
    replayssm_layers_destroy(conv_);
  }

  model_runner(const model_runner &) = delete;
  model_runner &operator=(const model_runner &) = delete;

  // A request takes its seat and block: empty, or (after a swap) at a position with a state that is written next.
  void start(const request &r, int64_t position) {
    auto args = REPLAYSSM_INIT(replayssm_reset_args);
    args.position = &position;
    args.generation = &r.generation;
    const auto list = list_of(r);
    must(replayssm_reset(slots_, &list, &args, nullptr));
  }

  // The state of all layers, then the convolution windows of all layers.
  std::vector<float> read_state(const request &r) const {
    std::vector<float> state(static_cast<size_t>(model_.shape.layers * (model_.shape.state_size() + model_.shape.window_size())));
    const auto list = list_of(r);
    auto dense = dense_state(state.data());
    must(replayssm_export(mamba_, &list, nullptr, &dense, nullptr));
    dense.data = state.data() + model_.shape.layers * model_.shape.state_size();
    must(replayssm_export(conv_, &list, nullptr, &dense, nullptr));
    return state;
  }

  void write_state(const request &r, const std::vector<float> &state) {
    const auto list = list_of(r);
    auto dense = dense_state(const_cast<float *>(state.data()));
    must(replayssm_import(mamba_, &list, nullptr, &dense, nullptr));
    dense.data = const_cast<float *>(state.data()) + model_.shape.layers * model_.shape.state_size();
    must(replayssm_import(conv_, &list, nullptr, &dense, nullptr));
  }

  // Runs all layers. Nothing moves.
  void execute(const model_input &in) {
    const model_shape &s = model_.shape;
    const int64_t tokens = static_cast<int64_t>(in.tokens.size());
    const int64_t T = in.batch.cu_seqlens ? 0 : in.batch.tokens;
    const bool extend = (in.batch.flags & REPLAYSSM_BATCH_EXTEND) != 0;
    std::vector<uint16_t> projected(static_cast<size_t>(tokens * s.projected()));
    std::vector<uint16_t> xBC(static_cast<size_t>(tokens * s.channels()));
    for (int layer = 0; layer < s.layers; layer++) {
      const layer_weights &w = model_.layers[static_cast<size_t>(layer)];
      for (int64_t t = 0; t < tokens; t++) {
        model_.project(layer, in.tokens[static_cast<size_t>(t)], projected.data() + t * s.projected());
      }
      const int64_t wide = s.projected(), narrow = s.channels();
      auto conv = REPLAYSSM_INIT(replayssm_conv1d_args);
      conv.x = view(projected.data(), T * wide, wide, 0);
      conv.out = view(xBC.data(), T * narrow, narrow, narrow);
      conv.weight = parameter(w.conv_weight, s.width);
      conv.bias = parameter(w.conv_bias);
      must((extend ? replayssm_conv1d_extend : replayssm_conv1d_step)(conv_, layer, &in.batch, &conv, nullptr));

      output.assign(static_cast<size_t>(tokens * s.inner()), to_bf16(7.0f));
      auto ssm = REPLAYSSM_INIT(replayssm_mamba2_args);
      ssm.x = view(xBC.data(), T * narrow, narrow, s.dim);
      ssm.B = view(xBC.data() + s.inner(), T * narrow, narrow, s.state);
      ssm.C = view(xBC.data() + s.inner() + s.bc(), T * narrow, narrow, s.state);
      ssm.dt = view(projected.data() + s.channels(), T * wide, wide, 1);
      ssm.A = parameter(w.A);
      ssm.dt_bias = parameter(w.dt_bias);
      ssm.D = parameter(w.D);
      ssm.out = view(output.data(), T * s.inner(), s.inner(), s.dim);
      must((extend ? replayssm_mamba2_extend : replayssm_mamba2_step)(mamba_, layer, &in.batch, &ssm, nullptr));
    }
  }

  // After sampling. accepted: of each row, the bonus token included; null for prompts.
  void commit(const model_input &in, const int32_t *accepted) {
    auto args = REPLAYSSM_INIT(replayssm_commit_args);
    args.convention = REPLAYSSM_COUNTS_ACCEPTED;
    args.counts = accepted;
    must(replayssm_commit(slots_, &in.batch, &args, nullptr));
  }

  int64_t position(const request &r) const {
    replayssm_cursor cursor;
    const auto list = list_of(r);
    must(replayssm_read_cursors(slots_, &list, &cursor, nullptr));
    require(cursor.generation == r.generation, "a seat is of another generation");
    return cursor.position;
  }

  void require_no_faults() const {
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(replayssm_check(slots_, 0, &report));
    require(report.bits == 0, "a fault bit is set");
  }

  uint64_t folds() const {
    auto stats = REPLAYSSM_INIT(replayssm_stats);
    must(replayssm_stats_read(slots_, &stats));
    return stats.flushes;
  }

  std::vector<uint16_t> output;  // [tokens][inner] of the last layer

 private:
  static replayssm_list list_of(const request &r) {
    auto list = REPLAYSSM_INIT(replayssm_list);
    list.n = 1;
    list.place = REPLAYSSM_WHERE_HOST;
    list.slots = ids(&r.block);
    list.rings = ids(&r.seat);
    return list;
  }

  static replayssm_state dense_state(float *data) {
    auto state = REPLAYSSM_INIT(replayssm_state);
    state.dtype = REPLAYSSM_DTYPE_F32;
    state.layer = -1;
    state.data = data;
    return state;
  }

  const model &model_;
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *mamba_ = nullptr, *conv_ = nullptr;
};

class scheduler {
 public:
  explicit scheduler(const model &m) : runner_(m), inner_(static_cast<size_t>(m.shape.inner())) {
    for (int64_t block = n_blocks - 2; block > null_block; block--) free_blocks_.push_back(block);
    for (int32_t seat = n_seats - 1; seat >= 0; seat--) free_seats_.push_back(seat);
    for (int i = 0; i < 16; i++) system_prompt_.push_back(300 + i);
  }

  void step() {
    while (running_.size() + waiting_.size() < n_seats + 2) arrive();
    admit();
    std::vector<int32_t> accepted;
    const std::unique_ptr<model_input> in = decode_batch();
    if (in) {
      runner_.execute(*in);
      if (random_.one_in(12)) runner_.execute(*in);  // a step that is run again changes nothing
      check_padding(*in);
    }
    // While the sampler of this step is busy: somebody hangs up, a newcomer may get that very seat and block, prompts go on.
    if (random_.one_in(8) && !running_.empty()) abort();
    admit();
    prefill();
    if (in) {
      for (size_t row = 0; row < in->seats.size(); row++) {
        const int n = length_of(*in, row);
        accepted.push_back(n == 0 ? 0 : 1 + random_.below(n));
      }
      runner_.commit(*in, accepted.data());
      take(*in, accepted);
    }
    if (random_.one_in(15) && !running_.empty()) preempt();
    for (const auto &r : running_) {
      require(runner_.position(*r) == static_cast<int64_t>(r->computed), "a position is not the number of computed tokens");
    }
    steps_++;
  }

  // Every running request against one extend over its tokens.
  void compare(bool broken) {
    require(!running_.empty() && aborted_ > 0 && reused_ > 0 && recomputed_ > 0 && swapped_ > 0 && restored_prompts_ > 0 &&
                null_rows_ > 0 && runner_.folds() > 0,
            "something never happened");
    size_t tokens = 0;
    for (const auto &r : running_) {
      request plain;
      plain.block = reference_block;
      plain.seat = reference_seat;
      plain.generation = ++generations_[reference_seat];
      runner_.start(plain, 0);
      model_input in;
      in.add_row(plain);
      in.tokens.assign(r->tokens.begin(), r->tokens.begin() + static_cast<std::ptrdiff_t>(r->computed));
      if (broken) in.tokens.back() ^= 1;
      in.batch.flags = REPLAYSSM_BATCH_EXTEND;
      in.batch.tokens = static_cast<int32_t>(r->computed);
      in.finish();
      if (r->computed > 0) runner_.execute(in);
      runner_.commit(in, nullptr);
      require(same_bytes(runner_.read_state(*r), runner_.read_state(plain)), "a state differs from the plain update's");
      tokens += r->computed;
    }
    runner_.require_no_faults();
    std::printf("vllm_scheduler: %d steps, %zu requests of %zu tokens, %d aborted (%d seats or blocks reused before the commit), "
                "%d recomputed, %d swapped, %d system prompts restored, %d null rows: states equal by bytes\n",
                steps_, running_.size(), tokens, aborted_, reused_, recomputed_, swapped_, restored_prompts_, null_rows_);
  }

 private:
  void arrive() {
    auto r = std::make_shared<request>();
    if (random_.one_in(2)) r->tokens = system_prompt_;
    for (int n = 1 + random_.below(60); n > 0; n--) r->tokens.push_back(random_.below(256));
    r->prompt = r->tokens.size();
    waiting_.push_back(r);
  }

  // Waiting requests get a seat and a block.
  void admit() {
    while (!waiting_.empty() && !free_seats_.empty()) {
      const auto r = waiting_.front();
      waiting_.pop_front();
      r->seat = free_seats_.back();
      r->block = free_blocks_.back();
      free_seats_.pop_back();
      free_blocks_.pop_back();
      r->generation = ++generations_[static_cast<size_t>(r->seat)];
      if (!r->swapped.empty()) {
        runner_.start(*r, static_cast<int64_t>(r->computed));
        runner_.write_state(*r, r->swapped);
        r->swapped.clear();
      } else if (r->computed == 0 && !system_state_.empty() && r->tokens.size() > system_prompt_.size() &&
                 std::equal(system_prompt_.begin(), system_prompt_.end(), r->tokens.begin())) {
        r->computed = system_prompt_.size();
        runner_.start(*r, static_cast<int64_t>(r->computed));
        runner_.write_state(*r, system_state_);
        restored_prompts_++;
      } else {
        runner_.start(*r, 0);
      }
      running_.push_back(r);
    }
  }

  void leave(const std::shared_ptr<request> &r) {
    free_seats_.push_back(r->seat);
    free_blocks_.push_back(r->block);
    r->seat = -1;
    r->block = null_block;
    running_.erase(std::find(running_.begin(), running_.end(), r));
  }

  bool decoding(const request &r) const { return r.computed == r.tokens.size() && r.computed >= r.prompt; }

  // All requests past their prompt: with drafts, packed rows of different lengths; without, one token per row. Padded to a
  // multiple of four rows.
  std::unique_ptr<model_input> decode_batch() {
    auto in = std::make_unique<model_input>();
    const bool drafts = random_.one_in(2);
    in_flight_.clear();
    if (drafts) in->query_start_loc.push_back(0);
    for (const auto &r : running_) {
      if (!decoding(*r) || random_.one_in(6)) continue;
      in_flight_.push_back(r);
      in->add_row(*r);
      const int n = drafts ? 1 + random_.below(1 + n_draft) : 1;
      for (int t = 0; t < n; t++) in->tokens.push_back(random_.below(256));
      if (drafts) in->query_start_loc.push_back(static_cast<int32_t>(in->tokens.size()));
    }
    if (in_flight_.empty()) return nullptr;
    while (in->seats.size() % 4 != 0) {
      in->add_padding();
      if (drafts) {
        in->query_start_loc.push_back(in->query_start_loc.back());
      } else {
        in->tokens.push_back(-1);
        null_rows_++;
      }
    }
    if (!drafts) in->batch.tokens = 1;
    in->finish();
    return in;
  }

  static int length_of(const model_input &in, size_t row) {
    return in.query_start_loc.empty() ? in.batch.tokens : in.query_start_loc[row + 1] - in.query_start_loc[row];
  }

  // Outputs of padded rows are zero, of all others not.
  void check_padding(const model_input &in) const {
    if (!in.query_start_loc.empty()) return;
    for (size_t row = 0; row < in.seats.size(); row++) {
      const auto begin = runner_.output.begin() + static_cast<std::ptrdiff_t>(row * inner_);
      const bool zero = std::all_of(begin, begin + static_cast<std::ptrdiff_t>(inner_), [](uint16_t v) { return v == 0; });
      require(zero == (in.block_table[2 * row] == null_block), "the output of a null row is not zero");
    }
  }

  // The next chunk of every prompt, for which no step is in flight.
  void prefill() {
    model_input in;
    std::vector<std::shared_ptr<request>> rows;
    in.query_start_loc.push_back(0);
    for (const auto &r : running_) {
      if (decoding(*r)) continue;
      size_t end = std::min(r->computed + chunk, r->tokens.size());
      // Stop where the system prompt ends, so that its state can be kept.
      if (r->computed < system_prompt_.size() && end > system_prompt_.size()) end = system_prompt_.size();
      in.tokens.insert(in.tokens.end(), r->tokens.begin() + static_cast<std::ptrdiff_t>(r->computed),
                       r->tokens.begin() + static_cast<std::ptrdiff_t>(end));
      in.query_start_loc.push_back(static_cast<int32_t>(in.tokens.size()));
      in.add_row(*r);
      rows.push_back(r);
    }
    if (rows.empty()) return;
    in.batch.flags = REPLAYSSM_BATCH_EXTEND;
    in.finish();
    runner_.execute(in);
    runner_.commit(in, nullptr);
    for (size_t i = 0; i < rows.size(); i++) {
      request &r = *rows[i];
      r.computed += static_cast<size_t>(length_of(in, i));
      if (system_state_.empty() && r.computed == system_prompt_.size() &&
          std::equal(system_prompt_.begin(), system_prompt_.end(), r.tokens.begin())) {
        system_state_ = runner_.read_state(r);
      }
    }
  }

  // Accepted tokens join their requests, unless the request has gone meanwhile.
  void take(const model_input &in, const std::vector<int32_t> &accepted) {
    size_t first = 0;
    for (size_t row = 0; row < in_flight_.size(); row++) {
      request &r = *in_flight_[row];
      if (r.seat >= 0) {
        r.tokens.insert(r.tokens.end(), in.tokens.begin() + static_cast<std::ptrdiff_t>(first),
                        in.tokens.begin() + static_cast<std::ptrdiff_t>(first) + accepted[row]);
        r.computed = r.tokens.size();
      }
      first += static_cast<size_t>(length_of(in, row));
    }
  }

  void abort() {
    const auto r = running_[static_cast<size_t>(random_.below(static_cast<int>(running_.size())))];
    const bool flying = std::find(in_flight_.begin(), in_flight_.end(), r) != in_flight_.end();
    leave(r);
    aborted_++;
    if (flying && !waiting_.empty()) reused_++;
  }

  void preempt() {
    const auto r = running_.back();
    if (random_.one_in(2)) {
      r->swapped = runner_.read_state(*r);
      swapped_++;
    } else {
      // What was generated becomes a part of the prompt.
      r->prompt = r->tokens.size();
      r->computed = 0;
      recomputed_++;
    }
    leave(r);
    waiting_.push_back(r);
  }

  model_runner runner_;
  size_t inner_;
  random_numbers random_{11};
  std::deque<std::shared_ptr<request>> waiting_;
  std::vector<std::shared_ptr<request>> running_, in_flight_;
  std::vector<int64_t> free_blocks_;
  std::vector<int32_t> free_seats_;
  std::vector<uint32_t> generations_ = std::vector<uint32_t>(n_rings, 0);
  std::vector<int> system_prompt_;
  std::vector<float> system_state_;
  int steps_ = 0, aborted_ = 0, reused_ = 0, recomputed_ = 0, swapped_ = 0, restored_prompts_ = 0, null_rows_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
  const model m({4, 64, 64, 1, 4, 2});
  scheduler engine(m);
  for (int step = 0; step < 400; step++) engine.step();
  // "break" shows that the comparison compares.
  engine.compare(argc > 1 && std::strcmp(argv[1], "break") == 0);
  return 0;
}
