#include "roofline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "bench/counters.hpp"
#include "bench/entry.hpp"
#include "bench/sets.hpp"
#include "bench/three_steps.hpp"
#include "check.hpp"
#include "progress.hpp"
#include "roofline_output.hpp"
#include "support/cases.hpp"

namespace rapt::tools {
namespace {

using bench::Budget, bench::Peaks, bench::Roofline, bench::Sample, bench::Summary, bench::take_samples,
    bench::ThreeSteps;

constexpr std::int64_t kCheckedRows = 8;
constexpr int kReadings = 5, kMinSamples = 5;
constexpr float kTolerance = 1e-4f;  // between fp32 results, which are means of standard normal numbers

/// Readings of the machine's limits. The largest count: clocks and neighbours only ever make them smaller.
class Limits {
 public:
  Limits(const Machine& machine, int threads, const std::shared_ptr<const std::vector<float>>& buffer) {
    for (const Isa isa : usable_isas())
      if (isa == Isa::amx || bench::vector_isa(isa) == isa)
        units_.push_back({isa, Roofline(isa, threads, buffer), 0, 0});
    const Cache l1 = data_cache(machine, 1), l2 = data_cache(machine, 2), l3 = data_cache(machine, 3);
    if (l1.bytes > 0) levels_.push_back({"L1", l1.bytes / 2, 0});
    if (l2.bytes > 2 * l1.bytes) levels_.push_back({"L2", l2.bytes / 2, 0});
    // What is well past L2, where so much of all threads fits.
    if (l3.bytes >= 8 * l2.bytes * std::min(threads, l3.shared_by)) levels_.push_back({"L3", 4 * l2.bytes, 0});
    levels_.push_back({"memory", 0, 0});
  }

  void read() {
    for (int i = 0; i < kReadings; ++i) {
      for (Unit& unit : units_) {
        const Peaks peaks = unit.roofline.peaks();
        unit.gflops = std::max(unit.gflops, unit.isa == Isa::amx ? peaks.amx : peaks.fma);
        if (has_int8_chains(unit.isa)) unit.int8_gops = std::max(unit.int8_gops, unit.roofline.int8_gops(unit.isa));
      }
      const Roofline& best = units_.front().roofline;
      for (Level& level : levels_) {
        const auto bytes = static_cast<std::size_t>(level.bytes);
        level.gbs = std::max(level.gbs, bytes > 0 ? best.cached_read_gbs(bytes) : best.read_gbs());
      }
    }
  }

  const Roofline& roofline(Isa isa) const { return of(isa).roofline; }
  double peak(Isa isa) const { return of(isa).gflops; }
  double memory() const { return levels_.back().gbs; }
  std::vector<Ceiling> units() const {
    std::vector<Ceiling> all;
    for (const Unit& u : units_)
      all.push_back({std::string(to_string(u.isa)) + (u.isa == Isa::amx ? " bf16" : " fp32"), u.gflops});
    return all;
  }
  std::vector<Ceiling> int8() const {
    std::vector<Ceiling> all;
    for (const Unit& u : units_)
      if (has_int8_chains(u.isa)) all.push_back({std::string(to_string(u.isa)) + " int8", u.int8_gops});
    return all;
  }
  std::vector<Ceiling> reads() const {
    std::vector<Ceiling> all;
    for (const Level& l : levels_) all.push_back({l.name, l.gbs});
    return all;
  }

 private:
  struct Unit {
    Isa isa;
    Roofline roofline;
    double gflops, int8_gops;
  };
  struct Level {
    const char* name;
    std::int64_t bytes;  ///< of each thread; 0: of the buffer
    double gbs;
  };

  static Cache data_cache(const Machine& machine, int level) {
    for (const Cache& cache : machine.caches)
      if (cache.level == level && cache.type != "Instruction") return cache;
    return {};
  }
  const Unit& of(Isa isa) const {
    return *std::find_if(units_.begin(), units_.end(), [&](const Unit& u) { return u.isa == isa; });
  }

  std::vector<Unit> units_;
  std::vector<Level> levels_;
};

class Run {
 public:
  Run(const RooflineOptions& options, const Machine& machine)
      : limits_(machine, options.threads, read_buffer(machine)),
        run_{{}, options.threads, options.seeds, kMinSamples, {}, {}, {}, {}, {}} {
    budget_.seconds = options.min_time / options.seeds;
    budget_.min_samples = (kMinSamples + options.seeds - 1) / options.seeds;
    std::vector<bench::SetLine> lines;
    if (options.problems.empty()) lines = bench::read_set(options.set);
    for (const std::string& text : options.problems) lines.push_back({parse_problem(text), ""});
    for (const bench::SetLine& line : lines) {
      entries_.emplace_back(make_plan(line.problem, make_context(0, ""), line.where).entry());
      if (!bench::cpu_isa(bench::info_of(entries_.back())))
        throw UsageError(fmt::format("{}: an entry without a CPU ISA cannot be timed yet", entries_.back()));
      run_.problems.push_back(line.problem);
    }
  }

  /// Throws std::runtime_error for a result that is wrong.
  RooflineRun measure() {
    limits_.read();
    Progress progress(run_.problems.size());
    for (std::size_t i = 0; i < run_.problems.size(); ++i) {
      const Problem& problem = run_.problems[i];
      progress.begin(short_text(problem));
      const Context context = make_context(run_.threads, entries_[i]);
      with_memory(problem, context, [&] { std::visit([&](const auto& p) { time_problem(i, p, context); }, problem); });
    }
    limits_.read();
    run_.units = limits_.units(), run_.int8 = limits_.int8(), run_.reads = limits_.reads();
    for (Dot& dot : run_.dots) dot.peak = limits_.peak(dot.unit), dot.read_gbs = limits_.memory();
    return run_;
  }

 private:
  /// A dot as its samples come in, seed by seed.
  struct Timed {
    Dot dot;
    std::vector<Sample> samples;
  };

  template <class P>
  void time_problem(std::size_t i, const P& problem, const Context& context) {
    const EntryInfo info = bench::info_of(entries_[i]);
    const Isa isa = *bench::cpu_isa(info), vectors = bench::vector_isa(isa);
    // Entries that make one product of several are held against the multiply-adds that they stand in for.
    const Isa unit = isa == Isa::amx && info.arithmetic == "bf16" ? isa : vectors;
    const std::string name(std::is_same_v<P, AttentionProblem> ? "fused" : to_string(operation_of(problem)));
    std::vector<Timed> timed;
    for (int seed = 1; seed <= run_.seeds; ++seed) {
      auto inputs = testing::CaseOf<P>::timed(problem, static_cast<std::uint64_t>(seed));
      const auto args = inputs.args();
      const std::string violation = testing::CaseOf<P>::verify(inputs, context, kCheckedRows).violation;
      if (!violation.empty()) throw std::runtime_error(fmt::format("{}: wrong: {}", short_text(problem), violation));
      if (seed == 1) timed.push_back({{i, name, entries_[i], unit, cost_of(args)}, {}});
      add_seed(timed[0], [&] { testing::call(args, context); });
      if constexpr (std::is_same_v<P, AttentionProblem>)
        if (bench::why_no_three_steps(problem).empty()) time_steps(timed, args, vectors);
    }
    add(timed);
  }

  /// After a call that left its result in args.out. `timed` has the fused call's, and from the first seed on the
  /// steps'.
  void time_steps(std::vector<Timed>& timed, const AttentionArgs& args, Isa isa) {
    const std::size_t i = timed[0].dot.problem;
    ThreeSteps pipeline(args, isa, run_.threads);
    for (int step = 0; step < 3; ++step) pipeline.run(step);
    const auto* const fused = static_cast<const float*>(args.out.data);
    for (std::size_t n = 0; n < pipeline.out().size(); ++n)
      if (!(std::abs(pipeline.out()[n] - fused[n]) <= kTolerance))
        throw std::runtime_error(fmt::format("{}: three steps give {}, fused {}", short_text(run_.problems[i]),
                                             pipeline.out()[n], fused[n]));
    for (int step = 0; step < 3; ++step) {
      const ThreeSteps::Step& s = pipeline.steps()[static_cast<std::size_t>(step)];
      const auto dot = static_cast<std::size_t>(step) + 1;
      if (timed.size() == dot)
        timed.push_back({{i, s.name, fmt::format("Eigen, {}", to_string(isa)), isa, s.cost}, {}});
      add_seed(timed[dot], [&] { pipeline.run(step); });
    }
  }

  /// Takes the samples of one seed. After the first seed's, runs the same number of calls under the counters.
  void add_seed(Timed& timed, const std::function<void()>& call) {
    const std::vector<Sample> samples = take_samples(call, limits_.roofline(timed.dot.unit), budget_);
    timed.dot.seeds_s.push_back(summarise(samples, timed.dot.cost).median_s);
    timed.samples.insert(timed.samples.end(), samples.begin(), samples.end());
    if (timed.dot.seeds_s.size() > 1) return;
    const std::int64_t calls = samples.front().calls;
    const auto all = [&] {
      for (std::int64_t n = 0; n < calls; ++n) call();
    };
    const bench::Counts counts = bench::count(all, run_.no_counters);
    timed.dot.counts = counts / static_cast<double>(calls);
  }

  /// The dots of a problem, with that of all three steps behind the fused call's.
  void add(const std::vector<Timed>& timed) {
    std::vector<Dot> dots;
    for (const Timed& t : timed) {
      const Summary time = summarise(t.samples, t.dot.cost);
      dots.push_back(t.dot);
      dots.back().median_s = time.median_s, dots.back().spread = time.spread, dots.back().samples = time.steady;
    }
    if (dots.size() > 1) {
      Dot all = dots[1];
      all.step = "three steps", all.cost.flops = dots[0].cost.flops;
      for (std::size_t step = 2; step < dots.size(); ++step) {
        const Dot& more = dots[step];
        all.cost.bytes += more.cost.bytes, all.median_s += more.median_s, all.counts += more.counts;
        for (std::size_t seed = 0; seed < all.seeds_s.size(); ++seed) all.seeds_s[seed] += more.seeds_s[seed];
        all.samples = std::min(all.samples, more.samples), all.spread = std::max(all.spread, more.spread);
      }
      dots.insert(dots.begin() + 1, all);
    }
    run_.dots.insert(run_.dots.end(), dots.begin(), dots.end());
  }

  Limits limits_;
  RooflineRun run_;
  Budget budget_;
  std::vector<std::string> entries_;
};

}  // namespace

int run_roofline(const RooflineOptions& options) {
  require_writable({options.json_path, options.svg_path, options.html_path});
  const Machine machine = read_machine();
  const RooflineRun run = Run(options, machine).measure();
  fmt::print("{}", roofline_table(machine, run));
  std::fflush(stdout);
  if (!options.json_path.empty()) write_json(options.json_path, roofline_json(machine, run));
  if (!options.svg_path.empty()) write_file(options.svg_path, roofline_svg(machine, run));
  if (!options.html_path.empty()) write_file(options.html_path, roofline_html(machine, run));
  return kSuccess;
}

}  // namespace rapt::tools
