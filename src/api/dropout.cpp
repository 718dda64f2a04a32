#include "rapt/dropout.hpp"

#include <string>

#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "semantics/dropout.hpp"

namespace rapt {

void dropout_mask(const Dropout& dropout, const MutableTensorView& mask) {
  check_dropout("dropout", dropout.p);
  if (mask.ndim == 0) throw Error("mask", "no tensor", "[b, hq, sq, sk]");
  span_of("mask", mask, true);
  if (mask.ndim != 4) throw Error("mask", "shape " + shape_text(mask), "[b, hq, sq, sk]");
  if (mask.dtype != DType::boolean) throw Error("mask", "dtype " + std::string(to_string(mask.dtype)), "boolean");
  if (mask.device.type != DeviceType::cpu) throw Error("mask", "a tensor on a device", "one in host memory");

  const auto [b, hq, sq, sk] = mask.shape;
  const auto [b_stride, h_stride, q_stride, k_stride] = mask.strides;
  const DropoutParams params = dropout_params(dropout.p, dropout.seed, dropout.offset, hq);
  for (std::int64_t n = 0; n < b; ++n)
    for (std::int64_t h = 0; h < hq; ++h)
      for (std::int64_t i = 0; i < sq; ++i) {
        auto* const row = static_cast<bool*>(mask.data) + n * b_stride + h * h_stride + i * q_stride;
        for (std::int64_t j = 0; j < sk; ++j) row[j * k_stride] = !is_dropped(params, n, h, i, j);
      }
}

}  // namespace rapt
