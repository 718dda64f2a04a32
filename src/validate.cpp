// Arguments -> Call, or an Error that names the argument. Nothing is written, and nothing is read but lengths and block
// tables in host memory.
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

#include "call.hpp"
#include "dtypes.hpp"
#include "float_environment.hpp"
#include "span.hpp"
#include "text.hpp"

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

void check_heads(int64_t hq, int64_t hk) {
  if (hk == 0 ? hq != 0 : hq % hk != 0)
    refuse("k", std::to_string(hk) + " heads for " + std::to_string(hq) + " query heads", "a divisor of them");
}

// True when positions matter and nobody said how queries and keys line up.
bool needs_align(const Problem& p) {
  return (p.causal || p.alibi || p.window_left >= 0 || p.window_right >= 0) && p.align == Problem::Align::none;
}
[[noreturn]] void refuse_align(int64_t q, int64_t k, const std::string& where = "") {
  refuse("score.align", "none, with " + std::to_string(q) + " queries and " + std::to_string(k) + " keys" + where,
         "top_left, bottom_right or an offset for causal, window and alibi");
}

class Validator {
 public:
  explicit Validator(const AttentionArgs& args)
      : args_(args), score_(args.score), host_(args.q.device.type == DeviceType::cpu), p_(call_.problem) {
    call_.device = args.q.device.index;
    all_.reserve(memory_.size() / sizeof(Checked));
  }

  Call run(std::span<const std::byte> workspace) {
    tensors();
    lengths();
    score();
    check(p_);
    ring();
    pages();
    check_overlaps(all_);
    apart_from(workspace);
    return call_;
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
  // [b, h, s, d] or ragged [total, h, d] as strides of b, h, s, d. Of a single element nothing steps by the stride,
  // which may be any number, and kernels that look one step ahead would overflow.
  static Operand operand(const TensorView& t, bool ragged) {
    Operand o{const_cast<void*>(t.data), t.dtype, t.strides};
    for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i)
      if (t.shape[i] <= 1) o.strides[i] = i + 1 == static_cast<std::size_t>(t.ndim) ? 1 : 0;
    if (ragged) o.strides = {0, o.strides[1], o.strides[0], o.strides[2]};
    return o;
  }

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
    need("out", out, nq, ragged_q ? "[total_q, hq, dv]" : "[b, hq, sq, dv]", true, Takes::floats);
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
      need("lse", lse, nq - 1, ragged_q ? "[total_q, hq]" : "[b, hq, sq]", true);
      same("lse", lse, 0, q.shape[0], ragged_q ? "q's rows total_q" : "q's batch b");
      same("lse", lse, 1, p_.hq, "q's heads hq");
      if (!ragged_q) same("lse", lse, 2, q.shape[2], "q's rows sq");
      p_.lse = true;
      call_.lse = {const_cast<void*>(lse.data), lse.dtype, lse.strides};
      if (ragged_q) call_.lse.strides = {0, lse.strides[1], lse.strides[0], 0};
    }
    call_.q = operand(q, ragged_q), call_.out = operand(out, ragged_q);
    call_.k = operand(k, ragged_k), call_.v = operand(v, ragged_k);
    p_.k_groups = groups("kv.k_scale", args_.kv.k_scale, k, 0, call_.k_scale);
    p_.v_groups = groups("kv.v_scale", args_.kv.v_scale, v, 0, call_.v_scale);
    groups("kv.k_zero", args_.kv.k_zero, k, p_.k_groups, call_.k_zero);
    groups("kv.v_zero", args_.kv.v_zero, v, p_.v_groups, call_.v_zero);
    p_.zeros = args_.kv.k_zero || args_.kv.v_zero;
    p_.layout = layout(q, k, v, out);
  }

  // Scales or zeros of `rows`, which is k or v: its shape with groups for the last dimension, where the first and that
  // of rows may be 1. Returns the groups of a row; 0 when not given.
  int64_t groups(const char* name, const TensorView& t, const TensorView& rows, int64_t wanted, Operand& o) {
    if (!t) return 0;
    const bool ragged = rows.ndim == 3, zero = &o == &call_.k_zero || &o == &call_.v_zero;
    need(name, t, rows.ndim, ragged ? "[total_k or 1, hk, groups]" : "[b (pages) or 1, hk, rows or 1, groups]");
    if (zero && wanted == 0) refuse(name, "zero points without scales", "scales too");
    o = operand(t, ragged);
    for (int dim = 0; dim < rows.ndim - 1; ++dim) {
      const bool broadcasts = dim != 1 && t.shape[static_cast<std::size_t>(dim)] == 1;
      if (broadcasts) o.strides[ragged || dim == 2 ? 2 : 0] = 0;
      else same(name, t, dim, rows.shape[static_cast<std::size_t>(dim)], dim == 1 ? "k's heads hk" : "1 or the rows'");
    }
    const int64_t n = t.shape[static_cast<std::size_t>(t.ndim - 1)];
    if (n < 1) refuse(name, "shape " + shape_text(t), "1 group of a row or more");
    if (zero) same(name, t, t.ndim - 1, wanted, "the scales' groups");
    return n;
  }

  static Problem::Layout layout(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out) {
    using enum Problem::Layout;
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
      call_.q_begin = starts("cu_seqlens_q", args_.cu_seqlens_q, p_.ragged_q, p_.sq);
    } else {
      p_.sq = args_.q.shape[2];
    }
    if (kv.block_table && kv.kind != KvSource::Kind::paged)
      refuse("kv.block_table", "pages for another kind of keys", "KvSource::paged");
    if (kv.kind == KvSource::Kind::ragged) {
      if (!kv.cu_seqlens) refuse("kv.cu_seqlens", "no tensor", "[b + 1] starts");
      p_.ragged_k = kv.k.shape[0];
      call_.k_begin = starts("kv.cu_seqlens", kv.cu_seqlens, p_.ragged_k, p_.sk, b + 1);
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
    call_.k_len = list("kv.seqlens", kv.seqlens, b);
    const int64_t most = p_.ring ? kMaxSize : p_.sk;
    for (int64_t i = 0; host_ && i < b; ++i)
      if (const int64_t n = call_.k_len[i]; n < 0 || n > most)
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
    p_.page_size = k.shape[2];
    if (p_.page_size < 1) refuse("k", "shape " + shape_text(k), "pages of 1 row or more");
    if (__builtin_mul_overflow(t.shape[1], p_.page_size, &p_.sk) || p_.sk > kMaxSize)
      refuse("kv.block_table", "shape " + shape_text(t), "room for at most 2^48 keys");
  }

  // Checks every entry that leads to a key some row may see; the others may be anything.
  void pages() {
    if (p_.page_size == 0) return;
    const TensorView& t = args_.kv.block_table;
    call_.pages = {t.data, t.strides[1], t.dtype == DType::i64};
    call_.pages_stride_b = t.strides[0], call_.page_count = args_.kv.k.shape[0];
    for (int64_t i = 0; host_ && i < p_.b; ++i) {
      const auto [first, last] = seen_keys(i);
      if (first >= last) continue;
      for (int64_t n = first / p_.page_size; n <= (last - 1) / p_.page_size; ++n) {
        const int64_t page = call_.pages.element(i * t.strides[0] + n * t.strides[1]);
        if (page < 0 || page >= call_.page_count)
          refuse("kv.block_table",
                 "page " + std::to_string(page) + " at [" + std::to_string(i) + ", " + std::to_string(n) + "]",
                 "0 to " + std::to_string(call_.page_count - 1) + ", one of k's pages");
      }
    }
  }

  // Every key that rows see is still in the ring: with fewer than they ask for the result would be wrong, silently.
  void ring() const {
    if (!p_.ring) return;
    if (!host_) {  // lengths may be anything, and have to be taken for long ones
      const bool known = p_.ragged_q < 0 && p_.window_left >= 0 && p_.align == Problem::Align::bottom_right;
      if (known && p_.sq > 0 && p_.window_left > p_.sk - p_.sq)
        refuse("k", "a ring of " + std::to_string(p_.sk) + " rows",
               "window_left + query rows or more, " + std::to_string(p_.window_left) + " + " + std::to_string(p_.sq));
      return;
    }
    for (int64_t i = 0; i < p_.b; ++i) {
      const int64_t oldest = call_.k_len[i] - p_.sk;
      const Rows rows = query_rows(i);
      // Without a left end the first row that sees keys sees as many as the ring has, like the last.
      const int64_t first = rows.right < 0 ? rows.begin : std::max(rows.begin, -rows.right);
      const int64_t end = rows.right < 0 ? call_.k_len[i] : std::min(first + rows.right + 1, call_.k_len[i]);
      const int64_t begin = std::max<int64_t>(rows.left < 0 ? end - p_.sk : first - rows.left, 0);
      if (first >= rows.end || begin >= end || begin >= oldest) continue;
      refuse("k",
             "a ring of " + std::to_string(p_.sk) + " rows, where key " + std::to_string(begin) + " of sequence " +
                 std::to_string(i) + ", which a query row sees, is overwritten",
             rows.left < 0 ? "one query row a call, or a window, once a sequence is longer than the ring"
                           : std::to_string(call_.k_len[i] - begin) +
                                 " rows or more (window_left + query rows), or fewer query rows a call");
    }
  }

  int64_t query_count(int64_t i) const { return call_.q_begin ? call_.q_begin[i + 1] - call_.q_begin[i] : p_.sq; }
  int64_t key_count(int64_t i) const {
    return call_.k_len ? call_.k_len[i] : call_.k_begin ? call_.k_begin[i + 1] - call_.k_begin[i] : p_.sk;
  }

  // The positions [begin, end) of sequence i's query rows, and how far each of them sees; -1: to the end.
  struct Rows {
    int64_t begin, end, left, right;
  };
  Rows query_rows(int64_t i) const {
    const int64_t rows = query_count(i);
    const int64_t begin = p_.align == Problem::Align::bottom_right ? key_count(i) - rows
                          : p_.align == Problem::Align::offset     ? p_.align_offset
                                                                   : 0;
    return {begin, begin + rows, std::min(p_.window_left, 2 * kMaxOffset),
            p_.causal ? 0 : std::min(p_.window_right, 2 * kMaxOffset)};
  }

  // The keys of sequence i that windows and lengths leave its rows together: [first, second).
  std::pair<int64_t, int64_t> seen_keys(int64_t i) const {
    const int64_t length = key_count(i);
    const Rows rows = query_rows(i);
    if (rows.begin == rows.end) return {0, 0};
    return {rows.left < 0 ? 0 : std::max<int64_t>(rows.begin - rows.left, 0),
            rows.right < 0 ? length : std::min(rows.end + rows.right, length)};
  }

  // bias or mask: right-aligned [b, hq, sq, sk] where missing dimensions and those of size 1 broadcast.
  std::uint8_t term(const char* name, const TensorView& t, Operand& o) {
    take(name, t);
    const std::array<int64_t, 4> full = {p_.b, p_.hq, p_.sq, p_.sk};
    o = {const_cast<void*>(t.data), t.dtype, {}};
    std::uint8_t dims = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const int at = t.ndim - 4 + static_cast<int>(i);
      const int64_t size = at < 0 ? 1 : t.shape[static_cast<std::size_t>(at)];
      const int64_t stride = at < 0 ? 0 : t.strides[static_cast<std::size_t>(at)];
      // Local indices of ragged sequences need room for the longest one.
      const bool ragged = (i == 2 && p_.ragged_q >= 0) || (i == 3 && p_.ragged_k >= 0);
      const bool fits = size == full[i] || (ragged && (size > full[i] || !host_));
      if (!fits && (size != 1 || i == 3))
        refuse(name, "shape " + shape_text(t),
               "a shape that broadcasts over b, hq, sq to " + dims_text(p_.b, p_.hq, p_.sq, p_.sk));
      if (i == 3) call_.term_keys = std::min(call_.term_keys, size);
      if (size == 1) continue;
      if (i == 2) call_.term_rows = std::min(call_.term_rows, size);
      o.strides[i] = stride;
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
      p_.align = score_.align->kind == Align::Kind::top_left       ? Problem::Align::top_left
                 : score_.align->kind == Align::Kind::bottom_right ? Problem::Align::bottom_right
                                                                   : Problem::Align::offset;
      if (p_.align == Problem::Align::offset) p_.align_offset = score_.align->value;
    }
    if (score_.bias) {
      if (!is_float(score_.bias.dtype))
        refuse("score.bias", "dtype " + std::string(to_string(score_.bias.dtype)), kFloats);
      p_.bias = term("score.bias", score_.bias, call_.bias);
      p_.bias_dtype = score_.bias.dtype;
    }
    if (score_.mask) {
      if (score_.mask.dtype != DType::boolean)
        refuse("score.mask", "dtype " + std::string(to_string(score_.mask.dtype)),
               "boolean (additive masks are a bias)");
      p_.mask = term("score.mask", score_.mask, call_.mask);
    }
    if (score_.alibi) {
      const TensorView& t = score_.alibi;
      need("score.alibi", t, t.ndim == 2 ? 2 : 1, "[hq] or [b, hq]", false, Takes::floats);
      same("score.alibi", t, t.ndim - 1, p_.hq, "q's heads hq");
      if (t.ndim == 2) same("score.alibi", t, 0, p_.b, "the batch b");
      p_.alibi = true;
      call_.alibi = {
          const_cast<void*>(t.data), t.dtype, {t.ndim == 2 ? t.strides[0] : 0, t.strides[t.ndim == 2 ? 1 : 0], 0, 0}};
    }
    if (score_.sinks) {
      need("score.sinks", score_.sinks, 1, "[hq]", false, Takes::floats);
      same("score.sinks", score_.sinks, 0, p_.hq, "q's heads hq");
      p_.sinks = true;
      call_.sinks = {const_cast<void*>(score_.sinks.data), score_.sinks.dtype, {0, score_.sinks.strides[0], 0, 0}};
    }
    // check() has the case of equal lengths for all. On a device they may differ for all we know.
    if (!host_ && needs_align(p_) && (p_.ragged_q >= 0 || p_.ragged_k >= 0 || p_.kv_lengths))
      refuse("score.align", "none, with lengths on a device",
             "top_left, bottom_right or an offset for causal, window and alibi");
    const bool unequal = call_.q_begin || call_.k_begin || call_.k_len;
    for (int64_t i = 0; host_ && unequal && needs_align(p_) && i < p_.b; ++i)
      if (query_count(i) != key_count(i))
        refuse_align(query_count(i), key_count(i), " in sequence " + std::to_string(i));
    call_.scale = score_.scale.value_or(p_.d > 0 ? 1.f / std::sqrt(static_cast<float>(p_.d)) : 0.f);
  }

  // The workspace is written while every tensor is in use.
  void apart_from(std::span<const std::byte> workspace) const {
    if (workspace.empty()) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(workspace.data());
    std::uintptr_t end = 0;
    if (__builtin_add_overflow(begin, workspace.size(), &end))
      refuse("workspace", std::to_string(workspace.size()) + " bytes", "memory within the address space");
    for (const Checked& tensor : all_) {
      const auto at = reinterpret_cast<std::uintptr_t>(tensor.view.data);
      if (tensor.bytes > 0 && at < end && begin < at + static_cast<std::uintptr_t>(tensor.bytes))
        refuse("workspace", "memory shared with " + tensor.name, "memory of its own");
    }
  }

  const AttentionArgs& args_;
  const ScoreSpec& score_;
  const bool host_;  // lengths and tables can be read here
  Call call_;
  Problem& p_;
  // On the stack, as every call comes here: more tensors than a call has.
  alignas(Checked) std::array<std::byte, 20 * sizeof(Checked)> memory_;
  std::pmr::monotonic_buffer_resource resource_{memory_.data(), memory_.size()};
  std::pmr::vector<Checked> all_{&resource_};
};

// What pages, rings and quantised types ask for beyond the sizes.
void check_cache(const Problem& p) {
  if (p.page_size < 0 || p.page_size > kMaxSize || (p.page_size > 0 && p.sk % p.page_size != 0))
    refuse("k", "pages of " + std::to_string(p.page_size) + " rows", "a divisor of sk = " + std::to_string(p.sk));
  if (p.page_size > 0 && p.ring) refuse("kv", "pages and a ring", "one of them");
  if (p.page_size > 0 || p.ring) {
    if (p.ragged_k >= 0) refuse("kv", "ragged keys in pages or a ring", "keys with lengths");
    if (!p.kv_lengths) refuse("kv.seqlens", "no tensor", "[b] lengths for pages and rings");
  }
  if (p.ring) {
    if (p.sk < 1) refuse("k", "a ring of no rows", "1 or more");
    for (const auto& [name, dims] : {std::pair{"score.bias", p.bias}, {"score.mask", p.mask}})
      if (dims != Problem::kNone) refuse(name, "a tensor for keys in a ring", "none: positions there have no end");
  }
  const bool packed = p.kv_dtype == DType::i4x2;
  for (const auto& [name, size, count] :
       {std::tuple{"kv.k_scale", p.d, p.k_groups}, {"kv.v_scale", p.dv, p.v_groups}}) {
    if (count == 0 && is_integer(p.kv_dtype))
      refuse(name, "no tensor", "scales for " + std::string(to_string(p.kv_dtype)));
    if (count != 0 && is_float(p.kv_dtype))
      refuse(name, "scales for " + std::string(to_string(p.kv_dtype)), "none, or quantised keys and values");
    if (count < 0 || (count > 0 && size % count != 0))
      refuse(name, std::to_string(count) + " groups", "a divisor of the head size " + std::to_string(size));
    if (packed && size / count % 2 != 0)
      refuse(name, "groups of " + std::to_string(size / count) + " elements", "an even number of i4x2");
  }
  if (p.zeros && p.k_groups == 0 && p.v_groups == 0) refuse("kv.k_zero", "zero points without scales", "scales too");
}

}  // namespace

void check(const Problem& p) {
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"hq", p.hq}, {"hk", p.hk}, {"sq", p.sq}, {"sk", p.sk}})
    if (size < 0 || size > kMaxSize) refuse(name, std::to_string(size), "0 to 2^48");
  int64_t rows = 0;
  const auto at_least_1 = [](int64_t size) {
    return std::max<int64_t>(size, 1);
  };  // a size of 0 must not hide the others
  if (__builtin_mul_overflow(at_least_1(p.b), at_least_1(std::max(p.hq, p.hk)), &rows) ||
      __builtin_mul_overflow(rows, at_least_1(p.sq), &rows) || rows > kMaxOffset)
    refuse("q", "more than 2^52 rows", "a smaller problem");
  for (const auto& [name, dtype] : {std::pair{"q", p.q_dtype}, {"out", p.out_dtype}})
    if (!is_float(dtype)) refuse(name, "dtype " + std::string(to_string(dtype)), kFloats);
  if (!is_cache(p.kv_dtype)) refuse("k", "dtype " + std::string(to_string(p.kv_dtype)), kCaches);
  if (!is_float(p.bias_dtype)) refuse("score.bias", "dtype " + std::string(to_string(p.bias_dtype)), kFloats);
  if (p.d < 1 || p.d > kMaxHeadSize) refuse("q", "head size d = " + std::to_string(p.d), "1 to 8192");
  if (p.dv < 1 || p.dv > kMaxHeadSize) refuse("v", "head size dv = " + std::to_string(p.dv), "1 to 8192");
  check_heads(p.hq, p.hk);
  if (!std::isfinite(p.scale)) refuse("score.scale", shortest(p.scale), "a finite number");
  if (!(p.softcap == 0 || (p.softcap >= 1e-30f && p.softcap <= 1e30f)))
    refuse("score.softcap", shortest(p.softcap), "a number from 1e-30 to 1e30");
  if (p.layout > Problem::Layout::other) refuse("problem", "an unknown layout", "one of Problem::Layout");
  for (const int64_t side : {p.window_left, p.window_right})
    if (side < -1) refuse("score.window", std::to_string(side), "-1 (open), or 0 and more");
  for (const auto& [name, total, longest] : {std::tuple{"q", p.ragged_q, p.sq}, {"k", p.ragged_k, p.sk}})
    if (total >= 0 && (total < longest || (longest > 0 ? (total - 1) / longest >= p.b : total > 0)))
      refuse(name, std::to_string(total) + " ragged rows", "between the longest sequence and b times it");
  if (p.kv_lengths && p.ragged_k >= 0) refuse("kv.seqlens", "lengths for ragged keys", "cu_seqlens alone");
  check_cache(p);
  const bool equal_lengths = p.ragged_q < 0 && p.ragged_k < 0 && !p.kv_lengths;
  if (equal_lengths && needs_align(p) && p.sq != p.sk) refuse_align(p.sq, p.sk);
  if (p.align_offset > kMaxOffset || p.align_offset < -kMaxOffset)
    refuse("score.align", "offset " + std::to_string(p.align_offset), "at most 2^52 either way");
}

Call validate(const AttentionArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;  // for the default scale
  return Validator(args).run(workspace);
}

Problem Problem::of(const AttentionArgs& args) {
  return validate(args).problem;
}

}  // namespace rapt
