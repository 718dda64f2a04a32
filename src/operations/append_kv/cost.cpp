// The work in a call of append_kv.
#include "operations/cost.hpp"

#include "operations/append_kv/operation.hpp"

namespace rapt {

Cost append_cost(const AppendKvArgs& args, const AppendKvProblem& p, const AppendKvParams& params) {
  double rows = 0;
  for (std::int64_t i = 0; i < p.b; ++i) {
    const std::int64_t n = new_rows(params, i).count;
    rows += static_cast<double>(n - first_kept(params, n));
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

Cost cost_of(const AppendKvArgs& args, const Call& call) {
  return append_cost(args, std::get<AppendKvProblem>(call.problem), std::get<AppendKvParams>(call.params));
}

}  // namespace rapt
