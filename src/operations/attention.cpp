// attention: arguments -> Call, or an Error that names the argument. Nothing is written, and nothing is read but
// lengths and block tables in host memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory_resource>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "core/dtypes.hpp"
#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/attention_check.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;

[[noreturn]] void refuse(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw Error(argument, got, wanted);
}
template <class... T>
std::string dims_text(T... sizes) {
  std::string text;
  ((text += (text.empty() ? "[" : ", ") + std::to_string(sizes)), ...);
  return text + "]";
}

class Validator {
 public:
  explicit Validator(const AttentionArgs& args, bool writes = true)
      : args_(args), score_(args.score), host_(args.q.device.type == DeviceType::cpu), writes_(writes) {
    all_.reserve(memory_.size() / sizeof(Checked));
  }

  void check_all() {
    tensors();
    lengths();
    fill_sizes(p_, f_);
    score();
    check(p_);
    if (!host_ && p_.page_size > 0 && f_.page_count == 0) f_.sk = 0;  // no key can be there, whatever the lengths say
    ring();
    pages();
  }
  Call run(std::span<const std::byte> workspace) {
    check_all();
    check_overlaps(all_);
    check_apart(workspace, all_);
    return {p_, f_, args_.q.device, p_.b == 0 || p_.hq == 0 || p_.sq == 0, nullptr};
  }
  AttentionProblem give(AttentionParams& params, std::vector<Checked>& all) {
    check_all();
    params = f_;
    all.assign(all_.begin(), all_.end());
    return p_;
  }

 private:
  const TensorView& take(const char* name, const TensorView& t, bool written = false) {
    const int64_t bytes = span_of(name, t, written);
    if (t.device != args_.q.device) refuse(name, "a tensor on another device than q", "all tensors on one device");
    all_.push_back({name, t, bytes, written});
    return t;
  }
  enum class Takes : std::uint8_t { f32, floats, caches };
  // Requires a tensor of the given rank and of a type that is taken there.
  const TensorView& need(const char* name, const TensorView& t, int ndim, const char* shape, bool written = false,
                         Takes takes = Takes::f32) {
    if (t.ndim == 0) refuse(name, "no tensor", shape);
    take(name, t, written);
    if (t.ndim != ndim) refuse(name, "shape " + shape_text(t), shape);
    const bool taken = takes == Takes::f32      ? t.dtype == DType::f32
                       : takes == Takes::floats ? is_float(t.dtype)
                                                : is_cache(t.dtype);
    if (!taken)
      refuse(name, "dtype " + std::string(to_string(t.dtype)),
             takes == Takes::f32      ? "f32"
             : takes == Takes::floats ? kFloats
                                      : kCaches);
    return t;
  }
  void same(const char* name, const TensorView& t, int dim, int64_t wanted, const char* what) {
    const int64_t got = t.shape[static_cast<std::size_t>(dim)];
    if (got != wanted) refuse(name, "shape " + shape_text(t), std::string(what) + " = " + std::to_string(wanted));
  }
  static Strides strides(const TensorView& t, bool ragged) { return row_strides(t, ragged, true); }

  void tensors() {
    using enum KvSource::Kind;
    if (args_.kv.kind > ring) refuse("kv", "an unknown kind", "one of KvSource's factories");
    const bool ragged_q = static_cast<bool>(args_.cu_seqlens_q);
    const bool ragged_k = args_.kv.kind == ragged, is_paged = args_.kv.kind == paged;
    const TensorView &q = args_.q, &k = args_.kv.k, &v = args_.kv.v;
    const TensorView out = args_.out;
    const int nq = ragged_q ? 3 : 4, nk = ragged_k ? 3 : 4;
    need("q", q, nq, ragged_q ? "[total_q, hq, d]" : "[b, hq, sq, d]", false, Takes::floats);
    need("k", k, nk,
         ragged_k   ? "[total_k, hk, d]"
         : is_paged ? "[pages, hk, page_size, d]"
                    : "[b, hk, sk, d]",
         false, Takes::caches);
    need("v", v, nk,
         ragged_k   ? "[total_k, hk, dv]"
         : is_paged ? "[pages, hk, page_size, dv]"
                    : "[b, hk, sk, dv]",
         false, Takes::caches);
    need("out", out, nq, ragged_q ? "[total_q, hq, dv]" : "[b, hq, sq, dv]", writes_, Takes::floats);
    if (v.dtype != k.dtype)
      refuse("v", "dtype " + std::string(to_string(v.dtype)), "k's, " + std::string(to_string(k.dtype)));
    p_.device = q.device.type;
    p_.q_dtype = q.dtype, p_.kv_dtype = k.dtype, p_.out_dtype = out.dtype;
    if (ragged_q) {
      check_list("cu_seqlens_q", args_.cu_seqlens_q);
      if (args_.cu_seqlens_q.shape[0] == 0) refuse("cu_seqlens_q", "no elements", "[b + 1] starts");
    }
    p_.b = ragged_q ? args_.cu_seqlens_q.shape[0] - 1 : q.shape[0];
    p_.hq = q.shape[1];
    p_.hk = k.shape[1];
    p_.d = q.shape[static_cast<std::size_t>(nq - 1)];
    const int64_t packed = k.dtype == DType::i4x2 ? 2 : 1;  // elements to a byte
    p_.dv = v.shape[static_cast<std::size_t>(nk - 1)] * packed;
    if (p_.d % packed != 0) refuse("q", "head size d = " + std::to_string(p_.d), "an even one for keys of i4x2");
    same("k", k, nk - 1, p_.d / packed, packed == 1 ? "q's head size d" : "half of q's head size d, in bytes,");
    if (!ragged_k && !is_paged) same("k", k, 0, p_.b, ragged_q ? "the batch b" : "q's batch b");
    check_heads(p_.hq, p_.hk);
    same("v", v, 1, p_.hk, "k's heads hk");
    same("out", out, 1, p_.hq, "q's heads hq");
    same("out", out, nq - 1, p_.dv, "v's head size dv");
    same("v", v, 0, k.shape[0], ragged_k ? "k's rows total_k" : is_paged ? "k's pages" : "k's batch b");
    if (!ragged_k) same("v", v, 2, k.shape[2], is_paged ? "k's page_size" : "k's rows sk");
    same("out", out, 0, q.shape[0], ragged_q ? "q's rows total_q" : "q's batch b");
    if (!ragged_q) same("out", out, 2, q.shape[2], "q's rows sq");
    if (args_.lse) {
      const TensorView lse = args_.lse;
      need("lse", lse, nq - 1, ragged_q ? "[total_q, hq]" : "[b, hq, sq]", writes_);
      same("lse", lse, 0, q.shape[0], ragged_q ? "q's rows total_q" : "q's batch b");
      same("lse", lse, 1, p_.hq, "q's heads hq");
      if (!ragged_q) same("lse", lse, 2, q.shape[2], "q's rows sq");
      p_.lse = true;
      f_.lse = static_cast<float*>(args_.lse.data);
      f_.lse_stride = row_strides(lse, ragged_q, false);
    }
    f_.q = q.data, f_.k = k.data, f_.v = v.data, f_.out = args_.out.data;
    f_.q_stride = strides(q, ragged_q), f_.out_stride = strides(out, ragged_q);
    f_.k_stride = strides(k, ragged_k), f_.v_stride = strides(v, ragged_k);
    p_.k_groups = groups("kv.k_scale", args_.kv.k_scale, k, f_.k_quant.scale, f_.k_quant.scale_stride);
    p_.v_groups = groups("kv.v_scale", args_.kv.v_scale, v, f_.v_quant.scale, f_.v_quant.scale_stride);
    zeros("kv.k_zero", args_.kv.k_zero, k, p_.k_groups, f_.k_quant);
    zeros("kv.v_zero", args_.kv.v_zero, v, p_.v_groups, f_.v_quant);
    p_.zeros = args_.kv.k_zero || args_.kv.v_zero;
    p_.layout = layout(q, k, v, out);
  }

  // Scales or zeros of `rows`, which is k or v: its shape with groups for the last dimension, where the first and that
  // of rows may be 1. Returns the groups of a row; 0 when not given.
  int64_t groups(const char* name, const TensorView& t, const TensorView& rows, const float*& data, Strides& stride) {
    if (!t) return 0;
    const bool ragged = rows.ndim == 3;
    need(name, t, rows.ndim, ragged ? "[total_k or 1, hk, groups]" : "[b (pages) or 1, hk, rows or 1, groups]");
    data = static_cast<const float*>(t.data), stride = strides(t, ragged);
    for (int dim = 0; dim < rows.ndim - 1; ++dim) {
      const bool broadcasts = dim != 1 && t.shape[static_cast<std::size_t>(dim)] == 1;
      if (broadcasts) (ragged || dim == 2 ? stride.s : stride.b) = 0;
      else same(name, t, dim, rows.shape[static_cast<std::size_t>(dim)], dim == 1 ? "k's heads hk" : "1 or the rows'");
    }
    const int64_t n = t.shape[static_cast<std::size_t>(t.ndim - 1)];
    if (n < 1) refuse(name, "shape " + shape_text(t), "1 group of a row or more");
    return n;
  }
  void zeros(const char* name, const TensorView& t, const TensorView& rows, int64_t wanted, Quantization& quant) {
    if (!t) return;
    if (wanted == 0) {
      need(name, t, rows.ndim, "the scales' shape");
      refuse(name, "zero points without scales", "scales too");
    }
    groups(name, t, rows, quant.zero, quant.zero_stride);
    same(name, t, t.ndim - 1, wanted, "the scales' groups");
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

  // A list of integers, whose values only kernels see if it lies on a device.
  Integers list(const char* name, const TensorView& t, std::optional<int64_t> count = {}) {
    check_list(name, take(name, t), count);
    return {t.data, t.strides[0], t.dtype == DType::i64};
  }
  // [b + 1] starts; `longest` becomes the longest sequence's length, or the most it can be.
  Integers starts(const char* name, const TensorView& t, int64_t total, int64_t& longest,
                  std::optional<int64_t> count = {}) {
    const Integers starts = list(name, t, count);
    longest = host_ ? check_starts(name, starts, t.shape[0], total) : total;
    return starts;
  }

  void lengths() {
    const KvSource& kv = args_.kv;
    const int64_t b = p_.b;
    if (args_.cu_seqlens_q) {
      p_.ragged_q = args_.q.shape[0];
      f_.q_begin = starts("cu_seqlens_q", args_.cu_seqlens_q, p_.ragged_q, p_.sq);
    } else {
      p_.sq = args_.q.shape[2];
    }
    if (kv.block_table && kv.kind != KvSource::Kind::paged)
      refuse("kv.block_table", "pages for another kind of keys", "KvSource::paged");
    if (kv.kind == KvSource::Kind::ragged) {
      if (!kv.cu_seqlens) refuse("kv.cu_seqlens", "no tensor", "[b + 1] starts");
      p_.ragged_k = kv.k.shape[0];
      f_.k_begin = starts("kv.cu_seqlens", kv.cu_seqlens, p_.ragged_k, p_.sk, b + 1);
      if (kv.seqlens) refuse("kv.seqlens", "lengths for ragged keys", "cu_seqlens alone");
      return;
    }
    if (kv.cu_seqlens) refuse("kv.cu_seqlens", "starts for keys that are not ragged", "KvSource::ragged");
    if (kv.kind == KvSource::Kind::paged) {
      table();
    } else {
      p_.sk = kv.k.shape[2];
      p_.ring = kv.kind == KvSource::Kind::ring;
    }
    if (!kv.seqlens) {
      if (p_.ring || p_.page_size > 0) refuse("kv.seqlens", "no tensor", "[b] lengths for pages and rings");
      return;
    }
    p_.kv_lengths = true;
    f_.k_len = list("kv.seqlens", kv.seqlens, b);
    const int64_t most = p_.ring ? kMaxSize : p_.sk;
    for (int64_t i = 0; host_ && i < b; ++i)
      if (const int64_t n = f_.k_len[i]; n < 0 || n > most)
        refuse("kv.seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
               p_.ring ? "0 to 2^48" : "0 to sk = " + std::to_string(most));
  }

  // The shapes of pages and their table; its entries are read once it is known which pages rows see.
  void table() {
    const TensorView &t = args_.kv.block_table, &k = args_.kv.k;
    if (!t) refuse("kv.block_table", "no tensor", "[b, n] pages");
    take("kv.block_table", t);
    if (t.ndim != 2) refuse("kv.block_table", "shape " + shape_text(t), "[b, n]");
    same("kv.block_table", t, 0, p_.b, "the batch b");
    check_integers("kv.block_table", t);
    if (k.shape[0] > std::numeric_limits<std::int32_t>::max())
      refuse("k", std::to_string(k.shape[0]) + " pages", "less than 2^31");
    f_.pages = {t.data, t.strides[1], t.dtype == DType::i64};
    f_.pages_stride_b = t.strides[0], f_.page_count = k.shape[0];
    p_.page_size = k.shape[2];
    if (p_.page_size < 1) refuse("k", "shape " + shape_text(k), "pages of 1 row or more");
    if (__builtin_mul_overflow(t.shape[1], p_.page_size, &p_.sk) || p_.sk > kMaxSize)
      refuse("kv.block_table", "shape " + shape_text(t), "room for at most 2^48 keys");
  }

  // Checks every entry that leads to a key that some row may see; the others may be anything.
  void pages() const {
    if (p_.page_size == 0) return;
    for (int64_t i = 0; host_ && i < p_.b; ++i) {
      const KeyRange keys = visible_keys(f_.score, sequence_of(f_, f_, i));
      if (keys.first >= keys.last) continue;
      for (int64_t n = keys.first / p_.page_size; n <= (keys.last - 1) / p_.page_size; ++n) {
        const int64_t page = f_.pages.element(i * f_.pages_stride_b + n * f_.pages.stride);
        if (page < 0 || page >= f_.page_count)
          refuse("kv.block_table",
                 "page " + std::to_string(page) + " at [" + std::to_string(i) + ", " + std::to_string(n) + "]",
                 "0 to " + std::to_string(f_.page_count - 1) + ", one of k's pages");
      }
    }
  }

  // Every key that rows see is still in the ring: with fewer than they ask for the result would be wrong, silently.
  void ring() const {
    if (!p_.ring) return;
    if (!host_) {  // lengths may be anything, and have to be taken for long ones
      const bool known = p_.ragged_q < 0 && p_.window_left >= 0 && p_.align == AttentionProblem::Align::bottom_right;
      if (known && p_.sq > 0 && p_.window_left > p_.sk - p_.sq)
        refuse("k", "a ring of " + std::to_string(p_.sk) + " rows",
               "window_left + query rows or more, " + std::to_string(p_.window_left) + " + " + std::to_string(p_.sq));
      return;
    }
    const bool open_left = p_.window_left < 0, open_right = f_.score.right == kOpen;
    for (int64_t i = 0; i < p_.b; ++i) {
      const Sequence q = sequence_of(f_, f_, i);
      // The first row that sees a key, if all were there; it sees the oldest keys.
      const int64_t offset = row_offset(f_.score, q);
      const int64_t token = open_right ? 0 : std::max<int64_t>(0, -f_.score.right - offset);
      if (token >= q.len_q) continue;
      KeyRange keys = visible_keys(f_.score, token, offset + token, 0, q.len_k);
      // Without a left end the first row that sees keys sees as many as the ring has, like the last.
      if (open_left) keys.first = std::max<int64_t>(keys.last - p_.sk, 0);
      if (keys.first >= keys.last || keys.first >= q.oldest) continue;
      refuse("k",
             "a ring of " + std::to_string(p_.sk) + " rows, where key " + std::to_string(keys.first) + " of sequence " +
                 std::to_string(i) + ", which a query row sees, is overwritten",
             open_left ? "one query row a call, or a window, once a sequence is longer than the ring"
                       : std::to_string(q.len_k - keys.first) +
                             " rows or more (window_left + query rows), or fewer query rows a call");
    }
  }

  // bias or mask: right-aligned [b, hq, sq, sk] where missing dimensions and those of size 1 broadcast.
  std::uint8_t modifier(const char* name, const TensorView& t, Strides& stride) {
    take(name, t);
    const std::array<int64_t, 4> full = {p_.b, p_.hq, p_.sq, p_.sk};
    stride = {};
    std::uint8_t dims = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const int at = t.ndim - 4 + static_cast<int>(i);
      const int64_t size = at < 0 ? 1 : t.shape[static_cast<std::size_t>(at)];
      // Local indices of ragged sequences need room for the longest one.
      const bool ragged = (i == 2 && p_.ragged_q >= 0) || (i == 3 && p_.ragged_k >= 0);
      const bool fits = size == full[i] || (ragged && (size > full[i] || !host_));
      if (!fits && (size != 1 || i == 3))
        refuse(name, "shape " + shape_text(t),
               "a shape that broadcasts over b, hq, sq to " + dims_text(p_.b, p_.hq, p_.sq, p_.sk));
      if (i == 3) f_.score.modifier_keys = std::min(f_.score.modifier_keys, size);
      if (size == 1) continue;
      if (i == 2) f_.score.modifier_rows = std::min(f_.score.modifier_rows, size);
      (i == 0 ? stride.b : i == 1 ? stride.h : i == 2 ? stride.s : stride.d) = t.strides[static_cast<std::size_t>(at)];
      if (i < 3) dims |= static_cast<std::uint8_t>(1 << i);
    }
    return dims;
  }

  void score() {
    p_.causal = score_.causal;
    if (score_.window) p_.window_left = score_.window->left, p_.window_right = score_.window->right;
    p_.has_scale = score_.scale.has_value();
    p_.scale = score_.scale.value_or(0.f);
    if (score_.softcap) {
      p_.softcap = *score_.softcap;
      if (!(p_.softcap > 0)) refuse("score.softcap", shortest(p_.softcap), "a number from 1e-30 to 1e30");
    }
    if (score_.align) {
      if (score_.align->kind > Align::Kind::offset) refuse("score.align", "an unknown kind", "one of rapt::Align");
      p_.align = score_.align->kind == Align::Kind::top_left       ? AttentionProblem::Align::top_left
                 : score_.align->kind == Align::Kind::bottom_right ? AttentionProblem::Align::bottom_right
                                                                   : AttentionProblem::Align::offset;
      if (p_.align == AttentionProblem::Align::offset) p_.align_offset = score_.align->value;
    }
    if (score_.bias) {
      if (!is_float(score_.bias.dtype))
        refuse("score.bias", "dtype " + std::string(to_string(score_.bias.dtype)), kFloats);
      p_.bias = modifier("score.bias", score_.bias, f_.score.bias_stride);
      p_.bias_dtype = f_.score.bias_type = score_.bias.dtype, f_.score.bias = score_.bias.data;
    }
    if (score_.mask) {
      if (score_.mask.dtype != DType::boolean)
        refuse("score.mask", "dtype " + std::string(to_string(score_.mask.dtype)),
               "boolean (additive masks are a bias)");
      p_.mask = modifier("score.mask", score_.mask, f_.score.mask_stride);
      f_.score.mask = static_cast<const std::uint8_t*>(score_.mask.data);
    }
    if (score_.alibi) {
      const TensorView& t = score_.alibi;
      need("score.alibi", t, t.ndim == 2 ? 2 : 1, "[hq] or [b, hq]", false, Takes::floats);
      same("score.alibi", t, t.ndim - 1, p_.hq, "q's heads hq");
      if (t.ndim == 2) same("score.alibi", t, 0, p_.b, "the batch b");
      p_.alibi = true;
      f_.score.alibi = t.data, f_.score.alibi_type = t.dtype;
      f_.score.alibi_stride_b = t.ndim == 2 ? t.strides[0] : 0;
      f_.score.alibi_stride_h = t.strides[t.ndim == 2 ? 1 : 0];
    }
    if (score_.sinks) {
      need("score.sinks", score_.sinks, 1, "[hq]", false, Takes::floats);
      same("score.sinks", score_.sinks, 0, p_.hq, "q's heads hq");
      p_.sinks = true;
      f_.score.sinks = score_.sinks.data, f_.score.sinks_type = score_.sinks.dtype;
      f_.score.sinks_stride = score_.sinks.strides[0];
    }
    p_.dropout = score_.dropout ? score_.dropout->p : 0;
    if (p_.dropout > 0 && p_.dropout <= 1) {  // else there is none, or check() refuses it
      f_.score.dropout = dropout_params(p_.dropout, score_.dropout->seed, score_.dropout->offset, p_.hq);
    }
    // check() has the case of equal lengths for all. On a device they may differ for all we know.
    if (!host_ && needs_align(p_) && has_lengths(p_))
      refuse("score.align", "none, with lengths on a device",
             "top_left, bottom_right or an offset for causal, window and alibi");
    positions();
    for (int64_t i = 0; host_ && has_lengths(p_) && needs_align(p_) && i < p_.b; ++i)
      if (const Sequence q = sequence_of(f_, f_, i); q.len_q != q.len_k)
        refuse_align(q.len_q, q.len_k, " in sequence " + std::to_string(i));
    const float scale = score_.scale.value_or(p_.d > 0 ? 1.f / std::sqrt(static_cast<float>(p_.d)) : 0.f);
    constexpr double kMaxScale = std::numeric_limits<float>::max();
    f_.score.scale_log2 = static_cast<float>(std::clamp(scale * kLog2e, -kMaxScale, kMaxScale));
    f_.score.softcap_log2 = static_cast<float>(p_.softcap * kLog2e);
  }

  void positions() {
    const auto side = [](int64_t width) { return width < 0 ? kOpen : std::min(width, kOpen); };
    f_.score.left = side(p_.window_left);
    f_.score.right = p_.causal ? 0 : side(p_.window_right);
    f_.score.offset = p_.align == AttentionProblem::Align::offset ? p_.align_offset : 0;
    f_.score.bottom_right = p_.align == AttentionProblem::Align::bottom_right;
  }

  const AttentionArgs& args_;
  const ScoreSpec& score_;
  const bool host_;    // lengths and tables can be read here
  const bool writes_;  // out and lse; else they are read
  AttentionProblem p_{};
  AttentionParams f_ = no_params();
  static AttentionParams no_params() {
    AttentionParams f{};
    f.score.modifier_rows = f.score.modifier_keys = kNoLimit;
    return f;
  }
  // On the stack, as every call comes here: more tensors than a call has.
  alignas(Checked) std::array<std::byte, 20 * sizeof(Checked)> memory_;
  std::pmr::monotonic_buffer_resource resource_{memory_.data(), memory_.size()};
  std::pmr::vector<Checked> all_{&resource_};
};

}  // namespace

// Along a dimension of one element no kernel steps, and its stride may be any number, by which those that look one step
// ahead would overflow.
Strides row_strides(const Layout& t, bool ragged, bool has_elements) {
  std::array<int64_t, kMaxDims> step = t.strides;
  const std::size_t rank = static_cast<std::size_t>(t.ndim), rows = has_elements ? rank - 1 : rank;
  for (std::size_t i = 0; i < rows; ++i)
    if (t.shape[i] <= 1) step[i] = 0;
  const int64_t inner = !has_elements ? 0 : t.shape[rank - 1] <= 1 ? 1 : step[rank - 1];
  if (ragged) return {0, step[1], step[0], inner};
  return {step[0], step[1], step[2], inner};
}

AttentionProblem check_forward(const AttentionArgs& args, AttentionParams& params, std::vector<Checked>& all) {
  return Validator(args, false).give(params, all);
}

void fill_sizes(const AttentionProblem& p, AttentionParams& f) {
  f.q_type = p.q_dtype, f.kv_type = p.kv_dtype, f.out_type = p.out_dtype;
  f.b = p.b, f.hk = p.hk, f.sq = p.sq, f.sk = p.sk, f.d = p.d, f.dv = p.dv;
  f.group = p.hk > 0 ? p.hq / p.hk : 0;  // without query heads there is nothing to read
  f.total_q = p.ragged_q, f.total_k = p.ragged_k;
  f.page_size = p.ring ? p.sk : p.page_size, f.ring = p.ring;
  f.k_quant.group = p.d / std::max<int64_t>(p.k_groups, 1);
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
