// Runs of delta_rule that more than one test file makes, and assertions about them.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "operations/delta_rule/case.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

inline DeltaRuleProblem problem_of(const std::string& words) {
  return DeltaRuleProblem::parse("delta_rule " + words);
}

/// Every entry, each into fresh poison, within the bounds of float64.
inline void check_every_entry(DeltaRuleCase& c) {
  std::map<DType, std::optional<DeltaRuleReference>> references;  // by the type of products' operands
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.clear();
    c.run(forced(entry));
    std::optional<DeltaRuleReference>& reference = references[c.operands];
    if (!reference) reference = c.reference();
    const Verdict verdict = c.verdict(*reference);
    INFO(describe(verdict.errors));
    REQUIRE(verdict.violation == "");
  }
}

/// The bits of out and of the final state on an entry.
struct DeltaRuleBits {
  std::vector<float> out, state;
  friend bool operator==(const DeltaRuleBits& a, const DeltaRuleBits& b) {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
    };
    return same(a.out, b.out) && same(a.state, b.state);
  }
};
template <class Where>
DeltaRuleBits bits_on(DeltaRuleCase& c, const Where& context) {
  c.clear();
  c.run(context);
  return {c.out.values(), c.final ? c.final.values() : std::vector<float>()};
}

/// The call for tokens [first, first + count) of one sequence, which starts from and leaves its own state.
inline DeltaRuleArgs part_of(DeltaRuleCase& c, std::int64_t sequence, std::int64_t first, std::int64_t count) {
  DeltaRuleArgs args = c.args();
  const bool ragged = static_cast<bool>(args.cu_seqlens);
  std::int64_t begin = first;
  for (std::int64_t i = 0; ragged && i < sequence; ++i) begin += c.length(i);
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.beta}) *t = tokens_of(*t, ragged, sequence, begin, count);
  if (args.g.ndim != 1) args.g = tokens_of(args.g, ragged, sequence, begin, count);
  args.out = tokens_of(args.out, ragged, sequence, begin, count);
  if (args.initial_state) args.initial_state = slice(args.initial_state, 0, sequence, 1);
  if (args.final_state) args.final_state = slice(args.final_state, 0, sequence, 1);
  args.cu_seqlens = {};
  return args;
}

/// A case with an initial and a final state, apart.
inline DeltaRuleCase case_with_states(const DeltaRuleProblem& problem, std::uint64_t seed, Decays decays) {
  for (;; ++seed) {
    DeltaRuleCase c(problem, seed, Placement::heap, Spacing::dense, decays);
    if (c.initial && c.final && !c.in_place) return c;
  }
}

}  // namespace rapt::testing
