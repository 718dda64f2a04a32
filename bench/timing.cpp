#include "timing.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <limits>
#include <set>
#include <stdexcept>
#include <thread>

#include "entry.hpp"

namespace rapt::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kReadingSeconds = 1e-3;
constexpr double kLongCallSeconds = 50e-3;
constexpr double kAgreement = 0.02, kLongAgreement = 0.03;
constexpr int kReadingAttempts = 5;
constexpr double kMinCpuShare = 0.75;  // of the elapsed time that threads with CPUs of their own run

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Processor time of the calling thread: what it takes when another process has the core is not counted.
double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Runs work(worker), which returns an amount, on `threads` workers at once and adds up their rates, each over its own
/// processor time. An executor may run workers one after another on one thread, whose rates do not add up: such a run
/// is tried again, and 0 is returned when that does not help. With `own_cpus`, so is a run whose threads had to share
/// CPUs: the bandwidth that they compete for would seem more than it is.
double total_rate(Executor& executor, int threads, bool own_cpus, const std::function<double(int)>& work) {
  struct Worker {
    double rate = 0, seconds = 0;
    std::thread::id thread;
  };
  struct Run {
    const std::function<double(int)>& work;
    std::vector<Worker> workers;
  };
  for (int attempt = 0; attempt < kReadingAttempts; ++attempt) {
    Run run{work, std::vector<Worker>(static_cast<std::size_t>(threads))};
    const auto worker = [](void* argument, int index) {
      Run& of = *static_cast<Run*>(argument);
      const double begin = thread_seconds();
      const double amount = of.work(index), taken = thread_seconds() - begin;
      of.workers[static_cast<std::size_t>(index)] = {amount / taken, taken, std::this_thread::get_id()};
    };
    const auto start = Clock::now();
    executor.run(threads, worker, &run);
    const double elapsed = since(start);
    double rate = 0, seconds = 0;
    std::set<std::thread::id> distinct;
    for (const Worker& done : run.workers) {
      rate += done.rate;
      seconds += done.seconds;
      distinct.insert(done.thread);
    }
    const bool shared = own_cpus && seconds < kMinCpuShare * elapsed * threads;
    if (distinct.size() == run.workers.size() && !shared) return rate;
  }
  return 0;
}

bool agree(double before, double after, double tolerance) {
  return std::isnan(before) ||
         (std::min(before, after) > 0 && std::abs(before - after) <= tolerance * std::min(before, after));
}

/// `amount` is what one call has of what `peak` counts.
Summary::Share share_of(const std::vector<Sample>& samples, double amount, double Peaks::*peak, bool unsteady = false) {
  std::vector<double> shares, peaks;
  for (const Sample& sample : samples) {
    if (!(sample.steady || unsteady) || std::isnan(sample.peaks.*peak)) continue;
    peaks.push_back(sample.peaks.*peak);
    shares.push_back(amount / sample.seconds / 1e9 / peaks.back());
  }
  return {quantile(shares, 0.5), quantile(shares, 1), quantile(peaks, 0.5)};
}

/// Not inlined, so that a profile shows the timed calls under one name.
[[gnu::noinline]] void run_timed_calls(const std::function<void()>& call, std::int64_t calls) {
  for (std::int64_t i = 0; i < calls; ++i) call();
}

/// How many calls, after one that is not timed, take `min_seconds`.
std::int64_t calls_within(const std::function<void()>& call, double min_seconds) {
  run_timed_calls(call, 1);
  for (std::int64_t calls = 1;; calls *= 2) {
    const auto start = Clock::now();
    run_timed_calls(call, calls);
    const double seconds = since(start);
    if (seconds >= min_seconds) return calls;
    if (seconds * 4 >= min_seconds)
      return static_cast<std::int64_t>(std::ceil(static_cast<double>(calls) * min_seconds / seconds));
  }
}

}  // namespace

std::string naive_entry(Isa isa) {
  for (const EntryInfo& entry : entries()) {
    if (entry.phase == Phase::naive && cpu_isa(entry) == isa) return entry.name;
  }
  return {};
}

Isa vector_isa(Isa isa) {
  for (Isa usable : usable_isas()) {
    if (usable <= isa && !naive_entry(usable).empty()) return usable;
  }
  throw std::logic_error("no ISA with an attention_naive entry");
}

Roofline::Roofline(Isa isa, int threads, std::shared_ptr<const std::vector<float>> buffer)
    : fma_(calibrated(run_fma_chains, vector_isa(isa))),
      threads_(threads),
      buffer_(std::move(buffer)),
      executor_(threads == 1 ? serial_executor() : tbb_executor()) {
  if (isa == Isa::amx) amx_ = calibrated(run_fma_chains, isa);
}

Roofline::Chains Roofline::calibrated(double (*run)(Isa, std::int64_t), Isa isa) {
  Chains chains{run, isa, 1};
  for (double seconds = 0; seconds < kReadingSeconds; chains.rounds *= 2) {
    const double start = thread_seconds();
    run(isa, chains.rounds);
    seconds = (thread_seconds() - start) * 2;  // of the rounds it is doubled to
  }
  return chains;
}

double Roofline::giga_rate(const Chains& chains) const {
  return total_rate(*executor_, threads_, false, [&](int) { return chains.run(chains.isa, chains.rounds); }) / 1e9;
}

double Roofline::int8_gops(Isa isa) const {
  return giga_rate(calibrated(run_int8_chains, isa));
}

Peaks Roofline::peaks(bool bandwidth) const {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  return {giga_rate(fma_), amx_ ? giga_rate(*amx_) : kNone, bandwidth ? read_gbs() : kNone};
}

double Roofline::read_gbs() const {
  return read_gbs(buffer_->size() / static_cast<std::size_t>(threads_) * sizeof(float) - 64, 1);
}

double Roofline::cached_read_gbs(std::size_t bytes) const {
  constexpr std::size_t kBytes = std::size_t{256} << 20;  // a few milliseconds of them, however slow the cache
  return read_gbs(bytes, static_cast<std::int64_t>(std::max<std::size_t>(kBytes / bytes, 1)));
}

double Roofline::read_gbs(std::size_t bytes, std::int64_t rounds) const {
  const std::size_t share = buffer_->size() / static_cast<std::size_t>(threads_);
  volatile float sink = 0;
  const auto read = [&](int worker) {
    // From where a cache line begins: loads that span two count twice in L1.
    const float* own = buffer_->data() + share * static_cast<std::size_t>(worker);
    own += (64 - reinterpret_cast<std::uintptr_t>(own) % 64) % 64 / sizeof(float);
    const float value = run_read_stream(fma_.isa, own, bytes, rounds);
    if (value == 1) sink = value;
    return static_cast<double>(bytes) * static_cast<double>(rounds);
  };
  return total_rate(*executor_, threads_, threads_ > 1, read) / 1e9;
}

double mean_reading(double before, double after) {
  return std::min(before, after) > 0 ? (before + after) / 2 : std::numeric_limits<double>::quiet_NaN();
}

std::vector<Sample> take_samples(const std::function<void()>& call, const Roofline& roofline, const Budget& budget) {
  const std::int64_t calls = calls_within(call, budget.min_call);
  std::vector<Sample> samples;
  int steady = 0;
  const auto start = Clock::now();
  Peaks before = roofline.peaks(budget.bandwidth);
  const auto enough = [&] {
    const double spent = since(start);
    return (spent >= budget.seconds && steady >= budget.min_samples) || spent >= budget.seconds * budget.patience;
  };
  do {
    const std::clock_t cpu_start = std::clock();
    const auto call_start = Clock::now();
    run_timed_calls(call, calls);
    const double seconds = since(call_start);
    const double cpu_seconds = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
    const Peaks after = roofline.peaks(budget.bandwidth);
    const double tolerance = seconds > kLongCallSeconds ? kLongAgreement : kAgreement;
    const double count = static_cast<double>(calls);
    const bool agreed = agree(before.fma, after.fma, tolerance) && agree(before.amx, after.amx, tolerance);
    const Peaks mean{mean_reading(before.fma, after.fma), mean_reading(before.amx, after.amx),
                     mean_reading(before.read, after.read)};
    samples.push_back({seconds / count, cpu_seconds / count, mean, calls, agreed});
    steady += agreed ? 1 : 0;
    before = after;
  } while (!enough());
  return samples;
}

Comparison compare(const std::function<void()>& first, const std::function<void()>& second, double seconds,
                   double min_call) {
  constexpr std::size_t kMinRounds = 8;
  run_timed_calls(second, 1);
  const std::int64_t calls = calls_within(first, min_call);
  std::vector<double> of_first, of_second, ratios;
  const auto time = [&](const std::function<void()>& call, std::vector<double>& times) {
    const auto start = Clock::now();
    run_timed_calls(call, calls);
    times.push_back(since(start) / static_cast<double>(calls));
  };
  const auto start = Clock::now();
  while (ratios.size() < kMinRounds || since(start) < seconds) {
    if (ratios.size() % 2 == 0) time(first, of_first), time(second, of_second);
    else time(second, of_second), time(first, of_first);
    ratios.push_back(of_first.back() / of_second.back());
  }
  const double ratio = quantile(ratios, 0.5);
  std::vector<double> deviations;
  for (const double x : ratios) deviations.push_back(std::abs(x - ratio));
  // Of normal numbers: the deviation from their median one, and the error of a median from that of a mean.
  constexpr double kDeviation = 1.4826, kOfMedian = 1.2533;
  const double error =
      kOfMedian * kDeviation * quantile(deviations, 0.5) / std::sqrt(static_cast<double>(ratios.size()));
  return {quantile(of_first, 0.5), quantile(of_second, 0.5), ratio, error};
}

Summary summarise(const std::vector<Sample>& samples, const Cost& per_call) {
  Summary summary;
  summary.taken = static_cast<int>(samples.size());
  summary.steady =
      static_cast<int>(std::count_if(samples.begin(), samples.end(), [](const Sample& s) { return s.steady; }));
  std::vector<double> seconds, cpu_seconds;
  for (const Sample& sample : samples) {
    summary.calls += sample.calls;
    if (summary.steady != 0 && !sample.steady) continue;
    seconds.push_back(sample.seconds);
    cpu_seconds.push_back(sample.cpu_seconds);
  }
  summary.median_s = quantile(seconds, 0.5);
  summary.best_s = quantile(seconds, 0);
  summary.median_cpu_s = quantile(cpu_seconds, 0.5);
  summary.spread = (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / summary.median_s;
  summary.of_fma = share_of(samples, per_call.flops, &Peaks::fma);
  summary.of_amx = share_of(samples, per_call.flops, &Peaks::amx);
  summary.of_read = share_of(samples, per_call.bytes, &Peaks::read, summary.steady == 0);
  return summary;
}

double quantile(std::vector<double> values, double at) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const double position = at * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (position - static_cast<double>(below)) * (values[above] - values[below]);
}

}  // namespace rapt::bench
