// Guards of attention: the row of the first result that is not finite is followed from its query to its output.
#include "guards/not_finite.hpp"
#include "operations/attention/guards_row.hpp"
#include "operations/attention/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

const char* name_of(AttentionRow::Stage stage) {
  constexpr const char* kNames[] = {"q",           "q_scale",     "k",          "kv.k_scale", "kv.k_zero",
                                    "kv.k_tail",   "v",           "kv.v_scale", "kv.v_zero",  "score.bias",
                                    "score.alibi", "score.sinks", "scores"};
  return kNames[static_cast<std::size_t>(stage)];
}

std::optional<NotFinite> cause_of(const WatchedCall<AttentionArgs>& w, const NotFinite& result) {
  const std::vector<int64_t>& at = result.place.index;
  AttentionRow row(w.args.kv, w.args.score, std::get<AttentionProblem>(w.call.problem),
                   std::get<AttentionParams>(w.call.params));
  row.compute(w.args.out.ndim == 3 ? at[0] : at[0] * w.args.out.shape[2] + at[2], at[1]);
  if (row.first.stage == AttentionRow::Stage::none) return {};
  return NotFinite{{name_of(row.first.stage), row.first.index}, row.first.value};
}

}  // namespace

void find_not_finite(const WatchedCall<AttentionArgs>& w, const SavedState&, Reports& reports) {
  if (const auto result = not_finite_result(w.args)) report(reports, *result, cause_of(w, *result));
}

const char* why_not_again(const AttentionArgs&) {
  return nullptr;
}

}  // namespace rapt
