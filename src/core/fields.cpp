#include "core/fields.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "core/dtypes.hpp"

namespace rapt {
namespace {

template <class T>
T number_of(const Word& word, std::string_view text, const char* wanted) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) word.refuse("a number in the range of int64, or of float");
  if (error != std::errc() || end != text.data() + text.size()) word.refuse(wanted);
  return value;
}

}  // namespace

void Word::refuse(const std::string& wanted) const {
  throw Error("problem", "\"" + std::string(text) + "\"", wanted);
}
std::int64_t Word::integer(const char* wanted) const {
  return number_of<std::int64_t>(*this, value, wanted);
}
float Word::number() const {
  const auto x = number_of<float>(*this, value, "a number after =");
  if (!std::isfinite(x)) refuse("a finite number");  // NaN would differ from itself
  return x;
}
DType Word::dtype() const {
  for (const DType type : kDTypes)
    if (value == to_string(type)) return type;
  refuse(types_text(kFloatTypes) + "; for q of attention also f8e4m3; for kv " + types_text(kCacheTypes));
}

Words::Words(std::string_view text, std::string_view operation) {
  bool named = false;
  while (!text.empty()) {
    const std::size_t space = text.find_first_of(" \t\n");
    const std::string_view word_text = text.substr(0, space);
    text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
    if (word_text.empty()) continue;
    const std::size_t equals = word_text.find('=');
    const bool has_value = equals != std::string_view::npos;
    const Word word{word_text, word_text.substr(0, equals),
                    has_value ? word_text.substr(equals + 1) : std::string_view(), has_value};
    if (!named) {
      if (word_text != operation)
        word.refuse("the operation first: " + std::string(operation) + " (parse_problem() takes all operations)");
      named = true;
      continue;
    }
    if (has(word.key)) word.refuse("every word once");
    words_.push_back(word);
  }
  if (!named) Word{}.refuse(std::string(operation) + " and its words");
}

bool Words::has(std::string_view key) const {
  return std::any_of(words_.begin(), words_.end(), [&](const Word& word) { return word.key == key; });
}

}  // namespace rapt
