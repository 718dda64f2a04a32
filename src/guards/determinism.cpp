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
      reports.add(GuardReport::Guard::determinism, {name, to_vector(index, first.ndim)},
                  static_cast<double>(element_of(row, first.dtype, step, i)),
                  static_cast<double>(element_of(other, first.dtype, step, i)));
      return true;
    }
    return false;
  });
}

void compare(const Results& first, const Results& second, Reports& reports) {
  for (std::size_t i = 0; i < first.size(); ++i)
    if (*first[i].view && compare(first[i].name, *first[i].view, *second[i].view, reports)) return;
}

// Puts results of the same layout into memory of their own.
std::vector<Workspace> lay_elsewhere(const Results& results, const Allocator& allocator) {
  std::vector<Workspace> memory;
  for (const auto& [name, view] : results) {
    if (!*view) continue;
    memory.emplace_back(allocator, static_cast<std::size_t>(span_of(name, *view, true)));
    if (memory.back().size() > 0) view->data = memory.back().data();
  }
  return memory;
}

void run_on(const Context::Impl& context, const Entry& entry, const Call& call) {
  const auto plan = entry.plan(call.problem, context);
  Workspace workspace = context.borrow(plan->workspace_bytes);
  entry.run(*plan, call, context, nullptr, workspace.data());
  context.give_back(std::move(workspace));
}

// Where a state that is updated in place is read from.
template <class Args>
void start_from(Args&, const SavedState&) {}
void start_from(DeltaRuleArgs& args, const SavedState& before) {
  if (before.copy.size() > 0) args.initial_state.data = before.copy.data();
}

}  // namespace

void keep_state(const DeltaRuleArgs& args, const Allocator& allocator, SavedState& before) {
  if (args.state_slots || !is_updated_in_place(args)) return;
  const auto bytes = static_cast<std::size_t>(span_of("initial_state", args.initial_state, false));
  before.copy = Workspace(allocator, bytes);
  if (bytes > 0) std::memcpy(before.copy.data(), args.initial_state.data, bytes);
}

template <class Args>
void run_again(const WatchedCall<Args>& watched, const Context::Impl& other, const SavedState& before,
               Reports& reports) {
  Args first = watched.args, second = watched.args;
  const Results results = results_of(second);
  const std::vector<Workspace> memory = lay_elsewhere(results, other.allocator);
  start_from(second, before);
  run_on(other, watched.entry, validate(second));
  compare(results_of(first), results, reports);
}

#define RAPT_OPERATION(name, Name, NAME) \
  template void run_again(const WatchedCall<Name##Args>&, const Context::Impl&, const SavedState&, Reports&);
#include "rapt/operations.def"

}  // namespace rapt
