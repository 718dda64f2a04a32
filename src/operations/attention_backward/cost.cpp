#include "operations/cost.hpp"

#include "operations/attention/work.hpp"

namespace rapt {

Cost cost_of(const AttentionBackwardArgs& args, const Call& call) {
  if (call.is_empty) return {};
  const auto& p = std::get<AttentionBackwardProblem>(call.problem);
  const AttentionWork work(std::get<AttentionBackwardParams>(call.params));
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

}  // namespace rapt
