// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace demo {

struct Request {
  std::string prompt;
  std::uint64_t seed;
  std::size_t n_bytes;  // to generate
};

}  // namespace demo
