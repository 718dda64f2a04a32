#include "bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <type_traits>
#include <variant>

#include "bench/entry.hpp"
#include "bench/sets.hpp"
#include "bench/timing.hpp"
#include "bench_compare.hpp"
#include "bench_output.hpp"
#include "check.hpp"
#include "common.hpp"
#include "progress.hpp"
#include "support/cases.hpp"
#include "trace.hpp"

namespace rapt::tools {
namespace {

using bench::mean_reading, bench::Budget, bench::Peaks, bench::quantile, bench::Roofline, bench::Sample, bench::SetLine,
    bench::Summary, bench::take_samples;

constexpr std::int64_t kCheckedRows = 8;
constexpr std::int64_t kNaiveMaxLength = 4096;
constexpr std::size_t kNaiveMaxWorkspace = std::size_t{2} << 30;

class Bench {
 public:
  Bench(const BenchOptions& options, const Machine& machine) : options_(options) {
    if (options.problems.empty()) lines_ = bench::read_set(options.set);
    for (const std::string& text : options.problems) lines_.push_back({parse_problem(text), ""});
    budget_.seconds = options.min_time / options.seeds;
    budget_.min_samples = (budget_.min_samples + options.seeds - 1) / options.seeds;
    names_ = options.entry.empty() ? std::vector<std::string>{""} : match_entries(options.entry);
    buffer_ = read_buffer(machine);
    for (const std::string& name : names_) {
      for (const SetLine& line : lines_) {
        if (concerns(name, line.problem) && taken(line.problem, name)) add_case(line, name);
      }
    }
    if (cases_.empty()) throw UsageError(fmt::format("--entry {}: no problem is of its operation", options.entry));
    // --entry chooses among the lines of a set; problems that were given are not dropped without a word.
    for (const SetLine& line : lines_)
      if (!options.problems.empty() && !some_concerns(line.problem))
        fmt::print(stderr, "rapt: --problem \"{}\": skipped: {}\n", short_text(line.problem),
                   no_entry_of(options.entry, operation_of(line.problem)));
  }

  std::vector<Problem> problems() const {
    std::vector<Problem> problems;
    for (const SetLine& line : lines_) problems.push_back(line.problem);
    return problems;
  }

  RunInfo info() const {
    RunInfo info{options_.problems.empty() ? options_.set : "", {}, Budget{}.min_samples};
    for (const Planned& planned : cases_) {
      if (std::find(info.isas.begin(), info.isas.end(), planned.isa) == info.isas.end())
        info.isas.push_back(planned.isa);
    }
    return info;
  }

  /// Calls report(row) for every row as soon as it is there.
  template <class ReportRow>
  void run(ReportRow report) {
    Progress progress(cases_.size() * options_.threads.size());
    for (const Planned& planned : cases_) {
      for (int threads : options_.threads) {
        progress.begin(fmt::format("{}, threads {}", short_text(planned.problem), threads));
        const Context context = make_context(threads, planned.entry);
        const Row row = with_memory(planned.problem, context, [&] { return time_row(planned, threads, context); });
        progress.clear();
        report(row);
      }
    }
  }

  const Trace& trace() const { return trace_; }

  std::vector<Ceilings> ceilings() const {
    std::vector<Ceilings> all;
    for (int threads : options_.threads) {
      all.push_back({threads, median(fma_peaks_, threads), median(amx_peaks_, threads), median(reads_, threads)});
    }
    return all;
  }

 private:
  struct Planned {
    Problem problem;
    std::string entry;
    Isa isa;
  };

  using Readings = std::map<int, std::vector<double>>;  // by threads

  static double median(const Readings& readings, int threads) {
    const auto found = readings.find(threads);
    if (found == readings.end()) return std::numeric_limits<double>::quiet_NaN();
    std::vector<double> had;
    std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(had), [](double x) { return x > 0; });
    return quantile(had, 0.5);
  }

  /// Whether an entry, or dispatch's choice, is for the problem's operation.
  static bool concerns(const std::string& entry, const Problem& problem) {
    return entry.empty() || bench::info_of(entry).operation == operation_of(problem);
  }

  bool some_concerns(const Problem& problem) const {
    return std::any_of(names_.begin(), names_.end(), [&](const std::string& name) { return concerns(name, problem); });
  }

  /// False for an entry that refuses a problem which another one of those asked for takes.
  bool taken(const Problem& problem, const std::string& name) const {
    const auto takes = [&](const std::string& entry) {
      if (!concerns(entry, problem)) return false;
      try {
        Plan(problem, make_context(0, entry));
        return true;
      } catch (const Error&) {
        return false;
      }
    };
    return takes(name) || std::none_of(names_.begin(), names_.end(), takes);
  }

  /// Plans the case now, so that whatever cannot run is said before the first second is spent.
  void add_case(const SetLine& line, const std::string& name) {
    const Plan plan = make_plan(line.problem, make_context(0, name), line.where);
    const AttentionProblem* p = std::get_if<AttentionBackwardProblem>(&line.problem);
    if (!p) p = std::get_if<AttentionProblem>(&line.problem);
    if (p && (p->ragged_q >= 0 || p->ragged_k >= 0)) testing::Case{*p};  // throws for impossible totals
    const std::string entry(plan.entry());
    const auto isa = bench::cpu_isa(bench::info_of(entry));
    if (!isa) throw UsageError(fmt::format("{}: an entry without a CPU ISA cannot be timed yet", entry));
    cases_.push_back({line.problem, entry, *isa});
  }

  const Roofline& roofline(Isa isa, int threads) {
    const auto key = std::pair(isa, threads);
    return rooflines_.try_emplace(key, isa, threads, buffer_).first->second;
  }

  Row time_row(const Planned& planned, int threads, const Context& context) {
    const Roofline& roof = roofline(planned.isa, threads);
    Row row;
    row.problem = planned.problem;
    row.entry = planned.entry;
    row.threads = threads;
    std::vector<Sample> samples, naive;
    const auto time_seed = [&](const auto& problem, int seed) {
      using Of = testing::CaseOf<std::remove_cvref_t<decltype(problem)>>;
      auto inputs = Of::timed(problem, static_cast<std::uint64_t>(seed));
      const auto args = inputs.args();
      row.cost = cost_of(args);
      row.error = Of::verify(inputs, context, kCheckedRows).violation;
      if (!row.error.empty()) return;
      append(samples, samples_of([&] { testing::call(args, context); }, row.cost, roof));
      if constexpr (std::is_same_v<decltype(args), const AttentionArgs>)
        if (seed == 1) naive = naive_samples(problem, planned.isa, args, roof);
      if (seed == 1 && !options_.trace_path.empty())
        trace_.add(planned.problem, planned.entry, threads,
                   [&](const Context& watched) { testing::call(args, watched); });
    };
    for (int seed = 1; seed <= options_.seeds && row.error.empty(); ++seed)
      std::visit([&](const auto& problem) { time_seed(problem, seed); }, planned.problem);
    if (!row.error.empty()) return row;
    row.time = summarise(samples, row.cost);
    row.naive_s = summarise(naive, row.cost).median_s;
    for (const Sample& sample : samples) {
      fma_peaks_[threads].push_back(sample.peaks.fma);
      if (planned.isa == Isa::amx) amx_peaks_[threads].push_back(sample.peaks.amx);
    }
    reads_[threads].push_back(row.time.of_read.peak);
    return row;
  }

  /// Bandwidth moves as clocks do: it is read beside every sample of calls that it bounds. Others get its mean before
  /// and after them all, as such a read takes longer than a sample and empties the caches.
  std::vector<Sample> samples_of(const std::function<void()>& call, const Cost& cost, const Roofline& roof) const {
    Budget budget = budget_;
    const Peaks before = roof.peaks(true);
    budget.bandwidth = cost.bytes / before.read > cost.flops / before.fma;
    std::vector<Sample> samples = take_samples(call, roof, budget);
    if (budget.bandwidth) return samples;
    const double read = mean_reading(before.read, roof.read_gbs());
    for (Sample& sample : samples) sample.peaks.read = read;
    return samples;
  }

  static void append(std::vector<Sample>& all, const std::vector<Sample>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }

  /// A few samples of the naive entry; none when it does not take the problem or would take too much.
  std::vector<Sample> naive_samples(const AttentionProblem& p, Isa isa, const AttentionArgs& args,
                                    const Roofline& roof) const {
    const std::string name = bench::naive_entry(bench::vector_isa(isa));
    if (name.empty() || std::max(p.sq, p.sk) > kNaiveMaxLength) return {};
    const Context context = make_context(roof.threads(), name);
    try {
      if (Plan(p, context).workspace_bytes() > kNaiveMaxWorkspace) return {};
    } catch (const Error&) {
      return {};
    }
    Budget budget;
    budget.seconds = budget_.seconds / 4;
    budget.min_samples = 3;
    budget.patience = 1;
    return take_samples([&] { attention(args, context); }, roof, budget);
  }

  const BenchOptions& options_;
  std::vector<SetLine> lines_;
  std::vector<std::string> names_;
  Budget budget_;
  std::shared_ptr<const std::vector<float>> buffer_;
  std::vector<Planned> cases_;
  std::map<std::pair<Isa, int>, Roofline> rooflines_;
  Readings fma_peaks_, amx_peaks_, reads_;
  Trace trace_;
};

}  // namespace

int run_bench(const BenchOptions& options) {
  require_writable({options.json_path, options.trace_path});
  std::optional<EarlierRun> earlier;
  if (!options.compare_path.empty()) earlier.emplace(options.compare_path);
  const Machine machine = read_machine();
  Bench bench(options, machine);
  Table table(machine, bench.info(), bench.problems(), earlier ? &*earlier : nullptr);
  std::vector<Row> rows;
  int wrong = 0;
  bench.run([&](const Row& row) {
    table.add(row);
    rows.push_back(row);
    wrong += row.error.empty() ? 0 : 1;
  });
  table.finish(bench.ceilings());
  const Json document = to_json(machine, bench.info(), bench.ceilings(), rows);
  const bool slower = earlier && earlier->report(machine, document.at("benchmarks"));
  if (!options.json_path.empty()) write_json(options.json_path, document);
  if (!options.trace_path.empty()) write_file(options.trace_path, bench.trace().text(machine));
  if (wrong != 0) fmt::print(stderr, "rapt: {} of {} results are wrong\n", wrong, rows.size());
  return wrong == 0 && !slower ? kSuccess : kFailure;
}

}  // namespace rapt::tools
