// The guards of a context. A call that none watches pays for one comparison.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/entry.hpp"
#include "rapt/guards.hpp"

namespace rapt {

// What guards have to say of a call, until its work is done.
class Reports {
 public:
  using Guard = GuardReport::Guard;

  Reports(const Problem& problem, const std::string& entry) : problem_(problem), entry_(entry) {}

  void add(Guard guard, GuardReport::Place place, double value, double wanted = 0, double bound = 0,
           GuardReport::Place seen = {}) {
    GuardReport report = about(guard, GuardReport::Kind::finding);
    report.place = std::move(place), report.seen = std::move(seen);
    report.value = value, report.wanted = wanted, report.bound = bound;
    findings.push_back(std::move(report));
  }
  // The guard does not watch the call, or a part of it. Keeps the reason alone: most calls have one that was reported
  // before.
  void skip(Guard guard, const char* reason) { skipped.emplace(guard, reason); }
  GuardReport about(Guard guard, GuardReport::Kind kind) const {
    GuardReport report;
    report.guard = guard, report.kind = kind;
    report.problem = to_string(problem_), report.entry = entry_;
    return report;
  }
  Operation operation() const { return operation_of(problem_); }

  std::vector<GuardReport> findings;
  std::set<std::pair<Guard, std::string_view>> skipped;

 private:
  const Problem& problem_;
  const std::string& entry_;
};

// A call of an operation, on the CPU and not empty, as guards see it.
template <class Args>
struct WatchedCall {
  const Entry& entry;
  const EntryPlan& plan;
  const Args& args;
  const Call& call;
};

// A state that delta_rule updates in place, as it was before the call.
struct SavedState {
  Workspace copy;                        // of its memory; for the second run
  std::vector<std::int64_t> not_finite;  // index of its first element that is not; empty: none
  double value = 0;                      // of that one
};

class ContextGuards {
 public:
  // Those of a context that has everything else: its options' or the environment's; null where none is on.
  static std::shared_ptr<const ContextGuards> of(Context::Impl& context);
  ContextGuards(const Guards& guards, const Context::Impl& context);

  // Calls run(), which does the call's work, looks at what it did, and calls done() before handlers, which may throw.
  template <class Args, class Run, class Done>
  void watch(const WatchedCall<Args>& watched, const Run& run, const Done& done) const {
    if (watched.call.is_empty) return run(), done();
    Reports reports(watched.call.problem, watched.entry.name);
    if (watched.call.device.type != DeviceType::cpu) {
      run();
      skip_all(reports, "tensors in a GPU's memory");
    } else {
      const SavedState before = save_state_before(watched);
      run();
      check_after(watched, before, reports);
    }
    done();
    deliver(reports);
  }

 private:
  template <class Args>
  SavedState save_state_before(const WatchedCall<Args>& watched) const;
  template <class Args>
  void check_after(const WatchedCall<Args>& watched, const SavedState& before, Reports& reports) const;
  void skip_all(Reports& reports, const char* reason) const;
  void deliver(const Reports& reports) const;
  void deliver(const GuardReport& report) const;

  Guards guards_;
  // For second runs: of one worker, and of several.
  std::unique_ptr<const Context::Impl> serial_, several_;
  mutable std::atomic<std::uint64_t> calls_{0};
  mutable std::mutex mutex_;
  // What deliver() has said of calls that are not watched.
  mutable std::set<std::tuple<Operation, GuardReport::Guard, std::string_view>> skipped_;
};

// The guards themselves, for each operation.

// Finds the first result that is not finite, and what made it so. The other is called before the work.
void find_not_finite_state(const DeltaRuleArgs& args, const DeltaRuleParams& params, SavedState& before);
#define RAPT_OPERATION(name, Name, NAME) \
  void find_not_finite(const WatchedCall<Name##Args>& watched, const SavedState& before, Reports& reports);
#include "rapt/operations.def"

// Computes `rows` rows again in float64. `number` is that of the call: it chooses the rows.
void compare_with_shadow(const WatchedCall<AttentionArgs>& watched, int rows, double tolerance, std::uint64_t number,
                         Reports& reports);
void compare_with_shadow(const WatchedCall<AttentionBackwardArgs>& watched, int rows, double tolerance,
                         std::uint64_t number, Reports& reports);
template <class Args>
void compare_with_shadow(const WatchedCall<Args>&, int, double, std::uint64_t, Reports& reports) {
  reports.skip(GuardReport::Guard::shadow, "the shadow is of attention and its dq alone");
}

// Why a second run would not find what the first one did, or may not write where it did; null if it may run again.
#define RAPT_OPERATION(name, Name, NAME) const char* why_not_again(const Name##Args& args);
#include "rapt/operations.def"
// Runs the call again on `other` and compares. The other is called before the work.
void keep_state(const DeltaRuleArgs& args, const Allocator& allocator, SavedState& before);
template <class Args>
void run_again(const WatchedCall<Args>& watched, const Context::Impl& other, const SavedState& before,
               Reports& reports);

}  // namespace rapt
