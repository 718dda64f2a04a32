#include "support/tensor.hpp"

#include <cstring>

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

}  // namespace

Tensor::Tensor(DType dtype, const Layout& layout, Placement placement)
    : dtype_(dtype), layout_(layout), buffer_(extent_bytes(dtype, layout), placement) {
  poison();
}

void Tensor::poison() {
  if (dtype_ != DType::f32) {
    std::memset(buffer_.data(), 0xb5, buffer_.size());
    return;
  }
  for (std::size_t i = 0; i < buffer_.size(); i += sizeof(kPoison)) {
    std::memcpy(buffer_.data() + i, &kPoison, sizeof(kPoison));
  }
}

std::int64_t Tensor::size() const noexcept {
  std::int64_t elements = layout_.ndim ? 1 : 0;
  for (int i = 0; i < layout_.ndim; ++i) elements *= layout_.shape[i];
  return elements;
}

std::int64_t Tensor::offset(std::span<const std::int64_t> index) const {
  std::int64_t result = 0;
  for (std::size_t i = 0; i < index.size(); ++i) result += index[i] * layout_.strides[i];
  return result;
}

std::int64_t Tensor::flat_offset(std::int64_t position) const {
  std::int64_t result = 0;
  for (int i = layout_.ndim - 1; i >= 0; --i) {
    result += position % layout_.shape[i] * layout_.strides[i];
    position /= layout_.shape[i];
  }
  return result;
}

std::vector<float> Tensor::values() const {
  std::vector<float> result(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = flat(static_cast<std::int64_t>(i));
  return result;
}

bool Tensor::gaps_intact() const {
  const std::size_t width = size_of(dtype_);
  std::vector<bool> used(buffer_.size() / width);
  for (std::int64_t i = 0; i < size(); ++i) used[static_cast<std::size_t>(flat_offset(i))] = true;
  const Tensor fresh(dtype_, layout_);
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i] && std::memcmp(buffer_.data() + i * width, fresh.buffer_.data() + i * width, width) != 0) return false;
  }
  return true;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const std::vector<float> x = a.values(), y = b.values();
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

}  // namespace rapt::testing
