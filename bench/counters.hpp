// What the processor and the kernel count while calls run: Linux's perf_event_open.
#pragma once

#include <functional>
#include <limits>
#include <string>

namespace rapt::bench {

/// Of all threads of the process, in user space. NaN is what could not be counted.
struct Counts {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  // By the processor. Most virtual machines hide its counters.
  double instructions = kNone, cycles = kNone;
  double cache_misses = kNone;  ///< of the last level, in lines; by many processors without what was prefetched
  // By the kernel, on any machine.
  double cpu_seconds = kNone, page_faults = kNone;

  /// What cache misses read, for lines of 64 bytes.
  double miss_bytes() const { return 64 * cache_misses; }
  Counts& operator+=(const Counts& other);
  Counts operator/(double calls) const;
};

/// Counts while work() runs. Threads that it starts are counted too. Where an event cannot be counted on all threads,
/// the first reason goes to `why`, unless there is one already.
Counts count(const std::function<void()>& work, std::string& why);

}  // namespace rapt::bench
