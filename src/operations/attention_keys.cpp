#include "operations/attention_keys.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace rapt {
namespace {

using std::int64_t;

// Whether lengths and tables can be read here.
bool on_host(const AttentionProblem& p) {
  return p.device == DeviceType::cpu;
}

class KeyValidator {
 public:
  KeyValidator(const AttentionArgs& args, AttentionTensors& tensors, AttentionProblem& p, AttentionParams& params)
      : args_(args), tensors_(tensors), p_(p), f_(params), host_(on_host(p)) {}

  void check_all() {
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
    const int64_t max_length = p_.ring ? kMaxSize : p_.sk;
    for (int64_t i = 0; host_ && i < b; ++i)
      if (const int64_t n = f_.k_len[i]; n < 0 || n > max_length)
        throw Error("kv.seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
                    p_.ring ? "0 to 2^48" : "0 to sk = " + std::to_string(max_length));
  }

 private:
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

  const AttentionArgs& args_;
  AttentionTensors& tensors_;
  AttentionProblem& p_;
  AttentionParams& f_;
  const bool host_;
};

// Every key that rows see is still in the ring: with fewer than they ask for the result would be wrong, silently.
void check_ring(const AttentionProblem& p, const AttentionParams& f) {
  if (!p.ring) return;
  if (!on_host(p)) {  // lengths may be anything, and have to be taken for long ones
    const bool known = p.ragged_q < 0 && p.window_left >= 0 && p.align == AttentionProblem::Align::bottom_right;
    if (known && p.sq > 0 && p.window_left > p.sk - p.sq)
      throw Error("k", "a ring of " + std::to_string(p.sk) + " rows",
                  "window_left + query rows or more, " + std::to_string(p.window_left) + " + " + std::to_string(p.sq));
    return;
  }
  const bool open_left = p.window_left < 0, open_right = f.score.right == kOpen;
  for (int64_t i = 0; i < p.b; ++i) {
    const Sequence q = sequence_of(f, f, i);
    // The first row that sees a key, if all were there; it sees the oldest keys.
    const int64_t offset = row_offset(f.score, q);
    const int64_t token = open_right ? 0 : std::max<int64_t>(0, -f.score.right - offset);
    if (token >= q.len_q) continue;
    KeyRange keys = visible_keys(f.score, token, offset + token, 0, q.len_k);
    // Without a left end the first row that sees keys sees as many as the ring has, like the last.
    if (open_left) keys.first = std::max<int64_t>(keys.last - p.sk, 0);
    if (keys.first >= keys.last || keys.first >= q.oldest) continue;
    throw Error("k",
                "a ring of " + std::to_string(p.sk) + " rows, where key " + std::to_string(keys.first) +
                    " of sequence " + std::to_string(i) + ", which a query row sees, is overwritten",
                open_left ? "one query row a call, or a window, once a sequence is longer than the ring"
                          : std::to_string(q.len_k - keys.first) +
                                " rows or more (window_left + query rows), or fewer query rows a call");
  }
}

// Checks every entry that leads to a key that some row may see; the others may be anything.
void check_pages(const AttentionProblem& p, const AttentionParams& f) {
  if (p.page_size == 0) return;
  for (int64_t i = 0; on_host(p) && i < p.b; ++i) {
    const KeyRange keys = visible_keys(f.score, sequence_of(f, f, i));
    if (keys.first >= keys.last) continue;
    for (int64_t n = keys.first / p.page_size; n <= (keys.last - 1) / p.page_size; ++n) {
      const int64_t page = f.pages.element(i * f.pages_stride_b + n * f.pages.stride);
      if (page < 0 || page >= f.page_count)
        throw Error("kv.block_table",
                    "page " + std::to_string(page) + " at [" + std::to_string(i) + ", " + std::to_string(n) + "]",
                    f.page_count == 0 ? "sequences without keys, as k has no pages"
                                      : "0 to " + std::to_string(f.page_count - 1) + ", one of k's pages");
    }
  }
}

}  // namespace

void check_keys(const AttentionArgs& args, AttentionTensors& tensors, AttentionProblem& p, AttentionParams& params) {
  KeyValidator(args, tensors, p, params).check_all();
}

void check_visible_keys(const AttentionProblem& p, const AttentionParams& params) {
  check_ring(p, params);
  check_pages(p, params);
}

}  // namespace rapt
