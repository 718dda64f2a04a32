// Guards of attention_backward.
#include "guards/not_finite.hpp"
#include "operations/attention_backward/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

// The rows of k or v that some query row sees.
template <class F>
void for_each_seen(const AttentionParams& p, const Block& whole, F f) {
  const bool ragged = static_cast<bool>(p.k_begin);
  for (int64_t i = 0; i < p.b; ++i) {
    Sequence s = sequence_of(p, p, i);
    const int64_t entry = entry_of(p, i, s);
    if (p.tokens > 0) {
      const Block pool = slice(whole, 0, whole.view.shape[0] == 1 ? 0 : entry, 1);
      for (int64_t j = 0; j < s.len_k; ++j) f(slice(pool, 2, listed_row(p, entry, s.k_first, j), 1));
      continue;
    }
    const KeyRange keys = visible_keys(p.score, s);
    if (keys.first >= keys.last) continue;
    if (ragged) f(slice(whole, 0, s.k_first + keys.first, keys.last - keys.first));
    else f(slice(slice(whole, 0, i, 1), 2, keys.first, keys.last - keys.first));
  }
}

std::optional<NotFinite> cause_of(const WatchedCall<AttentionBackwardArgs>& w) {
  const AttentionBackwardArgs& a = w.args;
  const auto& p = std::get<AttentionBackwardParams>(w.call.params);
  FirstNotFinite first;
  first("q", a.q);
  for_each_seen(p, {"k", a.kv.k}, [&](const Block& block) { first(block); });
  for_each_seen(p, {"v", a.kv.v}, [&](const Block& block) { first(block); });
  first("score.bias", a.score.bias, true), first("score.alibi", a.score.alibi),
      first("score.sinks", a.score.sinks, true);
  first("out", a.out), first("lse", a.lse, true), first("dout", a.dout), first("dlse", a.dlse);
  return first.found();
}

}  // namespace

void find_not_finite(const WatchedCall<AttentionBackwardArgs>& w, const SavedState&, Reports& reports) {
  if (const auto result = not_finite_result(w.args)) report(reports, *result, cause_of(w));
}

const char* why_not_again(const AttentionBackwardArgs&) {
  return nullptr;
}

}  // namespace rapt
