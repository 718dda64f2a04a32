#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "operations/attention/case_modifier.hpp"

namespace rapt::testing::modifiers {

struct Alibi : ModifierCase {
  Tensor alibi;

  void make(const AttentionProblem& p, std::uint64_t seed, Placement placement) {
    if (!p.alibi) return;
    const bool per_batch = seed % 2 == 0;
    alibi = Tensor(p.bias_dtype, Layout(per_batch ? Dims{p.b, p.hq} : Dims{p.hq}), placement);
    for (std::int64_t i = 0; i < alibi.size(); ++i) {
      const std::int64_t h = i % p.hq, n = i / p.hq;
      alibi.flat(i) =
          std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(p.hq)) / static_cast<float>(n + 1);
    }
  }
  std::vector<Tensor*> tensors() { return {&alibi}; }
  void give(const AttentionProblem&, ScoreSpec& score) const { score.alibi = alibi.view(); }
  static bool is_given(const ScoreSpec& score) { return static_cast<bool>(score.alibi); }
};

}  // namespace rapt::testing::modifiers
