#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "operations/attention/case_modifier.hpp"
#include "support/fill.hpp"

namespace rapt::testing::modifiers {

struct Bias : ModifierCase {
  Tensor bias;

  static void sample(Random& random, AttentionProblem& p) {
    if (one_in(random, 2)) p.bias = sample_broadcast(random);
  }
  void make(const AttentionProblem& p, std::uint64_t seed, Placement placement) {
    if (p.bias == AttentionProblem::kNone) return;
    bias = Tensor(p.bias_dtype, broadcast_layout(p, p.bias, seed), placement);
    fill_normal(bias, generator(seed, 4));
    fill_mask(bias, 0.04, generator(seed, 5), [&](std::int64_t i, bool masked) {
      if (masked) bias.flat(i) = -std::numeric_limits<float>::infinity();
    });
  }
  std::vector<Tensor*> tensors() { return {&bias}; }
  void give(const AttentionProblem&, ScoreSpec& score) const { score.bias = bias.view(); }
  static bool is_given(const ScoreSpec& score) { return static_cast<bool>(score.bias); }
};

}  // namespace rapt::testing::modifiers
