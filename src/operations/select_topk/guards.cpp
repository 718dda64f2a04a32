// Guards of select_topk.
#include "guards/not_finite.hpp"
#include "operations/select_topk/operation.hpp"

namespace rapt {

// NaN is the largest score, then comes infinity: the first one selected tells.
void find_not_finite(const WatchedCall<SelectTopkArgs>& w, const SavedState&, Reports& reports) {
  const TensorView indices = w.args.indices, &scores = w.args.scores;
  const auto last = static_cast<std::size_t>(scores.ndim - 1);
  any_row(indices, [&](const void* row, const Index& at) {
    const std::int32_t best = *static_cast<const std::int32_t*>(row);
    if (best < 0) return false;
    Block block{"scores", scores};
    for (std::size_t dim = 0; dim < last; ++dim) block = slice(block, dim, at[dim], 1);
    const auto found = first_not_finite_in(slice(block, last, best, 1));
    if (found) reports.add(GuardReport::Guard::nan, found->place, found->value);
    return found.has_value();
  });
}

const char* why_not_again(const SelectTopkArgs&) {
  return nullptr;
}

}  // namespace rapt
