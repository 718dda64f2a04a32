// Assertions that more than one test file makes.
#pragma once

#include "support/catch.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// Runs `args`, whose outputs belong to `c`, on every usable entry, each into fresh poison, and holds the result to the
/// oracle. Nothing outside the rows of an output may change.
inline void check_every_entry(Case& c, const AttentionArgs& args) {
  const Reference reference = oracle(args);
  for (const std::string& entry : usable_entries()) {
    INFO(entry << ": " << c.problem.to_string());
    c.poison_outputs();
    attention(args, forced(entry));
    const Errors errors = compare(args, reference);
    INFO(describe(errors));
    CHECK(errors.ok());
    CHECK(c.out.gaps_intact());
    CHECK(c.lse.gaps_intact());
  }
}

inline void check_every_entry(Case& c) {
  check_every_entry(c, c.args());
}

inline void check_every_entry(const std::string& problem, std::uint64_t seed = 1) {
  Case c(Problem::parse(problem), seed);
  check_every_entry(c);
}

}  // namespace rapt::testing
