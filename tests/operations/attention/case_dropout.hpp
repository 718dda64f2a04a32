#pragma once

#include <cstdint>

#include "operations/attention/case_modifier.hpp"

namespace rapt::testing::modifiers {

struct Dropout : ModifierCase {
  rapt::Dropout dropout;  // of any seed and offset

  static void sample(Random& random, AttentionProblem& p) {
    if (one_in(random, 6)) p.dropout = static_cast<float>(between(random, 1, 16)) / 16;
  }
  void make(const AttentionProblem& p, std::uint64_t seed, Placement) {
    auto numbers = generator(seed, 11);
    dropout = {p.dropout, numbers(), numbers()};
  }
  void give(const AttentionProblem& p, ScoreSpec& score) const {
    if (p.dropout != 0) score.dropout = dropout;
  }
  static bool is_given(const ScoreSpec& score) { return score.dropout.has_value(); }
};

}  // namespace rapt::testing::modifiers
