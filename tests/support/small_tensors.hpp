// Small tensors for tests of single functions.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "support/tensor.hpp"

namespace rapt::testing {

using Sizes = std::initializer_list<std::int64_t>;

inline Tensor make(DType dtype, Sizes shape, Sizes strides = {}) {
  return Tensor(dtype, Layout({shape.begin(), shape.size()}, {strides.begin(), strides.size()}));
}
inline Tensor filled(DType dtype, Sizes shape, const std::function<float(std::int64_t)>& value, Sizes strides = {}) {
  Tensor t = make(dtype, shape, strides);
  for (std::int64_t i = 0; i < t.size(); ++i) t.flat(i) = value(i);
  return t;
}
inline Tensor ints(std::initializer_list<std::int32_t> values) {
  Tensor t = make(DType::i32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), &t.flat<std::int32_t>(0));
  return t;
}
inline std::vector<std::byte> bytes_of(const Tensor& t) {
  return {t.buffer().data(), t.buffer().data() + t.buffer().size()};
}

}  // namespace rapt::testing
