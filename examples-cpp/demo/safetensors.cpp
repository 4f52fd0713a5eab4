// SPDX-License-Identifier: MIT OR Apache-2.0
#include "safetensors.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "dense.h"

namespace demo {
namespace {

std::size_t element_bytes(const std::string& dtype) {
  if (dtype == "F32") return 4;
  if (dtype == "BF16") return 2;
  throw std::runtime_error("safetensors: dtype " + dtype + ", where F32 or BF16 was expected");
}

std::size_t n_elements(const Json& tensor) {
  std::size_t n = 1;
  for (const Json& extent : tensor.at("shape").values) {
    const long long e = extent.integer();
    // 2^31 elements are beyond any file that this reader is for, and keep the product from overflowing.
    if (e < 0 || e > (1LL << 31) || (n *= static_cast<std::size_t>(e)) > (std::size_t{1} << 31)) {
      throw std::runtime_error("safetensors: a shape out of range");
    }
  }
  return n;
}

}  // namespace

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path);
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

Safetensors::Safetensors(const std::string& path) : file_(read_file(path)) {
  std::uint64_t length = 0;  // little-endian
  if (file_.size() < 8) throw std::runtime_error(path + ": not a safetensors file");
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(file_[static_cast<std::size_t>(i)]);
  if (length > file_.size() - 8) throw std::runtime_error(path + ": the header ends behind the file");
  data_ = 8 + static_cast<std::size_t>(length);
  header_ = Json::parse(std::string_view(file_).substr(8, static_cast<std::size_t>(length)));
  const auto available = static_cast<long long>(file_.size() - data_);
  for (std::size_t i = 0; i < header_.keys.size(); ++i) {
    if (header_.keys[i] == "__metadata__") continue;
    const Json& tensor = header_.values[i];
    const auto& offsets = tensor.at("data_offsets").values;
    if (offsets.size() != 2) throw std::runtime_error(path + ": " + header_.keys[i] + ": two offsets were expected");
    const long long from = offsets[0].integer(), to = offsets[1].integer();
    const auto bytes = static_cast<long long>(n_elements(tensor) * element_bytes(tensor.at("dtype").text()));
    if (from < 0 || to < from || to > available || to - from != bytes) {
      throw std::runtime_error(path + ": " + header_.keys[i] + ": offsets do not fit its shape or the file");
    }
  }
}

const Json& Safetensors::tensor(const std::string& name, std::initializer_list<int> shape) const {
  const Json& found = header_.at(name);
  const auto& extents = found.at("shape").values;
  bool same = extents.size() == shape.size();
  std::size_t i = 0;
  for (const int expected : shape) same = same && extents[i++].integer() == expected;
  if (!same) throw std::runtime_error("safetensors: " + name + " has another shape than the configuration says");
  return found;
}

const char* Safetensors::begin(const Json& tensor) const {
  return file_.data() + data_ + static_cast<std::size_t>(tensor.at("data_offsets").values[0].integer());
}

std::vector<float> Safetensors::floats(const std::string& name, std::initializer_list<int> shape) const {
  const Json& found = tensor(name, shape);
  std::vector<float> out(n_elements(found));
  if (found.at("dtype").text() == "F32") {
    std::memcpy(out.data(), begin(found), out.size() * 4);
  } else {
    const std::vector<std::uint16_t> raw = bf16(name, shape);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = bf16_to_float(raw[i]);
  }
  return out;
}

std::vector<std::uint16_t> Safetensors::bf16(const std::string& name, std::initializer_list<int> shape) const {
  const Json& found = tensor(name, shape);
  if (found.at("dtype").text() != "BF16") throw std::runtime_error("safetensors: " + name + " is not BF16");
  std::vector<std::uint16_t> out(n_elements(found));
  std::memcpy(out.data(), begin(found), out.size() * 2);
  return out;
}

const std::string& Safetensors::metadata(const std::string& key) const {
  return header_.at("__metadata__").at(key).text();
}

std::string base64_decode(const std::string& text) {
  static const std::string alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  std::uint32_t bits = 0;
  int n_bits = 0;
  for (const char c : text) {
    if (c == '=') break;
    const auto digit = alphabet.find(c);
    if (digit == std::string::npos) throw std::runtime_error("base64: a character that is no digit");
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    n_bits += 6;
    if (n_bits >= 8) {
      n_bits -= 8;
      out += static_cast<char>(bits >> n_bits & 0xff);
    }
  }
  return out;
}

}  // namespace demo
