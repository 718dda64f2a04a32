#pragma once

#include <cstdint>
#include <vector>

#include "operations/attention/case_modifier.hpp"

namespace rapt::testing::modifiers {

struct Mask : ModifierCase {
  Tensor mask;

  static void sample(Random& random, AttentionProblem& p) {
    if (one_in(random, 2)) p.mask = sample_broadcast(random);
  }
  void make(const AttentionProblem& p, std::uint64_t seed, Placement placement) {
    if (p.mask == AttentionProblem::kNone) return;
    mask = Tensor(DType::boolean, broadcast_layout(p, p.mask, seed + 1), placement);
    fill_mask(mask, 0.2, generator(seed, 6), [&](std::int64_t i, bool masked) { mask.flat<bool>(i) = !masked; });
  }
  std::vector<Tensor*> tensors() { return {&mask}; }
  void give(const AttentionProblem&, ScoreSpec& score) const { score.mask = mask.view(); }
  static bool is_given(const ScoreSpec& score) { return static_cast<bool>(score.mask); }
};

}  // namespace rapt::testing::modifiers
