#include "operations/attention/modifier.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/attention/check.hpp"

namespace rapt::modifiers {
namespace {

using P = AttentionProblem;

constexpr std::pair<char, std::uint8_t> kFull[] = {
    {'b', P::kFullB}, {'h', P::kFullH}, {'q', P::kFullQ}, {'k', P::kFullK}};

}  // namespace

std::uint8_t read_broadcast(const Word& word) {
  if (word.value == "1") return 0;
  std::uint8_t dims = 0;
  std::size_t at = 0;
  for (const auto& [letter, bit] : kFull)
    if (at < word.value.size() && word.value[at] == letter) dims |= bit, ++at;
  if (dims == 0 || at != word.value.size())
    word.refuse("the letters of the full dimensions, in order, out of b, h, q and k, or 1 if there are none");
  return dims;
}
void print_broadcast(std::uint8_t dims, std::string_view key, std::string& text) {
  if (dims == P::kNone) return;
  std::string letters;
  for (const auto& [letter, bit] : kFull)
    if (dims & bit) letters += letter;
  print_word(text, key, letters.empty() ? "1" : letters);
}

std::uint8_t fill_pairs(const TensorView& t, ScoreParams& params, Strides& stride) {
  const auto& [size, step] = Pairs(t);
  stride = {step[0], step[1], step[2], step[3]};
  if (size[2] != 1) params.modifier_rows = std::min(params.modifier_rows, size[2]);
  if (size[3] != 1) params.modifier_keys = std::min(params.modifier_keys, size[3]);
  std::uint8_t dims = 0;
  for (std::size_t i = 0; i < 4; ++i)
    if (size[i] != 1) dims |= kFull[i].second;
  return dims;
}

}  // namespace rapt::modifiers
