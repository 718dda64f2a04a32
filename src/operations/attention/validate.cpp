// attention: arguments -> Call, or an Error that names the argument. Nothing is written, and nothing is read but
// lengths, block tables and lists of keys in host memory.
#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/lists.hpp"
#include "operations/attention/operation.hpp"
#include "operations/c_values.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = AttentionProblem;

// The order in memory that q, k, v and out have.
AttentionProblem::Layout layout_of(const TensorView& q, const TensorView& k, const TensorView& v, const Layout& out) {
  using enum AttentionProblem::Layout;
  const auto matches = [](const Layout& t, std::array<std::size_t, 4> order) {  // outermost first
    int64_t step = 1;
    for (std::size_t i = 4; i-- > 0;) {
      const std::size_t dim = order[i];
      if (t.shape[dim] > 1 && t.strides[dim] != step) return false;
      if (i > 0 && __builtin_mul_overflow(step, std::max<int64_t>(t.shape[dim], 1), &step)) return false;
    }
    return true;
  };
  if (q.ndim != 4 || k.ndim != 4) return bhsd;  // ragged rows have one customary order
  for (const auto& [layout, order] :
       {std::pair{bhsd, std::array<std::size_t, 4>{0, 1, 2, 3}}, {bshd, {0, 2, 1, 3}}, {bhds, {0, 1, 3, 2}}})
    if (matches(q, order) && matches(k, order) && matches(v, order) && matches(out, order)) return layout;
  return other;
}

// Whether rows of v are what rows of k begin with. Strides along dimensions of one element may be any numbers.
bool begins_rows(const TensorView& v, const TensorView& k) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(v.ndim); ++i)
    if (v.shape[i] > 1 && v.strides[i] != k.strides[i]) return false;
  return k.data && v.data == k.data;
}

// Whether no scale of k or v depends on a key's row, nor on its page.
bool has_head_scales(const P& p, const AttentionParams& f) {
  const auto of_heads = [&](int64_t groups, const Strides& s) {
    return groups == 0 || (s.s == 0 && (p.page_size == 0 || s.b == 0));
  };
  return p.k_groups + p.v_groups > 0 && of_heads(p.k_groups, f.k_quant.scale_stride) &&
         of_heads(p.v_groups, f.v_quant.scale_stride);
}

P problem_of(const AttentionArgs& args, const Bound& bound) {
  const KvSource& kv = args.kv;
  P p;
  p.device = bound.device.type;
  p.q_dtype = args.q.dtype, p.kv_dtype = kv.k.dtype, p.out_dtype = args.out.dtype;
  p.b = bound[attention_dimension("b")];
  p.hq = bound[attention_dimension("hq")], p.hk = bound[attention_dimension("hk")];
  p.sq = bound[attention_dimension("sq")], p.sk = bound[attention_dimension("sk")];
  p.d = bound[attention_dimension("d")], p.dv = bound[attention_dimension("dv")];
  p.lse = static_cast<bool>(args.lse), p.q_scale = static_cast<bool>(args.q_scale);
  if (bound.features & AttentionFeatures::ragged_q) p.ragged_q = bound[attention_dimension("total_q")];
  fill_kind(bound.features, bound, p);
  p.kv_lengths = static_cast<bool>(kv.seqlens);
  if (kv.k_scale) p.k_groups = bound[attention_dimension("k_groups")];
  if (kv.v_scale) p.v_groups = bound[attention_dimension("v_groups")];
  p.zeros = kv.k_zero || kv.v_zero;
  if (kv.k_tail) p.k_tail = bound[attention_dimension("tail")], p.k_tail_dtype = kv.k_tail.dtype;
  return p;
}

void fill_tensors(const AttentionArgs& args, const P& p, AttentionParams& f) {
  const KvSource& kv = args.kv;
  const bool ragged_q = p.ragged_q >= 0, ragged_k = p.ragged_k >= 0;
  f.q = args.q.data, f.k = kv.k.data, f.v = kv.v.data, f.out = args.out.data;
  f.q_stride = row_strides(args.q, ragged_q, true), f.out_stride = row_strides(args.out, ragged_q, true);
  f.k_stride = row_strides(kv.k, ragged_k, true), f.v_stride = row_strides(kv.v, ragged_k, true);
  if (args.lse) f.lse = static_cast<float*>(args.lse.data), f.lse_stride = row_strides(args.lse, ragged_q, false);
  const auto fill = [](const TensorView& t, bool ragged, const float*& data, Strides& stride) {
    if (t) data = static_cast<const float*>(t.data), stride = row_strides(t, ragged, true);
  };
  fill(args.q_scale, ragged_q, f.q_scale, f.q_scale_stride);
  fill(kv.k_scale, ragged_k, f.k_quant.scale, f.k_quant.scale_stride);
  fill(kv.v_scale, ragged_k, f.v_quant.scale, f.v_quant.scale_stride);
  fill(kv.k_zero, ragged_k, f.k_quant.zero, f.k_quant.zero_stride);
  fill(kv.v_zero, ragged_k, f.v_quant.zero, f.v_quant.zero_stride);
  if (kv.k_tail) f.k_tail = {kv.k_tail.data, kv.k_tail.dtype, row_strides(kv.k_tail, ragged_k, true), p.k_tail};
}

}  // namespace

AttentionProblem bind_forward(const AttentionArgs& args, const Bound& bound, AttentionParams& f,
                              std::shared_ptr<const void>& lists) {
  const bool on_host = bound.device.type == DeviceType::cpu;
  const TensorView &k = args.kv.k, &v = args.kv.v;
  P p = problem_of(args, bound);
  if (!has_positions(p)) check_row_count(p.b, std::max(p.hq, p.hk), p.sq);  // before tokens are counted
  fill_tensors(args, p, f);
  fill_keys(args, p, f);
  p.head_scales = has_head_scales(p, f);
  // Values that are whole keys, as in self-attention over one tensor, are no part of a latent row.
  p.latent = begins_rows(v, k) && p.dv <= p.d - p.k_tail && p.dv < p.d;
  p.layout = layout_of(args.q, k, p.latent ? k : v, args.out);
  fill_sizes(p, f);
  fill_score(args.score, p, f);
  check(p);
  if (!on_host && p.page_size > 0 && f.page_count == 0) f.sk = 0;  // no key can be there, whatever lengths say
  check_visible_keys(p, f);
  if (!has_positions(p) && on_host && p.hq > 0) lists = read_lists(f);
  return p;
}

Call OperationOf<AttentionArgs>::bind(const Args& args, Bound& bound) {
  Call call{P{}, AttentionParams{}, bound.device, bound.writes_nothing(), nullptr};
  call.problem = bind_forward(args, bound, std::get<AttentionParams>(call.params), call.storage);
  return call;
}

void set_attention_scalars(const rapt_attention_args& c, KvSource& kv, ScoreSpec& score) {
  kv.kind = c::to_enum(c.kv_kind, AttentionFeatures::last, "kv.kind");
  if (c.has_scale) score.scale = c.scale;
  score.causal = c.causal != 0;
  if (c.has_window) score.window = {c.window_left, c.window_right};
  score.align = c::to_align(c.align, c.align_offset, "score.align");
  Modifiers::for_each([&]<class M>(M) { M::set(c, score); });
}

void fill_sizes(const AttentionProblem& problem, AttentionParams& f) {
  const AttentionProblem p = in_sequences(problem);
  f.q_type = p.q_dtype, f.kv_type = p.kv_dtype, f.out_type = p.out_dtype;
  f.b = p.b, f.hk = p.hk, f.sq = p.sq, f.sk = p.sk, f.d = p.d, f.dv = p.dv;
  f.group = p.hk > 0 ? p.hq / p.hk : 0;  // without query heads there is nothing to read
  f.total_q = p.ragged_q, f.total_k = p.ragged_k;
  fill_layout(problem, f);
  f.k_quant.group = (p.d - p.k_tail) / std::max<int64_t>(p.k_groups, 1);
  f.v_quant.group = p.dv / std::max<int64_t>(p.v_groups, 1);
}

Needs needs_of(const AttentionProblem& p) {
  return {set_of(p.q_dtype) | set_of(p.kv_dtype), p.d, p.dv};
}

}  // namespace rapt
