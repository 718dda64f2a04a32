#include "operations/cost.hpp"

#include <algorithm>
#include <cstddef>

namespace rapt {

double row_bytes(double rows, std::int64_t n, DType dtype) {
  return rows * static_cast<double>(n) * bytes_of(dtype);
}

double whole_bytes(const TensorView& t) {
  double bytes = t ? bytes_of(t.dtype) : 0;
  for (int dim = 0; dim < t.ndim; ++dim) bytes *= static_cast<double>(t.shape[static_cast<std::size_t>(dim)]);
  return bytes;
}

double scale_bytes(const TensorView& t, double rows) {
  return t ? std::min(whole_bytes(t), row_bytes(rows, t.shape[static_cast<std::size_t>(t.ndim - 1)], t.dtype)) : 0;
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
