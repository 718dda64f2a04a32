// What a ScoreSpec asks for: checked, and filled into attention's problem and parameters.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "core/dtypes.hpp"
#include "core/text.hpp"
#include "operations/attention_check.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = AttentionProblem;

template <class... T>
std::string dims_text(T... sizes) {
  std::string text;
  ((text += (text.empty() ? "[" : ", ") + std::to_string(sizes)), ...);
  return text + "]";
}

// bias or mask: right-aligned [b, hq, sq, sk] where missing dimensions and those of size 1 broadcast. Returns which of
// the first three do not.
std::uint8_t check_modifier(const char* name, const TensorView& t, const P& p, ScoreParams& params, Strides& stride) {
  const std::array<int64_t, 4> full = {p.b, p.hq, p.sq, p.sk};
  stride = {};
  std::uint8_t dims = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const int at = t.ndim - 4 + static_cast<int>(i);
    const int64_t size = at < 0 ? 1 : t.shape[static_cast<std::size_t>(at)];
    // Local indices of ragged sequences need room for the longest one.
    const bool ragged = (i == 2 && p.ragged_q >= 0) || (i == 3 && p.ragged_k >= 0);
    const bool fits = size == full[i] || (ragged && (size > full[i] || p.device != DeviceType::cpu));
    if (!fits && (size != 1 || i == 3))
      throw Error(name, "shape " + shape_text(t),
                  "a shape that broadcasts over b, hq, sq to " + dims_text(p.b, p.hq, p.sq, p.sk));
    if (i == 3) params.modifier_keys = std::min(params.modifier_keys, size);
    if (size == 1) continue;
    if (i == 2) params.modifier_rows = std::min(params.modifier_rows, size);
    (i == 0 ? stride.b : i == 1 ? stride.h : i == 2 ? stride.s : stride.d) = t.strides[static_cast<std::size_t>(at)];
    if (i < 3) dims |= static_cast<std::uint8_t>(1 << i);
  }
  return dims;
}

void check_tensors(const ScoreSpec& score, AttentionTensors& tensors, P& p, ScoreParams& params) {
  params.modifier_rows = params.modifier_keys = kNoLimit;
  if (const TensorView& t = score.bias) {
    check_float("score.bias", t.dtype);
    tensors.take("score.bias", t);
    p.bias = check_modifier("score.bias", t, p, params, params.bias_stride);
    p.bias_dtype = params.bias_type = t.dtype, params.bias = t.data;
  }
  if (const TensorView& t = score.mask) {
    if (t.dtype != DType::boolean)
      throw Error("score.mask", "dtype " + std::string(to_string(t.dtype)), "boolean (additive masks are a bias)");
    tensors.take("score.mask", t);
    p.mask = check_modifier("score.mask", t, p, params, params.mask_stride);
    params.mask = static_cast<const std::uint8_t*>(t.data);
  }
  if (const TensorView& t = score.alibi) {
    tensors.need("score.alibi", t, t.ndim == 2 ? 2 : 1, "[hq] or [b, hq]", check_float);
    check_size("score.alibi", t, t.ndim - 1, p.hq, "q's heads hq");
    if (t.ndim == 2) check_size("score.alibi", t, 0, p.b, "the batch b");
    p.alibi = true;
    params.alibi = t.data, params.alibi_type = t.dtype;
    params.alibi_stride_b = t.ndim == 2 ? t.strides[0] : 0;
    params.alibi_stride_h = t.strides[t.ndim == 2 ? 1 : 0];
  }
  if (const TensorView& t = score.sinks) {
    tensors.need("score.sinks", t, 1, "[hq]", check_float);
    check_size("score.sinks", t, 0, p.hq, "q's heads hq");
    p.sinks = true;
    params.sinks = t.data, params.sinks_type = t.dtype, params.sinks_stride = t.strides[0];
  }
}

void fill_positions(const P& p, ScoreParams& params) {
  const auto side = [](int64_t width) { return width < 0 ? kOpen : std::min(width, kOpen); };
  params.left = side(p.window_left);
  params.right = p.causal ? 0 : side(p.window_right);
  params.offset = p.align == P::Align::offset ? p.align_offset : 0;
  params.bottom_right = p.align == P::Align::bottom_right;
}

}  // namespace

void check_score(const ScoreSpec& score, AttentionTensors& tensors, P& p, AttentionParams& f) {
  const bool on_host = p.device == DeviceType::cpu;
  p.causal = score.causal;
  if (score.window) p.window_left = score.window->left, p.window_right = score.window->right;
  p.has_scale = score.scale.has_value();
  p.scale = score.scale.value_or(0.f);
  if (score.softcap) {
    p.softcap = *score.softcap;
    if (!(p.softcap > 0)) throw Error("score.softcap", shortest(p.softcap), "a number from 1e-30 to 1e30");
  }
  if (score.align) {
    if (score.align->kind > Align::Kind::offset) throw Error("score.align", "an unknown kind", "one of rapt::Align");
    p.align = score.align->kind == Align::Kind::top_left       ? P::Align::top_left
              : score.align->kind == Align::Kind::bottom_right ? P::Align::bottom_right
                                                               : P::Align::offset;
    if (p.align == P::Align::offset) p.align_offset = score.align->value;
  }
  if (p.gathered) {
    P asked = p;
    if (score.bias) asked.bias = 0;
    if (score.mask) asked.mask = 0;
    asked.alibi = static_cast<bool>(score.alibi);
    asked.dropout = score.dropout ? score.dropout->p : 0;
    check_gathered(asked);
  }
  check_tensors(score, tensors, p, f.score);
  p.dropout = score.dropout ? score.dropout->p : 0;
  if (p.dropout > 0 && p.dropout <= 1)  // else there is none, or check() refuses it
    f.score.dropout = dropout_params(p.dropout, score.dropout->seed, score.dropout->offset, p.hq);
  fill_positions(p, f.score);
  // check() has the case of equal lengths for all. On a device they may differ for all we know.
  if (has_lengths(p) && needs_align(p)) {
    if (!on_host)
      throw Error("score.align", "none, with lengths on a device",
                  "top_left, bottom_right or an offset for causal, window and alibi");
    for (int64_t i = 0; i < p.b; ++i)
      if (const Sequence q = sequence_of(f, f, i); q.len_q != q.len_k)
        refuse_align(q.len_q, q.len_k, " in sequence " + std::to_string(i));
  }
  const float scale = score.scale.value_or(p.d > 0 ? 1.f / std::sqrt(static_cast<float>(p.d)) : 0.f);
  constexpr double kMaxScale = std::numeric_limits<float>::max();
  f.score.scale_log2 = static_cast<float>(std::clamp(scale * kLog2e, -kMaxScale, kMaxScale));
  f.score.softcap_log2 = static_cast<float>(p.softcap * kLog2e);
}

}  // namespace rapt
