// attention: arguments -> Call, or an Error that names the argument. Nothing is written, and nothing is read but
// lengths, block tables and lists of keys in host memory.
#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "operations/attention_check.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;

class Validator {
 public:
  explicit Validator(const AttentionArgs& args, bool writes = true)
      : args_(args), host_(args.q.device.type == DeviceType::cpu), writes_(writes), tensors_(args.q.device) {}

  void check_all() {
    shapes();
    lengths();
    fill_sizes(p_, f_);
    check_score(args_.score, tensors_, p_, f_);
    check(p_);
    if (!host_ && p_.page_size > 0 && f_.page_count == 0) f_.sk = 0;  // no key can be there, whatever the lengths say
    ring();
    pages();
    const bool is_empty = p_.b == 0 || p_.hq == 0 || p_.sq == 0;
    if (!p_.gathered || !host_ || is_empty) return;
    if (f_.pages.is_int64) read_lists<int64_t>();
    else read_lists<std::int32_t>();
  }
  Call run(std::span<const std::byte> workspace) {
    check_all();
    check_overlaps(tensors_.all());
    check_apart(workspace, tensors_.all());
    return {p_, f_, args_.q.device, p_.b == 0 || p_.hq == 0 || p_.sq == 0, std::move(storage_)};
  }
  AttentionProblem give(AttentionParams& params, std::vector<Checked>& all, std::shared_ptr<const void>& lists) {
    check_all();
    params = f_, lists = std::move(storage_);
    all.assign(tensors_.all().begin(), tensors_.all().end());
    return p_;
  }

 private:
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
    tensors_.need("q", q, nq, ragged_q ? "[total_q, hq, d]" : "[b, hq, sq, d]", check_float);
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
    const int64_t packed = k.dtype == DType::i4x2 ? 2 : 1;  // elements to a byte
    p_.dv = v.shape[static_cast<std::size_t>(nk - 1)] * packed;
    tail(k);
    const int64_t d = p_.d - p_.k_tail;
    if (d % packed != 0) throw Error("q", "head size " + std::to_string(p_.d), "an even one for keys of i4x2");
    check_size("k", k, nk - 1, d / packed,
               packed == 1 ? p_.k_tail > 0 ? "q's head size d less k_tail's columns" : "q's head size d"
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
    p_.k_groups = groups("kv.k_scale", args_.kv.k_scale, k, f_.k_quant.scale, f_.k_quant.scale_stride);
    p_.v_groups = groups("kv.v_scale", args_.kv.v_scale, v, f_.v_quant.scale, f_.v_quant.scale_stride);
    zeros("kv.k_zero", args_.kv.k_zero, k, p_.k_groups, f_.k_quant);
    zeros("kv.v_zero", args_.kv.v_zero, v, p_.v_groups, f_.v_quant);
    p_.zeros = args_.kv.k_zero || args_.kv.v_zero;
    p_.latent = k.data && v.data == k.data && v.strides == k.strides && p_.dv <= d;
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

  // Scales or zeros of `rows`, which is k or v: its shape with groups for the last dimension, where the first and that
  // of rows may be 1. Returns the groups of a row; 0 when not given.
  int64_t groups(const char* name, const TensorView& t, const TensorView& rows, const float*& data, Strides& stride) {
    if (!t) return 0;
    const bool ragged = rows.ndim == 3;
    tensors_.need(name, t, rows.ndim, ragged ? "[total_k or 1, hk, groups]" : "[b (pages) or 1, hk, rows or 1, groups]",
                  check_f32);
    data = static_cast<const float*>(t.data), stride = strides(t, ragged);
    for (int dim = 0; dim < rows.ndim - 1; ++dim) {
      const bool broadcasts = dim != 1 && t.shape[static_cast<std::size_t>(dim)] == 1;
      if (broadcasts) (ragged || dim == 2 ? stride.s : stride.b) = 0;
      else
        check_size(name, t, dim, rows.shape[static_cast<std::size_t>(dim)],
                   dim == 1 ? "k's heads hk" : "1 or the rows'");
    }
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
    tensors_.take(name, t);
    check_list(name, t, count);
    return integers_of(t);
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
      throw Error("kv.block_table", "pages for another kind of keys", "KvSource::paged");
    for (const auto& [name, given] : {std::pair{"kv.indices", &kv.indices}, {"kv.counts", &kv.counts}})
      if (*given && !p_.gathered) throw Error(name, "lists for another kind of keys", "KvSource::gathered");
    if (kv.kind == KvSource::Kind::ragged) {
      if (!kv.cu_seqlens) throw Error("kv.cu_seqlens", "no tensor", "[b + 1] starts");
      p_.ragged_k = kv.k.shape[0];
      f_.k_begin = starts("kv.cu_seqlens", kv.cu_seqlens, p_.ragged_k, p_.sk, b + 1);
      if (kv.seqlens) throw Error("kv.seqlens", "lengths for ragged keys", "cu_seqlens alone");
      return;
    }
    if (kv.cu_seqlens) throw Error("kv.cu_seqlens", "starts for keys that are not ragged", "KvSource::ragged");
    if (p_.gathered) {
      if (kv.seqlens) throw Error("kv.seqlens", "lengths for gathered keys", "none, or kv.counts");
      return indices();
    }
    if (kv.kind == KvSource::Kind::paged) {
      table();
    } else {
      p_.sk = kv.k.shape[2];
      p_.ring = kv.kind == KvSource::Kind::ring;
    }
    if (!kv.seqlens) {
      if (p_.ring || p_.page_size > 0) throw Error("kv.seqlens", "no tensor", "[b] lengths for pages and rings");
      return;
    }
    p_.kv_lengths = true;
    f_.k_len = list("kv.seqlens", kv.seqlens, b);
    const int64_t most = p_.ring ? kMaxSize : p_.sk;
    for (int64_t i = 0; host_ && i < b; ++i)
      if (const int64_t n = f_.k_len[i]; n < 0 || n > most)
        throw Error("kv.seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
                    p_.ring ? "0 to 2^48" : "0 to sk = " + std::to_string(most));
  }

  // The shapes of pages and their table; its entries are read once it is known which pages rows see.
  void table() {
    const TensorView &t = args_.kv.block_table, &k = args_.kv.k;
    if (!t) throw Error("kv.block_table", "no tensor", "[b, n] pages");
    tensors_.take("kv.block_table", t);
    if (t.ndim != 2) throw Error("kv.block_table", "shape " + shape_text(t), "[b, n]");
    check_size("kv.block_table", t, 0, p_.b, "the batch b");
    check_integers("kv.block_table", t);
    if (k.shape[0] > std::numeric_limits<std::int32_t>::max())
      throw Error("k", std::to_string(k.shape[0]) + " pages", "less than 2^31");
    f_.pages = integers_of(t, 1);
    f_.pages_stride_b = t.strides[0], f_.page_count = k.shape[0];
    p_.page_size = k.shape[2];
    if (p_.page_size < 1) throw Error("k", "shape " + shape_text(k), "pages of 1 row or more");
    if (__builtin_mul_overflow(t.shape[1], p_.page_size, &p_.sk) || p_.sk > kMaxSize)
      throw Error("kv.block_table", "shape " + shape_text(t), "room for at most 2^48 keys");
  }

  // The shapes of lists of keys; their entries are read last.
  void indices() {
    const TensorView &t = args_.kv.indices, &counts = args_.kv.counts, &k = args_.kv.k;
    if (p_.ragged_q >= 0) check_gathered(p_);
    check_rows(p_);  // before tokens are counted
    if (!t) throw Error("kv.indices", "no tensor", "[b, sq, n] keys");
    tensors_.take("kv.indices", t);
    if (t.ndim != 3) throw Error("kv.indices", "shape " + shape_text(t), "[b, sq, n]");
    check_size("kv.indices", t, 0, p_.b, "q's batch b");
    check_size("kv.indices", t, 1, p_.sq, "q's rows sq");
    check_integers("kv.indices", t);
    f_.pages = integers_of(t, 2);
    f_.pages_stride_b = t.strides[0], f_.pages_stride_token = t.strides[1], f_.page_count = k.shape[2];
    p_.sk = t.shape[2];
    if (!counts) return;
    tensors_.take("kv.counts", counts);
    if (counts.ndim != 2) throw Error("kv.counts", "shape " + shape_text(counts), "[b, sq]");
    check_size("kv.counts", counts, 0, p_.b, "q's batch b");
    check_size("kv.counts", counts, 1, p_.sq, "q's rows sq");
    check_integers("kv.counts", counts);
  }

  // Reads the lists. Kernels see them without gaps: the length of each becomes the number of its valid entries, and if
  // some valid entry stands behind one that is not, all lists are copied.
  template <class T>
  void read_lists() {
    struct Lists {
      std::unique_ptr<int64_t[]> length;
      std::unique_ptr<T[]> rows;
    };
    const int64_t tokens = p_.b * p_.sq;
    std::shared_ptr<Lists> own;  // from the first list on that is not full
    int64_t longest = 0;
    bool has_gaps = false;
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t count = count_of(i), valid = valid_entries<T>(i, count);
      if (valid < p_.sk && !own) {
        own = std::make_shared<Lists>();
        own->length = std::make_unique_for_overwrite<int64_t[]>(static_cast<std::size_t>(tokens));
        std::fill_n(own->length.get(), i, p_.sk);
      }
      if (own) own->length[static_cast<std::size_t>(i)] = valid;
      has_gaps = has_gaps || (valid < count && valid_entries<T>(i, valid) < valid);
      longest = std::max(longest, valid);
    }
    if (!own) return;
    if (has_gaps) {
      int64_t size = 0;
      if (__builtin_mul_overflow(tokens, longest, &size)) throw std::bad_alloc();
      own->rows = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(size));
      for (int64_t i = 0; i < tokens; ++i) {
        const T* const list = list_of<T>(i);
        T* const rows = own->rows.get() + i * longest;
        const int64_t length = own->length[static_cast<std::size_t>(i)];
        for (int64_t j = 0, at = 0; at < length && j < p_.sk; ++j)
          if (const T row = list[j * f_.pages.stride]; row >= 0) rows[at++] = row;
      }
      f_.pages = {own->rows.get(), 1, f_.pages.is_int64};
      f_.pages_stride_b = p_.sq * longest, f_.pages_stride_token = longest;
    }
    f_.k_len = {own->length.get(), 1, true};
    storage_ = own;
  }
  // Of token i, counted over the batch.
  template <class T>
  const T* list_of(int64_t i) const {
    return static_cast<const T*>(f_.pages.data) + i / p_.sq * f_.pages_stride_b + i % p_.sq * f_.pages_stride_token;
  }
  // Among the first `count` of its list. All of them are checked.
  template <class T>
  int64_t valid_entries(int64_t i, int64_t count) const {
    const T* const list = list_of<T>(i);
    const int64_t step = f_.pages.stride;
    int64_t valid = 0;
    T largest = -1;
    for (int64_t j = 0; j < count; ++j) {
      const T row = list[j * step];
      valid += row >= 0, largest = std::max(largest, row);
    }
    if (largest < f_.page_count) return valid;
    int64_t j = 0;
    while (list[j * step] != largest) ++j;
    throw Error("kv.indices",
                "key " + std::to_string(largest) + " at [" + std::to_string(i / p_.sq) + ", " +
                    std::to_string(i % p_.sq) + ", " + std::to_string(j) + "]",
                f_.page_count == 0
                    ? "negative, for no key, as k has no rows"
                    : "0 to " + std::to_string(f_.page_count - 1) + ", one of k's rows, or negative, for no key");
  }
  int64_t count_of(int64_t i) const {
    const TensorView& t = args_.kv.counts;
    if (!t) return p_.sk;
    const int64_t count = integers_of(t).element(i / p_.sq * t.strides[0] + i % p_.sq * t.strides[1]);
    if (count < 0 || count > p_.sk)
      throw Error("kv.counts",
                  std::to_string(count) + " keys of token " + std::to_string(i % p_.sq) + " of sequence " +
                      std::to_string(i / p_.sq),
                  "0 to n = " + std::to_string(p_.sk));
    return count;
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
          throw Error("kv.block_table",
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
        throw Error(
            "k", "a ring of " + std::to_string(p_.sk) + " rows",
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
      throw Error("k",
                  "a ring of " + std::to_string(p_.sk) + " rows, where key " + std::to_string(keys.first) +
                      " of sequence " + std::to_string(i) + ", which a query row sees, is overwritten",
                  open_left ? "one query row a call, or a window, once a sequence is longer than the ring"
                            : std::to_string(q.len_k - keys.first) +
                                  " rows or more (window_left + query rows), or fewer query rows a call");
    }
  }

  const AttentionArgs& args_;
  const bool host_;    // lengths and tables can be read here
  const bool writes_;  // out and lse; else they are read
  AttentionProblem p_{};
  AttentionParams f_{};
  AttentionTensors tensors_;
  std::shared_ptr<const void> storage_;  // of lists
};

}  // namespace

AttentionProblem check_forward(const AttentionArgs& args, AttentionParams& params, std::vector<Checked>& all,
                               std::shared_ptr<const void>& lists) {
  return Validator(args, false).give(params, all, lists);
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
