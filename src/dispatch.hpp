// Picks the entry that runs a problem: the first of its device's backend that does not refuse.
#pragma once

#include <vector>

#include "backend.hpp"
#include "rapt/plan.hpp"

namespace rapt {

struct Choice {
  const Backend* backend = nullptr;
  const Entry* entry = nullptr;
};

// Throws Error, with every entry's reason, when all refuse.
Choice dispatch(const Problem& problem, const Context::Impl& context);
// Every entry of that backend with its reason.
std::vector<Candidate> candidates(const Problem& problem, const Context::Impl& context);

}  // namespace rapt
