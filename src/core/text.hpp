// Numbers as errors and problems spell them, and names that were meant.
#pragma once

#include <array>
#include <charconv>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rapt {

// The fewest digits that read back as x.
template <class Float>
std::string shortest(Float x) {
  std::array<char, 32> text;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), x);
  return {text.data(), result.ptr};
}

// "a, b or c".
std::string list_text(std::span<const std::string_view> words, std::string_view last);

// Those of `names` that are nearest to `name`, or have it as a part; few, or none that is near.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& names);

}  // namespace rapt
