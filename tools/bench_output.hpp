// What a bench run says: the table for people and the file for programs.
#pragma once

#include <string>
#include <vector>

#include "bench/entry.hpp"
#include "bench/timing.hpp"
#include "bench_compare.hpp"
#include "common.hpp"

namespace rapt::tools {

/// One line of the result.
struct Row {
  Problem problem;
  std::string entry;
  int threads = 1;
  Cost cost;
  bench::Summary time;
  double naive_s = 0;  ///< median of the naive entry; NaN when it was not timed
  std::string error;   ///< not empty: the result was wrong, nothing was timed

  double gflops() const { return cost.flops / time.median_s / 1e9; }
  double vs_naive() const { return naive_s / time.median_s; }
  /// The peak that the table holds it against: AMX's where every product is one of AMX, else that of fp32
  /// multiply-adds.
  bool against_amx() const {
    const EntryInfo info = bench::info_of(entry);
    return info.arithmetic == "bf16" && bench::cpu_isa(info) == Isa::amx;
  }
};

/// The ceilings of one thread count, medians over the run.
struct Ceilings {
  int threads = 1;
  double fma_gflops = 0;
  double amx_gflops = 0;  ///< NaN when no entry used AMX
  double read_gbs = 0;
};

struct RunInfo {
  std::string set;  ///< empty when problems were given one by one
  std::vector<Isa> isas;
  int min_samples = 0;
};

/// The table on standard output, row by row as they come.
class Table {
 public:
  /// With a column for how rows compare with `earlier`, unless it is null.
  Table(const Machine& machine, const RunInfo& run, const std::vector<Problem>& problems, const EarlierRun* earlier);
  void add(const Row& row);
  void finish(const std::vector<Ceilings>& ceilings);

 private:
  std::size_t width_ = 7, type_width_ = 4;
  int min_samples_;
  const EarlierRun* earlier_;
  std::string entry_;
};

/// The layout of google-benchmark's --benchmark_format=json, with more columns.
Json to_json(const Machine& machine, const RunInfo& run, const std::vector<Ceilings>& ceilings,
             const std::vector<Row>& rows);

}  // namespace rapt::tools
