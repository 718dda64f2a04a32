// A strided tensor that owns its memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "rapt/tensor.hpp"
#include "support/buffer.hpp"

namespace rapt::testing {

/// What a gap between elements (and every element not yet written) holds: a NaN of this bit pattern for f32, the byte
/// 0xb5 for everything else.
inline constexpr std::uint32_t kPoison = 0x7fdeadb5;

class Tensor {
 public:
  Tensor() = default;
  /// Memory from the first to the last element that `layout` reaches, all of it poisoned. Contiguous when the layout
  /// was made without strides.
  Tensor(DType dtype, const Layout& layout, Placement placement = Placement::heap);

  TensorView view() const { return layout_.ndim ? TensorView(buffer_.data(), dtype_, layout_) : TensorView(); }
  MutableTensorView mutable_view() {
    return layout_.ndim ? MutableTensorView(buffer_.data(), dtype_, layout_) : MutableTensorView();
  }
  explicit operator bool() const noexcept { return layout_.ndim != 0; }
  const Layout& layout() const noexcept { return layout_; }
  std::int64_t size() const noexcept;  ///< elements, gaps not counted
  Buffer& buffer() noexcept { return buffer_; }
  const Buffer& buffer() const noexcept { return buffer_; }

  /// The element at `index`; T must be the type that `dtype` stands for.
  template <class T = float>
  T& at(std::initializer_list<std::int64_t> index) {
    return reinterpret_cast<T*>(buffer_.data())[offset({index.begin(), index.size()})];
  }
  template <class T = float>
  T at(std::initializer_list<std::int64_t> index) const {
    return reinterpret_cast<const T*>(buffer_.data())[offset({index.begin(), index.size()})];
  }
  /// The element at a row-major logical position, whatever the strides.
  template <class T = float>
  T& flat(std::int64_t position) {
    return reinterpret_cast<T*>(buffer_.data())[flat_offset(position)];
  }
  template <class T = float>
  T flat(std::int64_t position) const {
    return reinterpret_cast<const T*>(buffer_.data())[flat_offset(position)];
  }

  void poison();
  /// All elements in row-major logical order, gaps left out.
  std::vector<float> values() const;
  /// True when every gap still holds the poison.
  bool gaps_intact() const;

 private:
  std::int64_t offset(std::span<const std::int64_t> index) const;
  std::int64_t flat_offset(std::int64_t position) const;

  DType dtype_ = DType::f32;
  Layout layout_;
  Buffer buffer_;
};

/// The part of a TensorView or MutableTensorView where index `dim` lies in [begin, begin + count).
template <class View>
View slice(View view, int dim, std::int64_t begin, std::int64_t count) {
  const auto at = static_cast<std::size_t>(dim);
  view.data = static_cast<float*>(const_cast<void*>(static_cast<const void*>(view.data))) + begin * view.strides[at];
  view.shape[at] = count;
  return view;
}

/// Equal bit for bit, NaN included, gaps left out. Strides may differ.
bool same_bits(const Tensor& a, const Tensor& b);

}  // namespace rapt::testing
