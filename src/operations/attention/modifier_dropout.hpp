// Weights that are dropped at random after the softmax.
#pragma once

#include <array>

#include "operations/attention/check.hpp"
#include "operations/attention/modifier.hpp"

namespace rapt::modifiers {

struct Dropout : Modifier {
  static constexpr const char* name = "score.dropout";
  static constexpr bool is_in_score = false;
  static constexpr unsigned keys = AttentionFeatures::positions;
  static constexpr std::array fields = {number_field<AttentionProblem, &AttentionProblem::dropout>("dropout")};
  static void set(const rapt_attention_args& c, ScoreSpec& score) {
    if (c.dropout != 0) score.dropout = rapt::Dropout{c.dropout, c.dropout_seed, c.dropout_offset};
  }
  static bool is_given(const AttentionProblem& p) { return p.dropout != 0; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params) {
    p.dropout = score.dropout ? score.dropout->p : 0;
    if (p.dropout > 0 && p.dropout <= 1)  // else there is none, or check() refuses it
      params.dropout = dropout_params(p.dropout, score.dropout->seed, score.dropout->offset, p.hq);
  }
  static void check(const AttentionProblem& p) { check_dropout(name, p.dropout); }
};

}  // namespace rapt::modifiers
