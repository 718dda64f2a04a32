#include "support/tensor.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#include "support/dtypes.hpp"

namespace rapt::testing {
namespace {

std::size_t extent_bytes(DType dtype, const Layout& layout) {
  std::int64_t last = 0;
  for (int i = 0; i < layout.ndim; ++i) {
    if (layout.shape[i] == 0) return 0;
    last += (layout.shape[i] - 1) * layout.strides[i];
  }
  return static_cast<std::size_t>(last + 1) * size_of(dtype);
}

template <class T>
void fill_bytes(Buffer& buffer, T value) {
  for (std::size_t i = 0; i < buffer.size(); i += sizeof value) std::memcpy(buffer.data() + i, &value, sizeof value);
}

/// An 8-bit float: its fraction's bits, its exponent's bias, how many finite numbers it has that are not negative, and
/// whether infinity follows them. The other codes are NaN.
struct Fp8 {
  DType type;
  int digits, bias, finite;
  bool has_infinity;
};
constexpr Fp8 kFp8[] = {{DType::f8e4m3, 3, 7, 0x7f, false}, {DType::f8e5m2, 2, 15, 0x7c, true}};

const Fp8& fp8_of(DType dtype) {
  return *std::find_if(std::begin(kFp8), std::end(kFp8), [&](const Fp8& f) { return f.type == dtype; });
}

float decoded(const Fp8& f, int code) {
  const int magnitude = code & 0x7f, exponent = magnitude >> f.digits, fraction = magnitude % (1 << f.digits);
  float x = exponent == 0 ? std::ldexp(static_cast<float>(fraction), 1 - f.bias - f.digits)
                          : std::ldexp(static_cast<float>(fraction + (1 << f.digits)), exponent - f.bias - f.digits);
  if (magnitude >= f.finite) x = f.has_infinity && magnitude == f.finite ? INFINITY : NAN;
  return code & 0x80 ? -x : x;
}

/// The numbers of all codes.
const std::array<float, 256>& float8_numbers(DType dtype) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, std::size(kFp8)> all;
    for (std::size_t i = 0; i < all.size(); ++i)
      for (int code = 0; code < 256; ++code) all[i][static_cast<std::size_t>(code)] = decoded(kFp8[i], code);
    return all;
  }();
  return tables[static_cast<std::size_t>(&fp8_of(dtype) - kFp8)];
}
float float8(DType dtype, std::uint8_t code) {
  return float8_numbers(dtype)[code];
}

/// The nearest finite number's code, of two the even one.
std::uint8_t float8_code(DType dtype, float value) {
  if (std::isnan(value)) return 0x7f;
  const auto first = float8_numbers(dtype).begin(), last = first + fp8_of(dtype).finite;
  const float x = std::abs(value);
  auto code = std::lower_bound(first, last, x) - first;
  if (first + code == last) {
    --code;
  } else if (code > 0) {
    const float above = first[code] - x, below = x - first[code - 1];
    if (below < above || (below == above && code % 2 == 1)) --code;
  }
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

}  // namespace

float read_element(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[index];
  if (dtype == DType::bf16) return static_cast<float>(static_cast<const Eigen::bfloat16*>(data)[index]);
  if (dtype == DType::f16) return static_cast<float>(static_cast<const Eigen::half*>(data)[index]);
  if (dtype == DType::i8) return static_cast<const std::int8_t*>(data)[index];
  if (is_fp8(dtype)) return float8(dtype, static_cast<const std::uint8_t*>(data)[index]);
  throw Error("dtype", std::string(to_string(dtype)), "a type of whole elements that are numbers");
}

void write_element(void* data, DType dtype, std::int64_t index, float value) {
  if (dtype == DType::f32) static_cast<float*>(data)[index] = value;
  else if (dtype == DType::bf16) static_cast<Eigen::bfloat16*>(data)[index] = Eigen::bfloat16(value);
  else if (dtype == DType::f16) static_cast<Eigen::half*>(data)[index] = Eigen::half(value);
  else if (dtype == DType::i8)
    static_cast<std::int8_t*>(data)[index] = static_cast<std::int8_t>(std::clamp(std::nearbyint(value), -128.f, 127.f));
  else if (is_fp8(dtype)) static_cast<std::uint8_t*>(data)[index] = float8_code(dtype, value);
  else throw Error("dtype", std::string(to_string(dtype)), "a type of whole elements that are numbers");
}

double largest(DType dtype) {
  if (is_integer(dtype)) return dtype == DType::i8 ? 127 : 7;
  return static_cast<double>(float8(dtype, static_cast<std::uint8_t>(fp8_of(dtype).finite - 1)));
}

float rounded(float value, DType dtype) {
  alignas(float) std::byte element[sizeof(float)];
  write_element(element, dtype, 0, value);
  return read_element(element, dtype, 0);
}

Tensor::Tensor(DType dtype, const Layout& layout, Placement placement)
    : dtype_(dtype), layout_(layout), contiguous_(true), buffer_(extent_bytes(dtype, layout), placement) {
  std::int64_t stride = 1;
  for (int i = layout.ndim - 1; i >= 0; stride *= layout.shape[i--])
    contiguous_ &= layout.shape[i] == 1 || layout.strides[i] == stride;
  if (!contiguous_ && stride > UINT32_MAX) throw std::length_error("a test's tensor is too large for its positions");
  poison();
}

void Tensor::poison() {
  switch (dtype_) {
    case DType::f32:
      return fill_bytes(buffer_, kPoison);
    case DType::bf16:
      return fill_bytes(buffer_, kPoisonBf16);
    case DType::f16:
      return fill_bytes(buffer_, kPoisonF16);
    default:
      return fill_bytes(buffer_, is_fp8(dtype_) ? kPoisonF8 : std::uint8_t{0xb5});
  }
}

std::int64_t Tensor::size() const noexcept {
  std::int64_t elements = layout_.ndim ? 1 : 0;
  for (int i = 0; i < layout_.ndim; ++i) elements *= layout_.shape[i];
  return elements;
}

void Tensor::throw_out_of_range() {
  throw std::out_of_range("a test's index is outside its tensor");
}

std::int64_t Tensor::strided_offset(std::int64_t position) const {
  std::int64_t result = 0;
  auto left = static_cast<std::uint32_t>(position);  // 32-bit divisions take half the time
  for (int i = layout_.ndim - 1; i >= 0; --i) {
    const auto size = static_cast<std::uint32_t>(layout_.shape[i]);
    result += left % size * layout_.strides[i];
    left /= size;
  }
  return result;
}

std::vector<float> Tensor::values() const {
  std::vector<float> result(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = flat(static_cast<std::int64_t>(i));
  return result;
}

std::vector<bool> Tensor::used() const {
  std::vector<bool> used(buffer_.size() / size_of(dtype_));
  for (std::int64_t i = 0; i < size(); ++i) used[static_cast<std::size_t>(flat_offset(i))] = true;
  return used;
}

bool Tensor::gaps_intact() const {
  const std::size_t width = size_of(dtype_);
  if (buffer_.size() == static_cast<std::size_t>(size()) * width) return true;  // there are none
  const std::vector<bool> elements = used();
  const Tensor fresh(dtype_, layout_);
  for (std::size_t i = 0; i < elements.size(); ++i) {
    if (!elements[i] && std::memcmp(buffer_.data() + i * width, fresh.buffer_.data() + i * width, width) != 0)
      return false;
  }
  return true;
}

bool Tensor::spoil_gap() {
  const std::vector<bool> elements = used();
  const auto gap = std::find(elements.begin(), elements.end(), false);
  if (gap == elements.end()) return false;
  const auto at = static_cast<std::size_t>(gap - elements.begin()) * size_of(dtype_);
  buffer_.data()[at] ^= std::byte{0x10};
  return true;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype_ != b.dtype_ || a.size() != b.size()) return false;
  const auto width = static_cast<std::int64_t>(size_of(a.dtype_));
  for (std::int64_t i = 0; i < a.size(); ++i) {
    const std::byte* x = a.buffer_.data() + a.flat_offset(i) * width;
    const std::byte* y = b.buffer_.data() + b.flat_offset(i) * width;
    if (std::memcmp(x, y, static_cast<std::size_t>(width)) != 0) return false;
  }
  return true;
}

}  // namespace rapt::testing
