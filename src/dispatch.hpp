// Picks the entry that runs a problem: the first of its device's backend that does not refuse.
#pragma once

#include <optional>
#include <string>
#include <string_view>
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
// The entry of that name, of whatever backend; the others' are not made for it.
std::optional<EntryInfo> find_entry(std::string_view name);
// Those whose names are nearest to it, or have it as a part; few, or none that is near.
std::vector<std::string> entries_like(std::string_view name);
// Every entry of that backend with its reason.
std::vector<Candidate> candidates(const Problem& problem, const Context::Impl& context);

}  // namespace rapt
