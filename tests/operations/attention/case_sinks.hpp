#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "operations/attention/case_modifier.hpp"
#include "support/fill.hpp"

namespace rapt::testing::modifiers {

struct Sinks : ModifierCase {
  Tensor sinks;

  static void sample(Random& random, AttentionProblem& p) { p.sinks = one_in(random, 3); }
  void make(const AttentionProblem& p, std::uint64_t seed, Placement placement) {
    if (!p.sinks) return;
    sinks = Tensor(p.bias_dtype, Layout(Dims{p.hq}), placement);
    fill_normal(sinks, generator(seed, 7));
    if (p.hq > 1)
      sinks.flat(static_cast<std::int64_t>(seed % static_cast<std::uint64_t>(p.hq))) =
          -std::numeric_limits<float>::infinity();
  }
  std::vector<Tensor*> tensors() { return {&sinks}; }
  void give(const AttentionProblem&, ScoreSpec& score) const { score.sinks = sinks.view(); }
  static bool is_given(const ScoreSpec& score) { return static_cast<bool>(score.sinks); }
};

}  // namespace rapt::testing::modifiers
