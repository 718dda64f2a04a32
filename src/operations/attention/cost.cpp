// The work in an attention call.
#include "operations/cost.hpp"

#include "operations/attention/work.hpp"

namespace rapt {

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

}  // namespace rapt
