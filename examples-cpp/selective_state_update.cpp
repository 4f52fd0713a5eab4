// Read this first: a decode loop that calls `selective_state_update` (mamba-ssm, vLLM), and the same loop on libreplayssm.
// What changes: states live in a pool, a step takes slot ids instead of states, and one commit ends it. In an engine the
// arrays are device pointers and `exec` carries a stream; here they are host memory. SPDX-License-Identifier: MIT OR Apache-2.0
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <replayssm.hpp>

constexpr int BATCH = 3, N_SLOTS = 8, NHEADS = 8, HEADDIM = 64, DSTATE = 128, NGROUPS = 2, STEPS = 200;
constexpr int X = NHEADS * HEADDIM, BC = NGROUPS * DSTATE;
using bf16 = std::uint16_t;
float widen(bf16 v) { const std::uint32_t bits = std::uint32_t{v} << 16; float f; std::memcpy(&f, &bits, 4); return f; }

// The call to replace. state [n_slots, nheads, headdim, dstate]; x, z, out [batch, nheads, headdim]; dt [batch, nheads];
// A, D, dt_bias [nheads]; B, C [batch, ngroups, dstate]. Reads and writes every element of every state.
void selective_state_update(float* state, const bf16* x, const float* dt, const float* A, const bf16* B, const bf16* C,
                            const float* D, const bf16* z, const float* dt_bias, const int* slots, float* out) {
  for (int i = 0; i < BATCH * X; ++i) {
    const int b = i / X, h = i % X / HEADDIM, group = (b * NGROUPS + h / (NHEADS / NGROUPS)) * DSTATE;
    const float step = std::log1p(std::exp(dt[b * NHEADS + h] + dt_bias[h])), decay = std::exp(A[h] * step);
    float *row = state + (slots[b] * X + i % X) * DSTATE, y = D[h] * widen(x[i]);
    for (int n = group; n < group + DSTATE; ++n, ++row) {
      *row = *row * decay + step * widen(x[i]) * widen(B[n]);
      y += *row * widen(C[n]);
    }
    out[i] = y * widen(z[i]) / (1 + std::exp(-widen(z[i])));
  }
}

int main() {
  const replayssm::Context context;                           // the best backend
  auto slots_desc = replayssm::init<replayssm_slots_desc>();  // positions: one handle for all layers of a model
  slots_desc.n_slots = N_SLOTS;
  replayssm::Slots slots(context, slots_desc);
  auto pool_desc = replayssm::init<replayssm_pool_desc>();  // states: of n_layers equal layers
  pool_desc.family = REPLAYSSM_FAMILY_MAMBA2, pool_desc.n_layers = 1, pool_desc.io = REPLAYSSM_DTYPE_BF16, pool_desc.out = REPLAYSSM_DTYPE_F32;
  pool_desc.nheads = NHEADS, pool_desc.headdim = HEADDIM, pool_desc.dstate = DSTATE, pool_desc.ngroups = NGROUPS;
  const replayssm::Layers layers(slots, pool_desc);

  const int row_slots[BATCH] = {5, 2, 7};  // the engine's own ids: its `state_batch_indices`
  std::vector<bf16> x(BATCH * X), z(BATCH * X), B(BATCH * BC), C(BATCH * BC);
  std::vector<float> A(NHEADS), D(NHEADS, 1.0f), dt_bias(NHEADS, -3.0f), dt(BATCH * NHEADS), out(BATCH * X);
  auto batch = replayssm::init<replayssm_batch>();
  batch.n_rows = BATCH, batch.tokens = 1, batch.slots = replayssm::ids(row_slots);
  auto args = replayssm::init<replayssm_mamba2_args>();  // strides in elements: of rows, tokens, heads
  args.x = replayssm::view(x.data(), REPLAYSSM_DTYPE_BF16, {X, 0, HEADDIM});
  args.z = replayssm::view(z.data(), REPLAYSSM_DTYPE_BF16, {X, 0, HEADDIM});
  args.B = replayssm::view(B.data(), REPLAYSSM_DTYPE_BF16, {BC, 0, DSTATE});
  args.C = replayssm::view(C.data(), REPLAYSSM_DTYPE_BF16, {BC, 0, DSTATE});
  args.dt = replayssm::view(dt.data(), {NHEADS, 0, 1}), args.dt_bias = replayssm::view(dt_bias.data(), {0, 0, 1});
  args.A = replayssm::view(A.data(), {0, 0, 1}), args.D = replayssm::view(D.data(), {0, 0, 1});
  args.out = replayssm::view(out.data(), {X, 0, HEADDIM});

  std::mt19937 random(1);
  std::vector<float> state(N_SLOTS * X * DSTATE), expected(BATCH * X);
  double error = 0, norm = 0;
  for (float& a : A) a = -1.0f - static_cast<float>(&a - A.data());
  for (int step = 0; step < STEPS; ++step) {
    for (auto* input : {&x, &z, &B, &C}) for (bf16& v : *input) v = static_cast<bf16>((random() & 0x80ff) + 0x3f00);
    for (float& v : dt) v = static_cast<float>(random() % 1000) * 2e-3f - 1.0f;
    selective_state_update(state.data(), x.data(), dt.data(), A.data(), B.data(), C.data(), D.data(), z.data(), dt_bias.data(),
                           row_slots, expected.data());
    layers.step(0, batch, args);  // every layer of the model, with the same batch
    slots.commit(batch);          // once a model step; with rejected drafts: fewer tokens
    for (std::size_t i = 0; i < out.size(); ++i) error += std::pow(out[i] - expected[i], 2), norm += std::pow(expected[i], 2);
  }
  const replayssm_stats s = slots.stats();
  const auto moved = static_cast<double>(s.checkpoint_bytes_read + s.checkpoint_bytes_written + s.ring_bytes_read + s.ring_bytes_written);
  std::printf("%.0f bytes of state and ring per step, %.2f times fewer; relative difference of outputs %.1e\n", moved / STEPS,
              8.0 * BATCH * X * DSTATE * STEPS / moved, std::sqrt(error / norm));
  // A step reads a bf16 view of the fp32 state. Rounding the outputs to bf16, as comes next in a model, makes 1.7e-3.
  return std::sqrt(error / norm) < 2e-3 && slots.report().bits == 0 ? 0 : 1;
}
