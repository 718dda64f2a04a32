// What a score modifier is: of each, in one struct, everything that operations with scores say of it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/fields.hpp"
#include "operations/arguments.hpp"
#include "operations/attention/features.hpp"
#include "rapt/attention_problem.hpp"
#include "rapt/score.hpp"
#include "semantics/score.hpp"

namespace rapt {

// What a modifier says; most of it has a default, which a modifier inherits.
//
//     name                          in errors
//     keys                          the kinds of keys that it goes with, as AttentionFeatures
//     fields                        of the problem's text
//     arguments<Args>               its tensors, of an operation whose arguments have a ScoreSpec `score`
//     set(c, score)                 from C, what is no tensor
//     is_given(problem)
//     is_in_score                   a pair's final score is another with it: what has_modifiers() asks
//     changes_derivative            as of semantics/score.hpp
//     fill(score, problem, params)  both have the call's sizes already
//     check(problem)                throws Error
//     transform(problem, u, s)      what becomes of a score that is not added to, for guards; u: fp32's roundoff
struct Modifier {
  // A score, what it may be off by, its derivative with respect to scale * (q . k), and what that may be off by.
  struct Score {
    double x, error, derivative = 1, derivative_error = 0;
  };
  static constexpr unsigned keys = AttentionFeatures::any;
  static constexpr bool is_in_score = true, changes_derivative = false;
  template <class Args>
  static constexpr std::array<Argument, 0> arguments{};
  static void set(const rapt_attention_args&, ScoreSpec&) {}
  static void check(const AttentionProblem&) {}
  static void transform(const AttentionProblem&, double, Score&) {}
};

namespace modifiers {

// "bk", "hqk", ..., "1": which dimensions of a tensor for pairs have their full size.
void print_broadcast(std::uint8_t dims, std::string_view key, std::string& text);
std::uint8_t read_broadcast(const Word& word);
template <auto kMember>
constexpr Field<AttentionProblem> broadcast_field(std::string_view key) {
  using P = AttentionProblem;
  return {key, false,
          [](const P& p, std::string_view word, std::string& text) { print_broadcast(p.*kMember, word, text); },
          [](P& p, const Word& word) { p.*kMember = read_broadcast(word); }};
}
// Fills the strides of a tensor with an element for every pair of a query and a key. Returns which of its dimensions
// have their full size.
std::uint8_t fill_pairs(const TensorView& t, ScoreParams& params, Strides& stride);

}  // namespace modifiers
}  // namespace rapt
