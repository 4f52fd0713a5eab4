// SPDX-License-Identifier: MIT OR Apache-2.0
#include "noise.h"

#include <algorithm>
#include <cmath>

namespace demo {

std::uint8_t sample(const float* logits, float temperature, std::uint64_t seed, std::int64_t position, float* noisy) {
  const std::uint64_t base = seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(position) * VOCAB;
  for (int v = 0; v < VOCAB; ++v) {
    const double u = (static_cast<double>(mix(base + static_cast<std::uint64_t>(v)) >> 40) + 0.5) / (1 << 24);
    noisy[v] = logits[v] / temperature + static_cast<float>(-std::log(-std::log(u)));
  }
  return static_cast<std::uint8_t>(std::max_element(noisy, noisy + VOCAB) - noisy);
}

}  // namespace demo
