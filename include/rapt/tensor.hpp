// Non-owning strided views of memory that somebody else keeps alive.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>

#include "rapt/types.hpp"

namespace rapt {

inline constexpr int kMaxDims = 4;

namespace detail {
template <class T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) return DType::f32;
  else if constexpr (std::is_same_v<U, bool>) return DType::boolean;
  else if constexpr (std::is_same_v<U, std::int32_t>) return DType::i32;
  else if constexpr (std::is_same_v<U, std::int64_t>) return DType::i64;
  else static_assert(!sizeof(U), "no rapt::DType for this element type; pass the DType explicitly");
}
}  // namespace detail

/// Shape and strides, both in elements, outermost dimension first. `ndim` of 0 means "no tensor given".
/// Strides may be anything but negative; 0 repeats a dimension (inputs only).
struct Layout {
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};

  Layout() = default;
  /// Row-major contiguous when `steps`, the strides, is empty. Throws Error on more than kMaxDims dimensions, on ranks
  /// that differ, or on a contiguous shape whose size overflows int64. Signs are checked by the operation.
  RAPT_API Layout(std::span<const std::int64_t> sizes, std::span<const std::int64_t> steps = {});
};

/// A read-only tensor: data, dtype, device, shape, strides. Copies are cheap and share the memory.
struct TensorView : Layout {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};

  TensorView() = default;
  TensorView(const void* pointer, DType type, const Layout& layout, Device place = {})
      : Layout(layout), data(pointer), dtype(type), device(place) {}
  /// `TensorView(q, DType::bf16, {b, h, s, d})`: the form for 16-bit elements, which have no C++ type of their own
  /// here.
  TensorView(const void* pointer, DType type, std::initializer_list<std::int64_t> sizes,
             std::initializer_list<std::int64_t> steps = {})
      : TensorView(pointer, type, Layout({sizes.begin(), sizes.size()}, {steps.begin(), steps.size()})) {}
  /// `TensorView(q, {b, h, s, d})`, or with strides in elements `TensorView(q, {b, h, s, d}, {..., 1})`, for float,
  /// bool, int32_t and int64_t.
  template <class T>
  requires(!std::is_void_v<T>) TensorView(const T* pointer, std::initializer_list<std::int64_t> sizes,
                                          std::initializer_list<std::int64_t> steps = {})
      : TensorView(pointer, detail::dtype_of<T>(),
                   Layout({sizes.begin(), sizes.size()}, {steps.begin(), steps.size()})) {}

  /// False when no tensor was given (a default-constructed view).
  explicit operator bool() const noexcept { return ndim != 0; }
};

/// A tensor that is written. Converts to TensorView.
struct MutableTensorView : Layout {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};

  MutableTensorView() = default;
  MutableTensorView(void* pointer, DType type, const Layout& layout, Device place = {})
      : Layout(layout), data(pointer), dtype(type), device(place) {}
  MutableTensorView(void* pointer, DType type, std::initializer_list<std::int64_t> sizes,
                    std::initializer_list<std::int64_t> steps = {})
      : MutableTensorView(pointer, type, Layout({sizes.begin(), sizes.size()}, {steps.begin(), steps.size()})) {}
  template <class T>
  requires(!std::is_void_v<T> && !std::is_const_v<T>)
      MutableTensorView(T* pointer, std::initializer_list<std::int64_t> sizes,
                        std::initializer_list<std::int64_t> steps = {})
      : MutableTensorView(pointer, detail::dtype_of<T>(),
                          Layout({sizes.begin(), sizes.size()}, {steps.begin(), steps.size()})) {}

  operator TensorView() const { return {data, dtype, *this, device}; }
  explicit operator bool() const noexcept { return ndim != 0; }
};

}  // namespace rapt
