// Whole models in llama.cpp: decoded by llama.cpp as it is, and by llama.cpp with examples-cpp/adapters/ggml/llama_cpp.patch, which gives
// its recurrent layers to the library. Tokens are the same, without drafts and with drafts of which some are rejected.
//
//   llama_model ARCH write MODEL             writes a small model of random weights: nemotron_h (Mamba-2) or qwen35 (Gated DeltaNet)
//   llama_model ARCH stock MODEL RECORD      decodes, and writes tokens and logits to RECORD
//   llama_model ARCH library MODEL RECORD    decodes with the library, and compares with RECORD
//   llama_model ARCH break MODEL RECORD      the same, but the library keeps one rejected draft: must fail
//
// Which llama.cpp it is, is a matter of linking (tests/llama.sh).
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine.hpp"
#include "replayssm_llama.hpp"

namespace {

using namespace engine;

constexpr int n_vocab = 512, n_embd = 128, n_ff = 192, n_conv = 4, n_drafts = 3, n_generated = 96, n_seqs = 3;
constexpr replayssm_ggml::mamba2_shape mamba2{4, 64, 128, 2};
constexpr replayssm_ggml::delta_shape delta{2, 4, 128, false};
constexpr int attention_heads = 2, attention_dim = 64;

// Each of three recurrent layers gives outputs within 1e-5 of ggml's (ggml_adapter.cpp has why), and all else is the same code on the same
// numbers, in fp32. Measured: 2e-6 of the logits.
constexpr double tolerance = 3e-5;

// ---- A model ----

class writer {
 public:
  writer(const std::string &arch) : arch_(arch), gguf_(gguf_init_empty()), context_(ggml_init({size_t{64} << 20, nullptr, false})) {
    gguf_set_val_str(gguf_, "general.architecture", arch.c_str());
    gguf_set_val_str(gguf_, "tokenizer.ggml.model", "none");
    number("vocab_size", n_vocab);
    number("context_length", 4096);
    number("embedding_length", n_embd);
    number("attention.head_count", attention_heads);
    number("ssm.conv_kernel", n_conv);
    real("attention.layer_norm_epsilon", 1e-5f);
    real("attention.layer_norm_rms_epsilon", 1e-5f);
    random("token_embd.weight", {n_embd, n_vocab}, -1.7f, 1.7f);
    random("output_norm.weight", {n_embd}, 0.8f, 1.2f);
    matrix("output.weight", n_embd, n_vocab);
  }
  ~writer() {
    gguf_free(gguf_);
    ggml_free(context_);
  }
  writer(const writer &) = delete;
  writer &operator=(const writer &) = delete;

  void number(const std::string &key, uint32_t value) { gguf_set_val_u32(gguf_, (arch_ + "." + key).c_str(), value); }
  void real(const std::string &key, float value) { gguf_set_val_f32(gguf_, (arch_ + "." + key).c_str(), value); }
  void numbers(const std::string &key, const std::vector<int32_t> &values) {
    gguf_set_arr_data(gguf_, (arch_ + "." + key).c_str(), GGUF_TYPE_INT32, values.data(), values.size());
  }
  void tensor(const std::string &name, const std::vector<int64_t> &shape, const std::function<float()> &value) {
    ggml_tensor *t = ggml_new_tensor(context_, GGML_TYPE_F32, static_cast<int>(shape.size()), shape.data());
    ggml_set_name(t, name.c_str());
    for (int64_t i = 0; i < ggml_nelements(t); i++) static_cast<float *>(t->data)[i] = value();
    gguf_add_tensor(gguf_, t);
  }
  void random(const std::string &name, const std::vector<int64_t> &shape, float low, float high) {
    tensor(name, shape, [&] { return r_.between(low, high); });
  }
  // Keeps the size of what it is applied to.
  void matrix(const std::string &name, int64_t from, int64_t to) {
    const float size = std::sqrt(3.0f / static_cast<float>(from));
    random(name, {from, to}, -size, size);
  }
  // -exp(uniform): decays of all speeds.
  void decays(const std::string &name, const std::vector<int64_t> &shape) {
    tensor(name, shape, [&] { return -std::exp(r_.between(-2.5f, 1.4f)); });
  }
  void attention(const std::string &block, int64_t query) {
    matrix(block + "attn_q.weight", n_embd, query);
    matrix(block + "attn_k.weight", n_embd, attention_dim);
    matrix(block + "attn_v.weight", n_embd, attention_dim);
    matrix(block + "attn_output.weight", attention_heads * attention_dim, n_embd);
  }
  void save(const char *path) const { require(gguf_write_to_file(gguf_, path, false), "the model was not written"); }

 private:
  std::string arch_;
  gguf_context *gguf_;
  ggml_context *context_;
  random_numbers r_{7};
};

std::string block(int layer) { return "blk." + std::to_string(layer) + "."; }

// Mamba-2, Mamba-2, attention, Mamba-2, feed-forward.
void write_nemotron_h(const char *path) {
  writer w("nemotron_h");
  const int64_t inner = mamba2.n_head * mamba2.head_dim, channels = inner + 2 * mamba2.n_group * mamba2.d_state;
  w.number("block_count", 5);
  w.numbers("attention.head_count_kv", {0, 0, 1, 0, 0});
  w.numbers("feed_forward_length", {0, 0, 0, 0, n_ff});
  w.number("ssm.inner_size", static_cast<uint32_t>(inner));
  w.number("ssm.state_size", mamba2.d_state);
  w.number("ssm.time_step_rank", mamba2.n_head);
  w.number("ssm.group_count", mamba2.n_group);
  for (int layer = 0; layer < 5; layer++) {
    const std::string b = block(layer);
    w.random(b + "attn_norm.weight", {n_embd}, 0.8f, 1.2f);
    if (layer == 2) {
      w.attention(b, attention_heads * attention_dim);
    } else if (layer == 4) {
      w.matrix(b + "ffn_up.weight", n_embd, n_ff);
      w.matrix(b + "ffn_down.weight", n_ff, n_embd);
    } else {
      w.matrix(b + "ssm_in.weight", n_embd, inner + channels + mamba2.n_head);
      w.random(b + "ssm_conv1d.weight", {n_conv, channels}, -0.8f, 0.8f);
      w.random(b + "ssm_conv1d.bias", {channels}, -0.1f, 0.1f);
      w.random(b + "ssm_dt.bias", {mamba2.n_head}, -4.0f, -1.0f);
      w.decays(b + "ssm_a", {1, mamba2.n_head});
      w.random(b + "ssm_d", {1, mamba2.n_head}, -0.5f, 0.5f);
      w.random(b + "ssm_norm.weight", {inner / mamba2.n_group, mamba2.n_group}, 0.8f, 1.2f);
      w.matrix(b + "ssm_out.weight", inner, n_embd);
    }
  }
  w.save(path);
}

// Gated DeltaNet three times, and attention.
void write_qwen35(const char *path) {
  writer w("qwen35");
  const int64_t values = delta.n_head_v * delta.head_size, channels = values + 2 * delta.n_head_k * delta.head_size;
  w.number("block_count", 4);
  w.number("feed_forward_length", n_ff);
  w.number("attention.head_count_kv", 1);
  w.number("attention.key_length", attention_dim);
  w.number("attention.value_length", attention_dim);
  w.number("rope.dimension_count", attention_dim);
  w.numbers("rope.dimension_sections", {11, 11, 10, 0});
  w.number("full_attention_interval", 4);
  w.number("ssm.inner_size", static_cast<uint32_t>(values));
  w.number("ssm.state_size", delta.head_size);
  w.number("ssm.time_step_rank", delta.n_head_v);
  w.number("ssm.group_count", delta.n_head_k);
  for (int layer = 0; layer < 4; layer++) {
    const std::string b = block(layer);
    w.random(b + "attn_norm.weight", {n_embd}, 0.8f, 1.2f);
    w.random(b + "post_attention_norm.weight", {n_embd}, 0.8f, 1.2f);
    w.matrix(b + "ffn_gate.weight", n_embd, n_ff);
    w.matrix(b + "ffn_up.weight", n_embd, n_ff);
    w.matrix(b + "ffn_down.weight", n_ff, n_embd);
    if (layer == 3) {
      w.attention(b, 2 * attention_heads * attention_dim);  // with a gate
      w.random(b + "attn_q_norm.weight", {attention_dim}, 0.8f, 1.2f);
      w.random(b + "attn_k_norm.weight", {attention_dim}, 0.8f, 1.2f);
    } else {
      w.matrix(b + "attn_qkv.weight", n_embd, channels);
      w.matrix(b + "attn_gate.weight", n_embd, values);
      w.random(b + "ssm_conv1d.weight", {n_conv, channels}, -0.8f, 0.8f);
      w.random(b + "ssm_dt.bias", {delta.n_head_v}, -4.0f, -1.0f);
      w.decays(b + "ssm_a", {delta.n_head_v});
      w.matrix(b + "ssm_beta.weight", n_embd, delta.n_head_v);
      w.matrix(b + "ssm_alpha.weight", n_embd, delta.n_head_v);
      w.random(b + "ssm_norm.weight", {delta.head_size}, 0.8f, 1.2f);
      w.matrix(b + "ssm_out.weight", values, n_embd);
    }
  }
  w.save(path);
}

// ---- Decoding ----

// What a run gave: tokens of each sequence, and the logits of all tokens that were decoded behind the prompts.
struct record {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  uint64_t state_bytes = 0;  // as llama.cpp says, states alone
  int32_t rejected = 0;
};

// Keeps a rejected draft when it is told to.
class keeps_one : public replayssm_llama::recurrent {
 public:
  using recurrent::recurrent;
  bool remove_tail(int32_t seq, int32_t n) override { return recurrent::remove_tail(seq, ++calls_ == 5 ? n - 1 : n); }

 private:
  int calls_ = 0;
};

// llama.cpp tells the size of its states to the log alone.
double logged_mib = 0;

void read_log(ggml_log_level level, const char *text, void *) {
  const char *at = std::strstr(text, "S (f32):");
  if (at != nullptr) logged_mib = std::atof(at + 8);
  if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

// Tokens to decode, all with logits.
struct batch {
  batch() : b(llama_batch_init(1024, 0, 1)) {}
  ~batch() { llama_batch_free(b); }
  batch(const batch &) = delete;
  batch &operator=(const batch &) = delete;
  void add(int32_t token, int32_t pos, int32_t seq) {
    const int32_t i = b.n_tokens++;
    b.token[i] = token;
    b.pos[i] = pos;
    b.n_seq_id[i] = 1;
    b.seq_id[i][0] = seq;
    b.logits[i] = 1;
  }
  llama_batch b;
};

int32_t best(const float *logits) { return static_cast<int32_t>(std::max_element(logits, logits + n_vocab) - logits); }

// Greedy, the sequences in parallel. With n_rs_seq, each step has that many drafts: right ones from `known`, the tokens of a run without, and
// wrong ones.
record decode(llama_model *model, int32_t n_rs_seq, const std::vector<int32_t> &known) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 4096;
  params.n_batch = params.n_ubatch = 1024;
  params.n_seq_max = n_seqs;
  params.n_rs_seq = static_cast<uint32_t>(n_rs_seq);
  params.n_threads = params.n_threads_batch = 1;  // more would wait for each other longer than they compute
  // Attention in fp32: fp16 would make 1e-5 of a difference in the last bit before it.
  params.type_k = params.type_v = GGML_TYPE_F32;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model, params), llama_free);
  require(context != nullptr, "no context");
  require(llama_n_rs_seq(context.get()) == params.n_rs_seq, "this model has no drafts");
  llama_memory_t memory = llama_get_memory(context.get());

  record out;
  out.state_bytes = static_cast<uint64_t>(std::lround(logged_mib * 100) * 1048576 / 100);
  random_numbers r{n_rs_seq == 0 ? 3u : 4u};
  // Prompts of two sequences, of different lengths; the last one goes on from the first.
  random_numbers prompts{5};
  int32_t position[n_seqs], next[n_seqs];
  {
    batch prompt;
    for (int seq = 0; seq < 2; seq++) {
      position[seq] = seq == 0 ? 37 : 22;
      for (int i = 0; i < position[seq]; i++) prompt.add(prompts.below(n_vocab), i, seq);
    }
    require(llama_decode(context.get(), prompt.b) == 0, "a prompt was not decoded");
    next[0] = best(llama_get_logits_ith(context.get(), position[0] - 1));
    next[1] = best(llama_get_logits_ith(context.get(), position[0] + position[1] - 1));
    llama_memory_seq_cp(memory, 0, 2, -1, -1);
    position[2] = position[0];
    next[2] = (next[0] + 1) % n_vocab;
  }
  std::vector<std::vector<int32_t>> tokens(n_seqs);
  for (int seq = 0; seq < n_seqs; seq++) tokens[static_cast<size_t>(seq)].push_back(next[seq]);
  const auto unfinished = [&](int seq) { return tokens[static_cast<size_t>(seq)].size() < n_generated; };
  while (unfinished(0) || unfinished(1) || unfinished(2)) {
    // The sampled token of each sequence, and drafts of which some are wrong. Sequences that have all their tokens go on, unlooked at.
    batch step;
    std::vector<std::vector<int32_t>> drafts(n_seqs);
    for (int seq = 0; seq < n_seqs; seq++) {
      const auto &so_far = tokens[static_cast<size_t>(seq)];
      step.add(so_far.back(), position[seq], seq);
      for (int i = 0; i < n_rs_seq; i++) {
        const size_t at = so_far.size() + static_cast<size_t>(i);
        int32_t draft = at < n_generated ? known[static_cast<size_t>(seq * n_generated) + at] : 0;
        if (r.one_in(4)) draft = (draft + 1) % n_vocab;
        drafts[static_cast<size_t>(seq)].push_back(draft);
        step.add(draft, position[seq] + 1 + i, seq);
      }
    }
    require(llama_decode(context.get(), step.b) == 0, "a step was not decoded");
    for (int seq = 0; seq < n_seqs; seq++) {
      auto &so_far = tokens[static_cast<size_t>(seq)];
      const auto &drafted = drafts[static_cast<size_t>(seq)];
      int accepted = 0;
      for (int i = 0; i <= n_rs_seq; i++) {
        const float *logits = llama_get_logits_ith(context.get(), seq * (1 + n_rs_seq) + i);
        out.logits.insert(out.logits.end(), logits, logits + n_vocab);
        so_far.push_back(best(logits));
        accepted++;
        if (i == n_rs_seq || drafted[static_cast<size_t>(i)] != so_far.back()) break;
      }
      position[seq] += accepted;
      if (accepted < 1 + n_rs_seq) {
        out.rejected += 1 + n_rs_seq - accepted;
        require(llama_memory_seq_rm(memory, seq, position[seq], -1), "rejected drafts were not removed");
      }
    }
  }
  for (const auto &sequence : tokens) out.tokens.insert(out.tokens.end(), sequence.begin(), sequence.begin() + n_generated);
  return out;
}

template <class T>
void write(std::FILE *file, const std::vector<T> &values) {
  const uint64_t n = values.size();
  require(std::fwrite(&n, sizeof n, 1, file) == 1 && std::fwrite(values.data(), sizeof(T), n, file) == n, "the record was not written");
}
template <class T>
std::vector<T> read(std::FILE *file) {
  uint64_t n = 0;
  require(std::fread(&n, sizeof n, 1, file) == 1, "the record was not read");
  std::vector<T> values(n);
  require(std::fread(values.data(), sizeof(T), n, file) == n, "the record was not read");
  return values;
}

double difference(const std::vector<float> &a, const std::vector<float> &b) {
  double worst = 0;
  for (size_t row = 0; row + n_vocab <= a.size(); row += n_vocab) {
    double squares = 0, norm = 0;
    for (size_t i = row; i < row + n_vocab; i++) {
      const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
      squares += d * d;
      norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
    }
    worst = std::max(worst, std::sqrt(squares / norm));
  }
  return worst;
}

}  // namespace

int main(int argc, char **argv) {
  require(argc >= 4, "usage: llama_model ARCH write|stock|library|break MODEL [RECORD]");
  const std::string arch = argv[1], mode = argv[2];
  require(arch == "nemotron_h" || arch == "qwen35", "nemotron_h or qwen35");
  const bool is_delta = arch == "qwen35";
  if (mode == "write") {
    (is_delta ? write_qwen35 : write_nemotron_h)(argv[3]);
    return 0;
  }
  require(argc == 5 && (mode == "stock" || mode == "library" || mode == "break"), "a record");
  llama_log_set(read_log, nullptr);
  const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(llama_model_load_from_file(argv[3], llama_model_default_params()),
                                                                       llama_model_free);
  require(model != nullptr, "no model");
  std::FILE *file = std::fopen(argv[4], mode == "stock" ? "wb" : "rb");
  require(file != nullptr, "no record");
  std::vector<int32_t> known;
  for (const int32_t n_rs_seq : {0, n_drafts}) {
    std::unique_ptr<replayssm_llama::recurrent> layers;
    if (mode == "library" && is_delta) layers = std::make_unique<replayssm_llama::recurrent>(delta, n_rs_seq);
    if (mode == "library" && !is_delta) layers = std::make_unique<replayssm_llama::recurrent>(mamba2, n_rs_seq);
    if (mode == "break" && is_delta) layers = std::make_unique<keeps_one>(delta, n_rs_seq);
    if (mode == "break" && !is_delta) layers = std::make_unique<keeps_one>(mamba2, n_rs_seq);
    llama_hook = layers.get();
    const record run = decode(model.get(), n_rs_seq, known);
    if (n_rs_seq == 0) {
      known = run.tokens;
      const std::set<int32_t> distinct(known.begin(), known.end());
      require(distinct.size() > 40, "a model that says the same all the time");
    } else {
      require(run.rejected > 40, "hardly a draft was rejected");
    }
    require(run.tokens == known, "tokens with drafts are not those without");
    if (mode == "stock") {
      write(file, run.tokens);
      write(file, run.logits);
      write(file, std::vector<uint64_t>{run.state_bytes});
      continue;
    }
    const auto tokens = read<int32_t>(file);
    const auto logits = read<float>(file);
    const uint64_t stock_bytes = read<uint64_t>(file)[0];
    require(run.tokens == tokens, "tokens differ from llama.cpp's");
    require(run.logits.size() == logits.size(), "more or fewer steps than llama.cpp's");
    const double d = difference(run.logits, logits);
    require(d <= tolerance, "logits differ from llama.cpp's");
    require(layers->memory().slots().report().bits == 0, "a fault bit is set");
    std::printf("llama_model: %s, %d sequences, %d drafts a step: %zu tokens are the same, %d drafts rejected; logits differ by %.1e; "
                "MB of states: llama.cpp %.2f, with the library %.2f (states and rings)\n",
                arch.c_str(), n_seqs, n_rs_seq, tokens.size(), run.rejected, d, static_cast<double>(stock_bytes) * 1e-6,
                static_cast<double>(layers->bytes()) * 1e-6);
  }
  std::fclose(file);
  return 0;
}
