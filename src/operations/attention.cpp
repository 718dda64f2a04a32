// attention: arguments -> Call, or an Error that names the argument. Nothing is written, and nothing is read but
// lengths, block tables and lists of keys in host memory. Here are the shapes of q, k, v and out, scales and layout;
// attention_keys.cpp has the rest of the keys, attention_lists.cpp the lists of gathered ones, attention_score.cpp the
// scores.
#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "operations/attention_check.hpp"
#include "operations/attention_keys.hpp"
#include "operations/attention_lists.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;

class Validator {
 public:
  explicit Validator(const AttentionArgs& args, bool writes = true)
      : args_(args), writes_(writes), tensors_(args.q.device) {}

  void check_all() {
    shapes();
    check_keys(args_, tensors_, p_, f_);
    fill_sizes(p_, f_);
    check_score(args_.score, tensors_, p_, f_);
    check(p_);
    const bool on_host = p_.device == DeviceType::cpu;
    if (!on_host && p_.page_size > 0 && f_.page_count == 0) f_.sk = 0;  // no key can be there, whatever lengths say
    check_visible_keys(p_, f_);
    if (p_.gathered && on_host && !is_empty()) lists_ = read_lists(args_.kv.counts, f_);
  }
  Call run(std::span<const std::byte> workspace) {
    check_all();
    check_overlaps(tensors_.all());
    check_apart(workspace, tensors_.all());
    return {p_, f_, args_.q.device, is_empty(), std::move(lists_)};
  }
  // Of a forward whose results are inputs of the call.
  AttentionProblem as_inputs(AttentionParams& params, std::vector<Checked>& all, std::shared_ptr<const void>& lists) {
    check_all();
    params = f_, lists = std::move(lists_);
    all.assign(tensors_.all().begin(), tensors_.all().end());
    return p_;
  }

 private:
  bool is_empty() const { return p_.b == 0 || p_.hq == 0 || p_.sq == 0; }

  static Strides strides(const TensorView& t, bool ragged) { return row_strides(t, ragged, true); }

  void shapes() {
    using enum KvSource::Kind;
    if (args_.kv.kind > gathered) throw Error("kv", "an unknown kind", "one of KvSource's factories");
    const bool ragged_q = static_cast<bool>(args_.cu_seqlens_q);
    const bool ragged_k = args_.kv.kind == ragged, is_paged = args_.kv.kind == paged;
    p_.gathered = args_.kv.kind == gathered;
    const TensorView &q = args_.q, &k = args_.kv.k, &v = args_.kv.v;
    const TensorView out = args_.out;
    const int nq = ragged_q ? 3 : 4, nk = ragged_k ? 3 : 4;
    tensors_.need("q", q, nq, ragged_q ? "[total_q, hq, d]" : "[b, hq, sq, d]", check_query_type);
    tensors_.need("k", k, nk,
                  ragged_k      ? "[total_k, hk, d]"
                  : is_paged    ? "[pages, hk, page_size, d]"
                  : p_.gathered ? "[b or 1, hk, sk, d]"
                                : "[b, hk, sk, d]",
                  check_cache_type);
    tensors_.need("v", v, nk,
                  ragged_k      ? "[total_k, hk, dv]"
                  : is_paged    ? "[pages, hk, page_size, dv]"
                  : p_.gathered ? "[b or 1, hk, sk, dv]"
                                : "[b, hk, sk, dv]",
                  check_cache_type);
    tensors_.need("out", out, nq, ragged_q ? "[total_q, hq, dv]" : "[b, hq, sq, dv]", check_float, writes_);
    if (v.dtype != k.dtype)
      throw Error("v", "dtype " + std::string(to_string(v.dtype)), "k's, " + std::string(to_string(k.dtype)));
    p_.device = q.device.type;
    p_.q_dtype = q.dtype, p_.kv_dtype = k.dtype, p_.out_dtype = out.dtype;
    if (ragged_q) {
      check_list("cu_seqlens_q", args_.cu_seqlens_q);
      if (args_.cu_seqlens_q.shape[0] == 0) throw Error("cu_seqlens_q", "no elements", "[b + 1] starts");
    }
    p_.b = ragged_q ? args_.cu_seqlens_q.shape[0] - 1 : q.shape[0];
    p_.hq = q.shape[1];
    p_.hk = k.shape[1];
    p_.d = q.shape[static_cast<std::size_t>(nq - 1)];
    const int64_t per_byte = k.dtype == DType::i4x2 ? 2 : 1;  // elements
    p_.dv = v.shape[static_cast<std::size_t>(nk - 1)] * per_byte;
    tail(k);
    const int64_t d = p_.d - p_.k_tail;
    if (d % per_byte != 0) throw Error("q", "head size " + std::to_string(p_.d), "an even one for keys of i4x2");
    check_size("k", k, nk - 1, d / per_byte,
               per_byte == 1 ? p_.k_tail > 0 ? "q's head size d less k_tail's columns" : "q's head size d"
                             : "half of q's head size d, less k_tail's columns, in bytes,");
    const bool is_pool = p_.gathered && k.shape[0] == 1;
    if (!ragged_k && !is_paged && !is_pool)
      check_size("k", k, 0, p_.b, p_.gathered ? "1, or q's batch b" : ragged_q ? "the batch b" : "q's batch b");
    check_heads(p_.hq, p_.hk);
    check_size("v", v, 1, p_.hk, "k's heads hk");
    check_size("out", out, 1, p_.hq, "q's heads hq");
    check_size("out", out, nq - 1, p_.dv, "v's head size dv");
    check_size("v", v, 0, k.shape[0], ragged_k ? "k's rows total_k" : is_paged ? "k's pages" : "k's batch b");
    if (!ragged_k) check_size("v", v, 2, k.shape[2], is_paged ? "k's page_size" : "k's rows sk");
    check_size("out", out, 0, q.shape[0], ragged_q ? "q's rows total_q" : "q's batch b");
    if (!ragged_q) check_size("out", out, 2, q.shape[2], "q's rows sq");
    if (args_.lse) {
      const TensorView lse = args_.lse;
      tensors_.need("lse", lse, nq - 1, ragged_q ? "[total_q, hq]" : "[b, hq, sq]", check_f32, writes_);
      // FlashAttention has [hq, total_q]: where the sizes do not fit, the order is what there is to say.
      check_size("lse", lse, 0, q.shape[0], ragged_q ? "[total_q, hq] with q's rows total_q" : "q's batch b");
      check_size("lse", lse, 1, p_.hq, ragged_q ? "[total_q, hq] with q's heads hq" : "q's heads hq");
      if (!ragged_q) check_size("lse", lse, 2, q.shape[2], "q's rows sq");
      p_.lse = true;
      f_.lse = static_cast<float*>(args_.lse.data);
      f_.lse_stride = row_strides(lse, ragged_q, false);
    }
    f_.q = q.data, f_.k = k.data, f_.v = v.data, f_.out = args_.out.data;
    f_.q_stride = strides(q, ragged_q), f_.out_stride = strides(out, ragged_q);
    f_.k_stride = strides(k, ragged_k), f_.v_stride = strides(v, ragged_k);
    scales_of_queries();
    p_.k_groups = groups("kv.k_scale", args_.kv.k_scale, k, f_.k_quant.scale, f_.k_quant.scale_stride);
    p_.v_groups = groups("kv.v_scale", args_.kv.v_scale, v, f_.v_quant.scale, f_.v_quant.scale_stride);
    zeros("kv.k_zero", args_.kv.k_zero, k, p_.k_groups, f_.k_quant);
    zeros("kv.v_zero", args_.kv.v_zero, v, p_.v_groups, f_.v_quant);
    p_.zeros = args_.kv.k_zero || args_.kv.v_zero;
    p_.head_scales = has_head_scales();
    // Values that are whole keys, as in self-attention over one tensor, are no part of a latent row.
    p_.latent = k.data && v.data == k.data && v.strides == k.strides && p_.dv <= d && p_.dv < p_.d;
    p_.layout = layout(q, k, p_.latent ? k : v, out);
  }

  // The columns of keys that are not quantised.
  void tail(const TensorView& k) {
    const TensorView& t = args_.kv.k_tail;
    if (!t) return;
    const bool ragged = k.ndim == 3;
    tensors_.need("kv.k_tail", t, k.ndim,
                  ragged ? "k's shape but for d, [total_k, hk, columns]" : "k's shape but for d", check_float);
    for (int dim = 0; dim < k.ndim - 1; ++dim)
      check_size("kv.k_tail", t, dim, k.shape[static_cast<std::size_t>(dim)], "k's size there");
    p_.k_tail = t.shape[static_cast<std::size_t>(t.ndim - 1)], p_.k_tail_dtype = t.dtype;
    if (p_.k_tail < 1) throw Error("kv.k_tail", "shape " + shape_text(t), "1 column or more");
    check_tail("kv.k_tail", k.dtype, p_.d, p_.k_tail, t.dtype);
    f_.k_tail = {t.data, t.dtype, strides(t, ragged), p_.k_tail};
  }

  void scales_of_queries() {
    const TensorView& t = args_.q_scale;
    if (!t) return;
    const bool ragged = args_.q.ndim == 3;
    tensors_.need("q_scale", t, args_.q.ndim, ragged ? "[total_q or 1, hq, 1]" : "[b or 1, hq, sq or 1, 1]", check_f32);
    check_rows_of("q_scale", t, args_.q, "q's heads hq");
    check_size("q_scale", t, t.ndim - 1, 1, "the scales of a row");
    p_.q_scale = true;
    f_.q_scale = static_cast<const float*>(t.data), f_.q_scale_stride = strides(t, ragged);
  }

  // What has an element for each of `rows`, or for several of them: the first size and that of rows may be 1.
  static void check_rows_of(const char* name, const TensorView& t, const TensorView& rows, const char* heads) {
    for (int dim = 0; dim < rows.ndim - 1; ++dim)
      if (dim == 1 || t.shape[static_cast<std::size_t>(dim)] != 1)
        check_size(name, t, dim, rows.shape[static_cast<std::size_t>(dim)], dim == 1 ? heads : "1 or the rows'");
  }

  // Scales or zeros of `rows`, which is k or v: its shape with groups for the last dimension, where the first and that
  // of rows may be 1. Returns the groups of a row; 0 when not given.
  int64_t groups(const char* name, const TensorView& t, const TensorView& rows, const float*& data, Strides& stride) {
    if (!t) return 0;
    const bool ragged = rows.ndim == 3;
    tensors_.need(name, t, rows.ndim, ragged ? "[total_k or 1, hk, groups]" : "[b (pages) or 1, hk, rows or 1, groups]",
                  check_f32);
    data = static_cast<const float*>(t.data), stride = strides(t, ragged);
    check_rows_of(name, t, rows, "k's heads hk");
    const int64_t n = t.shape[static_cast<std::size_t>(t.ndim - 1)];
    if (n < 1) throw Error(name, "shape " + shape_text(t), "1 group of a row or more");
    return n;
  }
  void zeros(const char* name, const TensorView& t, const TensorView& rows, int64_t wanted, Quantization& quant) {
    if (!t) return;
    if (wanted == 0) {
      tensors_.need(name, t, rows.ndim, "the scales' shape", check_f32);
      throw Error(name, "zero points without scales", "scales too");
    }
    groups(name, t, rows, quant.zero, quant.zero_stride);
    check_size(name, t, t.ndim - 1, wanted, "the scales' groups");
  }

  // Whether no scale of k or v depends on a key's row, nor on its page.
  bool has_head_scales() const {
    const bool paged = args_.kv.kind == KvSource::Kind::paged;
    const auto of_heads = [&](int64_t groups, const Strides& s) {
      return groups == 0 || (s.s == 0 && (!paged || s.b == 0));
    };
    return p_.k_groups + p_.v_groups > 0 && of_heads(p_.k_groups, f_.k_quant.scale_stride) &&
           of_heads(p_.v_groups, f_.v_quant.scale_stride);
  }

  static AttentionProblem::Layout layout(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const TensorView& out) {
    using enum AttentionProblem::Layout;
    const auto matches = [](const TensorView& t, std::array<std::size_t, 4> order) {  // outermost first
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

  const AttentionArgs& args_;
  const bool writes_;  // out and lse; else they are read
  AttentionProblem p_{};
  AttentionParams f_{};
  AttentionTensors tensors_;
  std::shared_ptr<const void> lists_;  // what f_ has of gathered keys, beside the tensors
};

}  // namespace

AttentionProblem check_forward(const AttentionArgs& args, AttentionParams& params, std::vector<Checked>& all,
                               std::shared_ptr<const void>& lists) {
  return Validator(args, false).as_inputs(params, all, lists);
}

void fill_sizes(const AttentionProblem& problem, AttentionParams& f) {
  const AttentionProblem p = in_sequences(problem);
  f.q_type = p.q_dtype, f.kv_type = p.kv_dtype, f.out_type = p.out_dtype;
  f.b = p.b, f.hk = p.hk, f.sq = p.sq, f.sk = p.sk, f.d = p.d, f.dv = p.dv;
  f.group = p.hk > 0 ? p.hq / p.hk : 0;  // without query heads there is nothing to read
  f.total_q = p.ragged_q, f.total_k = p.ragged_k;
  f.page_size = p.ring ? p.sk : p.gathered ? 1 : p.page_size, f.ring = p.ring;
  f.tokens = p.gathered ? problem.sq : 0;
  f.k_quant.group = (p.d - p.k_tail) / std::max<int64_t>(p.k_groups, 1);
  f.v_quant.group = p.dv / std::max<int64_t>(p.v_groups, 1);
}

Call validate(const AttentionArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;  // for the default scale
  return Validator(args).run(workspace);
}

AttentionProblem AttentionProblem::of(const AttentionArgs& args) {
  return std::get<AttentionProblem>(validate(args).problem);
}

}  // namespace rapt
