#include "operations/attention/sampler.hpp"

#include <algorithm>

#include "operations/attention/case_modifiers.hpp"
#include "operations/attention/layouts.hpp"
#include "support/dtypes.hpp"
#include "support/random.hpp"

namespace rapt::testing {
namespace {

std::int64_t head_dim(Random& random) {
  switch (between(random, 0, 5)) {
    case 0:
      return pick(random, {32, 40, 64, 80, 96, 128});
    case 1:
      return between(random, 1, 17);
    case 2:
      return between(random, 129, 576);
    default:
      return between(random, 1, 144);
  }
}

std::int64_t length(Random& random) {
  switch (between(random, 0, 4)) {
    case 0:
      return between(random, 1, 9);
    case 1:
      return pick(random, {16, 64, 128, 192, 256});
    default:
      return between(random, 1, 300);
  }
}

void sample_positions(Random& random, AttentionProblem& p) {
  p.causal = !one_in(random, 3);
  if (one_in(random, 2)) {
    p.window_left = one_in(random, 3) ? -1 : between(random, 0, 70);
    p.window_right = one_in(random, 3) ? -1 : between(random, 0, 70);
  }
  p.alibi = one_in(random, 4);
  switch (between(random, 0, 3)) {
    case 0:
      p.align = AttentionProblem::Align::top_left;
      break;
    case 1:
      p.align = AttentionProblem::Align::bottom_right;
      break;
    case 2:
      p.align = AttentionProblem::Align::offset;
      p.align_offset = between(random, -p.sq - 3, p.sk + 3);
      break;
    default:  // none: legal for equal lengths only
      p.sk = p.sq;
      break;
  }
}

void sample_scores(Random& random, AttentionProblem& p) {
  if (one_in(random, 3)) {
    p.has_scale = true;
    p.scale = static_cast<float>(between(random, -20, 60)) / 64;
  }
  Modifiers::sample_modifiers(random, p);
}

void sample_lengths(Random& random, AttentionProblem& p, bool equal) {
  switch (between(random, 0, 3)) {
    case 0:
      p.kv_lengths = true;
      break;
    case 1:
      p.ragged_k = total(random, p.b, p.sk);
      break;
    case 2:
      p.ragged_q = total(random, p.b, p.sq);
      break;
    default:
      p.ragged_q = total(random, p.b, p.sq);
      p.ragged_k = total(random, p.b, p.sk);
      break;
  }
  // Equal lengths in every sequence: ragged on both sides with one total, or on neither.
  if (equal && (p.ragged_q >= 0 || p.ragged_k >= 0)) p.ragged_q = p.ragged_k = total(random, p.b, p.sq);
}

void sample_types(Random& random, AttentionProblem& p) {
  const auto type = [&] { return static_cast<DType>(pick(random, {0, 1, 2})); };
  static_assert(static_cast<int>(DType::f32) == 0 && static_cast<int>(DType::f16) == 1 &&
                static_cast<int>(DType::bf16) == 2);
  if (p.bias != AttentionProblem::kNone) p.bias_dtype = type();
  switch (between(random, 0, 2)) {
    case 0:
      break;
    case 1:
      p.q_dtype = p.kv_dtype = p.out_dtype = one_in(random, 2) ? DType::bf16 : DType::f16;
      break;
    default:
      p.q_dtype = type();
      p.kv_dtype = type();
      p.out_dtype = type();
      break;
  }
}

/// How many scales rows of n elements have: a divisor of n, and of n / 2 if `packed`.
std::int64_t scales(Random& random, std::int64_t n, bool packed) {
  const std::int64_t most = packed ? n / 2 : n;
  const std::int64_t groups = one_in(random, 6) ? most : pick(random, {1, 1, 2, 3, 4, 8});
  return most % groups == 0 ? groups : 1;
}

void sample_caches(Random& random, AttentionProblem& p) {
  const bool packed = one_in(random, 5), bytes = !packed && one_in(random, 3);
  if (packed) p.d += p.d % 2, p.dv += p.dv % 2;
  if (packed || bytes) p.kv_dtype = packed ? DType::i4x2 : DType::i8;
  else if (one_in(random, 2)) p.kv_dtype = any_of(random, kFp8Types);
  const bool floats8 = is_fp8(p.kv_dtype);
  if ((packed || bytes || floats8) && p.d > 2 && one_in(random, 3)) {
    p.k_tail = one_in(random, 3) ? 1 : between(random, 1, p.d - 2);
    if (packed) p.k_tail = (p.k_tail + 1) / 2 * 2;  // half of one is nothing that k can have
    p.k_tail_dtype = static_cast<DType>(between(random, 0, 2));
  }
  if (packed || bytes || (floats8 && one_in(random, 2))) {
    p.k_groups = scales(random, p.d - p.k_tail, packed), p.v_groups = scales(random, p.dv, packed);
    if (floats8 && one_in(random, 3)) (one_in(random, 2) ? p.k_groups : p.v_groups) = 0;
    p.zeros = (p.k_groups > 0 || p.v_groups > 0) && one_in(random, 2);
  }
  if (one_in(random, 4)) keep_no_positions(p);
  sample_blocks(random, p);
}

}  // namespace

AttentionProblem sample(Random& random, const SampleOptions& options) {
  AttentionProblem p;
  p.b = between(random, 1, 3);
  p.hk = between(random, 1, 3);
  p.hq = p.hk * pick(random, {1, 1, 2, 3, 5, 7});
  p.sq = length(random);
  p.sk = length(random);
  p.d = head_dim(random);
  p.dv = one_in(random, 2) ? p.d : head_dim(random);
  // Keep float64 affordable.
  const auto products = [&p] { return p.b * p.hq * std::max(p.sq, p.sk) * p.sk * (p.d + p.dv); };
  while (products() > options.products) {
    if (p.hq > p.hk) p.hq -= p.hk;
    else if (p.b > 1) --p.b;
    else if (p.hk > 1) p.hk = p.hq = 1;
    else p.sk = (p.sk + 1) / 2, p.sq = (p.sq + 1) / 2;
  }
  p.lse = true;
  if (options.positions) sample_positions(random, p);
  if (options.scores) sample_scores(random, p);
  const bool positions = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.alibi;
  if (options.lengths) sample_lengths(random, p, positions && p.align == AttentionProblem::Align::none);
  if (options.types) sample_types(random, p);
  if (options.caches) sample_caches(random, p);
  if (options.layouts) p.layout = static_cast<AttentionProblem::Layout>(between(random, 0, 3));
  p.latent = p.dv <= p.d - p.k_tail && one_in(random, 4);
  const std::int64_t group = (p.d - p.k_tail) / std::max<std::int64_t>(p.k_groups, 1);
  if (p.latent && p.v_groups > 0 && p.k_groups > 0 && p.dv % group == 0) p.v_groups = p.dv / group;  // v may share k's
  if (options.caches) {
    p.head_scales = p.k_groups + p.v_groups > 0 && one_in(random, 3);
    if (one_in(random, 4)) p.q_dtype = DType::f8e4m3, p.q_scale = !one_in(random, 3);
  }
  return p;
}

AttentionBackwardProblem sample_backward(Random& random, SampleOptions options) {
  options.products = std::min(options.products, std::int64_t{1} << 21);
  AttentionBackwardProblem p;
  static_cast<AttentionProblem&>(p) = sample(random, options);
  if (!has_positions(p) || (p.ragged_q < 0 && p.ragged_k < 0 && one_in(random, 4))) {
    keep_no_positions(p);
    p.pool = one_in(random, 2) ? p.sk : between(random, 12, 2 * p.sk + 12);
  }
  p.dout_dtype = p.out_dtype;
  if (options.types && one_in(random, 3)) p.dout_dtype = static_cast<DType>(between(random, 0, 2));
  p.dlse = one_in(random, 2);
  p.dbias = p.bias != AttentionProblem::kNone && !one_in(random, 4);
  p.dsinks = p.sinks && !one_in(random, 4);
  p.dalibi = p.alibi && !one_in(random, 4);
  if (one_in(random, 4))
    p.grads = static_cast<std::uint8_t>(between(random, p.dbias || p.dsinks || p.dalibi ? 0 : 1, 7));
  return p;
}

}  // namespace rapt::testing
