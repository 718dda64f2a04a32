#include "support/cache.hpp"

#include <algorithm>
#include <cmath>

#include "support/fill.hpp"

namespace rapt::testing {
namespace {

/// Offset of an element whose entry and row may broadcast.
template <class T>
decltype(auto) at(T& tensor, Slot slot, std::int64_t h, std::int64_t i) {
  const auto& shape = tensor.layout().shape;
  const std::int64_t entry = shape[0] == 1 ? 0 : slot.entry;
  if (tensor.layout().ndim == 3) return tensor.at({entry, h, i});
  return tensor.at({entry, h, shape[2] == 1 ? 0 : slot.row, i});
}

void write_half(Tensor& rows, Slot slot, std::int64_t h, std::int64_t i, float value) {
  auto& byte = rows.layout().ndim == 3 ? rows.at<std::uint8_t>({slot.entry, h, i / 2})
                                       : rows.at<std::uint8_t>({slot.entry, h, slot.row, i / 2});
  const auto code = static_cast<unsigned>(static_cast<int>(std::clamp(std::nearbyint(value), -8.f, 7.f))) & 15u;
  byte = static_cast<std::uint8_t>(i % 2 ? (byte & 0x0fu) | code << 4 : (byte & 0xf0u) | code);
}

Layout broadcast(const Layout& rows, std::int64_t groups, Cache::Shared shared) {
  const auto last = static_cast<std::size_t>(rows.ndim - 1);
  Dims shape(rows.shape.begin(), rows.shape.begin() + rows.ndim);
  if (rows.ndim == 4 && shared.rows) shape[2] = 1;
  if (shared.entries) shape[0] = 1;
  shape[last] = groups;
  return Layout(shape);
}

}  // namespace

std::string cache_words(DType dtype, int groups) {
  const bool scales = is_integer(dtype) || (groups > 1 && is_quantized(dtype));
  return " kv=" + std::string(to_string(dtype)) + (scales ? " groups=" + std::to_string(groups) : "");
}

std::size_t byte_of(const Tensor& t, Slot slot, std::int64_t h, std::int64_t i) {
  const auto& shape = t.layout().shape;
  const auto& strides = t.layout().strides;
  const std::int64_t at = (shape[0] == 1 ? 0 : slot.entry) * strides[0] + h * strides[1] +
                          (shape[2] == 1 ? 0 : slot.row) * strides[2] + i * strides[3];
  return static_cast<std::size_t>(at) * size_of(t.dtype());
}

Cache::Cache(DType dtype, const Layout& layout, std::int64_t groups, Shared shared, bool zeros, std::uint64_t seed,
             Placement placement)
    : rows(dtype, layout, placement) {
  if (groups > 0) scale = Tensor(DType::f32, broadcast(layout, groups, shared), placement);
  if (zeros)
    zero = seed % 2 ? Tensor(DType::f32, scale.layout(), placement)
                    : Tensor(DType::f32, broadcast(layout, groups, {true, true}), placement);
}

void Cache::choose_scales(const Tensor& low, const Tensor& high, std::mt19937_64& generator) {
  const float limit = rows.dtype() == DType::i4x2 ? 7 : 127;  // i8 and i4x2
  const bool integers = is_integer(rows.dtype()), own_zeros = zero && zero.size() == scale.size();
  std::uniform_real_distribution<float> uniform(-1, 1);
  if (!own_zeros || !integers) {
    for (std::int64_t i = 0; i < zero.size(); ++i) zero.flat(i) = uniform(generator) * (integers ? limit / 8 : 0.5f);
  }
  for (std::int64_t i = 0; i < scale.size(); ++i) {
    const float a = low.flat(i), b = high.flat(i), most = std::max(std::abs(a), std::abs(b));
    const float power = uniform(generator);
    if (std::isnan(a)) continue;  // nothing lies there
    if (!integers) {
      scale.flat(i) = std::exp2(power);
    } else if (own_zeros && a < b) {
      scale.flat(i) = (b - a) / (2 * limit + 1);
      zero.flat(i) = -(limit + 1) - a / scale.flat(i);
    } else {
      if (own_zeros) zero.flat(i) = 0;
      scale.flat(i) = most == 0 ? 1 : most / (zero ? limit * 0.875f : limit);
    }
  }
}

void Cache::fill(const Tensor& values, const std::function<Slot(std::int64_t, std::int64_t)>& slot,
                 std::mt19937_64 generator) {
  const auto& shape = values.layout().shape;
  const std::int64_t d = shape[3];
  const auto each = [&](auto use) {  // use(value, slot, head, element)
    for (std::int64_t n = 0; n < shape[0]; ++n) {
      for (std::int64_t j = 0; j < shape[2]; ++j) {
        const Slot where = slot(n, j);
        if (where.entry < 0) continue;
        for (std::int64_t h = 0; h < shape[1]; ++h) {
          for (std::int64_t i = 0; i < d; ++i) use(values.at({n, h, j, i}), where, h, i);
        }
      }
    }
  };
  if (!scale) {
    return each([&](float x, Slot where, std::int64_t h, std::int64_t i) { at(rows, where, h, i) = x; });
  }
  const std::int64_t group = d / scale.layout().shape[static_cast<std::size_t>(scale.layout().ndim - 1)];
  Tensor low(DType::f32, scale.layout()), high(DType::f32, scale.layout());  // NaN: nothing yet
  each([&](float x, Slot where, std::int64_t h, std::int64_t i) {
    at(low, where, h, i / group) = std::fmin(at(low, where, h, i / group), x);
    at(high, where, h, i / group) = std::fmax(at(high, where, h, i / group), x);
  });
  choose_scales(low, high, generator);
  each([&](float x, Slot where, std::int64_t h, std::int64_t i) {
    float code = x / at(scale, where, h, i / group);
    if (zero) code += at(zero, where, h, i / group);
    if (rows.dtype() == DType::i4x2) write_half(rows, where, h, i, code);
    else at(rows, where, h, i) = code;
  });
}

}  // namespace rapt::testing
