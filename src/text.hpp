// Numbers as errors and problems spell them.
#pragma once

#include <array>
#include <charconv>
#include <string>

namespace rapt {

// The fewest digits that read back as x.
inline std::string shortest(float x) {
  std::array<char, 32> text;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), x);
  return {text.data(), result.ptr};
}

}  // namespace rapt
