// The adapters at work: what stands at each engine's call site afterwards, for a few decode steps, compared with the plain update.
// In an engine the arrays are device pointers and the last argument carries a stream. SPDX-License-Identifier: MIT OR Apache-2.0
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "flashinfer/checkpointing_ssu.h"
#include "onnxruntime_genai/varlen_gated_delta_net.h"
#include "trtllm/selective_scan_update.h"
#include "vllm/selective_state_update.h"

namespace {

using adapters::Tensor;
constexpr std::int32_t ROWS = 3, N_SLOTS = 8, H = 8, P = 32, N = 64, G = 2, STEPS = 60;
constexpr std::int32_t X = H * P, BC = G * N, XBC = X + 2 * BC, PROJECTED = X + XBC + H;  // z | raw x, B, C | dt
constexpr auto F32 = REPLAYSSM_DTYPE_F32;
const std::int32_t row_slots[ROWS] = {5, 2, 7};
std::mt19937 generator(1);

float random_value() { return static_cast<float>(generator() % 2001) * 1e-3f - 1.0f; }

void must(const adapters::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", replayssm_status_string(status.code), status.sentence.c_str());
  std::exit(1);
}

// One step's inputs, packed as engines pack them.
struct Inputs {
  std::vector<float> A = std::vector<float>(H, -2.0f), D = std::vector<float>(H, 0.5f), dt_bias = std::vector<float>(H, -1.0f);
  std::vector<float> xBC = std::vector<float>(ROWS * XBC), projected = std::vector<float>(ROWS * PROJECTED);
  std::vector<float> out = std::vector<float>(ROWS * X), state = std::vector<float>(ROWS * X * N);
  double error = 0, norm = 0;

  void draw() {
    for (float& v : xBC) v = random_value();
    for (float& v : projected) v = random_value();
  }
  // The plain update of every state, and how far `out` is from it.
  void compare() {
    for (int i = 0; i < ROWS * X; ++i) {
      const int row = i / X, h = i % X / P, group = row * XBC + X + h / (H / G) * N;
      const float x = xBC[static_cast<std::size_t>(row * XBC + i % X)], z = projected[static_cast<std::size_t>(row * PROJECTED + i % X)];
      const float dt = std::log1p(std::exp(projected[static_cast<std::size_t>(row * PROJECTED + X + XBC + h)] + dt_bias[0]));
      float y = D[0] * x;
      for (int n = 0; n < N; ++n) {
        float& s = state[static_cast<std::size_t>(i * N + n)];
        s = s * std::exp(A[0] * dt) + dt * x * xBC[static_cast<std::size_t>(group + n)];
        y += s * xBC[static_cast<std::size_t>(group + BC + n)];
      }
      y *= z / (1 + std::exp(-z));
      error += std::pow(out[static_cast<std::size_t>(i)] - y, 2), norm += std::pow(y, 2);
    }
  }
};

// Contexts, slots and a pool: once, when the engine starts.
struct Model {
  replayssm_context* context = nullptr;
  replayssm_slots* slots = nullptr;
  replayssm_layers* layers = nullptr;

  Model(const replayssm_slots_desc& slots_desc, const replayssm_pool_desc& pool_desc) {
    auto desc = replayssm_init<replayssm_context_desc>();
    desc.backend = REPLAYSSM_BACKEND_CPU;
    must(adapters::check(replayssm_context_create(&desc, &context)));
    must(adapters::check(replayssm_slots_create(context, &slots_desc, &slots)));
    must(adapters::check(replayssm_layers_create(slots, &pool_desc, nullptr, 0, &layers)));
  }
  ~Model() {
    replayssm_layers_destroy(layers);
    replayssm_slots_destroy(slots);
    replayssm_context_destroy(context);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
};

constexpr adapters::Mamba2Shape shape{H, P, N, G};
bool near_enough(const char* name, double error, double norm) {
  std::printf("%-18s relative difference of outputs %.1e\n", name, std::sqrt(error / norm));
  return std::sqrt(error / norm) < 2e-6;
}

bool vllm() {
  const Model model(adapters::vllm::slots_desc(N_SLOTS, 0, 0), adapters::mamba2_pool(shape, 1, F32, F32, F32));
  Inputs in;
  adapters::vllm::Metadata metadata;
  metadata.state_batch_indices = Tensor(row_slots, REPLAYSSM_DTYPE_I32, {ROWS}, {1});
  metadata.num_tokens = ROWS;
  for (int step = 0; step < STEPS; ++step, in.compare()) {
    in.draw();
    const float *xBC = in.xBC.data(), *projected = in.projected.data();
    must(adapters::vllm::selective_state_update(
        {model.layers, 0}, shape,                                        // was: the state tensor
        Tensor(xBC, F32, {ROWS, H, P}, {XBC, P, 1}),                     // x
        Tensor(projected + X + XBC, F32, {ROWS, H, P}, {PROJECTED, 1, 0}),  // dt
        Tensor(in.A.data(), F32, {H, P, N}, {1, 0, 0}),                  // A
        Tensor(xBC + X, F32, {ROWS, G, N}, {XBC, N, 1}),                 // B
        Tensor(xBC + X + BC, F32, {ROWS, G, N}, {XBC, N, 1}),            // C
        Tensor(in.D.data(), F32, {H, P}, {1, 0}),                        // D
        Tensor(projected, F32, {ROWS, H, P}, {PROJECTED, P, 1}),         // z
        Tensor(in.dt_bias.data(), F32, {H, P}, {1, 0}), true,            // dt_bias, dt_softplus
        metadata, Tensor(in.out.data(), F32, {ROWS, H, P}, {X, P, 1}), nullptr));
    must(adapters::vllm::commit(model.slots, metadata, Tensor(), nullptr));  // once a model step, after the last layer
  }
  return near_enough("vLLM", in.error, in.norm);
}

bool flashinfer() {
  const Model model(adapters::flashinfer::slots_desc(N_SLOTS, 17, 1), adapters::mamba2_pool(shape, 1, F32, F32, F32));
  Inputs in;
  adapters::flashinfer::Rows rows;
  rows.batch = ROWS;
  rows.T = 1;
  rows.state_batch_indices = Tensor(row_slots, REPLAYSSM_DTYPE_I32, {ROWS}, {1});
  for (int step = 0; step < STEPS; ++step, in.compare()) {
    in.draw();
    const float *xBC = in.xBC.data(), *projected = in.projected.data();
    must(adapters::flashinfer::checkpointing_ssu(
        {model.layers, 0}, shape,  // were: state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens
        Tensor(xBC, F32, {ROWS, 1, H, P}, {XBC, XBC, P, 1}), Tensor(projected + X + XBC, F32, {ROWS, 1, H, P}, {PROJECTED, PROJECTED, 1, 0}),
        Tensor(in.A.data(), F32, {H, P, N}, {1, 0, 0}), Tensor(xBC + X, F32, {ROWS, 1, G, N}, {XBC, XBC, N, 1}),
        Tensor(xBC + X + BC, F32, {ROWS, 1, G, N}, {XBC, XBC, N, 1}), Tensor(in.out.data(), F32, {ROWS, 1, H, P}, {X, X, P, 1}),
        Tensor(in.D.data(), F32, {H, P}, {1, 0}), Tensor(projected, F32, {ROWS, 1, H, P}, {PROJECTED, PROJECTED, P, 1}),
        Tensor(in.dt_bias.data(), F32, {H, P}, {1, 0}), true, rows, false, nullptr));
    must(adapters::flashinfer::advance(model.slots, rows, Tensor(), nullptr));  // was: advancing ring_start and the counts
  }
  return near_enough("FlashInfer", in.error, in.norm);
}

bool trtllm() {
  auto slots = replayssm_init<replayssm_slots_desc>();
  slots.n_slots = N_SLOTS;
  const Model model(slots, adapters::mamba2_pool(shape, 1, F32, F32, F32));
  Inputs in;
  adapters::trtllm::Params params;  // filled as theirs; x_ptr, the states, is the pool now
  params.batch = ROWS, params.dim = X, params.dstate = N, params.nheads = H, params.ngroups = G;
  params.input_type = params.output_type = F32;
  params.A_ptr = in.A.data(), params.D_ptr = in.D.data(), params.delta_bias_ptr = in.dt_bias.data();
  params.u_ptr = params.BC_ptr = in.xBC.data();
  params.z_ptr = params.delta_ptr = in.projected.data();
  params.out_ptr = in.out.data();
  params.slot_mapping_ptr = row_slots;
  for (int step = 0; step < STEPS; ++step, in.compare()) {
    in.draw();
    must(adapters::trtllm::selective_scan_update({model.layers, 0}, params, nullptr));
    must(adapters::trtllm::update_mamba_states(model.slots, params, nullptr, nullptr));
  }
  return near_enough("TensorRT-LLM", in.error, in.norm);
}

bool genai() {
  constexpr std::int32_t HV = 2, K = 32, V = 16, CAPACITY = 4, FIRST = 1;
  auto pool = replayssm_init<replayssm_pool_desc>();
  pool.family = REPLAYSSM_FAMILY_GDN, pool.n_layers = 1, pool.io = F32;
  pool.H = pool.HV = HV, pool.K = K, pool.V = V;
  const Model model(adapters::genai::slots_desc(CAPACITY, 1), pool);  // one bank: a step that is not committed has not moved
  const std::int32_t numbers[CAPACITY] = {0, 1, 2, 3}, cu_seqlens[ROWS + 1] = {0, 1, 2, 3};
  adapters::genai::Interval rows;
  rows.slots = {numbers, CAPACITY};
  rows.first = FIRST, rows.rows = ROWS, rows.cu_seqlens = cu_seqlens, rows.num_tokens = ROWS;
  std::vector<float> q(ROWS * HV * K), k(q.size()), v(ROWS * HV * V), a(ROWS * HV), b(a.size()), out(v.size()), state(v.size() * K);
  const std::vector<float> A_log(HV, 0.2f), dt_bias(HV, -1.0f);
  adapters::genai::Node node;
  node.io = node.out_type = F32;
  node.q = q.data(), node.k = k.data(), node.v = v.data(), node.decay = a.data(), node.beta = b.data(), node.out = out.data();
  node.A_log = A_log.data(), node.dt_bias = dt_bias.data();
  double error = 0, norm = 0;
  for (int step = 0; step < STEPS; ++step) {
    for (auto* input : {&q, &k, &v, &a, &b}) for (float& value : *input) value = random_value();
    must(adapters::genai::varlen_gated_delta_net({model.layers, 0}, {HV, HV, K, V}, rows, node, nullptr));
    must(adapters::genai::commit(model.slots, rows, nullptr, nullptr));
    for (std::size_t i = 0; i < v.size(); ++i) {  // the plain update of row i of all states
      const std::size_t head = i / V;
      const float *key = &k[head * K], *query = &q[head * K];
      float kk = 1e-6f, qq = 1e-6f, predicted = 0, y = 0, *row = &state[i * K];
      for (int n = 0; n < K; ++n) kk += key[n] * key[n], qq += query[n] * query[n];
      const float decay = std::exp(-std::exp(A_log[0]) * std::log1p(std::exp(a[head] + dt_bias[0])));
      for (int n = 0; n < K; ++n) row[n] *= decay, predicted += row[n] * key[n] / std::sqrt(kk);
      const float added = (v[i] - predicted) / (1 + std::exp(-b[head]));
      for (int n = 0; n < K; ++n) row[n] += added * key[n] / std::sqrt(kk), y += row[n] * query[n] / std::sqrt(qq * K);
      error += std::pow(out[i] - y, 2), norm += std::pow(y, 2);
    }
  }
  return near_enough("ONNX Runtime GenAI", error, norm);
}

}  // namespace

int main() {
  const bool all[] = {vllm(), flashinfer(), trtllm(), genai()};
  for (const bool one : all) {
    if (!one) return 1;
  }
  return 0;
}
