// SPDX-License-Identifier: MIT OR Apache-2.0
#include "json.h"

#include <cmath>
#include <cstdlib>
#include <stdexcept>

namespace demo {
namespace {

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Json document() {
    Json out = value(0);
    space();
    if (at_ != text_.size()) fail("trailing characters");
    return out;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error("JSON, byte " + std::to_string(at_) + ": " + what);
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void space() {
    while (at_ < text_.size() && (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r')) ++at_;
  }

  void expect(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) fail("unexpected character");
    at_ += token.size();
  }

  bool consume(char c) {
    space();
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  Json value(int depth) {
    if (depth > 16) fail("nested too deeply");
    space();
    Json out;
    switch (peek()) {
      case '{':
        out.type = Json::Type::Object;
        ++at_;
        if (consume('}')) return out;
        do {
          space();
          out.keys.push_back(string());
          space();
          expect(":");
          out.values.push_back(value(depth + 1));
        } while (consume(','));
        space();
        expect("}");
        return out;
      case '[':
        out.type = Json::Type::Array;
        ++at_;
        if (consume(']')) return out;
        do {
          out.values.push_back(value(depth + 1));
        } while (consume(','));
        space();
        expect("]");
        return out;
      case '"':
        out.type = Json::Type::String;
        out.string = string();
        return out;
      case 't':
        expect("true");
        out.type = Json::Type::Bool;
        out.number = 1;
        return out;
      case 'f':
        expect("false");
        out.type = Json::Type::Bool;
        return out;
      case 'n':
        expect("null");
        return out;
      default:
        out.type = Json::Type::Number;
        out.number = number();
        return out;
    }
  }

  double number() {
    const std::size_t start = at_;
    while (at_ < text_.size() && std::string_view("+-.eE0123456789").find(peek()) != std::string_view::npos) ++at_;
    const std::string digits(text_.substr(start, at_ - start));
    char* end = nullptr;
    const double out = std::strtod(digits.c_str(), &end);
    if (digits.empty() || *end != '\0' || !std::isfinite(out)) fail("not a number");
    return out;
  }

  std::string string() {
    expect("\"");
    std::string out;
    while (true) {
      if (at_ >= text_.size()) fail("a string without an end");
      const char c = text_[at_++];
      if (c == '"') return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      const char escaped = peek();
      ++at_;
      switch (escaped) {
        case '"': case '\\': case '/': out += escaped; break;
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case 'n': out += '\n'; break;
        case 'r': out += '\r'; break;
        case 't': out += '\t'; break;
        case 'u': {
          const std::string digits(text_.substr(at_, 4));
          char* end = nullptr;
          const long code = std::strtol(digits.c_str(), &end, 16);
          if (digits.size() != 4 || *end != '\0' || code < 0) fail("a bad \\u escape");
          if (code > 0x7f) fail("an escape beyond ASCII, which this reader does not need");
          out += static_cast<char>(code);
          at_ += 4;
          break;
        }
        default: fail("a bad escape");
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text) { return Reader(text).document(); }

const Json* Json::find(std::string_view key) const {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == key) return &values[i];
  }
  return nullptr;
}

const Json& Json::at(std::string_view key) const {
  if (const Json* found = find(key)) return *found;
  throw std::runtime_error("JSON: no key \"" + std::string(key) + "\"");
}

long long Json::integer() const {
  if (type != Type::Number || number != std::floor(number) || std::fabs(number) > 9e15) {
    throw std::runtime_error("JSON: an integer was expected");
  }
  return static_cast<long long>(number);
}

const std::string& Json::text() const {
  if (type != Type::String) throw std::runtime_error("JSON: a string was expected");
  return string;
}

}  // namespace demo
