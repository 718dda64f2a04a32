// Non-owning strided views of memory that the caller keeps alive.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <span>
#include <type_traits>

#include "rapt/types.hpp"

namespace rapt {

/// The largest number of dimensions of a tensor.
inline constexpr int kMaxDims = 4;

namespace detail {
// The compiler's 16-bit floats, which are std::float16_t and std::bfloat16_t where those are: void where there are
// none. (GCC 12 knows _Float16 in C++ for x86 only, but has the macro elsewhere, too.)
#if defined(__FLT16_MANT_DIG__) && !defined(__CUDACC__) && (defined(__clang__) || __GNUC__ >= 13 || defined(__x86_64__))
__extension__ using Float16 = _Float16;
#else
using Float16 = void;
#endif
#if defined(__BFLT16_MANT_DIG__) && !defined(__CUDACC__)
__extension__ using BFloat16 = __bf16;
#else
using BFloat16 = void;
#endif

// Unsigned bytes have no DType: they may hold bool, i4x2 or either 8-bit float. Nor has char, which is text.
template <class T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  constexpr bool integer = std::signed_integral<U> && !std::is_same_v<U, char> && !std::is_same_v<U, wchar_t>;
  if constexpr (std::is_same_v<U, float>) return DType::f32;
  else if constexpr (std::is_same_v<U, Float16>) return DType::f16;
  else if constexpr (std::is_same_v<U, BFloat16>) return DType::bf16;
  else if constexpr (std::is_same_v<U, bool>) return DType::boolean;
  else if constexpr (integer && sizeof(U) == 1) return DType::i8;
  else if constexpr (integer && sizeof(U) == 4) return DType::i32;
  else if constexpr (integer && sizeof(U) == 8) return DType::i64;
  else static_assert(!sizeof(U), "no rapt::DType for this element type; pass the DType explicitly");
}

// A size or stride given as an integer of any type. One past int64 counts as the largest, which everything refuses.
struct Size {
  template <class T>
  requires(std::is_convertible_v<T, std::int64_t> && !std::is_floating_point_v<T> && !std::is_same_v<T, bool> &&
           !std::is_same_v<T, char>) constexpr Size(T given)
      : value(static_cast<std::int64_t>(given)) {
    if constexpr (std::unsigned_integral<T> && sizeof(T) == 8)
      if (given > static_cast<T>(std::numeric_limits<std::int64_t>::max()))
        value = std::numeric_limits<std::int64_t>::max();
  }
  std::int64_t value;
};

// {2, 8, 100, 64}, std::vector<std::size_t>, std::array<int, 4>, std::span<const std::int64_t>, ...
template <class List>
concept SizeList = requires(const List& list) {
  std::size(list);
  Size(*std::data(list));
};
using Braces = std::initializer_list<Size>;
}  // namespace detail

/// Shape and strides, both in elements, outermost dimension first. An `ndim` of 0 means "no tensor given". Strides are
/// not negative; 0 repeats a dimension (inputs only).
struct Layout {
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};

  Layout() = default;
  /// Takes contiguous containers of integers. Without `steps`, the strides, the layout is contiguous in row-major
  /// order. Throws Error on more than kMaxDims dimensions, on a different number of sizes and strides, or if the size
  /// of a contiguous shape overflows int64. The operation checks signs.
  template <detail::SizeList Shape = std::span<const std::int64_t>,
            detail::SizeList Strides = std::span<const std::int64_t>>
  Layout(const Shape& sizes, const Strides& steps = {}) {
    copy(sizes, shape);
    copy(steps, strides);
    complete(std::size(sizes), std::size(steps));
  }

 private:
  template <class List>
  static void copy(const List& from, std::array<std::int64_t, kMaxDims>& to) {
    for (std::size_t i = 0; i < std::size(from) && i < to.size(); ++i) to[i] = detail::Size(std::data(from)[i]).value;
  }
  RAPT_API void complete(std::size_t sizes, std::size_t steps);
};

/// A read-only tensor: data, type, device, shape, strides. Copies are cheap and share the memory.
struct TensorView : Layout {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};

  TensorView() = default;
  TensorView(const void* pointer, DType type, const Layout& layout, Device place = {})
      : Layout(layout), data(pointer), dtype(type), device(place) {}
  /// `TensorView(q, DType::bf16, {b, h, s, d})`: for elements without a C++ type. Shape and strides, in elements, are
  /// integers of any type, in braces or in contiguous containers (std::vector, std::array, std::span).
  template <detail::SizeList Shape = detail::Braces, detail::SizeList Strides = detail::Braces>
  TensorView(const void* pointer, DType type, const Shape& sizes, const Strides& steps = {})
      : TensorView(pointer, type, Layout(sizes, steps)) {}
  /// `TensorView(q, {b, h, s, d})`, or with strides `TensorView(q, {b, h, s, d}, {..., 1})`: for float, bool, signed
  /// integers of 8, 32 and 64 bits, and _Float16 and __bf16 (std::float16_t, std::bfloat16_t) if the compiler has them.
  /// Unsigned bytes may be several types: pass the DType.
  template <class T, detail::SizeList Shape = detail::Braces, detail::SizeList Strides = detail::Braces>
  requires(!std::is_void_v<T>) TensorView(const T* pointer, const Shape& sizes, const Strides& steps = {})
      : TensorView(pointer, detail::dtype_of<T>(), Layout(sizes, steps)) {}

  /// False if no tensor was given (a default-constructed view).
  explicit operator bool() const noexcept { return ndim != 0; }
};

/// A tensor that a call writes. Converts to TensorView.
struct MutableTensorView : Layout {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};

  MutableTensorView() = default;
  MutableTensorView(void* pointer, DType type, const Layout& layout, Device place = {})
      : Layout(layout), data(pointer), dtype(type), device(place) {}
  template <detail::SizeList Shape = detail::Braces, detail::SizeList Strides = detail::Braces>
  MutableTensorView(void* pointer, DType type, const Shape& sizes, const Strides& steps = {})
      : MutableTensorView(pointer, type, Layout(sizes, steps)) {}
  template <class T, detail::SizeList Shape = detail::Braces, detail::SizeList Strides = detail::Braces>
  requires(!std::is_void_v<T> && !std::is_const_v<T>)
      MutableTensorView(T* pointer, const Shape& sizes, const Strides& steps = {})
      : MutableTensorView(pointer, detail::dtype_of<T>(), Layout(sizes, steps)) {}

  operator TensorView() const { return {data, dtype, *this, device}; }
  explicit operator bool() const noexcept { return ndim != 0; }
};

}  // namespace rapt
