// Calls that run a second time, with another number of workers.
#include <cstring>
#include <utility>

#include "core/span.hpp"
#include "guards/guards.hpp"
#include "guards/tensors.hpp"

namespace rapt {
namespace {

// Of elements of the two runs: NaNs are alike, whatever their bits.
bool are_same(const void* a, const void* b, std::int64_t at, DType dtype) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const void* const x = static_cast<const std::byte*>(a) + at * size;
  const void* const y = static_cast<const std::byte*>(b) + at * size;
  return std::memcmp(x, y, static_cast<std::size_t>(size)) == 0 ||
         (std::isnan(element_of(x, dtype, 1, 0)) && std::isnan(element_of(y, dtype, 1, 0)));
}

// The first difference.
bool compare(const std::string& name, const TensorView& first, const TensorView& second, Reports& reports) {
  const auto last = static_cast<std::size_t>(first.ndim - 1);
  const std::int64_t step = first.strides[last];
  return any_row(first, [&](const void* row, Index index) {
    const auto offset = static_cast<const std::byte*>(row) - static_cast<const std::byte*>(first.data);
    const void* const other = static_cast<const std::byte*>(second.data) + offset;
    for (std::int64_t i = 0; i < first.shape[last]; ++i) {
      if (are_same(row, other, i * step, first.dtype)) continue;
      index[last] = i;
      reports.find(GuardReport::Guard::determinism, {name, to_vector(index, first.ndim)},
                   static_cast<double>(element_of(row, first.dtype, step, i)),
                   static_cast<double>(element_of(other, first.dtype, step, i)));
      return true;
    }
    return false;
  });
}

// Where a state that is updated in place is read from.
template <class Args>
void start_from(Args&, const StateBefore&) {}
void start_from(DeltaRuleArgs& args, const StateBefore& before) {
  if (before.copy.size() > 0) args.initial_state.data = before.copy.data();
}

}  // namespace

void keep_state(const DeltaRuleArgs& args, const Allocator& allocator, StateBefore& before) {
  if (args.state_slots || !is_updated_in_place(args)) return;
  const auto bytes = static_cast<std::size_t>(span_of("initial_state", args.initial_state, false));
  before.copy = Workspace(allocator, bytes);
  if (bytes > 0) std::memcpy(before.copy.data(), args.initial_state.data, bytes);
}

template <class Args>
void run_again(const Watched<Args>& watched, const Context::Impl& other, const StateBefore& before, Reports& reports) {
  Args first = watched.args, second = watched.args;
  std::vector<Workspace> memory;
  for_each_result(second, [&](const char* name, MutableTensorView& t) {
    if (!t) return;
    memory.emplace_back(other.allocator, static_cast<std::size_t>(span_of(name, t, true)));
    if (memory.back().size() > 0) t.data = memory.back().data();
  });
  start_from(second, before);
  const Call call = validate(second);
  const auto plan = watched.entry.plan(call.problem, other);
  Workspace workspace = other.borrow(plan->workspace_bytes);
  watched.entry.run(*plan, call, other, nullptr, workspace.data());
  other.give_back(std::move(workspace));

  std::vector<std::pair<std::string, TensorView>> results;
  for_each_result(first, [&](const char* name, const TensorView& t) { results.emplace_back(name, t); });
  std::size_t at = 0;
  bool differs = false;
  for_each_result(second, [&](const char*, const TensorView& t) {
    const auto& [name, result] = results[at++];
    if (t && !differs) differs = compare(name, result, t, reports);
  });
}

#define RAPT_RUN_AGAIN(Args) \
  template void run_again(const Watched<Args>&, const Context::Impl&, const StateBefore&, Reports&);
RAPT_FOR_EACH_ARGS(RAPT_RUN_AGAIN)

}  // namespace rapt
