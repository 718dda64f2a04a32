#include "bench_compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

namespace rapt::tools {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string key(const Json& row) {
  return fmt::format("{}, threads {}", row.at("problem").get<std::string>(), row.at("threads").get<int>());
}

double number_of(const Json& row, const char* name) {
  const auto found = row.find(name);
  return found == row.end() || found->is_null() ? kNone : found->get<double>();
}

}  // namespace

EarlierRun::EarlierRun(const std::filesystem::path& path) : name_(path.string()) {
  if (std::filesystem::is_directory(path))
    throw UsageError(fmt::format("--compare {}: is a directory", printable(name_)));
  std::ifstream file(path);
  if (!file.is_open())
    throw UsageError(fmt::format("--compare {}: cannot be read: {}", printable(name_), std::strerror(errno)));
  try {
    const Json document = Json::parse(file);
    cpu_ = document.at("context").at("cpu").get<std::string>();
    for (const Json& row : document.at("benchmarks")) {
      if (row.contains("error_occurred")) continue;
      row.at("entry").get<std::string>();
      for (const char* name : {"best_ms", "of_peak_best", "of_bandwidth_best"}) number_of(row, name);
      rows_[key(row)].push_back(row);
    }
  } catch (const Json::exception&) {
    throw UsageError(fmt::format("--compare {}: wanted a file that `rapt bench --json` wrote", printable(name_)));
  }
}

double EarlierRun::speedup(const Json& row) const {
  const auto found = rows_.find(key(row));
  if (found == rows_.end() || row.contains("error_occurred")) return kNone;
  const std::vector<Json>& rows = found->second;
  const auto is_same = [&](const Json& earlier) { return earlier.at("entry") == row.at("entry"); };
  const auto same = std::find_if(rows.begin(), rows.end(), is_same);
  if (same == rows.end() && rows.size() > 1) return kNone;
  const Json& earlier = same == rows.end() ? rows.front() : *same;
  const auto ratio = [&](const char* name) { return number_of(row, name) / number_of(earlier, name); };
  const bool reads = number_of(earlier, "of_bandwidth_best") > number_of(earlier, "of_peak_best");
  const double share = ratio(reads ? "of_bandwidth_best" : "of_peak_best");
  return same != rows.end() && std::isfinite(share) && share > 0 ? share : 1 / ratio("best_ms");
}

bool EarlierRun::report(const Machine& machine, const Json& rows) const {
  if (machine.cpu != cpu_) fmt::print("{} is of another CPU: {}\n", printable(name_), printable(cpu_));
  double logarithms = 0;
  int compared = 0, slower = 0;
  std::pair<double, std::string> slowest{std::numeric_limits<double>::infinity(), ""};
  for (const Json& row : rows) {
    const double speed = speedup(row);
    if (std::isnan(speed)) continue;
    ++compared;
    logarithms += std::log(speed);
    slower += speed < kSlower ? 1 : 0;
    slowest = std::min(slowest, {speed, fmt::format("{}, {}", key(row), row.at("entry").get<std::string>())});
  }
  fmt::print("{}: {} of {} rows compared", printable(name_), compared, rows.size());
  if (compared > 0) {
    fmt::print(": geometric mean {:.3f}x, {} slower; least {:.3f}x: {}", std::exp(logarithms / compared), slower,
               slowest.first, slowest.second);
  }
  fmt::print("\n");
  return slower > 0 || compared == 0;
}

}  // namespace rapt::tools
