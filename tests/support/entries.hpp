// Running one registry entry at a time.
#pragma once

#include <string>
#include <vector>

#include "oracle/oracle.hpp"
#include "rapt/plan.hpp"
#include "support/case.hpp"

namespace rapt::testing {

/// Names of the fp32 entries that this machine can run, in dispatch order.
std::vector<std::string> usable_entries();

/// A serial context that uses `entry` and no other.
Context forced(const std::string& entry);
/// The same on `executor` with at most `threads` strands.
Context forced(const std::string& entry, std::shared_ptr<Executor> executor, int threads);

/// Runs `c` on `context` into fresh poison and compares with `reference`.
Errors run_and_compare(Case& c, const Context& context, const Reference& reference);

/// "rel_frobenius=..., ...": every figure.
std::string describe(const Errors& errors);

/// The argument that an Error thrown by `call` names; empty when nothing was thrown.
template <class Call>
std::string refused_argument(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.argument();
  }
  return {};
}

}  // namespace rapt::testing
