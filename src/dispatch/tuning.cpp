// The file of a tuning: lines of `key = value`. The first say what the file is for, and then come entries:
//
//   format = 1
//   rapt = 0.2.0
//   cpu = AMD EPYC 7R13 Processor
//   isas = avx2 generic
//   cpus = 48
//
//   [append_kv.avx2]
//   worker_us = 5
//   items_per_worker = 8
//   first = 0
//
// All values of an entry are written, those too that are the defaults, so that other defaults of another commit do not
// get among what was measured together. A file that lacks one is refused.
#include "dispatch/tuning.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "core/text.hpp"
#include "dispatch/entry.hpp"
#include "rapt/plan.hpp"

namespace rapt {
namespace {

constexpr std::string_view kFormat = "1";
constexpr const char* kWanted = "a file that `rapt tune` wrote";
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;

constexpr TuningKey kKeys[] = {{"worker_us", &TuningValues::worker_us, 1, 100'000},
                               {"items_per_worker", &TuningValues::items_per_worker, 1, 64},
                               {"min_item_rows", &TuningValues::min_item_rows, 0, 4096},
                               {"l2_percent", &TuningValues::l2_percent, 1, 400},
                               {"split_keys", &TuningValues::split_keys, 1, std::int64_t{1} << 20},
                               {"first", &TuningValues::first, 0, 1}};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const std::size_t first = text.find_first_not_of(kBlank);
  return first == text.npos ? std::string_view() : text.substr(first, text.find_last_not_of(kBlank) + 1 - first);
}

// What a file is for. The first value that differs says why this one is not for here.
struct Head {
  std::string_view key;
  std::string value, whose;
};
std::array<Head, 5> head() {
  const CpuIdentity cpu = cpu_identity();
  const char* here = "this machine; `rapt tune` makes a file for it";
  return {{{"format", std::string(kFormat), "this version of rapt"},
           {"rapt", std::string(version()), "this version; run `rapt tune` again"},
           {"cpu", std::string(trimmed(cpu.model)), here},
           {"isas", cpu.isas, "this machine and build; `rapt tune` makes a file for them"},
           {"cpus", std::to_string(cpu.count), here}}};
}

std::string range(const TuningKey& key) {
  return std::to_string(key.min) + " to " + std::to_string(key.max);
}
bool fits(const TuningKey& key, std::int64_t value) {
  return key.min <= value && value <= key.max;
}

// The values of an entry by default; empty if there is no such entry, or it has none.
std::optional<TuningValues> defaults_of(std::string_view name, const std::vector<EntryInfo>& all) {
  for (const EntryInfo& entry : all)
    if (entry.name == name && entry.tuning != TuningValues{}) return entry.tuning;
  return {};
}
std::string wanted_entry(std::string_view name, const std::vector<EntryInfo>& all) {
  std::vector<std::string> names;
  for (const EntryInfo& entry : all)
    if (entry.tuning != TuningValues{}) names.push_back(entry.name);
  std::string wanted = "an entry of this build on the CPU", separator = " (perhaps ";
  for (const std::string& near : nearest_names(name, names)) wanted += separator + near, separator = ", ";
  return wanted + (separator == ", " ? ")" : "");
}
bool has(const Tuning& tuning, std::string_view name) {
  return std::any_of(tuning.entries.begin(), tuning.entries.end(),
                     [&](const EntryTuning& entry) { return entry.entry == name; });
}

// Reads the lines of a file, one after another.
class Reader {
 public:
  explicit Reader(std::string where) : where_(std::move(where)) {}

  void read(std::string_view line) {
    ++number_;
    line_ = trimmed(line);
    if (line_.empty() || line_.front() == '#') return;
    if (line_.front() == '[' && line_.back() == ']' && known_ == head_.size())
      return begin_entry(line_.substr(1, line_.size() - 2));
    const std::size_t equals = line_.find('=');
    if (equals == line_.npos) refuse(wanted_line());
    const std::string_view key = trimmed(line_.substr(0, equals)), value = trimmed(line_.substr(equals + 1));
    if (known_ < head_.size()) read_head(key, value);
    else read_value(key, value);
  }
  Tuning finish() {
    if (known_ < head_.size()) throw Error(where_, "it ends before " + std::string(head_[known_].key), kWanted);
    end_entry();
    return std::move(tuning_);
  }

 private:
  [[noreturn]] void refuse(const std::string& wanted) const {
    constexpr std::size_t kShown = 100;
    std::string got(line_.substr(0, kShown));
    if (line_.size() > kShown) got += "...";
    throw Error(where_ + ":" + std::to_string(number_), got, wanted);
  }
  std::string wanted_line() const {
    if (known_ < head_.size()) return std::string(head_[known_].key) + " = ..., as in " + kWanted;
    return "[entry], or key = value";
  }

  void read_head(std::string_view key, std::string_view value) {
    const Head& expected = head_[known_];
    if (key != expected.key) refuse(wanted_line());
    if (value != expected.value) refuse(expected.value + ", of " + expected.whose);
    ++known_;
  }
  void begin_entry(std::string_view name) {
    const std::optional<TuningValues> defaults = defaults_of(name, all_);
    if (!defaults) refuse(wanted_entry(name, all_));
    if (has(tuning_, name)) refuse("every entry once");
    end_entry();
    tuning_.entries.push_back({std::string(name), *defaults});
    defaults_ = *defaults, given_.clear();
  }
  void end_entry() const {
    if (tuning_.entries.empty()) return;
    for (const TuningKey& key : kKeys)
      if (defaults_.*key.value != -1 && !is_given(key))
        throw Error(where_, "[" + tuning_.entries.back().entry + "] without " + std::string(key.name),
                    "all values of an entry, as `rapt tune` writes them");
  }
  bool is_given(const TuningKey& key) const {
    return std::find(given_.begin(), given_.end(), key.name) != given_.end();
  }
  void read_value(std::string_view key, std::string_view text) {
    if (tuning_.entries.empty()) refuse("[entry] before its values");
    std::string names;
    for (const TuningKey& known : kKeys) {
      if (defaults_.*known.value == -1) continue;
      names.append(names.empty() ? "" : ", ").append(known.name);
      if (known.name != key) continue;
      if (is_given(known)) refuse("every key once");
      std::int64_t value = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc() || end != text.data() + text.size() || !fits(known, value))
        refuse("a number from " + range(known));
      tuning_.entries.back().values.*known.value = value;
      given_.push_back(known.name);
      return;
    }
    refuse("one of " + names);
  }

  const std::string where_;
  const std::array<Head, 5> head_ = head();
  const std::vector<EntryInfo> all_ = entries();
  std::size_t known_ = 0;  // lines of the head
  Tuning tuning_;
  TuningValues defaults_;                // of the last entry
  std::vector<std::string_view> given_;  // its keys
  std::string_view line_;
  int number_ = 0;
};

}  // namespace

std::span<const TuningKey> tuning_keys() {
  return kKeys;
}

void check(const Tuning& tuning) {
  if (tuning.entries.empty()) return;
  const std::vector<EntryInfo> all = entries();
  for (const EntryTuning& entry : tuning.entries) {
    const std::optional<TuningValues> defaults = defaults_of(entry.entry, all);
    if (!defaults) throw Error("tuning", "\"" + entry.entry + "\"", wanted_entry(entry.entry, all));
    const auto same = [&](const EntryTuning& other) { return other.entry == entry.entry; };
    if (std::count_if(tuning.entries.begin(), tuning.entries.end(), same) > 1)
      throw Error("tuning", entry.entry + " twice", "every entry once");
    for (const TuningKey& key : kKeys) {
      const std::int64_t value = entry.values.*key.value;
      const bool has_none = (*defaults).*key.value == -1;
      if (has_none ? value != -1 : !fits(key, value))
        throw Error("tuning", entry.entry + ": " + std::string(key.name) + " = " + std::to_string(value),
                    has_none ? "-1: its plans have nothing of the kind" : range(key));
    }
  }
}

Tuning read_tuning(const std::string& path, const std::string& prefix) {
  const std::string where = prefix + path;
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw Error(where, "no regular file", kWanted);  // to open a pipe would wait for who writes to it
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(where, std::string("a file that cannot be read (") + std::strerror(errno) + ")", kWanted);
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxBytes) throw Error(where, "more than " + std::to_string(kMaxBytes) + " bytes", kWanted);
  Reader reader(where);
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    if (end == rest.npos) throw Error(where, "it ends within a line", kWanted);  // a number may have had more digits
    reader.read(rest.substr(0, end));
    rest.remove_prefix(end + 1);
  }
  Tuning tuning = reader.finish();
  tuning.source = path;
  return tuning;
}
Tuning read_tuning(const std::string& path) {
  return read_tuning(path, "");
}

std::string to_string(const Tuning& tuning) {
  check(tuning);
  std::string text = "# What plans go by on one machine, from `rapt tune`. It changes no bit of a result.\n";
  const auto add = [&](std::string_view key, std::string_view value) {
    text.append(key).append(" = ").append(value).append("\n");
  };
  for (const Head& line : head()) add(line.key, line.value);
  for (const EntryTuning& entry : tuning.entries) {
    text.append("\n[").append(entry.entry).append("]\n");
    for (const TuningKey& key : kKeys)
      if (entry.values.*key.value != -1) add(key.name, std::to_string(entry.values.*key.value));
  }
  return text;
}

}  // namespace rapt
