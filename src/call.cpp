#include "call.hpp"

#include <algorithm>
#include <limits>

#include "float_environment.hpp"

namespace rapt {

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
  s.bias = static_cast<const float*>(call.bias.data);
  s.mask = static_cast<const std::uint8_t*>(call.mask.data);
  s.bias_stride = strides(call.bias);
  s.mask_stride = strides(call.mask);
  s.alibi = static_cast<const float*>(call.alibi.data);
  s.alibi_stride_b = call.alibi.strides[0];
  s.alibi_stride_h = call.alibi.strides[1];
  s.sinks = static_cast<const float*>(call.sinks.data);
  s.sinks_stride = call.sinks.strides[1];
  return s;
}

}  // namespace rapt
