#include "bench_output.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "support/cases.hpp"

namespace rapt::tools {
namespace {

std::string percent(double share) {
  return std::isfinite(share) ? fmt::format("{:.1f}", 100 * share) : "-";
}

std::vector<std::string> names(const std::vector<Isa>& isas) {
  std::vector<std::string> result;
  for (Isa isa : isas) result.emplace_back(to_string(isa));
  return result;
}

Json row_json(const Row& row) {
  const bench::Summary& time = row.time;
  const std::string name = fmt::format("{}/{}/threads:{}", row.entry, short_text(row.problem), row.threads);
  Json json = {
      {"name", name},       {"run_name", name},      {"run_type", "iteration"}, {"problem", to_string(row.problem)},
      {"entry", row.entry}, {"threads", row.threads}};
  const auto sizes = std::visit([]<class P>(const P& p) { return testing::CaseOf<P>::sizes(p); }, row.problem);
  for (const auto& [word, size] : sizes) std::visit([&](auto number) { json[word] = number; }, size);
  json["dtype"] = types_text(row.problem);
  if (!row.error.empty()) {
    json["error_occurred"] = true;
    json["error_message"] = row.error;
    return json;
  }
  json.update({{"iterations", time.calls},
               {"real_time", time.median_s * 1e3},
               {"cpu_time", time.median_cpu_s * 1e3},
               {"time_unit", "ms"},
               {"median_ms", time.median_s * 1e3},
               {"best_ms", time.best_s * 1e3},
               {"spread", number(time.spread)},
               {"samples", time.steady},
               {"samples_taken", time.taken},
               {"flops", row.cost.flops},
               {"bytes", row.cost.bytes},
               {"gflops", row.gflops()},
               {"peak_gflops", number(time.of_fma.peak)},
               {"of_peak", number(time.of_fma.median)},
               {"of_peak_best", number(time.of_fma.best)},
               {"amx_peak_gflops", number(time.of_amx.peak)},
               {"of_amx_peak", number(time.of_amx.median)},
               {"of_amx_peak_best", number(time.of_amx.best)},
               {"gbs", row.cost.bytes / time.median_s / 1e9},
               {"read_gbs", number(time.of_read.peak)},
               {"of_bandwidth", number(time.of_read.median)},
               {"of_bandwidth_best", number(time.of_read.best)},
               {"vs_naive", number(row.vs_naive())}});
  return json;
}

}  // namespace

Table::Table(const Machine& machine, const RunInfo& run, const std::vector<Problem>& problems,
             const EarlierRun* earlier)
    : min_samples_(run.min_samples), earlier_(earlier) {
  for (const Problem& problem : problems) {
    width_ = std::max(width_, short_text(problem).size());
    type_width_ = std::max(type_width_, types_text(problem).size());
  }
  fmt::print("rapt {} on {}, {} CPUs; ISA {}{}\n", version(), machine.cpu.empty() ? machine.host : machine.cpu,
             machine.cpus, fmt::join(names(run.isas), ", "), run.set.empty() ? "" : "; set " + printable(run.set));
  fmt::print("{:<{}}  {:<{}}  threads  median ms   GFLOP/s  % of peak    best  % of read  x naive{}\n", "problem",
             width_, "type", type_width_, earlier_ ? "  x before" : "");
  std::fflush(stdout);
}

void Table::add(const Row& row) {
  if (row.entry != entry_) fmt::print("{}{}\n", row.entry, row.against_amx() ? " (% of the AMX peak)" : "");
  entry_ = row.entry;
  fmt::print("{:<{}}  {:<{}}  {:>7}", short_text(row.problem), width_, types_text(row.problem), type_width_,
             row.threads);
  if (row.error.empty()) {
    const std::string naive = std::isfinite(row.vs_naive()) ? fmt::format("{:.2f}", row.vs_naive()) : "-";
    const double ms = row.time.median_s * 1e3;
    const bench::Summary::Share& share = row.against_amx() ? row.time.of_amx : row.time.of_fma;
    fmt::print("  {:>9.{}f}  {:>8.1f}  {:>9}  {:>6}  {:>9}  {:>7}", ms, ms < 10 ? 4 : 2, row.gflops(),
               percent(share.median), percent(share.best), percent(row.time.of_read.median), naive);
    if (earlier_) {
      const double speed = earlier_->speedup(row_json(row));
      const std::string text = std::isfinite(speed) ? fmt::format("{:.3f}", speed) : "-";
      fmt::print("  {:>8}{}", text, speed < EarlierRun::kSlower ? "  slower" : "");
    }
    if (row.time.steady < min_samples_) fmt::print("  {} of {} samples steady", row.time.steady, row.time.taken);
  } else {
    fmt::print("  WRONG: {}", row.error);
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void Table::finish(const std::vector<Ceilings>& ceilings) {
  for (const Ceilings& c : ceilings) {
    const std::string amx = std::isfinite(c.amx_gflops) ? fmt::format("AMX peak {:.1f}, ", c.amx_gflops) : "";
    const std::string read = std::isfinite(c.read_gbs) ? fmt::format("{:.1f} GB/s", c.read_gbs) : "not had";
    fmt::print("{} thread{}: {}FMA peak {:.1f} GFLOP/s, read bandwidth {}\n", c.threads, c.threads == 1 ? "" : "s", amx,
               c.fma_gflops, read);
  }
  std::fflush(stdout);
}

Json to_json(const Machine& machine, const RunInfo& run, const std::vector<Ceilings>& ceilings,
             const std::vector<Row>& rows) {
  Json threads = Json::array(), peaks = Json::array(), amx_peaks = Json::array(), bandwidths = Json::array();
  for (const Ceilings& c : ceilings) {
    threads.push_back(c.threads);
    peaks.push_back(number(c.fma_gflops));
    amx_peaks.push_back(number(c.amx_gflops));
    bandwidths.push_back(number(c.read_gbs));
  }
  Json benchmarks = Json::array();
  for (const Row& row : rows) benchmarks.push_back(row_json(row));
  Json context = run_context(machine);
  context.update({{"isa", fmt::format("{}", fmt::join(names(run.isas), ","))},
                  {"set", run.set},
                  {"threads", threads},
                  {"fma_peak_gflops", peaks},
                  {"amx_peak_gflops", amx_peaks},
                  {"read_bandwidth_gbs", bandwidths}});
  return {{"context", context}, {"benchmarks", benchmarks}};
}

}  // namespace rapt::tools
