// Eigen's dense objects as tensors, in place.
#pragma once

#include <Eigen/Core>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "rapt/tensor.hpp"

namespace rapt::interop {

/// A float Matrix, Array, Map, Ref or Block with memory behind it.
template <class T>
concept EigenMatrix = requires(const T& m) {
  { m.data() } -> std::convertible_to<const float*>;
  { m.innerStride() } -> std::convertible_to<std::int64_t>;
  { m.outerStride() } -> std::convertible_to<std::int64_t>;
  { T::IsRowMajor } -> std::convertible_to<bool>;
};

/// A float Tensor, TensorFixedSize or TensorMap of rank 4. Found by its shape: <unsupported/Eigen/CXX11/Tensor> is for
/// those who use it to include.
template <class T>
concept EigenTensor4 = T::NumDimensions == 4 && requires(const T& t) {
  { t.data() } -> std::convertible_to<const float*>;
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

/// A [s, d] matrix as the one-head tensor [1, 1, s, d], a rank-4 tensor as itself, whatever the storage order. The
/// memory stays Eigen's: the object must outlive the view and not be resized.
template <class T>
requires EigenMatrix<T> || EigenTensor4<T> TensorView view_of(const T& m) {
  return {m.data(), DType::f32, detail::layout_of(m)};
}

/// The same to write to. Takes temporaries, for `mutable_view_of(m.topRows(n))`; refuses to compile for what is const.
template <class T>
requires(EigenMatrix<std::remove_cvref_t<T>> || EigenTensor4<std::remove_cvref_t<T>>) && requires(T&& m) {
  { m.data() } -> std::convertible_to<float*>;
}
MutableTensorView mutable_view_of(T&& m) {
  return {m.data(), DType::f32, detail::layout_of(m)};
}

}  // namespace rapt::interop
