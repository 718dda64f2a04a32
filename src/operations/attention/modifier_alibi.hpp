// x -> x - slope * distance, of a slope for each head.
#pragma once

#include <array>

#include "operations/attention/modifier.hpp"

namespace rapt::modifiers {

struct Alibi : Modifier {
  static constexpr const char* name = "score.alibi";
  static constexpr unsigned keys = AttentionFeatures::positions;
  static constexpr std::array fields = {flag_field<AttentionProblem, &AttentionProblem::alibi>("alibi")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::alibi, &Args::score, &ScoreSpec::alibi>(name, kFloatTypes, "b~ hq").in(keys)};
  static bool is_given(const AttentionProblem& p) { return p.alibi; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params) {
    const TensorView& t = score.alibi;
    if (!t) return;
    p.alibi = true;
    params.alibi = t.data, params.alibi_type = t.dtype;
    params.alibi_stride_b = t.ndim == 2 ? t.strides[0] : 0;
    params.alibi_stride_h = t.strides[t.ndim == 2 ? 1 : 0];
  }
};

}  // namespace rapt::modifiers
