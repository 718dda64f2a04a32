#include "info.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "bench/entry.hpp"
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
    if (const auto isa = bench::cpu_isa(entry)) reasons.emplace(*isa, entry.unusable);
  }
  for (Isa isa : bench::kIsas) {
    if (std::find(usable.begin(), usable.end(), isa) != usable.end()) continue;
    const auto found = reasons.find(isa);
    states.push_back({isa, found == reasons.end() ? "not in this build" : found->second});
  }
  return states;
}

struct BackendState {
  BackendInfo info;
  std::string unusable;  ///< empty: some entry of it is usable
};

/// The backends that rapt knows. One is unusable where it is missing, or all its entries are, for one reason.
std::vector<BackendState> backend_states() {
  std::vector<BackendState> states;
  const std::vector<EntryInfo> all = entries();
  for (const BackendInfo& backend : backends()) {
    std::vector<std::string> reasons;
    for (const EntryInfo& entry : all)
      if (entry.backend == backend.name) reasons.push_back(entry.unusable);
    const bool alike = std::equal(reasons.begin() + !reasons.empty(), reasons.end(), reasons.begin());
    states.push_back({backend, reasons.empty() ? backend.missing : alike ? reasons.front() : ""});
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

/// What an entry is, in fields.
Json describe(const EntryInfo& entry) {
  Json dtypes = Json::array();
  for (const DType dtype : entry.dtypes) dtypes.push_back(to_string(dtype));
  return {{"name", entry.name},
          {"backend", entry.backend},
          {"operation", to_string(entry.operation)},
          {"phase", to_string(entry.phase)},
          {"arithmetic", entry.arithmetic},
          {"isa", entry.isa},
          {"dtypes", dtypes},
          {"min_head_dim", entry.min_head_dim},
          {"max_head_dim", entry.max_head_dim},
          {"max_value_head_dim", entry.max_value_head_dim},
          {"block_q", entry.block_q},
          {"block_k", entry.block_k},
          {"dropout", entry.dropout},
          {"usable", entry.unusable.empty()},
          {"reason", entry.unusable},
          {"opt_in", entry.opt_in}};
}

/// `refusal`: why no context can be made in this environment; empty if one can.
Json describe_all(const std::string& refusal) {
  Json isas = Json::array();
  for (const IsaState& state : isa_states()) {
    isas.push_back({{"name", to_string(state.isa)}, {"usable", state.unusable.empty()}, {"reason", state.unusable}});
  }
  Json backends = Json::array();
  for (const BackendState& state : backend_states()) {
    backends.push_back({{"name", state.info.name},
                        {"usable", state.unusable.empty()},
                        {"reason", state.unusable},
                        {"library", state.info.library},
                        {"version", state.info.version}});
  }
  Json executors = Json::array();
  for (const ExecutorState& state : executor_states()) {
    executors.push_back({{"name", state.name}, {"threads", state.threads}, {"reason", state.unusable}});
  }
  Json listed = Json::array();
  for (const EntryInfo& entry : entries()) listed.push_back(describe(entry));
  return {{"context", run_context(read_machine())},
          {"isas", isas},
          {"backends", backends},
          {"executors", executors},
          {"refusal", refusal},
          {"entries", listed}};
}

void line(std::string_view label, const std::string& text) {
  fmt::print("{:<11} {}\n", label, text);
}

void print_machine(const Json& info) {
  const Json& context = info["context"];
  fmt::print("rapt {}, commit {}, compiled with {}\n", context["library_version"].get<std::string>(), kCommit,
             context["compiler"].get<std::string>());
  const std::string cpu = context["cpu"];
  line("cpu", fmt::format("{}, {} logical CPUs", cpu.empty() ? "unnamed" : cpu, context["num_cpus"].get<int>()));
  line("features", fmt::format("{}", fmt::join(context["features"].get<std::vector<std::string>>(), " ")));
  std::vector<std::string> caches;
  for (const Json& cache : context["caches"]) {
    const std::string type = cache["type"];
    const std::string kind = type == "Data" ? "d" : type == "Instruction" ? "i" : "";
    const int sharing = cache["num_sharing"];
    caches.push_back(fmt::format("L{}{} {}{}", cache["level"].get<int>(), kind,
                                 human_bytes(cache["size"].get<double>()),
                                 sharing > 1 ? fmt::format(" shared by {}", sharing) : ""));
  }
  line("caches", caches.empty() ? "unknown" : fmt::format("{}", fmt::join(caches, ", ")));
  const auto named = [&](const std::string& entry) {
    return std::any_of(info["entries"].begin(), info["entries"].end(),
                       [&](const Json& listed) { return listed["name"] == entry; });
  };
  for (const auto& [name, value] : context["environment"].items()) {
    const std::string given = value;
    if (given.empty()) continue;
    const bool none = name == "RAPT_KERNEL" && !named(given);
    line(name, printable(given) + (none ? " (environment): none of the entries below" : " (environment)"));
  }
}

void print_build(const Json& info) {
  std::string label = "ISAs";
  for (const Json& isa : info["isas"]) {
    const std::string state = isa["usable"].get<bool>() ? "usable" : isa["reason"].get<std::string>();
    line(label, fmt::format("{:<10} {}", isa["name"].get<std::string>(), state));
    label.clear();
  }
  label = "backends";
  std::map<std::string, bool> usable_backends;
  for (const Json& backend : info["backends"]) {
    const bool usable = backend["usable"];
    usable_backends[backend["name"]] = usable;
    const std::string library = backend["library"], version = backend["version"];
    line(label,
         fmt::format("{:<10} {}{}", backend["name"].get<std::string>(),
                     library.empty() ? "" : fmt::format("{} (rapt {}): ", library, version.empty() ? "?" : version),
                     usable ? "usable" : backend["reason"].get<std::string>()));
    label.clear();
  }
  label = "executors";
  for (const Json& executor : info["executors"]) {
    const std::string reason = executor["reason"];
    const std::string state =
        reason.empty() ? fmt::format("{} workers at once", executor["threads"].get<int>()) : reason;
    line(label, fmt::format("{:<10} {}", executor["name"].get<std::string>(), state));
    label.clear();
  }
  std::size_t width = 0;
  for (const Json& entry : info["entries"]) width = std::max(width, entry["name"].get<std::string>().size());
  label = "entries";
  for (const Json& entry : info["entries"]) {
    const std::string opt_in = entry["opt_in"];
    const std::string usable = opt_in.empty() ? "usable" : "usable, " + opt_in;
    const std::string backend = entry["backend"];
    const std::string unusable =
        usable_backends[backend] ? entry["reason"].get<std::string>() : backend + " is not usable";
    const std::string state = entry["usable"].get<bool>() ? usable : unusable;
    line(label, fmt::format("{:<{}}  {:<4}  {}", entry["name"].get<std::string>(), width, backend, state));
    label.clear();
  }
}

Json describe(const Plan& plan) {
  Json candidates = Json::array();
  for (const Candidate& candidate : plan.candidates()) {
    candidates.push_back({{"entry", candidate.entry}, {"refusal", candidate.refusal}});
  }
  return {{"context", run_context(read_machine())},
          {"problem", to_string(plan.problem())},
          {"entry", plan.entry()},
          {"backend", plan.backend()},
          {"threads", plan.threads()},
          {"work_items", plan.work_items()},
          {"workspace_bytes", plan.workspace_bytes()},
          {"candidates", candidates}};
}

/// Writes the file that was asked for. True if JSON goes to standard output, in place of text.
bool print_json(const InfoOptions& options, const Json& json) {
  const bool printed = options.json && options.json_path.empty();
  if (printed) fmt::print("{}\n", to_text(json));
  if (!options.json_path.empty()) write_json(options.json_path, json);
  return printed;
}

constexpr const char* kCodeRow = "{:<11} {:<34} {:>9} {:>6} {:>9} {:>5} {:>10} {:>9}\n";

/// A row for an object file, of a GPU's one for each architecture.
void print_code(const Json& object) {
  const auto integer = [](const Json& of, const char* key) { return of[key].get<std::int64_t>(); };
  const std::string path = object["source"], source = path.substr(path.rfind('/') + 1), isa = object["isa"];
  if (object.contains("not_read")) {
    fmt::print("{:<11} {:<34} not read: {}\n", isa, source, object["not_read"].get<std::string>());
  } else if (object.contains("gpu")) {
    for (const Json& usage : object["gpu"])
      fmt::print(
          "{:<11} {:<34} {:>9} {} kernels; at most {} registers a thread, {} bytes of stack, {} of shared memory\n",
          usage["architecture"].get<std::string>(), source, integer(usage, "code_bytes"), integer(usage, "kernels"),
          integer(usage, "registers"), integer(usage, "stack_bytes"), integer(usage, "shared_bytes"));
  } else if (const Json& tile = object["largest"]; tile.is_null()) {
    fmt::print(kCodeRow, isa, source, integer(object, "code_bytes"), 0, "", "", "", "");
  } else {
    fmt::print(kCodeRow, isa, source, integer(object, "code_bytes"), integer(object, "loops"),
               integer(object, "loops_on_stack"), integer(tile, "accumulators"), integer(tile, "registers"),
               integer(tile, "on_stack"));
  }
}

int list_code(const InfoOptions& options) {
  if (*kKernelCode == '\0') throw std::runtime_error("this rapt was built without Python 3, which reads object files");
  const Json code = Json::parse(kKernelCode);
  if (print_json(options, {{"context", run_context(read_machine())}, {"code", code}})) return kSuccess;
  fmt::print(
      "Loops that add products to registers, and of the largest its sums, registers, and instructions on the stack.\n");
  fmt::print(kCodeRow, "ISA", "source", "bytes", "loops", "on stack", "sums", "registers", "on stack");
  for (const Json& object : code) print_code(object);
  return kSuccess;
}

/// An environment that nothing can run in is an error, but what there is instead is what its user looks for.
int list_all(const InfoOptions& options) {
  std::string refusal;
  try {
    make_context(options.threads, {});
  } catch (const Error& error) {
    refusal = error.what();
  }
  const Json info = describe_all(refusal);
  if (!print_json(options, info)) {
    print_machine(info);
    print_build(info);
  }
  if (refusal.empty()) return kSuccess;
  std::fflush(stdout);
  throw UsageError(refusal);
}

}  // namespace

int run_info(const InfoOptions& options) {
  require_writable({options.json_path});
  if (options.code) return list_code(options);
  if (options.problem.empty()) return list_all(options);
  const Plan plan = make_plan(parse_problem(options.problem), make_context(options.threads, {}));
  if (print_json(options, describe(plan))) return kSuccess;
  const std::string text = plan.explain();
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
  return kSuccess;
}

}  // namespace rapt::tools
