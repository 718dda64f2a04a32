#include "dispatch.hpp"

#include <optional>
#include <string>

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

std::string_view refusal(const Backend& backend, const Entry& entry, const Problem& problem,
                         const Context::Impl& context) {
  if (!entry.unusable.empty()) return entry.unusable;
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

}  // namespace

Choice dispatch(const Problem& problem, const Context::Impl& context) {
  const Backend& backend = backend_of(problem.device);
  for (const Entry& entry : backend.entries())
    if (refusal(backend, entry, problem, context).empty()) return {&backend, &entry};
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
  const Backend& backend = backend_of(problem.device);
  std::vector<Candidate> all;
  for (const Entry& entry : backend.entries())
    all.push_back({entry.name, std::string(refusal(backend, entry, problem, context))});
  return all;
}

std::optional<EntryInfo> find_entry(std::string_view name) {
  for (const BackendOf& backend : kBackends)
    for (const Entry& entry : backend.get().entries())
      if (entry.name == name)
        return EntryInfo{entry.name, std::string(backend.get().name()), entry.unusable, entry.opt_in};
  return {};
}

std::vector<EntryInfo> entries() {
  std::vector<EntryInfo> all;
  for (const BackendOf& backend : kBackends)
    for (const Entry& entry : backend.get().entries())
      all.push_back({entry.name, std::string(backend.get().name()), entry.unusable, entry.opt_in});
  return all;
}

}  // namespace rapt
