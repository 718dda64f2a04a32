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
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "bench/sets.hpp"
#include "support/cases.hpp"

namespace rapt::tools {
namespace {

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

double tensor_bytes(const Problem& problem) {
  return std::visit([]<class P>(const P& p) { return testing::CaseOf<P>::tensor_bytes(p); }, problem);
}

void require_one(const fs::path& path) {
  if (fs::is_directory(path)) throw UsageError(fmt::format("{}: is a directory", path.string()));
  const Target target(path);
  const bool opened = std::ofstream(target.written, std::ios::app).is_open();
  const int reason = errno;
  if (!opened) throw UsageError(fmt::format("{}: cannot be written: {}", path.string(), std::strerror(reason)));
  if (target.temporary()) fs::remove(target.written);
}

/// Those that match_entries() describes, unusable ones too.
std::vector<EntryInfo> named_entries(std::string_view text) {
  // 3: the name; 2: its operation, or what stands between two dots of it; 1: part of it; 0: nothing of it.
  const auto rank = [&](const EntryInfo& entry) {
    if (entry.name == text) return 3;
    const bool whole = ("." + entry.name + ".").find(fmt::format(".{}.", text)) != std::string::npos;
    if (whole || to_string(entry.operation) == text) return 2;
    return entry.name.find(text) != std::string::npos ? 1 : 0;
  };
  std::vector<EntryInfo> matches;
  std::vector<std::string> names;
  int best = 1;
  for (EntryInfo& entry : entries()) {
    names.push_back(entry.name);
    if (rank(entry) > best) matches.clear(), best = rank(entry);
    if (rank(entry) == best) matches.push_back(std::move(entry));
  }
  if (matches.empty()) {
    throw UsageError(fmt::format("--entry {}: no such entry; this build has {}", text, fmt::join(names, ", ")));
  }
  return matches;
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

std::string printable(std::string_view text) {
  std::string printed;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if (byte < 0x20 || byte == 0x7f) {
      printed += fmt::format("\\x{:02x}", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F, which terminals obey, too
      printed += fmt::format("\\u{:04x}", next);
      ++i;
    } else {
      printed += text[i];
    }
  }
  return printed;
}

std::string human_bytes(double bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, bytes == std::floor(bytes) ? 0 : 1, kUnits[unit]);
}

std::string to_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
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
  Json environment = Json::object();
  for (const char* name : {"RAPT_ISA", "RAPT_KERNEL", "RAPT_GUARDS", "RAPT_CUDA_LIBRARY"}) {
    const char* value = std::getenv(name);
    environment[name] = value == nullptr ? "" : value;
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
          {"compiler", compiler()},
          {"environment", environment}};
}

std::vector<std::string> match_entries(std::string_view text) {
  std::vector<EntryInfo> matches = named_entries(text);
  std::vector<std::string> usable;
  for (EntryInfo& entry : matches) {
    if (entry.backend != "cpu" && entry.unusable.empty()) entry.unusable = "this tool's tensors lie in host memory";
    if (entry.unusable.empty()) usable.push_back(entry.name);
  }
  if (usable.empty()) {
    throw UsageError(fmt::format("--entry {}: cannot run here: {}", text, matches[0].unusable));
  }
  return usable;
}

std::string no_entry_of(std::string_view text, Operation operation) {
  return fmt::format("--entry {} names no usable entry of {}", text, to_string(operation));
}

Problem parse_problem(const std::string& text) {
  try {
    return bench::parse_line(text);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--problem \"{}\": {}", text, error.what()));
  }
}

std::string short_text(const Problem& problem) {
  const std::string text = to_string(problem);
  if (operation_of(problem) != Operation::attention) return text;
  return text.substr(std::min(text.find(' '), text.size() - 1) + 1);
}

std::string types_text(const Problem& problem) {
  std::vector<DType> types = std::visit([]<class P>(const P& p) { return testing::CaseOf<P>::types(p); }, problem);
  if (std::count(types.begin(), types.end(), types.front()) == std::ssize(types)) types.resize(1);
  std::vector<std::string_view> names;
  for (const DType type : types) names.push_back(to_string(type));
  return fmt::format("{}", fmt::join(names, "/"));
}

std::shared_ptr<const std::vector<float>> read_buffer(const Machine& machine) {
  constexpr std::int64_t kMinBytes = std::int64_t{256} << 20;
  const std::int64_t bytes = std::max(kMinBytes, 4 * machine.last_level_bytes());
  return std::make_shared<const std::vector<float>>(static_cast<std::size_t>(bytes) / sizeof(float), 0.5f);
}

bool exceeds_memory(const Problem& problem) {
  return tensor_bytes(problem) >
         static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

void refuse_memory(const Problem& problem, const Context& context) {
  const double tensors = tensor_bytes(problem);
  throw std::runtime_error(fmt::format("{}: out of memory; its tensors take {}, its workspace {}", short_text(problem),
                                       human_bytes(tensors),
                                       human_bytes(static_cast<double>(Plan(problem, context).workspace_bytes()))));
}

Context make_context(int threads, const std::string& entry, std::function<void(const Task&)> task_observer) {
  ContextOptions options;
  options.threads = threads;
  options.kernel = entry;
  options.task_observer = std::move(task_observer);
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

void require_writable(std::initializer_list<fs::path> paths) {
  for (const fs::path& path : paths) {
    if (path.empty()) continue;
    if (std::count(paths.begin(), paths.end(), path) > 1)
      throw UsageError(fmt::format("{}: given for two files", path.string()));
    require_one(path);
  }
}

void write_file(const fs::path& path, std::string_view text) {
  const Target target(path);
  std::ofstream file(target.written);
  file << text;
  file.close();
  if (!file) {
    const int reason = errno;
    if (target.temporary()) fs::remove(target.written);
    throw std::runtime_error(fmt::format("{}: writing failed: {}", path.string(), std::strerror(reason)));
  }
  if (target.temporary()) fs::rename(target.written, target.file);
}
void write_json(const fs::path& path, const Json& json) {
  write_file(path, to_text(json) + '\n');
}

}  // namespace rapt::tools
