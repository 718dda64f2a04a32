#include "dispatch.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace rapt {
namespace {

// Backends are made when they are asked for: who stays on the CPU starts no driver.
struct BackendOf {
  DeviceType device;
  const Backend& (*get)();
};
constexpr BackendOf kBackends[] = {
    {DeviceType::cpu, cpu_backend},
#ifdef RAPT_HAVE_CUDA
    {DeviceType::cuda, cuda_backend},
#endif
};

// As far as it is known without asking the OS.
std::string_view unusable(const Entry& entry) {
  return entry.unusable.empty() && entry.withheld ? entry.withheld(false) : std::string_view(entry.unusable);
}

std::string_view refusal(const Backend& backend, const Entry& entry, const Problem& problem,
                         const Context::Impl& context) {
  if (const std::string_view reason = unusable(entry); !reason.empty()) return reason;
  if (!context.options.kernel.empty() && context.options.kernel != entry.name) return "another entry is forced";
  if (std::string_view reason = backend.refuse(entry, problem, context); !reason.empty()) return reason;
  const bool forced = context.options.kernel == entry.name || (context.isa_forced && problem.device == DeviceType::cpu);
  return forced ? std::string_view() : entry.opt_in;
}

const Backend& backend_of(DeviceType device) {
  for (const BackendOf& backend : kBackends)
    if (backend.device == device) return backend.get();
  throw Error("device", std::string(to_string(device)),
              std::size(kBackends) > 1 ? "cpu or cuda" : "cpu (this rapt was built without CUDA: RAPT_CUDA)");
}

EntryInfo info(const Backend& backend, const Entry& entry) {
  return {entry.name, std::string(backend.name()), std::string(unusable(entry)), entry.opt_in};
}

// The least changes, additions and removals of characters that make `name` a part of `whole`.
std::size_t edits(std::string_view name, std::string_view whole) {
  // Of what was read of `name`, to end before each character of `whole`.
  std::vector<std::size_t> before(whole.size() + 1, 0), now(whole.size() + 1);
  for (const char c : name) {
    now[0] = before[0] + 1;
    for (std::size_t i = 0; i < whole.size(); ++i)
      now[i + 1] = std::min({before[i] + (c == whole[i] ? 0 : 1), before[i + 1] + 1, now[i] + 1});
    std::swap(before, now);
  }
  return *std::min_element(before.begin(), before.end());
}

}  // namespace

Choice dispatch(const Problem& problem, const Context::Impl& context) {
  const Backend& backend = backend_of(problem.device);
  for (const Entry& entry : backend.entries())
    if (refusal(backend, entry, problem, context).empty() && (!entry.withheld || entry.withheld(true).empty()))
      return {&backend, &entry};
  std::string reasons;
  const std::vector<Candidate> all = candidates(problem, context);
  for (const Candidate& c : all) {
    if (c.entry == context.options.kernel)
      throw Error("problem", problem.to_string(),
                  "a problem the forced entry takes (" + c.entry + ": " + c.refusal + ")");
    reasons += "\n  " + c.entry + ": " + c.refusal;
  }
  const auto alike = [&](const Candidate& c) { return c.refusal == all.front().refusal; };
  if (!all.empty() && std::all_of(all.begin(), all.end(), alike))
    reasons = " (all entries for " + std::string(backend.name()) + ": " + all.front().refusal + ")";
  else reasons.insert(0, ":");
  throw Error("problem", problem.to_string(), "a problem some entry takes" + reasons);
}

std::vector<Candidate> candidates(const Problem& problem, const Context::Impl& context) {
  const Backend& backend = backend_of(problem.device);
  std::vector<Candidate> all;
  for (const Entry& entry : backend.entries())
    all.push_back({entry.name, std::string(refusal(backend, entry, problem, context))});
  return all;
}

std::optional<EntryInfo> find_entry(std::string_view name) {
  for (const BackendOf& backend : kBackends)
    for (const Entry& entry : backend.get().entries())
      if (entry.name == name) return info(backend.get(), entry);
  return {};
}

std::vector<std::string> entries_like(std::string_view name) {
  constexpr std::size_t kMost = 3;
  std::size_t least = name.size() / 4;
  std::vector<std::string> nearest;
  for (const EntryInfo& entry : entries()) {
    const std::size_t distance = edits(name, entry.name);
    if (distance > least) continue;
    if (distance < least) nearest.clear();
    least = distance;
    if (nearest.size() < kMost) nearest.push_back(entry.name);
  }
  return nearest;
}

std::vector<EntryInfo> entries() {
  std::vector<EntryInfo> all;
  for (const BackendOf& backend : kBackends)
    for (const Entry& entry : backend.get().entries()) all.push_back(info(backend.get(), entry));
  return all;
}

}  // namespace rapt
