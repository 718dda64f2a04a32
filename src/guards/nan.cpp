// Which results are not finite, and what of the inputs made them so.
//
// What a call hides from its results (masked keys, padding, rows past a length) may hold anything, so that results are
// looked at first. Of attention the row of the first bad result is followed from its query to its output; of other
// operations, the inputs that the call may read are gone through in the order in which it takes them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "guards/attention_row.hpp"
#include "guards/guards.hpp"

namespace rapt {
namespace {

using std::int64_t;
using Guard = GuardReport::Guard;
using Place = GuardReport::Place;

struct Bad {
  Place place;
  double value;
};

std::optional<Bad> first_bad(const Block& block) {
  const std::optional<Found> found = first_not_finite(block);
  if (!found) return {};
  return Bad{{block.name, to_vector(found->index, block.view.ndim)}, static_cast<double>(found->value)};
}

// The first of several blocks, as they come to it.
class FirstBad {
 public:
  void operator()(const Block& block) {
    if (!bad_) bad_ = first_bad(block);
  }
  void operator()(std::string name, const TensorView& view, bool minus_infinity = false) {
    (*this)(Block{std::move(name), view, minus_infinity, {}});
  }
  const std::optional<Bad>& bad() const { return bad_; }

 private:
  std::optional<Bad> bad_;
};

void report(Reports& reports, const Bad& result, const std::optional<Bad>& cause) {
  if (cause) reports.find(Guard::nan, cause->place, cause->value, 0, 0, result.place);
  else reports.find(Guard::nan, result.place, result.value);
}

// Attention.

const char* name_of(AttentionRow::Stage stage) {
  constexpr const char* kNames[] = {"q",           "q_scale",     "k",          "kv.k_scale", "kv.k_zero",
                                    "kv.k_tail",   "v",           "kv.v_scale", "kv.v_zero",  "score.bias",
                                    "score.alibi", "score.sinks", "scores"};
  return kNames[static_cast<std::size_t>(stage)];
}

// The rows of k or v that some query row sees.
template <class F>
void for_each_seen(const AttentionParams& p, const Block& whole, F f) {
  const bool ragged = static_cast<bool>(p.k_begin);
  for (int64_t i = 0; i < p.b; ++i) {
    Sequence s = sequence_of(p, p, i);
    const int64_t entry = entry_of(p, i, s);
    if (p.tokens > 0) {
      const Block pool = cut(whole, 0, whole.view.shape[0] == 1 ? 0 : entry, 1);
      for (int64_t j = 0; j < s.len_k; ++j) f(cut(pool, 2, listed_row(p, entry, s.k_first, j), 1));
      continue;
    }
    const KeyRange keys = visible_keys(p.score, s);
    if (keys.first >= keys.last) continue;
    if (ragged) f(cut(whole, 0, s.k_first + keys.first, keys.last - keys.first));
    else f(cut(cut(whole, 0, i, 1), 2, keys.first, keys.last - keys.first));
  }
}

std::optional<Bad> cause_of(const Watched<AttentionArgs>& w, const Bad& result, const StateBefore&) {
  const std::vector<int64_t>& at = result.place.index;
  AttentionRow row(w.args.kv, w.args.score, std::get<AttentionProblem>(w.call.problem),
                   std::get<AttentionParams>(w.call.params));
  row.compute(w.args.out.ndim == 3 ? at[0] : at[0] * w.args.out.shape[2] + at[2], at[1]);
  if (row.first.stage == AttentionRow::Stage::none) return {};
  return Bad{{name_of(row.first.stage), row.first.index}, row.first.value};
}

std::optional<Bad> cause_of(const Watched<AttentionBackwardArgs>& w, const Bad&, const StateBefore&) {
  const AttentionBackwardArgs& a = w.args;
  const auto& p = std::get<AttentionBackwardParams>(w.call.params);
  FirstBad first;
  first("q", a.q);
  for_each_seen(p, {"k", a.kv.k}, [&](const Block& block) { first(block); });
  for_each_seen(p, {"v", a.kv.v}, [&](const Block& block) { first(block); });
  first("score.bias", a.score.bias, true), first("score.alibi", a.score.alibi),
      first("score.sinks", a.score.sinks, true);
  first("out", a.out), first("lse", a.lse, true), first("dout", a.dout), first("dlse", a.dlse);
  return first.bad();
}

// The delta rule.

template <class F>
void for_each_initial_state(const DeltaRuleArgs& a, const DeltaRuleParams& p, F f) {
  if (!a.state_slots) return f({"initial_state", a.initial_state});
  if (!a.initial_state) return;
  for (int64_t b = 0; b < p.b; ++b)
    if (const int64_t slot = initial_slot(p, b); slot >= 0) f(cut({"initial_state", a.initial_state}, 0, slot, 1));
}
// Slots that the call wrote: one of each sequence, or of each of its tokens.
template <class F>
void for_each_final_state(const DeltaRuleArgs& a, const DeltaRuleParams& p, F f) {
  if (!a.state_slots) return f({"final_state", a.final_state});
  if (!a.final_state) return;
  const bool each_token = a.state_slots.ndim == 2;
  for (int64_t b = 0; b < p.b; ++b)
    for (int64_t step = 0; step < (each_token ? std::min(p.steps, tokens_of(p, b).count) : 1); ++step)
      if (const int64_t slot = slot_of(p, b, step); slot >= 0) f(cut({"final_state", a.final_state}, 0, slot, 1));
}
void look_at_inputs(const DeltaRuleArgs& a, FirstBad& first) {
  first("q", a.q), first("k", a.k), first("v", a.v), first("g", a.g, true), first("beta", a.beta);
  first("a_log", a.a_log), first("dt_bias", a.dt_bias);
}

std::optional<Bad> bad_result(const Watched<DeltaRuleArgs>& w) {
  FirstBad first;
  first("out", w.args.out);
  for_each_final_state(w.args, std::get<DeltaRuleParams>(w.call.params), [&](const Block& block) { first(block); });
  return first.bad();
}
std::optional<Bad> cause_of(const Watched<DeltaRuleArgs>& w, const Bad&, const StateBefore& before) {
  FirstBad first;
  look_at_inputs(w.args, first);
  if (first.bad()) return first.bad();
  if (!before.not_finite.empty()) return Bad{{"initial_state", before.not_finite}, before.value};
  if (!is_updated_in_place(w.args))
    for_each_initial_state(w.args, std::get<DeltaRuleParams>(w.call.params), [&](const Block& block) { first(block); });
  return first.bad();
}
std::optional<Bad> cause_of(const Watched<DeltaRuleBackwardArgs>& w, const Bad&, const StateBefore&) {
  FirstBad first;
  look_at_inputs(w.args.forward, first);
  first("initial_state", w.args.forward.initial_state);
  first("dout", w.args.dout), first("dfinal_state", w.args.dfinal_state);
  return first.bad();
}

// Merging.

std::optional<Bad> cause_of(const Watched<MergeStatesArgs>& w, const Bad& result, const StateBefore&) {
  std::vector<int64_t> row = result.place.index;
  row.resize(static_cast<std::size_t>(w.args.out.ndim - 1));
  for (std::size_t i = 0; i < w.args.outs.size(); ++i) {
    Block lse{"lses[" + std::to_string(i) + "]", w.args.lses[i], true},
        out{"outs[" + std::to_string(i) + "]", w.args.outs[i]};
    for (std::size_t dim = 0; dim < row.size(); ++dim)
      lse = cut(lse, dim, row[dim], 1), out = cut(out, dim, row[dim], 1);
    if (auto bad = first_bad(lse)) return bad;
    // A part without keys is not looked at.
    if (std::isinf(element_of(lse.view.data, DType::f32, 1, 0))) continue;
    if (auto bad = first_bad(out)) return bad;
  }
  return {};
}

// The indexer.

std::optional<Bad> cause_of(const Watched<IndexScoresArgs>& w, const Bad&, const StateBefore&) {
  const IndexScoresArgs& a = w.args;
  const auto& p = std::get<IndexScoresParams>(w.call.params);
  FirstBad first;
  first("q", a.q), first("weights", a.weights);
  for (int64_t i = 0; i < p.b; ++i) {
    const Sequence s = sequence_of(p, p, i);
    KeyRange seen{s.len_k, 0};  // by some query
    for (int64_t token = 0; token < p.sq; ++token) {
      const KeyRange keys = visible_keys(p, i, s, token);
      if (keys.first < keys.last) seen = {std::min(seen.first, keys.first), std::max(seen.last, keys.last)};
    }
    for (const auto& [name, t] : {std::pair{"k", a.k}, {"k_scale", a.k_scale}})
      for (int64_t j = seen.first; t && j < seen.last && !first.bad(); ++j)
        first(cut(cut({name, t}, 0, block_of(p, i, j), 1), 1, p.page_size > 0 ? j % p.page_size : j, 1));
  }
  return first.bad();
}

// New rows of k or v, and the rows of a cache that they became. `column` is that of k_new where these begin.
std::optional<Bad> bad_row(const Watched<AppendKvArgs>& w, const AppendKvSide& side, const Block& from, const Block& to,
                           int64_t column) {
  const auto& p = std::get<AppendKvParams>(w.call.params);
  for (int64_t i = 0; i < p.b; ++i) {
    const NewRows rows = new_rows(p, i);
    // Of more rows than a ring has, the last ones stay.
    const int64_t begin = p.ring ? std::max<int64_t>(rows.count - p.page_size, 0) : 0;
    for (int64_t n = begin; n < rows.count; ++n)
      for (int64_t head = 0; head < p.hk; ++head) {
        const Block given = p.from_begin ? cut(cut(from, 0, rows.first + n, 1), 1, head, 1)
                                         : cut(cut(cut(from, 0, i, 1), 1, head, 1), 2, n, 1);
        if (auto bad = first_bad(cut(given, static_cast<std::size_t>(from.view.ndim - 1), column, side.size)))
          return bad;
        if (!(only(side.to_type) & (kFloatTypes | only(DType::f8e4m3) | only(DType::f8e5m2)))) continue;
        const int64_t key = p.len_before[i] + n, row = p.page_size > 0 ? key % p.page_size : key;
        if (auto bad = first_bad(cut(cut(cut(to, 0, block_of(p, i, key), 1), 1, head, 1), 2, row, 1))) return bad;
      }
  }
  return {};
}

// Of operations whose results show what went wrong, whatever it was.
template <class Args>
std::optional<Bad> bad_result(const Watched<Args>& w) {
  FirstBad first;
  Args args = w.args;
  for (const auto& [name, view] : results_of(args)) {
    // Of rows without keys, and of hidden keys.
    const bool minus_infinity = std::strcmp(name, "lse") == 0 || std::strcmp(name, "scores") == 0;
    first(name, *view, minus_infinity);
  }
  return first.bad();
}

}  // namespace

template <class Args>
void find_not_finite(const Watched<Args>& w, const StateBefore& before, Reports& reports) {
  if (const auto result = bad_result(w)) report(reports, *result, cause_of(w, *result, before));
}

// Indices show nothing, so that without scores the inputs are gone through in every call.
template <>
void find_not_finite(const Watched<IndexScoresArgs>& w, const StateBefore& before, Reports& reports) {
  if (!w.args.scores) {
    if (const auto bad = cause_of(w, {}, before)) reports.find(Guard::nan, bad->place, bad->value);
    return;
  }
  FirstBad first;
  first("scores", w.args.scores, true);
  if (first.bad()) report(reports, *first.bad(), cause_of(w, *first.bad(), before));
}

// NaN is the largest score, then comes infinity: the first one selected tells.
template <>
void find_not_finite(const Watched<SelectTopkArgs>& w, const StateBefore&, Reports& reports) {
  const TensorView indices = w.args.indices, &scores = w.args.scores;
  const auto last = static_cast<std::size_t>(scores.ndim - 1);
  any_row(indices, [&](const void* row, const Index& at) {
    const std::int32_t best = *static_cast<const std::int32_t*>(row);
    if (best < 0) return false;
    Block block{"scores", scores};
    for (std::size_t dim = 0; dim < last; ++dim) block = cut(block, dim, at[dim], 1);
    const auto bad = first_bad(cut(block, last, best, 1));
    if (bad) reports.find(Guard::nan, bad->place, bad->value);
    return bad.has_value();
  });
}

template <>
void find_not_finite(const Watched<AppendKvArgs>& w, const StateBefore&, Reports& reports) {
  const auto& p = std::get<AppendKvParams>(w.call.params);
  const AppendKvArgs& a = w.args;
  for (int i = 0; i < p.sides; ++i) {
    const AppendKvSide& side = p.side[i];
    const bool is_k = side.to == a.cache.k.data, is_tail = a.cache.k_tail && side.to == a.cache.k_tail.data;
    const TensorView& from = is_k || is_tail ? a.k_new : a.v_new;
    const Block to = is_tail ? Block{"cache.k_tail", a.cache.k_tail}
                     : is_k  ? Block{"cache.k", a.cache.k}
                             : Block{"cache.v", a.cache.v};
    const auto bad = bad_row(w, side, {is_k || is_tail ? "k_new" : "v_new", from}, to, is_tail ? p.side[0].size : 0);
    if (bad) return reports.find(Guard::nan, bad->place, bad->value);
  }
}

template void find_not_finite(const Watched<AttentionArgs>&, const StateBefore&, Reports&);
template void find_not_finite(const Watched<AttentionBackwardArgs>&, const StateBefore&, Reports&);
template void find_not_finite(const Watched<MergeStatesArgs>&, const StateBefore&, Reports&);
template void find_not_finite(const Watched<DeltaRuleArgs>&, const StateBefore&, Reports&);
template void find_not_finite(const Watched<DeltaRuleBackwardArgs>&, const StateBefore&, Reports&);

void look_at_state(const DeltaRuleArgs& args, const DeltaRuleParams& params, StateBefore& before) {
  if (!is_updated_in_place(args)) return;
  FirstBad first;
  for_each_initial_state(args, params, [&](const Block& block) { first(block); });
  if (first.bad()) before.not_finite = first.bad()->place.index, before.value = first.bad()->value;
}

}  // namespace rapt
