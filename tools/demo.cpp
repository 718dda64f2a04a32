#include "demo.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "bench/entry.hpp"
#include "bench/timing.hpp"
#include "common.hpp"
#include "operations/attention/captured.hpp"
#include "operations/attention/case.hpp"

namespace rapt::tools {
namespace {

using testing::Captured;
using testing::Difference;
using testing::Padding;
using Clock = std::chrono::steady_clock;

constexpr double kSecondsPerRow = 0.5;
constexpr int kMinRounds = 3;
constexpr double kSecondsPerSample = 2e-3;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Prints at once, so that a table grows before the reader's eyes.
template <class... Args>
void show(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print(format, std::forward<Args>(args)...);
  std::fflush(stdout);
}

std::string shortened(const std::string& text, std::size_t length) {
  return text.size() <= length ? text : text.substr(0, text.find_last_of(' ', length - 3)) + " ...";
}

std::string lengths_text(const Captured& captured) {
  std::string text;
  for (const std::int64_t length : captured.lengths()) text += fmt::format("{}{}", text.empty() ? "" : " + ", length);
  return text;
}

struct Comparison {
  int calls = 0, failed = 0;
  std::map<std::string, int> calls_by_entry;
  std::optional<Plan> first;
};

void introduce(const std::vector<Captured>& recordings) {
  show(
      "1. The same result as a real language model?\n\n"
      "   Queries, keys and values were recorded inside all-MiniLM-L6-v2 (6 layers, 12 heads of 32) while\n"
      "   it read these texts:\n\n");
  std::set<std::string> seen;
  for (const Captured& captured : recordings) {
    for (std::size_t n = 0; n < captured.texts().size(); ++n) {
      if (!seen.insert(captured.texts()[n]).second) continue;
      show("     {:3} tokens  \"{}\"\n", captured.lengths()[n], shortened(captured.texts()[n], 78));
    }
  }
  show(
      "\n   Texts of unequal length share a batch, the shorter ones padded. rapt computes\n"
      "   softmax(Q K^T / sqrt(32)) V for it, told in three ways which tokens are real, and is compared\n"
      "   with what the model (PyTorch, fp32) computed there, over all real tokens.\n\n"
      "   {:5}  {:12}  {:12}  {:>9} {:>9}  {:>9} {:>9}\n",
      "layer", "tokens", "padding by", "max error", "allowed", "rel error", "allowed");
}

Comparison compare_with_model(std::vector<Captured>& recordings, const Context& context) {
  Comparison result;
  bool same_bits = true;
  for (Captured& captured : recordings) {
    for (const Padding padding : testing::kPaddings) {
      const AttentionArgs args = captured.args(padding);
      const Plan plan(args, context);
      plan.run(args);
      const Difference difference = captured.difference(padding);
      const bool first = padding == testing::kPaddings.front();
      show("   {:5}  {:12}  {:12}  {:9.1e} {:9.1e}  {:9.1e} {:9.1e}  {}\n",
           first ? std::to_string(captured.layer()) : "", first ? lengths_text(captured) : "",
           testing::to_string(padding), difference.max_abs, difference.max_abs_bound, difference.relative,
           difference.relative_bound, difference.ok() ? "OK" : "FAILED");
      ++result.calls;
      result.failed += difference.ok() ? 0 : 1;
      ++result.calls_by_entry[std::string(plan.entry())];
      if (!result.first) result.first = plan;
      same_bits = same_bits && captured.same_bits(testing::kPaddings.front(), padding);
    }
  }
  show(
      "\n   max error: largest difference of one element; allowed is 8 fp32 rounding steps of the largest\n"
      "   value for each side. rel error: |rapt - model| / |model| over all elements; allowed is the 1e-6\n"
      "   that rapt promises against exact arithmetic, plus the model's own distance from it.\n"
      "   The three ways {}.\n\n",
      same_bits ? "give the same bits" : "differ in the last bits, within the bounds above");
  return result;
}

void explain_choice(const Comparison& comparison) {
  show("2. What ran, and why\n\n");
  for (const auto& [entry, calls] : comparison.calls_by_entry) {
    show("   {} of {} calls ran {}\n", calls, comparison.calls, entry);
  }
  const Plan& plan = *comparison.first;
  show("\n   The choice for \"{}\", best first:\n", to_string(plan.problem()));
  std::size_t width = 0;
  for (const Candidate& candidate : plan.candidates()) width = std::max(width, candidate.entry.size());
  for (const Candidate& candidate : plan.candidates()) {
    const bool chosen = candidate.entry == plan.entry();
    const std::string why = chosen ? "chosen: the first that can run" : candidate.refusal;
    show("     {} {:{}}  {}\n", chosen ? '>' : ' ', candidate.entry, width, why.empty() ? "could run too" : why);
  }
  show("   on {} thread{}, with {} of working memory.\n\n", plan.threads(), plan.threads() == 1 ? "" : "s",
       human_bytes(static_cast<double>(plan.workspace_bytes())));
}

/// One entry on one problem; samples are taken in turns with others.
struct Contender {
  Plan plan;
  double calls = 1;  ///< per sample, so that a sample is long enough for the clock
  std::vector<double> seconds, shares_of_peak;

  void run_sample(const AttentionArgs& args) const {
    for (double call = 0; call < calls; ++call) plan.run(args);
  }
  void take_sample(const AttentionArgs& args, const bench::Roofline& roofline, double flops) {
    const double before = roofline.peaks().fma;
    const auto start = Clock::now();
    run_sample(args);
    seconds.push_back(since(start) / calls);
    const double peak = (before + roofline.peaks().fma) / 2;
    if (peak > 0) shares_of_peak.push_back(flops / seconds.back() / 1e9 / peak);
  }
};

Contender prepare(const AttentionArgs& args, const Context& context) {
  Contender contender{Plan(args, context), 1, {}, {}};
  contender.run_sample(args);
  const auto start = Clock::now();
  contender.run_sample(args);
  contender.calls = std::max(1.0, std::ceil(kSecondsPerSample / since(start)));
  return contender;
}

void time_row(const AttentionProblem& problem, const Context& best, const Context& naive,
              const bench::Roofline& roofline) {
  testing::Case tensors(problem);
  const AttentionArgs args = tensors.args();
  const double flops = cost_of(args).flops;
  Contender fast = prepare(args, best), slow = prepare(args, naive);
  const auto start = Clock::now();
  while (since(start) < kSecondsPerRow || static_cast<int>(slow.seconds.size()) < kMinRounds) {
    fast.take_sample(args, roofline, flops);
    slow.take_sample(args, roofline, flops);
  }
  const double fast_s = bench::quantile(fast.seconds, 0.5), slow_s = bench::quantile(slow.seconds, 0.5);
  const double share = bench::quantile(fast.shares_of_peak, 0.5);
  show("   {:4}  {:6}  {:6}  {:8.3f} ms  {:7.1f}  {:>7}   {:8.3f} ms  {:7.1f}   {:5.2f}x\n", types_text(problem),
       problem.sq, problem.causal ? "causal" : "full", fast_s * 1e3, flops / fast_s / 1e9,
       std::isnan(share) ? "-" : fmt::format("{:.0f} %", share * 100), slow_s * 1e3, flops / slow_s / 1e9,
       slow_s / fast_s);
}

void show_speed(const Context& context, int threads) {
  const Plan plan(AttentionProblem::parse("attention b=1 hq=8 sq=512 d=64"), context);
  const std::string best(plan.entry());
  const Isa isa = bench::vector_isa(bench::cpu_isa(bench::info_of(best)).value());
  const std::string naive = bench::naive_entry(isa);
  const bench::Roofline roofline(isa, threads, std::make_shared<const std::vector<float>>());

  show(
      "3. How fast is it?\n\n"
      "   8 heads of 64, {} thread{}\n"
      "     rapt      {}\n"
      "     baseline  {} (three passes, every score written to memory)\n\n"
      "   {:4}  {:>6}  {:6}  {:>20}  {:>7}   {:>20}\n"
      "   {:4}  {:>6}  {:6}  {:>11}  {:>7}  {:>7}   {:>11}  {:>7}   {:>6}\n",
      threads, threads == 1 ? "" : "s", best, naive, "", "", "", "rapt", "", "baseline", "type", "tokens", "scores",
      "time", "GFLOP/s", "of peak", "time", "GFLOP/s", "faster");
  const Context baseline = make_context(threads, naive);
  for (const int tokens : {128, 512, 1024}) {
    for (const char* causal : {"", " causal"}) {
      const std::string text = fmt::format("attention b=1 hq=8 sq={} d=64{}", tokens, causal);
      time_row(AttentionProblem::parse(text), context, baseline, roofline);
    }
  }
  for (const char* dtype : {"bf16", "f16"}) {
    const std::string text = fmt::format("attention dtype={} b=1 hq=8 sq=1024 d=64", dtype);
    time_row(AttentionProblem::parse(text), context, baseline, roofline);
  }
  show(
      "\n   causal: a token attends to itself and those before it; only those operations are counted.\n"
      "   of peak: share of the multiply-adds per second this machine reaches at the same moment with\n"
      "   nothing else to do, in {} code on {} thread{}. Products of bf16 may\n   do more. Times are medians, the two "
      "run in turns.\n\n",
      to_string(isa), threads, threads == 1 ? "" : "s");
}

}  // namespace

int run_demo(const DemoOptions& options) {
  const auto start = Clock::now();
  std::vector<Captured> recordings = testing::load_captured(options.data_dir);
  const Context context = make_context(options.threads, "");
  const int threads = options.threads > 0 ? options.threads : tbb_executor()->concurrency();

  const Machine machine = read_machine();
  show("rapt {}: exact attention on CPUs, here {} ({} logical CPUs)\n\n", version(),
       machine.cpu.empty() ? "an unnamed CPU" : machine.cpu, machine.cpus);
  introduce(recordings);
  const Comparison comparison = compare_with_model(recordings, context);
  explain_choice(comparison);
  show_speed(context, threads);

  if (comparison.failed != 0) {
    show("FAILED: {} of {} comparisons with the model are out of bounds.\n", comparison.failed, comparison.calls);
    return kFailure;
  }
  show("OK: all {} comparisons with the model are within bounds ({:.1f} s).\n", comparison.calls, since(start));
  return kSuccess;
}

}  // namespace rapt::tools
