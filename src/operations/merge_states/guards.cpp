// Guards of merge_states.
#include "guards/not_finite.hpp"
#include "operations/merge_states/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

std::optional<NotFinite> cause_of(const WatchedCall<MergeStatesArgs>& w, const NotFinite& result) {
  std::vector<int64_t> row = result.place.index;
  row.resize(static_cast<std::size_t>(w.args.out.ndim - 1));
  for (std::size_t i = 0; i < w.args.outs.size(); ++i) {
    Block lse{"lses[" + std::to_string(i) + "]", w.args.lses[i], true},
        out{"outs[" + std::to_string(i) + "]", w.args.outs[i]};
    for (std::size_t dim = 0; dim < row.size(); ++dim)
      lse = slice(lse, dim, row[dim], 1), out = slice(out, dim, row[dim], 1);
    if (auto found = first_not_finite_in(lse)) return found;
    // A part without keys is not looked at.
    if (std::isinf(element_of(lse.view.data, DType::f32, 1, 0))) continue;
    if (auto found = first_not_finite_in(out)) return found;
  }
  return {};
}

}  // namespace

void find_not_finite(const WatchedCall<MergeStatesArgs>& w, const SavedState&, Reports& reports) {
  if (const auto result = not_finite_result(w.args)) report(reports, *result, cause_of(w, *result));
}

const char* why_not_again(const MergeStatesArgs&) {
  return nullptr;
}

}  // namespace rapt
