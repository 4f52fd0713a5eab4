// As much JSON as a safetensors header needs: a reader that throws on anything malformed.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace demo {

struct Json {
  enum class Type { Null, Bool, Number, String, Array, Object };

  Type type = Type::Null;
  double number = 0;
  std::string string;
  std::vector<std::string> keys;  // of an object, beside its values
  std::vector<Json> values;       // of an object or an array

  static Json parse(std::string_view text);

  const Json* find(std::string_view key) const;
  const Json& at(std::string_view key) const;
  long long integer() const;
  const std::string& text() const;
};

}  // namespace demo
