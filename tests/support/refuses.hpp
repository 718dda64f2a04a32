// Calls that are refused: the argument is named and no output is touched.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>

#include "support/catch.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

inline constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

/// Sizes and strides that no tensor may have, whatever it is given as.
inline constexpr void (*kBadLayouts[])(Layout&) = {[](Layout& l) { l.shape[0] = -1; },
                                                   [](Layout& l) { l.shape[0] = kHuge; },
                                                   [](Layout& l) { l.strides[0] = -1; },
                                                   [](Layout& l) { l.strides[0] = kHuge; },
                                                   [](Layout& l) { l.strides[0] = kHuge / 4; },
                                                   [](Layout& l) { l.ndim = 5; },
                                                   [](Layout& l) { l.ndim = -1; }};

inline bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Spoils the arguments of a valid case and expects the refusal to name `argument`, from every door into the library.
inline void refuses(const std::string& argument, const std::function<void(AttentionArgs&, Case&)>& spoil,
                    const AttentionProblem& problem) {
  // With pages of its own for every tensor, so that moving an output a little cannot make it meet a neighbour.
  Case c(problem, 1, Placement::front);
  const Tensor untouched_out(c.out.dtype(), c.out.layout()), untouched_lse(DType::f32, c.lse.layout());
  const Plan plan(c.args(), Context());
  AttentionArgs args = c.args();
  INFO(argument << ": " << problem.to_string());
  REQUIRE_NOTHROW(AttentionProblem::of(args));
  spoil(args, c);
  CHECK(refused_argument([&] { attention(args); }) == argument);
  CHECK(refused_argument([&] { AttentionProblem::of(args); }) == argument);
  CHECK(refused_argument([&] { Plan{args}; }) == argument);
  CHECK(refused_argument([&] { plan.run(args); }) == argument);
  CHECK(same_bits(c.out, untouched_out));
  CHECK(same_bits(c.lse, untouched_lse));
}

inline void refuses(const std::string& argument, const std::function<void(AttentionArgs&, Case&)>& spoil,
                    const std::string& words = "") {
  const std::string sk = words.starts_with("sk=") ? "" : "sk=10 ";
  refuses(argument, spoil, AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 d=8 dv=4 lse " + sk + words));
}

inline std::string message_of(const AttentionArgs& args) {
  return refused_text([&] { AttentionProblem::of(args); });
}

/// The named members of AttentionArgs as read-only views, for spoiling one after another.
struct Member {
  const char* name;
  std::function<Layout&(AttentionArgs&)> layout;
};

}  // namespace rapt::testing
