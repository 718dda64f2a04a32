// What tests do with the score modifiers together.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/attention/case_all_modifiers.hpp"

namespace rapt::testing {

template <class First, class... M>
struct ModifierCases : M... {
  static void sample_modifiers(Random& random, AttentionProblem& problem) { (M::sample(random, problem), ...); }
  template <class Choices, class Number>
  static void choose_numbers(ScoreSpec& score, Choices& choices, const Number& number) {
    (M::choose(score, choices, number), ...);
  }
  void make_modifiers(const AttentionProblem& problem, std::uint64_t seed, Placement placement) {
    (M::make(problem, seed, placement), ...);
  }
  std::vector<Tensor*> modifiers() {
    std::vector<Tensor*> all;
    for (const std::vector<Tensor*>& tensors : {M::tensors()...}) all.insert(all.end(), tensors.begin(), tensors.end());
    return all;
  }
  void give_modifiers(const AttentionProblem& problem, ScoreSpec& score) const { (M::give(problem, score), ...); }
  static bool any_given(const ScoreSpec& score) { return (M::is_given(score) || ...); }
  /// The score after what is no addend. `unit` is fp32's roundoff.
  static Score transformed(const ScoreSpec& spec, Score score, double unit) {
    (M::transform(spec, score, unit), ...);
    return score;
  }
};

/// Those of a case, with their tensors. (void stands before the first comma, and is none.)
using Modifiers = ModifierCases<void
#define RAPT_SCORE_MODIFIER(name, Name) , modifiers::Name
#include "rapt/score_modifiers.def"
                                >;

}  // namespace rapt::testing
