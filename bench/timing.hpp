// Taking times: the ceilings of the machine and the samples between them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "rapt/rapt.hpp"

namespace rapt::bench {

/// The attention_naive entry of an ISA; empty when there is none.
std::string naive_entry(Isa isa);
/// The ISA whose fp32 vectors kernels of `isa` use: `isa` itself, or the best one below it if that only adds products
/// of bf16. It has the FMA peak and the naive entry that `isa` is compared with.
Isa vector_isa(Isa isa);

/// GFLOP/s, and GB/s of reading; NaN where the ISA has no such unit or nobody asked, 0 when the threads could not be
/// had at the same time.
struct Peaks {
  double fma = 0;
  double amx = 0;
  double read = 0;
};

/// The ceilings of `threads` threads at once, read again whenever asked: clocks move, so a kernel is held against the
/// readings next to it.
class Roofline {
 public:
  /// FMA peak and bandwidth are of vector_isa(isa). `buffer` is what the bandwidth is read from: several times the
  /// last-level cache.
  Roofline(Isa isa, int threads, std::shared_ptr<const std::vector<float>> buffer);

  /// Of independent multiply-add chains on all threads at once, and of products of tiles where the ISA has them, about
  /// a millisecond each; of one sequential read of the buffer if asked to.
  Peaks peaks(bool bandwidth = false) const;
  /// GB/s of one sequential read of the buffer, a share of it per thread. 0 when the threads could not be had at once,
  /// each on a CPU of its own.
  double read_gbs() const;

  /// GB/s of reading the first `bytes` of its share over and over, on each thread.
  double cached_read_gbs(std::size_t bytes) const;

  /// Integer operations per second, in units of 1e9, of products of bytes on `isa`, which must have them
  /// (has_int8_chains()), on all threads at once. 0 when the threads could not be had at once.
  double int8_gops(Isa isa) const;

  int threads() const { return threads_; }

 private:
  struct Chains {
    double (*run)(Isa, std::int64_t rounds);  // returns the operations done
    Isa isa;
    std::int64_t rounds;
  };
  // With as many rounds as take a millisecond.
  static Chains calibrated(double (*run)(Isa, std::int64_t), Isa isa);
  double giga_rate(const Chains& chains) const;
  double read_gbs(std::size_t bytes, std::int64_t rounds) const;

  Chains fma_;
  std::optional<Chains> amx_;
  int threads_;
  std::shared_ptr<const std::vector<float>> buffer_;
  std::shared_ptr<Executor> executor_;
};

/// The mean of two readings; NaN when one was not had.
double mean_reading(double before, double after);

/// One timing: `calls` calls back to back, between two readings of the peaks.
struct Sample {
  double seconds = 0;      ///< per call
  double cpu_seconds = 0;  ///< of the whole process, per call
  Peaks peaks;             ///< mean of the two readings
  std::int64_t calls = 0;
  bool steady = false;  ///< the two readings of FLOP/s agree, so the clock did not move in between
};

struct Budget {
  double seconds = 0.5;    ///< enough once `min_samples` steady samples are there
  int min_samples = 7;     ///< steady ones
  double patience = 4;     ///< give up on steadiness after this many times `seconds`
  double min_call = 2e-3;  ///< seconds of calls per sample
  bool bandwidth = false;  ///< read the bandwidth beside every sample, too
};

/// Samples of call(), after one call that is not timed.
std::vector<Sample> take_samples(const std::function<void()>& call, const Roofline& roofline, const Budget& budget);

/// What the samples of one row say. Unsteady samples count only when there is no steady one; the shares of FLOP/s are
/// then NaN.
struct Summary {
  int steady = 0, taken = 0;
  std::int64_t calls = 0;
  double median_s = 0, best_s = 0, median_cpu_s = 0;
  double spread = 0;  ///< interquartile range over median
  struct Share {
    double median = 0, best = 0;
    double peak = 0;  ///< median
  };
  Share of_fma, of_amx, of_read;
};
Summary summarise(const std::vector<Sample>& samples, const Cost& per_call);

/// Two ways to do the same, side by side.
struct Comparison {
  double first_s = 0, second_s = 0;  ///< per call, medians
  double ratio = 0;                  ///< median over rounds of the first's time over the second's
  double error = 0;                  ///< standard error of that, from how much the rounds scatter
};
/// Each round times both, one right after the other, and every second round in the other order: drifts of the clock
/// affect both alike. Rounds take `seconds` or more together, and each at least `min_call` seconds of calls of either.
Comparison compare(const std::function<void()>& first, const std::function<void()>& second, double seconds,
                   double min_call = Budget{}.min_call);

/// The value below which a share `at` of `values` lies, between neighbours linearly; NaN when there are none.
double quantile(std::vector<double> values, double at);

}  // namespace rapt::bench
