#include "operations/attention_check.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "core/dtypes.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;

[[noreturn]] void refuse(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw Error(argument, got, wanted);
}

// What pages, rings and quantised types ask for beyond the sizes.
void check_cache(const AttentionProblem& p) {
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
      if (dims != AttentionProblem::kNone)
        refuse(name, "a tensor for keys in a ring", "none: positions there have no end");
  }
  check_scales("kv.k_scale", p.kv_dtype, p.d, p.k_groups);
  check_scales("kv.v_scale", p.kv_dtype, p.dv, p.v_groups);
  if (p.zeros && p.k_groups == 0 && p.v_groups == 0) refuse("kv.k_zero", "zero points without scales", "scales too");
}

}  // namespace

void check_heads(int64_t hq, int64_t hk) {
  if (hk == 0 ? hq != 0 : hq % hk != 0)
    refuse("k", std::to_string(hk) + " heads for " + std::to_string(hq) + " query heads", "a divisor of them");
}

bool needs_align(const AttentionProblem& p) {
  return (p.causal || p.alibi || p.window_left >= 0 || p.window_right >= 0) && p.align == AttentionProblem::Align::none;
}
void refuse_align(int64_t q, int64_t k, const std::string& where) {
  refuse("score.align", "none, with " + std::to_string(q) + " queries and " + std::to_string(k) + " keys" + where,
         "top_left, bottom_right or an offset for causal, window and alibi");
}

void check_scales(const char* name, DType dtype, int64_t size, int64_t groups) {
  const std::string type(to_string(dtype));
  if (groups == 0 && is_integer(dtype)) refuse(name, "no tensor", "scales for " + type);
  if (groups != 0 && is_float(dtype)) refuse(name, "scales for " + type, "none, or quantised keys and values");
  if (groups < 0 || (groups > 0 && size % groups != 0))
    refuse(name, std::to_string(groups) + " groups", "a divisor of the head size " + std::to_string(size));
  if (dtype == DType::i4x2 && size / groups % 2 != 0)
    refuse(name, "groups of " + std::to_string(size / groups) + " elements", "an even number of i4x2");
}

void check_dropout(const char* name, float p) {
  if (!(p >= 0 && p <= 1)) refuse(name, shortest(p), "a number from 0 to 1");
}

void check(const AttentionProblem& p) {
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
  check_dropout("score.dropout", p.dropout);
  if (p.layout > AttentionProblem::Layout::other)
    refuse("problem", "an unknown layout", "one of AttentionProblem::Layout");
  for (const int64_t side : {p.window_left, p.window_right})
    if (side < -1) refuse("score.window", std::to_string(side), "-1 (open), or 0 and more");
  for (const auto& [name, total, longest] : {std::tuple{"q", p.ragged_q, p.sq}, {"k", p.ragged_k, p.sk}})
    if (total >= 0 && (total < longest || (longest > 0 ? (total - 1) / longest >= p.b : total > 0)))
      refuse(name, std::to_string(total) + " ragged rows", "between the longest sequence and b times it");
  if (p.kv_lengths && p.ragged_k >= 0) refuse("kv.seqlens", "lengths for ragged keys", "cu_seqlens alone");
  check_cache(p);
  if (!has_lengths(p) && needs_align(p) && p.sq != p.sk) refuse_align(p.sq, p.sk);
  if (p.align_offset > kMaxOffset || p.align_offset < -kMaxOffset)
    refuse("score.align", "offset " + std::to_string(p.align_offset), "at most 2^52 either way");
}

}  // namespace rapt
