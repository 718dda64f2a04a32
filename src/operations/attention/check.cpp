#include "operations/attention/check.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "core/dtypes.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/attention/modifiers.hpp"
#include "operations/bound.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;

// What keys ask for beyond the sizes.
void check_cache(const AttentionProblem& p) {
  check_kind(p);
  const int64_t d = p.d - p.k_tail;  // of k's own rows
  check_tail("kv.k_tail", p.kv_dtype, p.d, p.k_tail, p.k_tail_dtype);
  if (p.latent && p.dv > d)
    throw Error("v", "head dimension " + std::to_string(p.dv),
                "at most k's, whose rows begin with v's: " + std::to_string(d));
  check_key_lengths(p);
  check_modifiers(p);
  check_scales("kv.k_scale", p.kv_dtype, d, p.k_groups);
  check_scales("kv.v_scale", p.kv_dtype, p.dv, p.v_groups);
  if (p.zeros && p.k_groups == 0 && p.v_groups == 0)
    throw Error("kv.k_zero", "zero points without scales", "scales too");
  if (p.head_scales && p.k_groups == 0 && p.v_groups == 0)
    throw Error("kv.k_scale", "scales of heads without groups", "groups too");
}

}  // namespace

Strides row_strides(const Layout& t, bool ragged, bool has_elements) {
  return ragged ? strides_along(t, -1, 1, 0, has_elements ? 2 : -1) : strides_along(t, 0, 1, 2, has_elements ? 3 : -1);
}

Pairs::Pairs(const Layout& t) {
  const auto rank = static_cast<std::size_t>(t.ndim);
  for (std::size_t from = 0; from < rank; ++from) {
    const std::size_t to = 4 - rank + from;
    size[to] = t.shape[from], step[to] = size[to] == 1 ? 0 : t.strides[from];
  }
}

void check_heads(int64_t hq, int64_t hk) {
  if (hk == 0 ? hq != 0 : hq % hk != 0)
    throw Error("k", std::to_string(hk) + " heads for " + std::to_string(hq) + " query heads", "a divisor of them");
}

bool needs_align(const AttentionProblem& p) {
  return (p.causal || p.alibi || p.window_left >= 0 || p.window_right >= 0) && p.align == AttentionProblem::Align::none;
}
void refuse_align(const char* name, int64_t q, int64_t k, const std::string& where, const char* need) {
  throw Error(name, "none, with " + std::to_string(q) + " queries and " + std::to_string(k) + " keys" + where,
              std::string("top_left, bottom_right or an offset") + need);
}
void set_align(const std::optional<Align>& align, const char* name, AttentionProblem::Align& kind, int64_t& offset) {
  using Kind = AttentionProblem::Align;
  if (!align) return;
  if (align->kind > Align::Kind::offset) throw Error(name, "an unknown kind", "one of rapt::Align");
  kind = align->kind == Align::Kind::top_left       ? Kind::top_left
         : align->kind == Align::Kind::bottom_right ? Kind::bottom_right
                                                    : Kind::offset;
  if (kind == Kind::offset) offset = align->value;
}

void check_scales(std::string_view name, DType dtype, int64_t size, int64_t groups) {
  const auto refuse = [&](const std::string& given, const std::string& wanted) {
    throw Error(std::string(name), given, wanted);
  };
  const auto type = [&] { return std::string(to_string(dtype)); };
  if (groups == 0 && needs_scales(dtype)) refuse("no tensor", "scales for " + type());
  if (groups != 0 && is_float(dtype)) refuse("scales for " + type(), "none, or quantised keys and values");
  if (groups < 0 || (groups > 0 && size % groups != 0))
    refuse(std::to_string(groups) + " groups", "a divisor of the head dimension " + std::to_string(size));
  if (dtype == DType::i4x2 && size / groups % 2 != 0)
    refuse("groups of " + std::to_string(size / groups) + " elements", "an even number of i4x2");
}

void check_tail(std::string_view name, DType dtype, int64_t d, int64_t tail, DType tail_dtype) {
  if (tail < 0 || (tail > 0 && tail >= d))
    throw Error(std::string(name), std::to_string(tail) + " columns",
                "fewer than the head dimension d = " + std::to_string(d));
  if (tail > 0 && is_float(dtype))
    throw Error(std::string(name), "columns beside keys of " + std::string(to_string(dtype)),
                "none, or quantised keys: others have all columns in k");
  check_type(name, tail_dtype, kFloatTypes);
}

void check_dropout(const char* name, float p) {
  if (!(p >= 0 && p <= 1)) throw Error(name, shortest(p), "a number from 0 to 1");
}

void check(const AttentionProblem& p) {
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"hq", p.hq}, {"hk", p.hk}, {"sq", p.sq}, {"sk", p.sk}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  check_row_count(p.b, std::max(p.hq, p.hk), p.sq);
  check_type("q", p.q_dtype, kQueryTypes), check_type("out", p.out_dtype, kFloatTypes);
  if (p.q_scale && p.q_dtype != DType::f8e4m3)
    throw Error("q_scale", "scales for " + std::string(to_string(p.q_dtype)), "none, or queries of f8e4m3");
  check_type("k", p.kv_dtype, kCacheTypes);
  if (p.d < 1 || p.d > kMaxHeadDim) throw Error("q", "head dimension " + std::to_string(p.d), "1 to 8192");
  if (p.dv < 1 || p.dv > kMaxHeadDim) throw Error("v", "head dimension " + std::to_string(p.dv), "1 to 8192");
  check_heads(p.hq, p.hk);
  if (!std::isfinite(p.scale)) throw Error("score.scale", shortest(p.scale), "a finite number");
  Modifiers::for_each([&]<class M>(M) { M::check(p); });
  if (p.layout > AttentionProblem::Layout::other)
    throw Error("problem", "an unknown layout", "one of AttentionProblem::Layout");
  for (const int64_t side : {p.window_left, p.window_right})
    if (side < -1) throw Error("score.window", std::to_string(side), "-1 (open), or 0 and more");
  check_ragged("q", p.ragged_q, "ragged rows", p.b, p.sq), check_ragged("k", p.ragged_k, "ragged rows", p.b, p.sk);
  if (p.kv_lengths && p.ragged_k >= 0) throw Error("kv.seqlens", "lengths for ragged keys", "cu_seqlens alone");
  check_cache(p);
  if (!has_lengths(p) && needs_align(p) && p.sq != p.sk) refuse_align("score.align", p.sq, p.sk, "");
  if (p.align_offset > kMaxOffset || p.align_offset < -kMaxOffset)
    throw Error("score.align", "offset " + std::to_string(p.align_offset), "at most 2^52 either way");
}

}  // namespace rapt
