// Views of Eigen's dense objects as tensors, without copies.
#pragma once

#include <Eigen/Core>
#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "rapt/tensor.hpp"

namespace rapt::interop {

namespace detail {
template <class Scalar>
inline constexpr bool kIsFloat =
    std::is_same_v<Scalar, float> || std::is_same_v<Scalar, Eigen::bfloat16> || std::is_same_v<Scalar, Eigen::half>;

template <class Scalar>
constexpr DType dtype_of() {
  return std::is_same_v<Scalar, float> ? DType::f32 : std::is_same_v<Scalar, Eigen::half> ? DType::f16 : DType::bf16;
}

/// The type that `T::data()` points to.
template <class T>
using ScalarOf = std::remove_cv_t<std::remove_pointer_t<decltype(std::declval<T>().data())>>;
}  // namespace detail

/// A Matrix, Array, Map, Ref or Block of float, Eigen::bfloat16 or Eigen::half with direct memory access.
template <class T>
concept EigenMatrix = requires(const T& m) {
  requires detail::kIsFloat<detail::ScalarOf<const T&>>;
  { m.innerStride() } -> std::convertible_to<std::int64_t>;
  { m.outerStride() } -> std::convertible_to<std::int64_t>;
  { T::IsRowMajor } -> std::convertible_to<bool>;
};

/// A Tensor, TensorFixedSize or TensorMap of rank 4 with these element types. Recognised by its members: include
/// <unsupported/Eigen/CXX11/Tensor> yourself.
template <class T>
concept EigenTensor4 = T::NumDimensions == 4 && requires(const T& t) {
  requires detail::kIsFloat<detail::ScalarOf<const T&>>;
  { t.dimension(0) } -> std::convertible_to<std::int64_t>;
  { T::Layout } -> std::convertible_to<int>;
};

namespace detail {
template <EigenMatrix T>
Layout layout_of(const T& m) {
  const std::int64_t rows = m.rows(), cols = m.cols();
  const std::int64_t row_stride = T::IsRowMajor ? m.outerStride() : m.innerStride();
  const std::int64_t col_stride = T::IsRowMajor ? m.innerStride() : m.outerStride();
  const std::int64_t shape[] = {1, 1, rows, cols};
  // Strides of dimensions of size 1 are never followed; 0 is as good as any.
  const std::int64_t strides[] = {0, 0, row_stride, col_stride};
  return Layout(shape, strides);
}

template <EigenTensor4 T>
Layout layout_of(const T& t) {
  const std::int64_t shape[] = {t.dimension(0), t.dimension(1), t.dimension(2), t.dimension(3)};
  if constexpr (static_cast<int>(T::Layout) == static_cast<int>(Eigen::RowMajor)) return Layout(shape);
  const std::int64_t strides[] = {1, shape[0], shape[0] * shape[1], shape[0] * shape[1] * shape[2]};
  return Layout(shape, strides);
}
}  // namespace detail

/// A view of a [s, d] matrix as the one-head tensor [1, 1, s, d], or of a rank-4 tensor, in any storage order. The
/// object must outlive the view and must not be resized.
template <class T>
requires EigenMatrix<T> || EigenTensor4<T> TensorView view_of(const T& m) {
  return {m.data(), detail::dtype_of<detail::ScalarOf<const T&>>(), detail::layout_of(m)};
}

/// A view to write to. Takes temporaries, such as `mutable_view_of(m.topRows(n))`. Does not compile for const objects.
template <class T>
requires(EigenMatrix<std::remove_cvref_t<T>> || EigenTensor4<std::remove_cvref_t<T>>) && requires(T&& m) {
  requires !std::is_const_v<std::remove_pointer_t<decltype(m.data())>>;
}
MutableTensorView mutable_view_of(T&& m) {
  return {m.data(), detail::dtype_of<detail::ScalarOf<T&>>(), detail::layout_of(m)};
}

}  // namespace rapt::interop
