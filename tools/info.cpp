#include "info.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "common.hpp"
#include "support/entries.hpp"

namespace rapt::tools {
namespace {

struct IsaState {
  Isa isa;
  std::string unusable;  ///< empty: built and usable
};

/// Every ISA rapt knows, best first: whether this build has kernels for it and this machine runs them.
std::vector<IsaState> isa_states() {
  std::vector<IsaState> states;
  const std::vector<Isa> usable = usable_isas();
  for (Isa isa : usable) states.push_back({isa, {}});
  std::map<Isa, std::string> reasons;
  for (const EntryInfo& entry : entries()) {
    if (const auto isa = isa_of(entry.name)) reasons.emplace(*isa, entry.unusable);
  }
  for (Isa isa : {Isa::amx, Isa::avx512, Isa::avx2, Isa::neon, Isa::generic}) {
    if (std::find(usable.begin(), usable.end(), isa) != usable.end()) continue;
    const auto found = reasons.find(isa);
    states.push_back({isa, found == reasons.end() ? "not in this build" : found->second});
  }
  return states;
}

struct ExecutorState {
  std::string name;
  int threads = 0;
  std::string unusable;
};

std::vector<ExecutorState> executor_states() {
  std::vector<ExecutorState> states;
  const auto add = [&](const char* name, std::shared_ptr<Executor> (*make)()) {
    try {
      const auto executor = make();
      states.push_back({std::string(executor->name()), executor->concurrency(), {}});
    } catch (const Error& error) {
      states.push_back({name, 0, error.what()});
    }
  };
  add("tbb", tbb_executor);
  add("openmp", openmp_executor);
  add("serial", serial_executor);
  return states;
}

/// What docs/contract.md calls the bounds an entry keeps; those of f32x3 hold only for who asks for that entry by name.
std::string tier_name(std::string_view entry) {
  return testing::tier_of(entry) == testing::Tier::f32x3 ? "f32x3" : "exact";
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Json describe() {
  const Machine machine = read_machine();
  Json caches = Json::array();
  for (const Cache& cache : machine.caches) {
    caches.push_back(
        {{"level", cache.level}, {"type", cache.type}, {"size", cache.bytes}, {"num_sharing", cache.shared_by}});
  }
  Json isas = Json::array();
  for (const IsaState& state : isa_states()) {
    isas.push_back({{"name", to_string(state.isa)}, {"usable", state.unusable.empty()}, {"reason", state.unusable}});
  }
  Json executors = Json::array();
  for (const ExecutorState& state : executor_states()) {
    executors.push_back({{"name", state.name}, {"threads", state.threads}, {"reason", state.unusable}});
  }
  Json listed = Json::array();
  for (const EntryInfo& entry : entries()) {
    listed.push_back({{"name", entry.name},
                      {"backend", entry.backend},
                      {"tier", tier_name(entry.name)},
                      {"usable", entry.unusable.empty()},
                      {"reason", entry.unusable},
                      {"opt_in", entry.opt_in}});
  }
  return {{"version", version()},
          {"compiler", compiler()},
          {"host", machine.host},
          {"cpu", machine.cpu},
          {"cpus", machine.cpus},
          {"features", machine.features},
          {"caches", caches},
          {"isas", isas},
          {"executors", executors},
          {"environment", {{"RAPT_ISA", environment("RAPT_ISA")}, {"RAPT_KERNEL", environment("RAPT_KERNEL")}}},
          {"entries", listed}};
}

void line(std::string_view label, const std::string& text) {
  fmt::print("{:<11} {}\n", label, text);
}

void print_machine(const Json& info) {
  fmt::print("rapt {}, compiled with {}\n", info["version"].get<std::string>(), info["compiler"].get<std::string>());
  const std::string cpu = info["cpu"];
  line("cpu", fmt::format("{}, {} logical CPUs", cpu.empty() ? "unnamed" : cpu, info["cpus"].get<int>()));
  line("features", fmt::format("{}", fmt::join(info["features"].get<std::vector<std::string>>(), " ")));
  std::vector<std::string> caches;
  for (const Json& cache : info["caches"]) {
    const std::string type = cache["type"];
    const std::string kind = type == "Data" ? "d" : type == "Instruction" ? "i" : "";
    const int sharing = cache["num_sharing"];
    caches.push_back(fmt::format("L{}{} {}{}", cache["level"].get<int>(), kind,
                                 human_bytes(cache["size"].get<double>()),
                                 sharing > 1 ? fmt::format(" shared by {}", sharing) : ""));
  }
  line("caches", fmt::format("{}", fmt::join(caches, ", ")));
  for (const auto& [name, value] : info["environment"].items()) {
    if (!value.get<std::string>().empty()) line(name, value.get<std::string>() + " (environment)");
  }
}

void print_build(const Json& info) {
  std::string label = "ISAs";
  for (const Json& isa : info["isas"]) {
    const std::string state = isa["usable"].get<bool>() ? "usable" : isa["reason"].get<std::string>();
    line(label, fmt::format("{:<8} {}", isa["name"].get<std::string>(), state));
    label.clear();
  }
  label = "executors";
  for (const Json& executor : info["executors"]) {
    const std::string reason = executor["reason"];
    const std::string state =
        reason.empty() ? fmt::format("{} strands at once", executor["threads"].get<int>()) : reason;
    line(label, fmt::format("{:<8} {}", executor["name"].get<std::string>(), state));
    label.clear();
  }
  std::size_t width = 0;
  for (const Json& entry : info["entries"]) width = std::max(width, entry["name"].get<std::string>().size());
  label = "entries";
  for (const Json& entry : info["entries"]) {
    const std::string tier = entry["tier"];
    const std::string opt_in = entry["opt_in"];
    const std::string usable = opt_in.empty() ? "usable" : "usable, " + opt_in;
    const std::string state = entry["usable"].get<bool>() ? usable : entry["reason"].get<std::string>();
    line(label, fmt::format("{:<{}}  {:<4} {:<5}  {}", entry["name"].get<std::string>(), width,
                            entry["backend"].get<std::string>(), tier, state));
    label.clear();
  }
}

Json describe(const Plan& plan) {
  Json candidates = Json::array();
  for (const Candidate& candidate : plan.candidates()) {
    candidates.push_back({{"entry", candidate.entry}, {"refusal", candidate.refusal}});
  }
  return {{"problem", plan.problem().to_string()},
          {"entry", plan.entry()},
          {"backend", plan.backend()},
          {"threads", plan.threads()},
          {"work_items", plan.work_items()},
          {"workspace_bytes", plan.workspace_bytes()},
          {"candidates", candidates}};
}

}  // namespace

int run_info(const InfoOptions& options) {
  const Context context = make_context(options.threads, {});  // refuses an environment that nothing can run in
  if (options.problem.empty()) {
    const Json info = describe();
    if (options.json) {
      fmt::print("{}\n", info.dump(2));
      return kSuccess;
    }
    print_machine(info);
    print_build(info);
    return kSuccess;
  }
  const Plan plan = make_plan(parse_problem(options.problem), context);
  if (options.json) {
    fmt::print("{}\n", describe(plan).dump(2));
    return kSuccess;
  }
  const std::string text = plan.explain();
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
  return kSuccess;
}

}  // namespace rapt::tools
