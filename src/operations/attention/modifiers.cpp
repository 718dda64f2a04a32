#include "operations/attention/modifiers.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/dtypes.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/attention/check.hpp"

namespace rapt::modifiers {
namespace {

using std::int64_t;
using P = AttentionProblem;

constexpr std::pair<char, std::uint8_t> kFull[] = {
    {'b', P::kFullB}, {'h', P::kFullH}, {'q', P::kFullQ}, {'k', P::kFullK}};

// Of a tensor for pairs, where missing dimensions and those of size 1 broadcast. Returns which do not.
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

void Softcap::fill(const ScoreSpec& score, P& p, ScoreParams& params) {
  if (score.softcap) {
    p.softcap = *score.softcap;
    if (!(p.softcap > 0)) throw Error(name, shortest(p.softcap), "a number from 1e-30 to 1e30");
  }
  params.softcap_log2 = static_cast<float>(p.softcap * kLog2e);
}
void Softcap::check(const P& p) {
  if (!(p.softcap == 0 || (p.softcap >= 1e-30f && p.softcap <= 1e30f)))
    throw Error(name, shortest(p.softcap), "a number from 1e-30 to 1e30");
}
void Softcap::transform(const P& p, double unit, Score& s) {
  const auto c = static_cast<double>(p.softcap);
  if (!(c > 0)) return;
  const auto capped = [c](double x) { return c * std::tanh(x / c); };
  const double x = capped(s.x), tanh = std::tanh(s.x / c);
  const double error = std::max(capped(s.x + s.error) - x, x - capped(s.x - s.error)) + 4 * unit * c;
  s = {x, error, 1 - tanh * tanh, std::min(2 * s.error / c, 1.0) + 8 * unit};
}

void Bias::fill(const ScoreSpec& score, P& p, ScoreParams& params) {
  const TensorView& t = score.bias;
  if (!t) return;
  p.bias = fill_pairs(t, params, params.bias_stride);
  p.bias_dtype = params.bias_type = t.dtype, params.bias = t.data;
}
void Bias::check(const P& p) {
  check_type(name, p.bias_dtype, kFloatTypes);
}

void Mask::fill(const ScoreSpec& score, P& p, ScoreParams& params) {
  const TensorView& t = score.mask;
  if (!t) return;
  p.mask = fill_pairs(t, params, params.mask_stride);
  params.mask = static_cast<const std::uint8_t*>(t.data);
}

void Alibi::fill(const ScoreSpec& score, P& p, ScoreParams& params) {
  const TensorView& t = score.alibi;
  if (!t) return;
  p.alibi = true;
  params.alibi = t.data, params.alibi_type = t.dtype;
  params.alibi_stride_b = t.ndim == 2 ? t.strides[0] : 0;
  params.alibi_stride_h = t.strides[t.ndim == 2 ? 1 : 0];
}

void Sinks::fill(const ScoreSpec& score, P& p, ScoreParams& params) {
  const TensorView& t = score.sinks;
  if (!t) return;
  p.sinks = true;
  params.sinks = t.data, params.sinks_type = t.dtype, params.sinks_stride = t.strides[0];
}

void Dropout::fill(const ScoreSpec& score, P& p, ScoreParams& params) {
  p.dropout = score.dropout ? score.dropout->p : 0;
  if (p.dropout > 0 && p.dropout <= 1)  // else there is none, or check() refuses it
    params.dropout = dropout_params(p.dropout, score.dropout->seed, score.dropout->offset, p.hq);
}
void Dropout::check(const P& p) {
  check_dropout(name, p.dropout);
}

}  // namespace rapt::modifiers
