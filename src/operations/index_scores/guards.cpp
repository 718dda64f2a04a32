// Guards of index_scores.
#include "guards/not_finite.hpp"
#include "operations/index_scores/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

std::optional<NotFinite> cause_of(const WatchedCall<IndexScoresArgs>& w) {
  const IndexScoresArgs& a = w.args;
  const auto& p = std::get<IndexScoresParams>(w.call.params);
  FirstNotFinite first;
  first("q", a.q), first("weights", a.weights);
  for (int64_t i = 0; i < p.b; ++i) {
    const Sequence s = sequence_of(p, p, i);
    KeyRange seen{s.len_k, 0};  // by some query
    for (int64_t token = 0; token < p.sq; ++token) {
      const KeyRange keys = visible_keys(p, i, s, token);
      if (keys.first < keys.last) seen = {std::min(seen.first, keys.first), std::max(seen.last, keys.last)};
    }
    for (const auto& [name, t] : {std::pair{"k", a.k}, {"k_scale", a.k_scale}})
      for (int64_t j = seen.first; t && j < seen.last && !first.found(); ++j)
        first(slice(slice({name, t}, 0, block_of(p, i, j), 1), 1, row_in_block(p, j), 1));
  }
  return first.found();
}

}  // namespace

// Indices show nothing, so that without scores the inputs are gone through in every call.
void find_not_finite(const WatchedCall<IndexScoresArgs>& w, const SavedState&, Reports& reports) {
  if (!w.args.scores) {
    if (const auto found = cause_of(w)) reports.add(GuardReport::Guard::nan, found->place, found->value);
    return;
  }
  FirstNotFinite first;
  first("scores", w.args.scores, true);
  if (first.found()) report(reports, *first.found(), cause_of(w));
}

const char* why_not_again(const IndexScoresArgs&) {
  return nullptr;
}

}  // namespace rapt
