#include "dispatch/dispatch.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/dtypes.hpp"
#include "dispatch/cuda_library.hpp"

namespace rapt {
namespace {

// Backends are made when they are asked for, so that a program that stays on the CPU starts no GPU driver.
struct BackendOf {
  DeviceType device;
  const Backend* (*get)();  // null where it is missing
};
constexpr BackendOf kBackends[] = {
    {DeviceType::cpu, [] { return &cpu_backend(); }},
    {DeviceType::cuda, [] { return cuda_backend_of_process().backend; }},
};

constexpr std::string_view kOtherTypes = "takes other element types", kOtherSizes = "takes other head dimensions",
                           kNoDropout = "takes no dropout", kNoKeyTail = "takes no k_tail";

// As far as it is known without asking the OS.
std::string_view unusable(const Entry& entry) {
  return entry.unusable.empty() && entry.denied ? entry.denied(false) : std::string_view(entry.unusable);
}

// What the entry's facts say of the problem.
std::string_view refusal_by(const KernelFacts& facts, const Problem& problem) {
  const auto [types, d, dv] = std::visit([](const auto& p) { return needs_of(p); }, problem);
  if ((types & ~facts.dtypes) != 0) return kOtherTypes;
  if (std::min(d, dv) < facts.min_head_dim || std::max(d, dv) > facts.max_head_dim || dv > facts.max_value_head_dim)
    return kOtherSizes;
  if (const AttentionProblem* p = attention_of(problem)) {
    if (p->dropout != 0 && !facts.dropout) return kNoDropout;
    if (p->k_tail != 0 && !facts.key_tail) return kNoKeyTail;
  }
  return {};
}

std::string_view refusal(const Entry& entry, const Problem& problem, const Context::Impl& context) {
  if (const std::string_view reason = unusable(entry); !reason.empty()) return reason;
  if (!context.forces(entry.facts.operation, entry.name)) return "another entry is forced";
  if (const std::string_view reason = refusal_by(entry.facts, problem); !reason.empty()) return reason;
  if (const std::string_view reason = entry.refuse(problem, context); !reason.empty()) return reason;
  const bool forced =
      context.options.kernel == entry.name || (context.isa_forced && device_of(problem) == DeviceType::cpu);
  return forced ? std::string_view() : entry.opt_in;
}

const Backend& backend_of(DeviceType device) {
  for (const BackendOf& backend : kBackends)
    if (const Backend* const found = backend.device == device ? backend.get() : nullptr) return *found;
  const bool missing = device == DeviceType::cuda;
  throw Error("device", std::string(to_string(device)),
              missing ? "cpu (" + cuda_backend_of_process().missing + ")" : "cpu or cuda");
}

EntryInfo info_of(const Backend& backend, const Entry& entry) {
  EntryInfo info;
  const KernelFacts& facts = entry.facts;
  info.name = entry.name, info.backend = backend.name;
  info.operation = facts.operation, info.phase = facts.phase;
  info.arithmetic = facts.arithmetic, info.isa = entry.isa;
  for (const DType dtype : kDTypes)
    if (set_of(dtype) & facts.dtypes) info.dtypes.push_back(dtype);
  info.min_head_dim = facts.min_head_dim, info.max_head_dim = facts.max_head_dim;
  info.max_value_head_dim = std::min(facts.max_value_head_dim, facts.max_head_dim);
  info.block_q = facts.block_q, info.block_k = facts.block_k, info.dropout = facts.dropout;
  info.unusable = unusable(entry), info.opt_in = entry.opt_in;
  return info;
}

}  // namespace

std::string entry_name(const KernelFacts& facts, std::string_view isa) {
  std::string name(to_string(facts.operation));
  if (facts.phase != Phase::all) name += "_" + std::string(to_string(facts.phase));
  name += std::string(".") + facts.arithmetic + "." + std::string(isa);
  if (facts.block_q > 0) name += ".q" + std::to_string(facts.block_q) + "k" + std::to_string(facts.block_k);
  return name;
}

Choice dispatch(const Problem& problem, const Context::Impl& context) {
  const Backend& backend = backend_of(device_of(problem));
  for (const auto& entry : backend.entries)
    if (entry->facts.operation == operation_of(problem) && refusal(*entry, problem, context).empty() &&
        (!entry->denied || entry->denied(true).empty()))
      return {&backend, entry.get()};
  std::string reasons;
  const std::vector<Candidate> all = candidates(problem, context);
  for (const Candidate& c : all) {
    if (c.entry == context.options.kernel)
      throw Error("problem", to_string(problem),
                  "a problem the forced entry takes (" + c.entry + ": " + c.refusal + ")");
    reasons += "\n  " + c.entry + ": " + c.refusal;
  }
  const auto alike = [&](const Candidate& c) { return c.refusal == all.front().refusal; };
  if (all.empty()) reasons = " (" + std::string(backend.name) + " has none for this operation)";
  else if (std::all_of(all.begin(), all.end(), alike))
    reasons = " (all entries for " + std::string(backend.name) + ": " + all.front().refusal + ")";
  else reasons.insert(0, ":");
  throw Error("problem", to_string(problem), "a problem some entry takes" + reasons);
}

std::vector<Candidate> candidates(const Problem& problem, const Context::Impl& context) {
  std::vector<Candidate> all;
  for (const auto& entry : backend_of(device_of(problem)).entries)
    if (entry->facts.operation == operation_of(problem))
      all.push_back({entry->name, std::string(refusal(*entry, problem, context))});
  return all;
}

std::optional<EntryInfo> find_entry(std::string_view name) {
  for (const BackendOf& backend : kBackends)
    if (const Backend* const found = backend.get())
      for (const auto& entry : found->entries)
        if (entry->name == name) return info_of(*found, *entry);
  return {};
}

std::vector<EntryInfo> entries() {
  std::vector<EntryInfo> all;
  for (const BackendOf& backend : kBackends)
    if (const Backend* const found = backend.get())
      for (const auto& entry : found->entries) all.push_back(info_of(*found, *entry));
  return all;
}

std::vector<BackendInfo> backends() {
  const CudaBackend& cuda = cuda_backend_of_process();
  return {{.name = "cpu", .library = "", .version = std::string(version()), .missing = ""},
          {.name = "cuda", .library = cuda.file, .version = cuda.version, .missing = cuda.missing}};
}

std::string explain(const Choice& choice, const EntryPlan& plan, const Problem& problem,
                    const std::vector<Candidate>& candidates, const Context::Impl& context) {
  std::string text = "problem    " + to_string(problem) + "\nentry      " + choice.entry->name + "\nbackend    " +
                     std::string(choice.backend->name) + "\nplan       " + plan.note() + "\nthreads    " +
                     std::to_string(plan.threads);
  if (device_of(problem) == DeviceType::cpu) text += "\nexecutor   " + std::string(context.executor().name());
  text += "\nworkspace  " + std::to_string(plan.workspace_bytes) + " bytes\n";
  for (const Candidate& c : candidates) {
    const bool chosen = c.entry == choice.entry->name;
    const std::string verdict = chosen ? "chosen" : c.refusal.empty() ? "usable, ranked lower" : c.refusal;
    text += (chosen ? "  * " : "    ") + c.entry + ": " + verdict + "\n";
  }
  return text;
}

}  // namespace rapt
