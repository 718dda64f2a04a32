#include "bench_compare.hpp"

#include <fmt/format.h>

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
      number_of(row, "best_ms");
      rows_.try_emplace(key(row), row);
    }
  } catch (const Json::exception&) {
    throw UsageError(fmt::format("--compare {}: wanted a file that `rapt bench --json` wrote", printable(name_)));
  }
}

double EarlierRun::speedup(const Json& row) const {
  const auto found = rows_.find(key(row));
  if (found == rows_.end() || row.contains("error_occurred")) return kNone;
  const Json& earlier = found->second;
  const auto ratio = [&](const char* share) { return number_of(row, share) / number_of(earlier, share); };
  const bool reads = number_of(earlier, "of_bandwidth_best") > number_of(earlier, "of_peak_best");
  for (const char* share : {reads ? "of_bandwidth_best" : "of_peak_best", "of_peak_best"})
    if (std::isfinite(ratio(share)) && ratio(share) > 0) return ratio(share);
  return 1 / ratio("best_ms");
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
    slowest = std::min(slowest, {speed, key(row)});
  }
  fmt::print("{}: {} of {} rows compared", printable(name_), compared, rows.size());
  if (compared > 0) {
    fmt::print(": geometric mean {:.3f}x, {} slower; least {:.3f}x: {}", std::exp(logarithms / compared), slower,
               slowest.first, slowest.second);
  }
  fmt::print("\n");
  return slower > 0;
}

}  // namespace rapt::tools
