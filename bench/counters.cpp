#include "counters.hpp"

#include <array>

#if defined(__linux__)
#include <linux/perf_event.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <vector>
#endif

namespace rapt::bench {
namespace {

constexpr std::array kFields = {&Counts::instructions, &Counts::cycles, &Counts::cache_misses, &Counts::cpu_seconds,
                                &Counts::page_faults};

#if defined(__linux__)
struct Event {
  std::uint32_t type;
  std::uint64_t config;
  double unit;  // of what the kernel counts
};
// Of kFields.
constexpr std::array<Event, kFields.size()> kEvents = {{{PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS, 1},
                                                        {PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES, 1},
                                                        {PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_MISSES, 1},
                                                        {PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK, 1e-9},
                                                        {PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS, 1}}};

/// An event of one thread and of those it starts, while this lives.
class Counter {
 public:
  Counter(const Event& event, int thread) : unit_(event.unit) {
    perf_event_attr attributes{};
    attributes.size = sizeof attributes;
    attributes.type = event.type;
    attributes.config = event.config;
    attributes.disabled = attributes.inherit = attributes.exclude_kernel = attributes.exclude_hv = 1;
    attributes.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;
    file_ = static_cast<int>(::syscall(SYS_perf_event_open, &attributes, thread, -1, -1, PERF_FLAG_FD_CLOEXEC));
    error_ = file_ < 0 ? errno : 0;
  }
  Counter(Counter&& other) noexcept : file_(other.file_), error_(other.error_), unit_(other.unit_) { other.file_ = -1; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  ~Counter() {
    if (file_ >= 0) ::close(file_);
  }

  int error() const { return error_; }
  void start() const { ::ioctl(file_, PERF_EVENT_IOC_ENABLE, 0); }
  void stop() const { ::ioctl(file_, PERF_EVENT_IOC_DISABLE, 0); }
  /// Where events took turns on too few counters, what all of the time would have had.
  double value() const {
    struct {
      std::uint64_t count, enabled, running;
    } read{};
    if (::read(file_, &read, sizeof read) != sizeof read) return Counts::kNone;
    if (read.running == 0) return read.enabled == 0 ? 0 : Counts::kNone;  // the thread slept; no counter was free
    return unit_ * static_cast<double>(read.count) * static_cast<double>(read.enabled) /
           static_cast<double>(read.running);
  }

 private:
  int file_, error_;
  double unit_;
};

std::vector<int> threads_of_process() {
  std::vector<int> ids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ids.push_back(std::stoi(entry.path().filename()));
  return ids;
}

/// What perf_event_open answers.
std::string reason(int error) {
  std::string why = std::string("perf_event_open: ") + std::strerror(error);
  if (error == EACCES || error == EPERM) why += "; /proc/sys/kernel/perf_event_paranoid says who may";
  else if (error == ENOENT || error == EOPNOTSUPP) why += "; most virtual machines hide the processor's counters";
  else if (error == EMFILE) why += "; each thread takes a file for each event, ulimit -n says how many there may be";
  return why;
}

/// Of every thread; none if one of them refuses, whose reason goes to `why` if that is empty.
std::vector<Counter> counters_of(const Event& event, const std::vector<int>& threads, std::string& why) {
  std::vector<Counter> counters;
  for (const int thread : threads) {
    Counter counter(event, thread);
    if (counter.error() == ESRCH) continue;  // it has ended
    if (counter.error() != 0) {
      if (why.empty()) why = reason(counter.error());
      return {};
    }
    counters.push_back(std::move(counter));
  }
  return counters;
}
#endif

}  // namespace

Counts& Counts::operator+=(const Counts& other) {
  for (const auto field : kFields) this->*field += other.*field;
  return *this;
}

Counts Counts::operator/(double calls) const {
  Counts each;
  for (const auto field : kFields) each.*field = this->*field / calls;
  return each;
}

#if defined(__linux__)
Counts count(const std::function<void()>& work, std::string& why) {
  const std::vector<int> threads = threads_of_process();
  std::array<std::vector<Counter>, kEvents.size()> counters;
  for (std::size_t i = 0; i < kEvents.size(); ++i) counters[i] = counters_of(kEvents[i], threads, why);
  for (const auto& event : counters)
    for (const Counter& counter : event) counter.start();
  work();
  for (const auto& event : counters)
    for (const Counter& counter : event) counter.stop();
  Counts counts;
  for (std::size_t i = 0; i < kEvents.size(); ++i) {
    if (counters[i].empty()) continue;
    counts.*kFields[i] = 0;
    for (const Counter& counter : counters[i]) counts.*kFields[i] += counter.value();
  }
  return counts;
}
#else
Counts count(const std::function<void()>& work, std::string& why) {
  if (why.empty()) why = "perf_event_open: this is not Linux";
  work();
  return {};
}
#endif

}  // namespace rapt::bench
