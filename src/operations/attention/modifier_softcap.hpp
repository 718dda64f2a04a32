// x -> c * tanh(x / c).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "core/text.hpp"
#include "operations/attention/modifier.hpp"

namespace rapt::modifiers {

struct Softcap : Modifier {
  static constexpr const char* name = "score.softcap";
  static constexpr bool changes_derivative = true;
  static constexpr std::array fields = {number_field<AttentionProblem, &AttentionProblem::softcap>("softcap")};
  static void set(const rapt_attention_args& c, ScoreSpec& score) {
    if (c.softcap != 0) score.softcap = c.softcap;
  }
  static bool is_given(const AttentionProblem& p) { return p.softcap != 0; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params) {
    if (score.softcap) {
      p.softcap = *score.softcap;
      if (!(p.softcap > 0)) throw Error(name, shortest(p.softcap), "a number from 1e-30 to 1e30");
    }
    params.softcap_log2 = static_cast<float>(p.softcap * kLog2e);
  }
  static void check(const AttentionProblem& p) {
    if (!(p.softcap == 0 || (p.softcap >= 1e-30f && p.softcap <= 1e30f)))
      throw Error(name, shortest(p.softcap), "a number from 1e-30 to 1e30");
  }
  static void transform(const AttentionProblem& p, double u, Score& s) {
    const auto c = static_cast<double>(p.softcap);
    if (!(c > 0)) return;
    const auto capped = [c](double x) { return c * std::tanh(x / c); };
    const double x = capped(s.x), tanh = std::tanh(s.x / c);
    const double error = std::max(capped(s.x + s.error) - x, x - capped(s.x - s.error)) + 4 * u * c;
    s = {x, error, 1 - tanh * tanh, std::min(2 * s.error / c, 1.0) + 8 * u};
  }
};

}  // namespace rapt::modifiers
