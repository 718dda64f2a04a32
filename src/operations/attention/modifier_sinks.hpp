// One extra logit for each head, in the denominator of the softmax.
#pragma once

#include <array>

#include "operations/attention/modifier.hpp"

namespace rapt::modifiers {

struct Sinks : Modifier {
  static constexpr const char* name = "score.sinks";
  static constexpr bool is_in_score = false;
  static constexpr std::array fields = {flag_field<AttentionProblem, &AttentionProblem::sinks>("sinks")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::sinks, &Args::score, &ScoreSpec::sinks>(name, kFloatTypes, "hq")
          .optional()
          .minus_infinity_allowed()};
  static bool is_given(const AttentionProblem& p) { return p.sinks; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params) {
    const TensorView& t = score.sinks;
    if (!t) return;
    p.sinks = true;
    params.sinks = t.data, params.sinks_type = t.dtype, params.sinks_stride = t.strides[0];
  }
};

}  // namespace rapt::modifiers
