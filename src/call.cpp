#include "call.hpp"

#include <algorithm>
#include <limits>

#include "float_environment.hpp"

namespace rapt {

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return Element::bf16;
    case DType::f16:
      return Element::f16;
    case DType::i8:
      return Element::i8;
    case DType::f8e4m3:
      return Element::e4m3;
    case DType::f8e5m2:
      return Element::e5m2;
    case DType::i4x2:
      return Element::i4;
    default:
      return Element::f32;
  }
}

Strides strides(const Operand& o) {
  return {o.strides[0], o.strides[1], o.strides[2], o.strides[3]};
}

ScoreParams score_params(const Call& call) {
  const FloatEnvironment environment;
  const Problem& p = call.problem;
  ScoreParams s{};
  constexpr double kMost = std::numeric_limits<float>::max();
  s.scale_log2 = static_cast<float>(std::clamp(call.scale * kLog2e, -kMost, kMost));
  s.softcap_log2 = static_cast<float>(p.softcap * kLog2e);
  const auto side = [](std::int64_t width) { return width < 0 ? kOpen : std::min(width, kOpen); };
  s.left = side(p.window_left);
  s.right = p.causal ? 0 : side(p.window_right);
  s.offset = p.align == Problem::Align::offset ? p.align_offset : 0;
  s.bottom_right = p.align == Problem::Align::bottom_right;
  s.bias = call.bias.data;
  s.mask = static_cast<const std::uint8_t*>(call.mask.data);
  s.bias_stride = strides(call.bias);
  s.mask_stride = strides(call.mask);
  s.alibi = call.alibi.data;
  s.alibi_stride_b = call.alibi.strides[0];
  s.alibi_stride_h = call.alibi.strides[1];
  s.sinks = call.sinks.data;
  s.sinks_stride = call.sinks.strides[1];
  s.bias_type = element_of(call.bias.dtype);
  s.alibi_type = element_of(call.alibi.dtype);
  s.sinks_type = element_of(call.sinks.dtype);
  return s;
}

}  // namespace rapt
