// What tests do with a score modifier: problems and arguments at random, tensors, and what becomes of a score.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "rapt/attention_problem.hpp"
#include "rapt/score.hpp"
#include "support/random.hpp"
#include "support/tensor.hpp"

namespace rapt::testing {

/// A score, its permitted error and its expected error, what it grows by when scale * (q . k) does, and what that may
/// be off by.
struct Score {
  double x, delta, sigma;
  double slope = 1, slope_error = 0;
};

/// A modifier says these, or inherits that there is nothing to do. Also give(problem, score), which hands on what it
/// has made, and is_given(score).
struct ModifierCase {
  /// Gives the problem the modifier now and then; for those that go with any positions of rows and keys.
  static void sample(Random&, AttentionProblem&) {}
  /// A number that any keys go with, or a wrong one, by a fuzzer's choices; `number(choices)` is any.
  template <class Choices, class Number>
  static void choose(ScoreSpec&, Choices&, const Number&) {}
  /// Makes the tensors of a problem that has it; case.hpp says what is in them.
  void make(const AttentionProblem&, std::uint64_t, Placement) {}
  std::vector<Tensor*> tensors() { return {}; }
  /// What becomes of a score that is not added to. `unit` is fp32's roundoff.
  static void transform(const ScoreSpec&, Score&, double) {}
};

namespace modifiers {

/// Numbers at random for tensor `tensor`, counted over all modifiers.
inline std::mt19937_64 generator(std::uint64_t seed, std::uint64_t tensor) {
  return std::mt19937_64(seed * 64 + tensor);
}

/// Which dimensions of a tensor for pairs have their full size.
inline std::uint8_t sample_broadcast(Random& random) {
  return static_cast<std::uint8_t>(between(random, 0, 15));
}
/// [b or 1, hq or 1, sq or 1, sk or 1]; every second seed leaves out leading dimensions of size 1.
Layout broadcast_layout(const AttentionProblem& problem, std::uint8_t full, std::uint64_t seed);

/// Calls set(position, masked) for every element of a tensor for pairs; whole rows are masked now and then, but never
/// row 0.
template <class Set>
void fill_mask(const Tensor& tensor, double masked_share, std::mt19937_64 random, Set set) {
  const std::int64_t sk = tensor.layout().shape[static_cast<std::size_t>(tensor.layout().ndim - 1)];
  const std::int64_t rows = sk ? tensor.size() / sk : 0;
  std::uniform_real_distribution<double> uniform(0, 1);
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool whole = uniform(random) < 1.0 / 16 && row != 0;
    for (std::int64_t j = 0; j < sk; ++j)
      set(row * sk + j, whole || (uniform(random) < masked_share && (sk > 1 || row > 0)));
  }
}

}  // namespace modifiers
}  // namespace rapt::testing
