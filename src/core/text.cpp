#include "core/text.hpp"

#include <algorithm>
#include <cstddef>

namespace rapt {
namespace {

// The fewest changes, additions and removals of characters that make `name` a part of `whole`.
std::size_t edits(std::string_view name, std::string_view whole) {
  // Column i: the fewest changes to what was read of `name` that make it end where whole[i] begins.
  std::vector<std::size_t> before(whole.size() + 1, 0), now(whole.size() + 1);
  for (const char c : name) {
    now[0] = before[0] + 1;
    for (std::size_t i = 0; i < whole.size(); ++i)
      now[i + 1] = std::min({before[i] + (c == whole[i] ? 0 : 1), before[i + 1] + 1, now[i] + 1});
    std::swap(before, now);
  }
  return *std::min_element(before.begin(), before.end());
}

}  // namespace

std::string list_text(std::span<const std::string_view> words, std::string_view last) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text.append(i == 0 ? "" : i + 1 < words.size() ? ", " : last).append(words[i]);
  return text;
}

std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNames = 3;
  std::size_t fewest = name.size() / 4;
  std::vector<std::string> nearest;
  for (const std::string& other : names) {
    const std::size_t distance = edits(name, other);
    if (distance > fewest) continue;
    if (distance < fewest) nearest.clear();
    fewest = distance;
    if (nearest.size() < kMaxNames) nearest.push_back(other);
  }
  return nearest;
}

}  // namespace rapt
