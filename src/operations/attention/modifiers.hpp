// The score modifiers: of each, in one struct, everything that operations with scores say of it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/fields.hpp"
#include "operations/arguments.hpp"
#include "operations/attention/modes.hpp"
#include "rapt/attention_problem.hpp"
#include "rapt/score.hpp"
#include "semantics/score.hpp"

namespace rapt {

// What a modifier says; most of it has a default, which a modifier inherits.
//
//     name                          in errors
//     keys                          the kinds of keys that it goes with, as AttentionModes
//     fields                        of the problem's text
//     arguments<Args>               its tensors, of an operation whose arguments have a ScoreSpec `score`
//     set(c, score)                 from C, what is no tensor
//     is_given(problem)
//     is_in_score                   a pair's final score is another with it: what has_modifiers() asks
//     changes_derivative            as of semantics/score.hpp
//     fill(score, problem, params)  both have the call's sizes already
//     check(problem)                throws Error
//     transform(problem, unit, s)   what becomes of a score that is not added to, for guards
struct Modifier {
  // A score, what it may be off by, its derivative with respect to scale * (q . k), and what that may be off by.
  struct Score {
    double x, error, derivative = 1, derivative_error = 0;
  };
  static constexpr unsigned keys = AttentionModes::any;
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
template <std::uint8_t AttentionProblem::*kMember>
constexpr Field<AttentionProblem> broadcast_field(std::string_view key) {
  using P = AttentionProblem;
  return {key, false,
          [](const P& p, std::string_view word, std::string& text) { print_broadcast(p.*kMember, word, text); },
          [](P& p, const Word& word) { p.*kMember = read_broadcast(word); }};
}

struct Softcap : Modifier {
  static constexpr const char* name = "score.softcap";
  static constexpr bool changes_derivative = true;
  static constexpr std::array fields = {number_field<AttentionProblem, &AttentionProblem::softcap>("softcap")};
  static void set(const rapt_attention_args& c, ScoreSpec& score) {
    if (c.softcap != 0) score.softcap = c.softcap;
  }
  static bool is_given(const AttentionProblem& p) { return p.softcap != 0; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params);
  static void check(const AttentionProblem& p);
  static void transform(const AttentionProblem& p, double unit, Score& s);
};

struct Bias : Modifier {
  static constexpr const char* name = "score.bias";
  static constexpr unsigned keys = AttentionModes::sequences;
  static constexpr std::array fields = {broadcast_field<&AttentionProblem::bias>("bias"),
                                        dtype_field<AttentionProblem, &AttentionProblem::bias_dtype>("bias_dtype")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::bias, &Args::score, &ScoreSpec::bias>(name, kFloatTypes, AttentionShapes::pairs)
          .in(keys)
          .minus_infinity_allowed()};
  static bool is_given(const AttentionProblem& p) { return p.bias != AttentionProblem::kNone; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params);
  static void check(const AttentionProblem& p);
};

struct Mask : Modifier {
  static constexpr const char* name = "score.mask";
  static constexpr unsigned keys = AttentionModes::sequences;
  static constexpr std::array fields = {broadcast_field<&AttentionProblem::mask>("mask")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::mask, &Args::score, &ScoreSpec::mask>(name, kBoolean, AttentionShapes::pairs)
          .in(keys)
          .with_types("boolean (additive masks are a bias)")};
  static bool is_given(const AttentionProblem& p) { return p.mask != AttentionProblem::kNone; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params);
};

struct Alibi : Modifier {
  static constexpr const char* name = "score.alibi";
  static constexpr unsigned keys = AttentionModes::positions;
  static constexpr std::array fields = {flag_field<AttentionProblem, &AttentionProblem::alibi>("alibi")};
  template <class Args>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::alibi, &Args::score, &ScoreSpec::alibi>(name, kFloatTypes, "b~ hq").in(keys)};
  static bool is_given(const AttentionProblem& p) { return p.alibi; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params);
};

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
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params);
};

struct Dropout : Modifier {
  static constexpr const char* name = "score.dropout";
  static constexpr bool is_in_score = false;
  static constexpr unsigned keys = AttentionModes::positions;
  static constexpr std::array fields = {number_field<AttentionProblem, &AttentionProblem::dropout>("dropout")};
  static void set(const rapt_attention_args& c, ScoreSpec& score) {
    if (c.dropout != 0) score.dropout = rapt::Dropout{c.dropout, c.dropout_seed, c.dropout_offset};
  }
  static bool is_given(const AttentionProblem& p) { return p.dropout != 0; }
  static void fill(const ScoreSpec& score, AttentionProblem& p, ScoreParams& params);
  static void check(const AttentionProblem& p);
};

}  // namespace modifiers

template <class... M>
struct ModifierList {
  template <class Args>
  static constexpr auto arguments = join(M::template arguments<Args>...);
  static constexpr auto fields = join(M::fields...);
  // Calls f(M()) for each modifier.
  template <class F>
  static void for_each(const F& f) {
    (f(M()), ...);
  }
};

// In the order of the problem's text.
using Modifiers = ModifierList<modifiers::Softcap, modifiers::Bias, modifiers::Mask, modifiers::Alibi, modifiers::Sinks,
                               modifiers::Dropout>;

// What has_modifiers() and changes_derivative() of semantics/score.hpp say of the parameters, of a problem.
inline bool has_modifiers(const AttentionProblem& p) {
  bool any = false;
  Modifiers::for_each([&](auto modifier) { any |= modifier.is_in_score && modifier.is_given(p); });
  return any;
}
inline bool changes_derivative(const AttentionProblem& p) {
  bool any = false;
  Modifiers::for_each([&](auto modifier) { any |= modifier.changes_derivative && modifier.is_given(p); });
  return any;
}

}  // namespace rapt
