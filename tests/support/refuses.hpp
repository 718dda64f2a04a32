// Calls that are refused: the argument is named and no output is touched.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

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

/// Spoils the arguments of a valid case by spoil(args) or spoil(args, case) and expects the refusal to name `argument`,
/// from every door into the library, and no output to change. The case should have pages of its own for every tensor,
/// so that moving an output a little cannot make it meet a neighbour.
template <class Case, class Args, class Spoil>
void check_refusal(const std::string& argument, Case c, void (*call)(const Args&, const Context&, std::span<std::byte>),
                   const Spoil& spoil) {
  using P = decltype(c.problem);
  const Plan plan(c.args(), Context());
  Args args = c.args();
  INFO(argument << ": " << c.problem.to_string());
  REQUIRE_NOTHROW(P::of(args));
  if constexpr (std::is_invocable_v<Spoil, Args&, Case&>) spoil(args, c);
  else spoil(args);
  CHECK(refused_argument([&] { call(args, default_context(), {}); }) == argument);
  CHECK(refused_argument([&] { P::of(args); }) == argument);
  CHECK(refused_argument([&] { Plan{args}; }) == argument);
  CHECK(refused_argument([&] { plan.run(args); }) == argument);
  for (const Tensor* t : c.outputs()) CHECK(same_bits(*t, Tensor(t->dtype(), t->layout())));
}
/// The same change is accepted.
template <class Case, class Args, class Change>
void check_accepted(Case c, void (*call)(const Args&, const Context&, std::span<std::byte>), const Change& change) {
  Args args = c.args();
  change(args);
  CHECK(refused_text([&] { call(args, default_context(), {}); }) == "");
}

/// A tensor of the arguments, for spoiling one after another, and a problem whose case has it.
template <class Args>
struct TensorField {
  const char* name;
  const char* words;
  Layout& (*layout)(Args&);
  const void*& (*data)(Args&);
  DType& (*dtype)(Args&);
  Device& (*device)(Args&);
};
template <class Args, auto... kPath>
constexpr TensorField<Args> tensor_field(const char* name, const char* words) {
  return {name,
          words,
          [](Args& a) -> Layout& { return (a.*....*kPath); },
          [](Args& a) -> const void*& { return const_cast<const void*&>((a.*....*kPath).data); },
          [](Args& a) -> DType& { return (a.*....*kPath).dtype; },
          [](Args& a) -> Device& { return (a.*....*kPath).device; }};
}

/// The same of attention.
inline void refuses(const std::string& argument, const std::function<void(AttentionArgs&, Case&)>& spoil,
                    const AttentionProblem& problem) {
  check_refusal(argument, Case(problem, 1, Placement::front), attention, spoil);
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
