// A strided tensor that owns its memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <vector>

#include "rapt/tensor.hpp"
#include "support/buffer.hpp"

namespace rapt::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

/// What a gap between elements (and every element not yet written) holds: a NaN of this bit pattern for f32, those
/// below for bf16, f16 and the 8-bit floats, the byte 0xb5 for everything else.
inline constexpr std::uint32_t kPoison = 0x7fdeadb5;
inline constexpr std::uint16_t kPoisonBf16 = 0x7fde;
inline constexpr std::uint16_t kPoisonF16 = 0x7eb5;
inline constexpr std::uint8_t kPoisonF8 = 0xff;

/// Element `index` of f32, bf16, f16, i8, f8e4m3 or f8e5m2 at `data`, by Eigen's and our own conversions: the library's
/// are under test. An i8 reads as its number.
float read_element(const void* data, DType dtype, std::int64_t index);
/// The same to write: `value` rounded to nearest, ties to even; types of 8 bits take their largest finite numbers for
/// values past them.
void write_element(void* data, DType dtype, std::int64_t index, float value);
/// `value` rounded to `dtype` as write_element() does.
float rounded(float value, DType dtype);
/// The largest finite number of a quantised type.
double largest(DType dtype);

/// An element of these types that reads as a float and is written rounded.
class Element {
 public:
  Element(void* data, DType dtype, std::int64_t index) : data_(data), dtype_(dtype), index_(index) {}
  operator float() const { return read_element(data_, dtype_, index_); }
  Element& operator=(float value) {
    write_element(data_, dtype_, index_, value);
    return *this;
  }
  Element& operator=(const Element& other) { return *this = static_cast<float>(other); }
  Element& operator+=(float value) { return *this = *this + value; }
  Element& operator*=(float value) { return *this = *this * value; }

 private:
  void* data_;
  DType dtype_;
  std::int64_t index_;
};

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

  DType dtype() const noexcept { return dtype_; }

  /// The floating-point element at `index`.
  Element at(std::initializer_list<std::int64_t> index) { return element(offset({index.begin(), index.size()})); }
  float at(std::initializer_list<std::int64_t> index) const {
    return read_element(buffer_.data(), dtype_, offset({index.begin(), index.size()}));
  }
  /// The same at a row-major logical position, whatever the strides.
  Element flat(std::int64_t position) { return element(flat_offset(position)); }
  float flat(std::int64_t position) const { return read_element(buffer_.data(), dtype_, flat_offset(position)); }

  /// Elements of the type T that `dtype` stands for.
  template <class T>
  T& at(std::initializer_list<std::int64_t> index) {
    return reinterpret_cast<T*>(buffer_.data())[offset({index.begin(), index.size()})];
  }
  template <class T>
  T at(std::initializer_list<std::int64_t> index) const {
    return reinterpret_cast<const T*>(buffer_.data())[offset({index.begin(), index.size()})];
  }
  template <class T>
  T& flat(std::int64_t position) {
    return reinterpret_cast<T*>(buffer_.data())[flat_offset(position)];
  }
  template <class T>
  T flat(std::int64_t position) const {
    return reinterpret_cast<const T*>(buffer_.data())[flat_offset(position)];
  }

  void poison();
  /// All elements in row-major logical order, gaps left out.
  std::vector<float> values() const;
  /// True when every gap still holds the poison.
  bool gaps_intact() const;
  /// Writes to one gap; false when there is none.
  bool spoil_gap();

 private:
  friend bool same_bits(const Tensor& a, const Tensor& b);

  Element element(std::int64_t offset) { return {buffer_.data(), dtype_, offset}; }
  // Most of the time of tests with large tensors goes by here.
  std::int64_t offset(std::span<const std::int64_t> index) const {
    std::int64_t result = 0;
    for (std::size_t i = 0; i < index.size(); ++i) {
      if (index[i] < 0 || index[i] >= layout_.shape[i]) throw_out_of_range();
      result += index[i] * layout_.strides[i];
    }
    return result;
  }
  std::int64_t flat_offset(std::int64_t position) const { return contiguous_ ? position : strided_offset(position); }
  std::int64_t strided_offset(std::int64_t position) const;
  [[noreturn]] static void throw_out_of_range();
  /// Whether elements of the buffer, counted from its start, are the tensor's.
  std::vector<bool> used() const;

  DType dtype_ = DType::f32;
  Layout layout_;
  bool contiguous_ = false;
  Buffer buffer_;
};

/// The part of a TensorView or MutableTensorView where index `dim` lies in [begin, begin + count).
template <class View>
View slice(View view, int dim, std::int64_t begin, std::int64_t count) {
  const auto at = static_cast<std::size_t>(dim);
  view.data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data))) +
              begin * view.strides[at] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[at] = count;
  return view;
}

/// Equal bit for bit, NaN included, gaps left out. Strides may differ, types may not.
bool same_bits(const Tensor& a, const Tensor& b);

/// Elements of i32 or i64 tensors, at an index or a row-major position.
inline std::int64_t index_at(const Tensor& t, std::initializer_list<std::int64_t> index) {
  return t.dtype() == DType::i64 ? t.at<std::int64_t>(index) : t.at<std::int32_t>(index);
}
inline std::int64_t index_at(const Tensor& t, std::int64_t i) {
  return t.dtype() == DType::i64 ? t.flat<std::int64_t>(i) : t.flat<std::int32_t>(i);
}
inline void set_index(Tensor& t, std::initializer_list<std::int64_t> index, std::int64_t value) {
  if (t.dtype() == DType::i64) t.at<std::int64_t>(index) = value;
  else t.at<std::int32_t>(index) = static_cast<std::int32_t>(value);
}
inline void set_index(Tensor& t, std::int64_t i, std::int64_t value) {
  if (t.dtype() == DType::i64) t.flat<std::int64_t>(i) = value;
  else t.flat<std::int32_t>(i) = static_cast<std::int32_t>(value);
}

}  // namespace rapt::testing
