// The guards of a context. A call that none watches pays for one comparison.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "dispatch/entry.hpp"
#include "rapt/guards.hpp"

namespace rapt {

// What guards have to say of a call, until its work is done.
class Reports {
 public:
  Reports(const Problem& problem, const std::string& entry) : problem_(problem), entry_(entry) {}

  void find(GuardReport::Guard guard, GuardReport::Place place, double value, double wanted = 0, double bound = 0,
            GuardReport::Place seen = {}) {
    reports_.push_back({guard,
                        GuardReport::Kind::finding,
                        to_string(problem_),
                        entry_,
                        std::move(place),
                        value,
                        wanted,
                        bound,
                        std::move(seen),
                        {}});
  }
  void pass(GuardReport::Guard guard, std::string reason) {
    reports_.push_back(
        {guard, GuardReport::Kind::not_watched, to_string(problem_), entry_, {}, 0, 0, 0, {}, std::move(reason)});
  }
  const std::vector<GuardReport>& all() const { return reports_; }
  const Problem& problem() const { return problem_; }

 private:
  const Problem& problem_;
  const std::string& entry_;
  std::vector<GuardReport> reports_;
};

// A call of an operation, on the CPU and not empty, as guards see it.
template <class Args>
struct Watched {
  const Entry& entry;
  const EntryPlan& plan;
  const Args& args;
  const Call& call;
};

// A state that delta_rule updates in place, as it was before the call.
struct StateBefore {
  Workspace copy;                        // of its memory; for the second run
  std::vector<std::int64_t> not_finite;  // index of its first element that is not; empty: none
  double value = 0;                      // of that one
};

class ContextGuards {
 public:
  // Those of a context that has everything else: its options' or the environment's; null where none is on.
  static std::shared_ptr<const ContextGuards> of(Context::Impl& context);
  ContextGuards(const Guards& guards, const Context::Impl& context);

  // Calls run(), which does the call's work, and looks at what it did.
  template <class Args, class Run>
  void watch(const Watched<Args>& watched, const Run& run) const {
    if (watched.call.is_empty) return run();
    Reports reports(watched.call.problem, watched.entry.name);
    if (watched.call.device.type != DeviceType::cpu) {
      run();
      pass_all(reports, "tensors in a GPU's memory");
    } else {
      const StateBefore before = look_before(watched);
      run();
      look_after(watched, before, reports);
    }
    deliver(reports);
  }

 private:
  template <class Args>
  StateBefore look_before(const Watched<Args>& watched) const;
  template <class Args>
  void look_after(const Watched<Args>& watched, const StateBefore& before, Reports& reports) const;
  void pass_all(Reports& reports, const char* reason) const;
  void deliver(const Reports& reports) const;

  Guards guards_;
  // For second runs: of one worker, and of several.
  std::unique_ptr<const Context::Impl> serial_, several_;
  mutable std::atomic<std::uint64_t> calls_{0};
  mutable std::mutex mutex_;
  mutable std::set<std::string> passed_;  // what deliver() has said of calls that are not watched
};

// The guards themselves, for each operation.

// Finds the first result that is not finite, and what made it so. The other is called before the work.
void look_at_state(const DeltaRuleArgs& args, const DeltaRuleParams& params, StateBefore& before);
template <class Args>
void find_not_finite(const Watched<Args>& watched, const StateBefore& before, Reports& reports);

// Computes `rows` rows again in float64. `number` is that of the call: it chooses the rows.
void compare_with_shadow(const Watched<AttentionArgs>& watched, int rows, double tolerance, std::uint64_t number,
                         Reports& reports);
void compare_with_shadow(const Watched<AttentionBackwardArgs>& watched, int rows, double tolerance,
                         std::uint64_t number, Reports& reports);
template <class Args>
void compare_with_shadow(const Watched<Args>&, int, double, std::uint64_t, Reports& reports) {
  reports.pass(GuardReport::Guard::shadow, "the shadow is of attention and its dq alone");
}

// Runs the call again on `other` and compares. The other is called before the work.
void keep_state(const DeltaRuleArgs& args, const Allocator& allocator, StateBefore& before);
template <class Args>
void run_again(const Watched<Args>& watched, const Context::Impl& other, const StateBefore& before, Reports& reports);

// Does so for the arguments of every operation: what templates are instantiated for.
#define RAPT_FOR_EACH_ARGS(DO) \
  DO(AttentionArgs)            \
  DO(AttentionBackwardArgs)    \
  DO(AppendKvArgs)             \
  DO(MergeStatesArgs)          \
  DO(DeltaRuleArgs)            \
  DO(DeltaRuleBackwardArgs)    \
  DO(IndexScoresArgs)          \
  DO(SelectTopkArgs)

}  // namespace rapt
