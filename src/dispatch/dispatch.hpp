// Picks the entry that runs a problem: of its device and operation, the first that does not refuse.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch/entry.hpp"
#include "rapt/plan.hpp"

namespace rapt {

struct Choice {
  const Backend* backend = nullptr;
  const Entry* entry = nullptr;
};

// Throws Error, with every entry's reason, when all refuse.
Choice dispatch(const Problem& problem, const Context::Impl& context);
// Every entry for the problem's device and operation, with its reason.
std::vector<Candidate> candidates(const Problem& problem, const Context::Impl& context);

// The entry of that name, of whatever backend.
std::optional<EntryInfo> find_entry(std::string_view name);

// The problem, the entry and how it runs, for people.
std::string explain(const Choice& choice, const EntryPlan& plan, const Problem& problem,
                    const std::vector<Candidate>& candidates, const Context::Impl& context);

}  // namespace rapt
