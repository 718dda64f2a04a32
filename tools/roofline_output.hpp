// What `rapt roofline` says: a table, a chart, a page, and a file for programs.
#pragma once

#include <string>
#include <vector>

#include "bench/counters.hpp"
#include "bench/timing.hpp"
#include "common.hpp"

namespace rapt::tools {

/// A limit of the machine, on all threads of the run.
struct Ceiling {
  std::string name;  ///< "avx512 fp32", "amx bf16", "L2"
  double rate = 0;   ///< GFLOP/s, GOP/s, or GB/s of reading; 0 where it could not be had
};

/// A call, or one of its three steps.
struct Dot {
  std::size_t problem = 0;        ///< index into the run's
  std::string step;               ///< a call: "fused", or what other operation it is of; "three steps", all of them;
                                  ///< "scores", "softmax", "values"
  std::string entry;              ///< or "Eigen, <isa>"
  Isa unit{};                     ///< of the ISA whose unit it is held against
  Cost cost;                      ///< by formula. "three steps": the fused call's FLOPs, all bytes of the steps
  bench::Counts counts{};         ///< of a call
  double median_s = 0;            ///< of "three steps" the sum of the steps'; likewise below
  std::vector<double> seeds_s{};  ///< medians of each seed
  double spread = 0;              ///< quartiles' distance over the median; of "three steps" the largest
  int samples = 0;                ///< steady ones
  double peak = 0;                ///< GFLOP/s, of that unit
  double read_gbs = 0;            ///< of memory

  double gflops() const { return cost.flops / median_s / 1e9; }
  double gbs() const { return cost.bytes / median_s / 1e9; }
  double intensity() const { return cost.flops / cost.bytes; }
  /// FLOPs by formula over the bytes of counted cache misses.
  double counted_intensity() const { return cost.flops / counts.miss_bytes(); }
  /// GFLOP/s that memory and unit allow it.
  double roof() const;
  /// The share of the lower ceiling; without FLOPs, of memory's bandwidth.
  double of_roof() const;
};

struct RooflineRun {
  std::vector<Problem> problems;
  int threads = 1, seeds = 1, min_samples = 0;
  std::vector<Ceiling> units, int8, reads;  ///< of reads the last is memory's; int8, in GOP/s, holds no dot
  std::vector<Dot> dots;                    ///< those of a problem one after another, the call first
  std::string no_counters;                  ///< why something could not be counted here; empty if all could
};

std::string roofline_table(const Machine& machine, const RooflineRun& run);
Json roofline_json(const Machine& machine, const RooflineRun& run);
std::string roofline_svg(const Machine& machine, const RooflineRun& run);
std::string roofline_html(const Machine& machine, const RooflineRun& run);

}  // namespace rapt::tools
