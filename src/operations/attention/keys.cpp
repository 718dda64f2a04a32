#include "operations/attention/keys.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/modifiers.hpp"
#include "operations/attention/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

// Whether lengths and tables can be read here.
bool on_host(const AttentionProblem& p) {
  return p.device == DeviceType::cpu;
}

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

void AttentionModes::refuse(unsigned kind, const char* argument) {
  if (kind == gathered)
    throw Error(argument, "one for gathered keys", "none: a token attends to the keys of its list, all alike");
  if (kind == ring) throw Error(argument, "a tensor for keys in a ring", "none: positions there have no end");
  throw Error(argument, std::string("one for ") + name_of(kind), "none");
}

void check_modifiers(const AttentionProblem& p) {
  const unsigned kind = AttentionModes::of(p);
  Modifiers::for_each([&]<class M>(M) {
    if (!(M::keys & kind) && M::is_given(p)) AttentionModes::refuse(kind, M::name);
  });
}

// Keys have no positions but those in a list: what counts on others is refused by its name.
void check_kind(const AttentionProblem& p) {
  if (!p.gathered) return;
  if (p.ragged_q >= 0) throw Error("cu_seqlens_q", "ragged queries with gathered keys", "[b, hq, sq, d] queries");
  if (p.ragged_k >= 0 || p.kv_lengths || p.page_size > 0 || p.ring)
    throw Error("kv", "gathered keys that are ragged, in pages, in a ring or have lengths", "one kind of keys");
  for (const auto& [name, given] : {std::pair{"score.causal", p.causal},
                                    {"score.window", p.window_left >= 0 || p.window_right >= 0},
                                    {"score.align", p.align != AttentionProblem::Align::none}})
    if (given) AttentionModes::refuse(AttentionModes::gathered, name);
  check_modifiers(p);
}

void check_cache(const CacheProblem& p, int64_t sk, const char* k, const char* kind) {
  if (p.page_size < 0 || p.page_size > kMaxSize || (p.page_size > 0 && sk % p.page_size != 0))
    throw Error(k, "pages of " + std::to_string(p.page_size) + " rows", "a divisor of sk = " + std::to_string(sk));
  if (p.page_size > 0 && p.ring) throw Error(kind, "pages and a ring", "one of them");
}

void check_key_lengths(const AttentionProblem& p) {
  check_cache(p, p.sk, "k", "kv");
  if (p.page_size > 0 || p.ring) {
    if (p.ragged_k >= 0) throw Error("kv", "ragged keys in pages or a ring", "keys with lengths");
    if (!p.kv_lengths) throw Error("kv.seqlens", "no tensor", "[b] lengths for pages and rings");
  }
  if (p.ring && p.sk < 1) throw Error("k", "a ring of no rows", "1 or more");
}

void check_key_shapes(const KvSource& kv, const Bound& bound) {
  const int64_t q_size = bound[attention_dimension("d")], per_byte = kv.k.dtype == DType::i4x2 ? 2 : 1;  // elements
  const int64_t tail = kv.k_tail ? bound[attention_dimension("tail")] : 0;
  if (kv.k_tail) {
    if (tail < 1) throw Error("kv.k_tail", "shape " + shape_text(kv.k_tail), "1 column or more");
    check_tail("kv.k_tail", kv.k.dtype, q_size, tail, kv.k_tail.dtype);
  }
  const int64_t d = q_size - tail;
  if (d % per_byte != 0) throw Error("q", "head size " + std::to_string(q_size), "an even one for keys of i4x2");
  if (bound[attention_dimension("dk")] != d)
    throw Error("k", "shape " + shape_text(kv.k),
                std::string(per_byte == 1 ? tail > 0 ? "q's head size d less k_tail's columns" : "q's head size d"
                                          : "half of q's head size d, less k_tail's columns, in bytes,") +
                    " = " + std::to_string(d / per_byte));
  if (const int64_t b = bound[attention_dimension("b")];
      bound.mode & AttentionModes::gathered && kv.k.shape[0] != 1 && kv.k.shape[0] != b)
    throw Error("k", "shape " + shape_text(kv.k), "1, or q's batch b = " + std::to_string(b));
  check_heads(bound[attention_dimension("hq")], bound[attention_dimension("hk")]);
}

void check_scale_shapes(const KvSource& kv, const Bound& bound) {
  for (const auto& [name, scale, groups, zero_name, zero] :
       {std::tuple{"kv.k_scale", &kv.k_scale, attention_dimension("k_groups"), "kv.k_zero", &kv.k_zero},
        std::tuple{"kv.v_scale", &kv.v_scale, attention_dimension("v_groups"), "kv.v_zero", &kv.v_zero}}) {
    if (*scale && bound[groups] < 1) throw Error(name, "shape " + shape_text(*scale), "1 group of a row or more");
    if (*zero && !*scale) throw Error(zero_name, "zero points without scales", "scales too");
  }
}

void check_lengths(const TensorView& cu_seqlens_q, const KvSource& kv, Bound& bound) {
  using M = AttentionModes;
  const bool host = bound.device.type == DeviceType::cpu;
  const int64_t b = bound[attention_dimension("b")];
  constexpr int kSk = attention_dimension("sk");
  // The longest sequence, or the most that it can be.
  const auto longest = [&](const char* name, const TensorView& starts, int64_t total) {
    return host ? check_starts(name, integers_of(starts), b + 1, total) : total;
  };
  if (bound.mode & M::ragged_q)
    bound.derive(attention_dimension("sq"),
                 longest("cu_seqlens_q", cu_seqlens_q, bound[attention_dimension("total_q")]));
  if (bound.mode & M::ragged)
    bound.derive(kSk, longest("kv.cu_seqlens", kv.cu_seqlens, bound[attention_dimension("total_k")]));
  if (bound.mode & M::gathered) bound.derive(kSk, bound[attention_dimension("n")]);
  if (bound.mode & M::paged) {
    if (kv.k.shape[0] > std::numeric_limits<std::int32_t>::max())
      throw Error("k", std::to_string(kv.k.shape[0]) + " pages", "less than 2^31");
    const int64_t page_size = bound[attention_dimension("page_size")];
    if (page_size < 1) throw Error("k", "shape " + shape_text(kv.k), "pages of 1 row or more");
    int64_t sk = 0;
    if (__builtin_mul_overflow(bound[attention_dimension("n")], page_size, &sk) || sk > kMaxSize)
      throw Error("kv.block_table", "shape " + shape_text(kv.block_table), "room for at most 2^48 keys");
    bound.derive(kSk, sk);
  }
  if (!kv.seqlens || !host) return;
  const bool is_ring = bound.mode & M::ring;
  const int64_t most = is_ring ? kMaxSize : bound[kSk];
  const Integers lengths = integers_of(kv.seqlens);
  for (int64_t i = 0; i < b; ++i)
    if (const int64_t n = lengths[i]; n < 0 || n > most)
      throw Error("kv.seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
                  is_ring ? "0 to 2^48" : "0 to sk = " + std::to_string(most));
}

void fill_cache(unsigned mode, int64_t rows, CacheProblem& p) {
  p.page_size = mode & KvModes::paged ? rows : 0, p.ring = mode & KvModes::ring;
}
void fill_layout(const CacheProblem& p, int64_t sk, KvLayout& f) {
  f.page_size = p.ring ? sk : p.page_size, f.ring = p.ring;
}

int64_t first_kept(const KvLayout& f, int64_t count) {
  return f.ring && count > f.page_size ? count - f.page_size : 0;
}

void fill_kind(unsigned mode, const Bound& bound, AttentionProblem& p) {
  using M = AttentionModes;
  if (mode & M::ragged) p.ragged_k = bound[attention_dimension("total_k")];
  fill_cache(mode, mode & M::paged ? bound[attention_dimension("page_size")] : 0, p);
  p.gathered = mode & M::gathered;
}
void fill_layout(const AttentionProblem& p, KvLayout& f) {
  fill_layout(p, p.sk, f);
  if (p.gathered) f.page_size = 1, f.tokens = p.sq;
}

void fill_keys(const AttentionArgs& args, const AttentionProblem& p, AttentionParams& f) {
  const KvSource& kv = args.kv;
  if (args.cu_seqlens_q) f.q_begin = integers_of(args.cu_seqlens_q);
  if (kv.cu_seqlens) f.k_begin = integers_of(kv.cu_seqlens);
  if (kv.seqlens) f.k_len = integers_of(kv.seqlens);
  if (p.page_size > 0) {
    f.pages = integers_of(kv.block_table, 1);
    f.pages_stride_b = kv.block_table.strides[0], f.page_count = kv.k.shape[0];
  }
  if (p.gathered) {
    f.pages = integers_of(kv.indices, 2);
    f.pages_stride_b = kv.indices.strides[0], f.pages_stride_token = kv.indices.strides[1];
    f.page_count = kv.k.shape[2];
  }
}

void check_visible_keys(const AttentionProblem& p, const AttentionParams& params) {
  check_ring(p, params);
  check_pages(p, params);
}

}  // namespace rapt
