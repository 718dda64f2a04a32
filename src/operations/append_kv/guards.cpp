// Guards of append_kv.
#include "operations/append_kv/guards.hpp"

#include "operations/append_kv/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

// New rows of k or v, and the rows of a cache that they became. `column` is that of k_new where these begin.
std::optional<NotFinite> not_finite_row(const AppendKvParams& p, const AppendKvSide& side, const Block& from,
                                        const Block& to, int64_t column) {
  for (int64_t i = 0; i < p.b; ++i) {
    const NewRows rows = new_rows(p, i);
    for (int64_t n = first_kept(p, rows.count); n < rows.count; ++n)
      for (int64_t head = 0; head < p.hk; ++head) {
        const Block given = p.from_begin ? slice(slice(from, 0, rows.first + n, 1), 1, head, 1)
                                         : slice(slice(slice(from, 0, i, 1), 1, head, 1), 2, n, 1);
        if (auto found =
                first_not_finite_in(slice(given, static_cast<std::size_t>(from.view.ndim - 1), column, side.size)))
          return found;
        if (!(set_of(side.to_type) & (kFloatTypes | kFp8Types))) continue;
        const int64_t key = p.len_before[i] + n, row = row_in_block(p, key);
        if (auto found = first_not_finite_in(slice(slice(slice(to, 0, block_of(p, i, key), 1), 1, head, 1), 2, row, 1)))
          return found;
      }
  }
  return {};
}

}  // namespace

std::optional<NotFinite> not_finite_rows(const AppendKvArgs& a, const AppendKvParams& p) {
  for (int i = 0; i < p.sides; ++i) {
    const AppendKvSide& side = p.side[i];
    const bool is_k = side.to == a.cache.k.data, is_tail = a.cache.k_tail && side.to == a.cache.k_tail.data;
    const TensorView& from = is_k || is_tail ? a.k_new : a.v_new;
    const Block to = is_tail ? Block{"cache.k_tail", a.cache.k_tail}
                     : is_k  ? Block{"cache.k", a.cache.k}
                             : Block{"cache.v", a.cache.v};
    auto found = not_finite_row(p, side, {is_k || is_tail ? "k_new" : "v_new", from}, to, is_tail ? p.side[0].size : 0);
    if (found) return found;
  }
  return {};
}

void find_not_finite(const WatchedCall<AppendKvArgs>& w, const SavedState&, Reports& reports) {
  const auto found = not_finite_rows(w.args, std::get<AppendKvParams>(w.call.params));
  if (found) reports.add(GuardReport::Guard::nan, found->place, found->value);
}

const char* why_not_again(const AppendKvArgs&) {
  return "a cache is written in place";
}

}  // namespace rapt
