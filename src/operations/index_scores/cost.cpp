// The work in a call of index_scores.
#include "operations/cost.hpp"

#include <algorithm>

#include "operations/index_scores/operation.hpp"

namespace rapt {

Cost cost_of(const IndexScoresArgs& args, const Call& call) {
  if (call.is_empty) return {};
  const auto& p = std::get<IndexScoresProblem>(call.problem);
  const auto& params = std::get<IndexScoresParams>(call.params);
  double pairs = 0, keys = 0;  // keys: from the first that some query of a sequence sees to the last
  for (std::int64_t i = 0; i < p.b; ++i) {
    const Sequence s = sequence_of(params, params, i);
    std::int64_t first = s.len_k, last = 0;
    for (std::int64_t token = 0; token < p.sq; ++token) {
      const KeyRange seen = visible_keys(params, i, s, token);
      if (seen.first >= seen.last) continue;
      pairs += static_cast<double>(seen.last - seen.first);
      first = std::min(first, seen.first), last = std::max(last, seen.last);
    }
    keys += static_cast<double>(std::max<std::int64_t>(last - first, 0));
  }
  Cost cost;
  cost.flops = 2 * pairs * static_cast<double>(p.h) * static_cast<double>(p.d);
  cost.bytes = whole_bytes(kArgumentsOf<IndexScoresArgs>, &args, {"k", "k_scale"}) + row_bytes(keys, p.d, p.k_dtype) +
               row_bytes(p.scales ? keys : 0, 1, DType::f32);
  return cost;
}

}  // namespace rapt
