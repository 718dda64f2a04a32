// What `rapt roofline` says: a table, a chart, a page, and a file for programs.
#pragma once

#include <string>
#include <vector>

#include "bench/timing.hpp"
#include "common.hpp"

namespace rapt::tools {

/// A limit of the machine, on all threads of the run.
struct Ceiling {
  std::string name;  ///< "avx512 fp32", "amx bf16", "L2"
  double rate = 0;   ///< GFLOP/s, or GB/s of reading; 0 where it could not be had
};

/// A call, or one of its three steps.
struct Dot {
  std::size_t problem = 0;  ///< index into the run's
  std::string step;         ///< "fused"; "three steps", all of them; "scores", "softmax", "values"
  std::string entry;        ///< or "Eigen, <isa>"
  Isa unit{};               ///< of the ISA whose unit it is held against
  Cost cost;                ///< "three steps": the fused call's FLOPs, all bytes of the steps
  double median_s = 0;
  int samples = 0;      ///< steady ones
  double peak = 0;      ///< GFLOP/s, of that unit
  double read_gbs = 0;  ///< of memory

  double gflops() const { return cost.flops / median_s / 1e9; }
  double gbs() const { return cost.bytes / median_s / 1e9; }
  double intensity() const { return cost.flops / cost.bytes; }
  /// What memory and unit allow it.
  double roof() const;
};

struct RooflineRun {
  std::vector<Problem> problems;
  int threads = 1, min_samples = 0;
  std::vector<Ceiling> units, reads;  ///< of reads the last is memory's
  std::vector<Dot> dots;              ///< those of a problem one after another, "fused" first
};

std::string roofline_table(const Machine& machine, const RooflineRun& run);
Json roofline_json(const Machine& machine, const RooflineRun& run);
std::string roofline_svg(const Machine& machine, const RooflineRun& run);
std::string roofline_html(const Machine& machine, const RooflineRun& run);

}  // namespace rapt::tools
