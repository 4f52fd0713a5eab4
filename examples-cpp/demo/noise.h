// Sampling: a byte is a function of the logits, the request's seed and the position, and of nothing else.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>

namespace demo {

constexpr int VOCAB = 256;

// splitmix64's finaliser: well-mixed bits of a number.
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// noisy[v] = logits[v] / temperature + gumbel(seed, position, v); returns the place of the largest, which is a draw
// from softmax(logits / temperature). Drafts use the noise of their positions too, so a good draft is the byte itself.
std::uint8_t sample(const float* logits, float temperature, std::uint64_t seed, std::int64_t position, float* noisy);

}  // namespace demo
