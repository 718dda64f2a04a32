#include "dispatch.hpp"

#include <array>
#include <string>

namespace rapt {
namespace {

std::string_view refusal(const Backend& backend, const Entry& entry, const Problem& problem,
                         const Context::Impl& context) {
  if (!entry.unusable.empty()) return entry.unusable;
  if (backend.device() != problem.device) return "the tensors are on another device";
  if (!context.options.kernel.empty() && context.options.kernel != entry.name) return "another entry is forced";
  if (std::string_view reason = backend.refuse(entry, problem, context); !reason.empty()) return reason;
  const bool forced = context.options.kernel == entry.name || context.isa_forced;
  return forced ? std::string_view() : entry.opt_in;
}

}  // namespace

std::span<const Backend* const> backends() {
  static const std::array<const Backend*, 1> all = {&cpu_backend()};
  return all;
}

Choice dispatch(const Problem& problem, const Context::Impl& context) {
  for (const Backend* backend : backends())
    for (const Entry& entry : backend->entries())
      if (refusal(*backend, entry, problem, context).empty()) return {backend, &entry};
  std::string reasons;
  for (const Candidate& c : candidates(problem, context)) {
    if (c.entry == context.options.kernel)
      throw Error("problem", problem.to_string(),
                  "a problem the forced entry takes (" + c.entry + ": " + c.refusal + ")");
    reasons += "\n  " + c.entry + ": " + c.refusal;
  }
  throw Error("problem", problem.to_string(), "a problem some entry takes:" + reasons);
}

std::vector<Candidate> candidates(const Problem& problem, const Context::Impl& context) {
  std::vector<Candidate> all;
  for (const Backend* backend : backends())
    for (const Entry& entry : backend->entries())
      all.push_back({entry.name, std::string(refusal(*backend, entry, problem, context))});
  return all;
}

std::vector<EntryInfo> entries() {
  std::vector<EntryInfo> all;
  for (const Backend* backend : backends())
    for (const Entry& entry : backend->entries())
      all.push_back({entry.name, std::string(backend->name()), entry.unusable, entry.opt_in});
  return all;
}

}  // namespace rapt
