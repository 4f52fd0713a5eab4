// Reads a safetensors file: an 8-byte length, a JSON header, and the tensors' bytes.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "json.h"

namespace demo {

class Safetensors {
 public:
  // Checks that every tensor lies inside the file and has as many bytes as its shape and dtype say.
  explicit Safetensors(const std::string& path);

  // The tensor's elements, widened to float; throws unless it has this shape.
  std::vector<float> floats(const std::string& name, std::initializer_list<int> shape) const;
  // The elements of a bf16 tensor as they lie in the file.
  std::vector<std::uint16_t> bf16(const std::string& name, std::initializer_list<int> shape) const;
  const std::string& metadata(const std::string& key) const;
  std::size_t bytes() const { return file_.size(); }

 private:
  const Json& tensor(const std::string& name, std::initializer_list<int> shape) const;
  const char* begin(const Json& tensor) const;

  std::string file_;
  std::size_t data_ = 0;  // where the tensors' bytes start
  Json header_;
};

std::string read_file(const std::string& path);
std::string base64_decode(const std::string& text);

}  // namespace demo
