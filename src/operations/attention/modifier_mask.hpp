// A tensor of booleans for pairs of a query and a key, which hides keys.
#pragma once

#include <array>
#include <cstdint>

#include "operations/attention/modifier.hpp"

namespace rapt::modifiers {

struct Mask : Modifier {
  static constexpr const char* name = "score.mask";
  static constexpr unsigned keys = AttentionFeatures::sequences;
  static constexpr std::array fields = {broadcast_field<&AttentionProblem::mask>("mask")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::mask, &Args::score, &ScoreSpec::mask>(name, kBoolean, AttentionShapes::pairs)
          .in(keys)
          .with_types("boolean (additive masks are a bias)")};
  static bool is_given(const AttentionProblem& p) { return p.mask != AttentionProblem::kNone; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params) {
    const TensorView& t = score.mask;
    if (!t) return;
    p.mask = fill_pairs(t, params, params.mask_stride);
    params.mask = static_cast<const std::uint8_t*>(t.data);
  }
};

}  // namespace rapt::modifiers
