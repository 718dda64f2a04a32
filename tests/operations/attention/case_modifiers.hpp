// What tests do with each score modifier: problems and arguments at random, tensors, and what becomes of a score.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "rapt/attention_problem.hpp"
#include "rapt/score.hpp"
#include "support/random.hpp"
#include "support/tensor.hpp"

namespace rapt::testing {

/// Those that are no matter of positions.
inline void sample_modifiers(Random& random, AttentionProblem& p) {
  const auto broadcast = [&] { return static_cast<std::uint8_t>(between(random, 0, 15)); };
  if (one_in(random, 4)) p.softcap = static_cast<float>(between(random, 1, 50));
  if (one_in(random, 2)) p.bias = broadcast();
  if (one_in(random, 2)) p.mask = broadcast();
  p.sinks = one_in(random, 3);
  if (one_in(random, 6)) p.dropout = static_cast<float>(between(random, 1, 16)) / 16;
}

/// Numbers that any keys go with, some of them wrong, by a fuzzer's choices; `number(choices)` is any.
template <class Choices, class Number>
void choose_numbers(ScoreSpec& score, Choices& c, const Number& number) {
  if (c.one_in(4)) score.softcap = number(c);
}

/// The tensors of a problem's modifiers; case.hpp says what is in them.
struct ModifierTensors {
  Tensor bias, mask, alibi, sinks;
  Dropout dropout;  // of any seed and offset

  void make_modifiers(const AttentionProblem& problem, std::uint64_t seed, Placement placement);
  std::vector<Tensor*> modifiers() { return {&bias, &mask, &alibi, &sinks}; }
  void give_modifiers(const AttentionProblem& problem, ScoreSpec& score) const {
    if (problem.softcap != 0) score.softcap = problem.softcap;
    if (problem.dropout != 0) score.dropout = dropout;
    score.bias = bias.view(), score.mask = mask.view(), score.alibi = alibi.view(), score.sinks = sinks.view();
  }
};

inline bool has_modifiers(const ScoreSpec& s) {
  return s.softcap || s.bias || s.mask || s.alibi || s.sinks || s.dropout;
}

/// A score, its permitted error and its expected error, what it grows by when scale * (q . k) does, and what that may
/// be off by.
struct Score {
  double x, delta, sigma;
  double slope = 1, slope_error = 0;
};

/// The score after what is no addend. `unit` is fp32's roundoff.
inline Score transformed(const ScoreSpec& spec, Score s, double unit) {
  if (spec.softcap) {
    const double c = *spec.softcap;
    const auto cap = [c](double value) { return c * std::tanh(value / c); };
    s.delta = cap(s.x + s.delta) - cap(s.x - s.delta) + 4 * unit * c;
    s.sigma = cap(s.x + s.sigma) - cap(s.x - s.sigma) + 2 * unit * c;
    s.x = cap(s.x);
    const double t = s.x / c, off = s.delta / c;
    s.slope = 1 - t * t;
    s.slope_error = 2 * std::abs(t) * off + off * off + 4 * unit;
  }
  return s;
}

}  // namespace rapt::testing
