// Assertions that more than one test file makes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// Runs `args`, whose outputs belong to `c`, on every usable entry, each into fresh poison, and holds the result to the
/// oracle. Nothing outside the rows of an output may change.
inline void check_every_entry(Case& c, const AttentionArgs& args) {
  const std::vector<std::string> names = every_entry(c.problem);
  if (names.empty()) return;  // RAPT_TEST_ENTRIES has others
  const Reference reference = oracle(args);
  for (const std::string& entry : names) {
    INFO(entry << ": " << c.problem.to_string());
    c.poison_outputs();
    run(args, entry);
    const Errors errors = compare(args, reference, weights_of(entry, args));
    INFO(describe(errors));
    CHECK(errors.ok());
    CHECK(c.out.gaps_intact());
    CHECK(c.lse.gaps_intact());
  }
}

inline void check_every_entry(Case& c) {
  check_every_entry(c, c.args());
}

inline void check_every_entry(const AttentionProblem& problem, std::uint64_t seed = 1) {
  if (every_entry(problem).empty()) return;
  Case c(problem, seed);
  check_every_entry(c);
}

/// Whether a case of a product of choices is run: every n-th one is. That leaves every pair of choices if `n` and the
/// numbers of choices have no common factor. On a GPU, whose kernels differ more from case to case, all are run.
inline bool is_sampled(std::size_t& turn, std::size_t n) {
  static const bool all = has_gpu();
  return turn++ % n == 0 || all;
}

/// Runs the test case that calls it once for each type.
inline DType each_type() {
  return GENERATE(DType::f32, DType::bf16, DType::f16);
}

/// The same for each type of a cache.
inline DType each_cache_type() {
  return GENERATE(from_range(kCacheTypes));
}

/// With q, k, v and out of each type in turn.
inline void check_every_type(const std::string& problem, std::uint64_t seed = 1) {
  for (DType dtype : kFloatTypes) check_every_entry(typed(problem, dtype), seed);
}

}  // namespace rapt::testing
