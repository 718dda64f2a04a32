#include "operations/cost.hpp"

#include <algorithm>
#include <vector>

namespace rapt {
namespace {

/// Of `rows` rows of n elements.
double row_bytes(double rows, std::int64_t n, DType dtype) {
  return rows * static_cast<double>(n) * bytes_of(dtype);
}

double whole_bytes(const TensorView& t) {
  double bytes = t ? bytes_of(t.dtype) : 0;
  for (int dim = 0; dim < t.ndim; ++dim) bytes *= static_cast<double>(t.shape[static_cast<std::size_t>(dim)]);
  return bytes;
}

/// Of scales or zeros for `rows` rows. Where they broadcast, there are fewer.
double scale_bytes(const TensorView& t, double rows) {
  return t ? std::min(whole_bytes(t), row_bytes(rows, t.shape[static_cast<std::size_t>(t.ndim - 1)], t.dtype)) : 0;
}

/// What causal, window, align, lengths, rings and lists leave of a call, in all its heads.
struct Work {
  double pairs = 0, rows = 0, keys = 0;  ///< pairs of a row and a key that it sees; keys that some row sees

  explicit Work(const AttentionParams& p) {
    if (p.tokens > 0) count_lists(p);
    else
      for (std::int64_t i = 0; i < p.b; ++i) count_sequence(p, sequence_of(p, p, i));
    const auto hk = static_cast<double>(p.hk), hq = static_cast<double>(p.hk * p.group);
    pairs *= hq, rows *= hq, keys *= hk;
  }

 private:
  void count_sequence(const AttentionParams& p, const Sequence& s) {
    const std::int64_t offset = row_offset(p.score, s);
    std::int64_t next = s.oldest;  // rows see ranges that move on: keys before this one are counted
    for (std::int64_t token = 0; token < s.len_q; ++token) {
      const KeyRange seen = visible_keys(p.score, token, offset + token, s.oldest, s.len_k);
      pairs += static_cast<double>(std::max<std::int64_t>(0, seen.last - seen.first));
      keys += static_cast<double>(std::max<std::int64_t>(0, seen.last - std::max(seen.first, next)));
      next = std::max(next, seen.last);
    }
    rows += static_cast<double>(s.len_q);
  }
  void count_lists(const AttentionParams& p) {
    std::vector<bool> listed(static_cast<std::size_t>(p.page_count));  // of the pool at hand
    for (std::int64_t i = 0; i < p.b; ++i) {
      Sequence s = sequence_of(p, p, i);
      const std::int64_t entry = entry_of(p, i, s);
      if (p.k_stride.b != 0 && s.q_first == 0) listed.assign(listed.size(), false);
      for (std::int64_t j = 0; j < s.len_k; ++j) {
        auto is_listed = listed[static_cast<std::size_t>(listed_row(p, entry, s.k_first, j))];
        if (!is_listed) ++keys;
        is_listed = true;
      }
      pairs += static_cast<double>(s.len_k);
    }
    rows = static_cast<double>(p.b);
  }
};

}  // namespace

Cost cost_of(const AttentionArgs& args, const Call& call) {
  if (call.is_empty) return {};  // its lists have not been checked
  const auto& p = std::get<AttentionProblem>(call.problem);
  const auto& params = std::get<AttentionParams>(call.params);
  const Work work(params);
  const std::int64_t own_values = values_in_keys(params) ? 0 : p.dv;  // columns that keys do not have
  Cost cost;
  cost.flops = 2 * work.pairs * static_cast<double>(p.d + p.dv);
  cost.bytes = row_bytes(work.rows, p.d, p.q_dtype) + row_bytes(work.keys, p.d - p.k_tail + own_values, p.kv_dtype) +
               row_bytes(work.keys, p.k_tail, p.k_tail_dtype) + row_bytes(work.rows, p.dv, p.out_dtype);
  cost.bytes += scale_bytes(args.q_scale, work.rows);
  const KvSource& kv = args.kv;
  for (const TensorView* t : {&kv.k_scale, &kv.k_zero}) cost.bytes += scale_bytes(*t, work.keys);
  if (kv.k_scale && kv.v_scale.data == kv.k_scale.data) return cost;
  for (const TensorView* t : {&kv.v_scale, &kv.v_zero}) cost.bytes += scale_bytes(*t, work.keys);
  return cost;
}

Cost cost_of(const AttentionBackwardArgs& args, const Call& call) {
  if (call.is_empty) return {};
  const auto& p = std::get<AttentionBackwardProblem>(call.problem);
  const Work work(std::get<AttentionBackwardParams>(call.params));
  const bool scores = (p.grads & (p.kDq | p.kDk)) || p.dbias || p.dsinks || p.dalibi;  // else P alone is needed
  const std::int64_t of_d = 1 + (p.grads & p.kDq ? 1 : 0) + (p.grads & p.kDk ? 1 : 0),
                     of_dv = (scores ? 1 : 0) + (p.grads & p.kDv ? 1 : 0);
  Cost cost;
  cost.flops = 2 * work.pairs * static_cast<double>(of_d * p.d + of_dv * p.dv);
  cost.bytes = row_bytes(work.rows, p.d, p.q_dtype) + row_bytes(work.keys, p.d + p.dv, p.kv_dtype) +
               row_bytes(work.rows, p.dv, p.out_dtype) + row_bytes(work.rows, p.dv, p.dout_dtype) +
               row_bytes(work.rows, p.dlse ? 2 : 1, DType::f32);
  if (args.dq) cost.bytes += row_bytes(work.rows, p.d, args.dq.dtype);
  if (args.dk) cost.bytes += row_bytes(work.keys, p.d, args.dk.dtype);
  if (args.dv) cost.bytes += row_bytes(work.keys, p.dv, args.dv.dtype);
  return cost;
}

Cost cost_of(const AppendKvArgs& args, const Call& call) {
  const auto& p = std::get<AppendKvProblem>(call.problem);
  const auto& params = std::get<AppendKvParams>(call.params);
  double rows = 0;
  for (std::int64_t i = 0; i < p.b; ++i) {
    const std::int64_t n = new_rows(params, i).count;
    rows += static_cast<double>(p.ring ? std::min(n, p.sk) : n);
  }
  rows *= static_cast<double>(p.hk);
  const std::int64_t size = p.values_are_keys ? p.d : p.d + p.dv;
  Cost cost;
  cost.bytes = row_bytes(rows, size, p.new_dtype) + row_bytes(rows, size - p.k_tail, p.kv_dtype) +
               row_bytes(rows, p.k_tail, p.k_tail_dtype);
  const KvCache& cache = args.cache;
  for (const MutableTensorView* t : {&cache.k_scale, &cache.k_zero}) cost.bytes += scale_bytes(*t, rows);
  if (p.values_are_keys) return cost;
  for (const MutableTensorView* t : {&cache.v_scale, &cache.v_zero}) cost.bytes += scale_bytes(*t, rows);
  return cost;
}

Cost cost_of(const MergeStatesArgs& args, const Call& call) {
  const auto& p = std::get<MergeStatesProblem>(call.problem);
  Cost cost;
  cost.flops = 2 * static_cast<double>(p.rows) * static_cast<double>(p.dv) * static_cast<double>(p.count);
  cost.bytes = row_bytes(p.rows, p.dv, p.out_dtype) + row_bytes(p.rows, p.count + (p.lse ? 1 : 0), DType::f32);
  for (const TensorView& out : args.outs) cost.bytes += row_bytes(p.rows, p.dv, out.dtype);
  return cost;
}

Cost cost_of(const DeltaRuleArgs& args, const Call& call) {
  const auto& p = std::get<DeltaRuleProblem>(call.problem);
  const bool has_delta = p.rule == UpdateRule::delta || p.rule == UpdateRule::gated_delta;
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t, outs = std::max(p.hq, h);
  const double state = static_cast<double>(p.d) * static_cast<double>(p.dv);
  Cost cost;
  cost.flops = static_cast<double>(tokens) * state *
               (static_cast<double>(h) * (has_delta ? 4 : 2) + static_cast<double>(outs) * 2);
  cost.bytes = row_bytes(tokens * p.hq, p.d, args.q.dtype) + row_bytes(tokens * p.hk, p.d, args.k.dtype) +
               row_bytes(tokens * p.hv, p.dv, args.v.dtype) + row_bytes(tokens * outs, p.dv, args.out.dtype);
  if (args.beta) cost.bytes += row_bytes(tokens, h, args.beta.dtype);
  if (p.decay == Decay::constant) cost.bytes += row_bytes(1, h, args.g.dtype);
  else if (args.g) cost.bytes += row_bytes(tokens * h, p.decay == Decay::channel ? p.d : 1, args.g.dtype);
  const double elements = state * static_cast<double>(p.b * h);
  if (args.initial_state) cost.bytes += elements * bytes_of(args.initial_state.dtype);
  if (args.final_state)
    cost.bytes += elements * bytes_of(args.final_state.dtype) * static_cast<double>(p.steps > 0 ? p.t : 1);
  return cost;
}

Cost cost_of(const DeltaRuleBackwardArgs& args, const Call& call) {
  const auto& p = std::get<DeltaRuleBackwardProblem>(call.problem);
  const bool has_delta = p.rule == UpdateRule::delta || p.rule == UpdateRule::gated_delta;
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t;
  const DeltaRuleArgs& f = args.forward;
  Cost cost;
  cost.flops = static_cast<double>(tokens * p.d * p.dv) *
               static_cast<double>(h * (has_delta ? 16 : 10) + 4 * std::max<std::int64_t>(p.hq - h, 0));
  for (const TensorView* t :
       {&f.q, &f.k, &f.v, &f.g, &f.beta, &f.initial_state, &f.a_log, &f.dt_bias, &args.dout, &args.dfinal_state})
    cost.bytes += whole_bytes(*t);
  for (const MutableTensorView* t :
       {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.dinitial_state, &args.da_log, &args.ddt_bias})
    cost.bytes += whole_bytes(*t);
  return cost;
}

Cost cost_of(const IndexScoresArgs&, const Call& call) {
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
  const std::int64_t rows = p.b * p.sq;
  Cost cost;
  cost.flops = 2 * pairs * static_cast<double>(p.h) * static_cast<double>(p.d);
  cost.bytes = row_bytes(rows * p.h, p.d, p.q_dtype) + row_bytes(rows, p.h, DType::f32) +
               row_bytes(keys, p.d, p.k_dtype) + row_bytes(p.scales ? keys : 0, 1, DType::f32) +
               row_bytes(p.scores ? rows : 0, p.sk, DType::f32) + row_bytes(rows, p.topk, DType::i32);
  return cost;
}

Cost cost_of(const SelectTopkArgs&, const Call& call) {
  const auto& p = std::get<SelectTopkProblem>(call.problem);
  Cost cost;
  cost.bytes = row_bytes(p.rows, p.sk, DType::f32) + row_bytes(p.rows, p.n, DType::i32);
  return cost;
}

Cost cost_of(const AttentionArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const AttentionBackwardArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const AppendKvArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const MergeStatesArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const DeltaRuleArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const DeltaRuleBackwardArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const IndexScoresArgs& args) {
  return cost_of(args, validate(args));
}
Cost cost_of(const SelectTopkArgs& args) {
  return cost_of(args, validate(args));
}

}  // namespace rapt
