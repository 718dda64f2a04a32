#pragma once

#include <cmath>

#include "operations/attention/case_modifier.hpp"

namespace rapt::testing::modifiers {

struct Softcap : ModifierCase {
  static void sample(Random& random, AttentionProblem& p) {
    if (one_in(random, 4)) p.softcap = static_cast<float>(between(random, 1, 50));
  }
  template <class Choices, class Number>
  static void choose(ScoreSpec& score, Choices& c, const Number& number) {
    if (c.one_in(4)) score.softcap = number(c);
  }
  void give(const AttentionProblem& p, ScoreSpec& score) const {
    if (p.softcap != 0) score.softcap = p.softcap;
  }
  static bool is_given(const ScoreSpec& score) { return score.softcap.has_value(); }
  static void transform(const ScoreSpec& score, Score& s, double unit) {
    if (!score.softcap) return;
    const double c = *score.softcap;
    const auto cap = [c](double value) { return c * std::tanh(value / c); };
    s.delta = cap(s.x + s.delta) - cap(s.x - s.delta) + 4 * unit * c;
    s.sigma = cap(s.x + s.sigma) - cap(s.x - s.sigma) + 2 * unit * c;
    s.x = cap(s.x);
    const double t = s.x / c, off = s.delta / c;
    s.slope = 1 - t * t;
    s.slope_error = 2 * std::abs(t) * off + off * off + 4 * unit;
  }
};

}  // namespace rapt::testing::modifiers
