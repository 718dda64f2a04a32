#include "operations/attention/kind_paged.hpp"

#include <limits>

#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/operation.hpp"

namespace rapt {

using std::int64_t;
using Paged = KeyKind<KvSource::Kind::paged>;

void Paged::check_shapes(const KvSource& kv, Bound& bound) {
  if (kv.k.shape[0] > std::numeric_limits<std::int32_t>::max())
    throw Error("k", std::to_string(kv.k.shape[0]) + " pages", "less than 2^31");
  const int64_t page_size = bound[attention_dimension("page_size")];
  if (page_size < 1) throw Error("k", "shape " + shape_text(kv.k), "pages of 1 row or more");
  int64_t sk = 0;
  if (__builtin_mul_overflow(bound[attention_dimension("n")], page_size, &sk) || sk > kMaxSize)
    throw Error("kv.block_table", "shape " + shape_text(kv.block_table), "room for at most 2^48 keys");
  bound.derive(attention_dimension("sk"), sk);
}

void Paged::check_blocks(const CacheProblem& p, int64_t sk, const char* k) {
  if (p.page_size < 0 || p.page_size > kMaxSize || (p.page_size > 0 && sk % p.page_size != 0))
    throw Error(k, "pages of " + std::to_string(p.page_size) + " rows", "a divisor of sk = " + std::to_string(sk));
}

// Checks every entry that leads to a key that some row may see; the others may be anything.
void Paged::check_visible(const AttentionProblem& p, const AttentionParams& f) {
  if (p.device != DeviceType::cpu) return;
  for (int64_t i = 0; i < p.b; ++i) {
    const KeyRange keys = visible_keys(f.score, sequence_of(f, f, i));
    if (keys.first >= keys.last) continue;
    for (int64_t n = keys.first / p.page_size; n <= (keys.last - 1) / p.page_size; ++n)
      check_page("kv.block_table", "k", f.page_count, f.pages.element(i * f.pages_stride_b + n * f.pages.stride),
                 [&] { return " at [" + std::to_string(i) + ", " + std::to_string(n) + "]"; });
  }
}

}  // namespace rapt
