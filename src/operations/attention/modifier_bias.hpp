// x -> x + bias, a tensor for pairs of a query and a key; -inf masks.
#pragma once

#include <array>

#include "operations/attention/check.hpp"
#include "operations/attention/modifier.hpp"

namespace rapt::modifiers {

struct Bias : Modifier {
  static constexpr const char* name = "score.bias";
  static constexpr unsigned keys = AttentionFeatures::sequences;
  static constexpr std::array fields = {broadcast_field<&AttentionProblem::bias>("bias"),
                                        dtype_field<AttentionProblem, &AttentionProblem::bias_dtype>("bias_dtype")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::bias, &Args::score, &ScoreSpec::bias>(name, kFloatTypes, AttentionShapes::pairs)
          .in(keys)
          .minus_infinity_allowed()};
  static bool is_given(const AttentionProblem& p) { return p.bias != AttentionProblem::kNone; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params) {
    const TensorView& t = score.bias;
    if (!t) return;
    p.bias = fill_pairs(t, params, params.bias_stride);
    p.bias_dtype = params.bias_type = t.dtype, params.bias = t.data;
  }
  static void check(const AttentionProblem& p) { check_type(name, p.bias_dtype, kFloatTypes); }
};

}  // namespace rapt::modifiers
