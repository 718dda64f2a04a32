#include "common.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "bench/cost.hpp"

namespace rapt::tools {
namespace {

constexpr Operation kOperations[] = {Operation::attention, Operation::append_kv, Operation::merge_states};

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 26> kFeatures = {
    "sse2",        "sse4_2",   "avx",      "f16c",       "fma",          "avx2",        "avx512f",
    "avx512bw",    "avx512dq", "avx512vl", "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",   "asimd",        "asimdhp",     "asimddp",
    "bf16",        "i8mm",     "sve",      "sve2",       "sme"};

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The value of the first "key : value" line of /proc/cpuinfo with this key.
std::string cpuinfo(std::string_view key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1) != key) continue;
    return line.substr(std::min(colon + 2, line.size()));
  }
  return {};
}

/// "32K" and "1024K" of sysfs in bytes; 0 when it cannot be read.
std::int64_t parse_size(const std::string& text) {
  std::istringstream stream(text);
  std::int64_t value = 0;
  char unit = ' ';
  stream >> value >> unit;
  if (unit == 'K') return value << 10;
  if (unit == 'M') return value << 20;
  return value;
}

/// How many CPUs a sysfs list such as "0-3,8" names.
int count_cpus(const std::string& list) {
  int count = 0;
  std::istringstream stream(list);
  for (std::string range; std::getline(stream, range, ',');) {
    int first = 0, last = 0;
    const int fields = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    if (fields >= 1) count += fields == 2 ? last - first + 1 : 1;
  }
  return std::max(count, 1);
}

std::vector<Cache> read_caches() {
  std::vector<Cache> caches;
  for (int index = 0;; ++index) {
    const fs::path folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}", index);
    const std::string level = first_line(folder / "level");
    if (level.empty()) return caches;
    caches.push_back({std::stoi(level), first_line(folder / "type"), parse_size(first_line(folder / "size")),
                      count_cpus(first_line(folder / "shared_cpu_list"))});
  }
}

/// Where the text for `path` is written first: beside the file, and beside its target if it is a symbolic link, so that
/// the link stays one.
struct Target {
  fs::path file, written;

  explicit Target(const fs::path& path) : file(path), written(path) {
    std::error_code error;
    if (fs::symlink_status(path, error).type() != fs::file_type::not_found) {
      // In place: devices, links that lead to nothing, files that have no name any more.
      const fs::path real = fs::canonical(path, error);
      if (error || !fs::is_regular_file(real, error) || !fs::equivalent(path, real, error)) return;
      file = real;
    }
    written = fmt::format("{}.tmp{}", file.string(), ::getpid());
  }
  bool temporary() const { return written != file; }
};

/// The compiler of this program, "g++ 12.2.0".
std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang++ {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("g++ {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

}  // namespace

std::int64_t Machine::last_level_bytes() const {
  std::int64_t bytes = 0;
  for (const Cache& cache : caches) {
    if (cache.type != "Instruction") bytes = std::max(bytes, cache.bytes);
  }
  return bytes;
}

Machine read_machine() {
  Machine machine;
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) == 0) machine.host = host.data();
  machine.cpu = cpuinfo("model name");
  machine.cpus = static_cast<int>(std::thread::hardware_concurrency());
  std::string flags = cpuinfo("flags");
  if (flags.empty()) flags = cpuinfo("Features");
  std::istringstream stream(flags);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  for (std::string_view feature : kFeatures) {
    if (std::find(words.begin(), words.end(), feature) != words.end()) machine.features.emplace_back(feature);
  }
  machine.caches = read_caches();
  return machine;
}

std::string human_bytes(double bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, bytes == std::floor(bytes) ? 0 : 1, kUnits[unit]);
}

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json run_context(const Machine& machine) {
  Json caches = Json::array();
  for (const Cache& cache : machine.caches) {
    caches.push_back(
        {{"type", cache.type}, {"level", cache.level}, {"size", cache.bytes}, {"num_sharing", cache.shared_by}});
  }
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return {{"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))},
          {"host_name", machine.host},
          {"executable", "rapt"},
          {"cpu", machine.cpu},
          {"num_cpus", machine.cpus},
          {"features", machine.features},
          {"caches", caches},
          {"library_version", version()},
          {"commit", kCommit},
          {"compiler", compiler()}};
}

std::vector<std::string> match_entries(std::string_view text) {
  std::vector<EntryInfo> matches;
  std::vector<std::string> names;
  for (EntryInfo& entry : entries()) {
    if (entry.backend != "cpu" && entry.unusable.empty()) entry.unusable = "this tool's tensors lie in host memory";
    names.push_back(entry.name);
    if (entry.name.find(text) != std::string::npos) matches.push_back(std::move(entry));
  }
  if (matches.empty()) {
    throw UsageError(fmt::format("--entry {}: no such entry; this build has {}", text, fmt::join(names, ", ")));
  }
  const auto exact = std::find_if(matches.begin(), matches.end(), [&](const EntryInfo& e) { return e.name == text; });
  if (exact != matches.end()) matches = {EntryInfo(*exact)};
  std::vector<std::string> usable;
  for (const EntryInfo& entry : matches) {
    if (entry.unusable.empty()) usable.push_back(entry.name);
  }
  if (usable.empty()) {
    throw UsageError(fmt::format("--entry {}: cannot run here: {}", matches[0].name, matches[0].unusable));
  }
  return usable;
}

Problem parse_problem(const std::string& text) {
  const std::size_t first = std::min(text.find_first_not_of(' '), text.size());
  const bool named = std::any_of(std::begin(kOperations), std::end(kOperations), [&](Operation operation) {
    return text.compare(first, to_string(operation).size(), to_string(operation)) == 0;
  });
  try {
    return rapt::parse_problem(named ? text : "attention " + text);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--problem \"{}\": {}", text, error.what()));
  }
}

std::string short_text(const Problem& problem) {
  const std::string text = to_string(problem);
  if (operation_of(problem) != Operation::attention) return text;
  return text.substr(std::min(text.find(' '), text.size() - 1) + 1);
}

std::string types_text(const AttentionProblem& p) {
  if (p.q_dtype == p.kv_dtype && p.q_dtype == p.out_dtype) return std::string(to_string(p.q_dtype));
  return fmt::format("{}/{}/{}", to_string(p.q_dtype), to_string(p.kv_dtype), to_string(p.out_dtype));
}

void refuse_memory(const AttentionProblem& p, const Context& context) {
  // As doubles: what does not fit memory may not fit int64 either.
  const auto number = [](std::int64_t size) { return static_cast<double>(size); };
  const double queries = number(p.hq) * (p.ragged_q >= 0 ? number(p.ragged_q) : number(p.b) * number(p.sq));
  const double keys = number(p.hk) * (p.ragged_k >= 0 ? number(p.ragged_k) : number(p.b) * number(p.sk));
  const auto term = [&](std::uint8_t dims, double size) {
    if (dims == AttentionProblem::kNone) return 0.0;
    return size * number(p.sk) * (dims & AttentionProblem::kFullB ? number(p.b) : 1) *
           (dims & AttentionProblem::kFullH ? number(p.hq) : 1) * (dims & AttentionProblem::kFullQ ? number(p.sq) : 1);
  };
  const double tensors =
      queries * (number(p.d) * bench::bytes_of(p.q_dtype) + number(p.dv) * bench::bytes_of(p.out_dtype)) +
      keys * (number(p.d + p.dv) * bench::bytes_of(p.kv_dtype) + number(p.k_groups + p.v_groups) * (p.zeros ? 8 : 4)) +
      term(p.bias, 4) + term(p.mask, 1) + (p.lse ? 4 * queries : 0);
  throw std::runtime_error(fmt::format("{}: out of memory; its tensors take {}, its workspace {}", short_text(p),
                                       human_bytes(tensors),
                                       human_bytes(static_cast<double>(Plan(p, context).workspace_bytes()))));
}

Context make_context(int threads, const std::string& entry) {
  ContextOptions options;
  options.threads = threads;
  options.kernel = entry;
  return Context(std::move(options));
}

Plan make_plan(const Problem& problem, const Context& context, const std::string& where) {
  try {
    return Plan(problem, context);
  } catch (const Error& error) {
    const std::string option = fmt::format("--problem \"{}\"", short_text(problem));
    throw UsageError(fmt::format("{}: {}", where.empty() ? option : where, error.what()));
  }
}

void require_writable(const fs::path& path) {
  if (fs::is_directory(path)) throw UsageError(fmt::format("{}: is a directory", path.string()));
  const Target target(path);
  const bool opened = std::ofstream(target.written, std::ios::app).is_open();
  const int reason = errno;
  if (!opened) throw UsageError(fmt::format("{}: cannot be written: {}", path.string(), std::strerror(reason)));
  if (target.temporary()) fs::remove(target.written);
}

void write_json(const fs::path& path, const Json& json) {
  const Target target(path);
  std::ofstream file(target.written);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) {
    const int reason = errno;
    if (target.temporary()) fs::remove(target.written);
    throw std::runtime_error(fmt::format("{}: writing failed: {}", path.string(), std::strerror(reason)));
  }
  if (target.temporary()) fs::rename(target.written, target.file);
}

}  // namespace rapt::tools
