#include "support/fill.hpp"

#include <algorithm>
#include <numeric>
#include <string>

namespace rapt::testing {

Layout layout_of(const Dims& shape, const Dims& order, std::int64_t inner, std::int64_t gap) {
  Dims strides(shape.size());
  std::int64_t next = inner;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[static_cast<std::size_t>(*dim)] = next;
    next = next * std::max<std::int64_t>(shape[static_cast<std::size_t>(*dim)], 1) + gap;
  }
  return Layout(shape, strides);
}

Layout spaced(const Dims& shape, Spacing spacing) {
  Dims order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  return spacing == Spacing::gaps ? layout_of(shape, order, 2, 3) : layout_of(shape, order);
}

Dims rows_in(std::int64_t rows, std::size_t dims) {
  Dims shape{rows};
  for (const std::int64_t factor : {3, 2, 5}) {
    if (shape.size() == dims || shape.front() % factor != 0) continue;
    shape.front() /= factor;
    shape.insert(shape.begin() + 1, factor);
  }
  while (shape.size() < dims) shape.insert(shape.begin(), 1);
  return shape;
}

Dims ragged_lengths(std::int64_t b, std::int64_t longest, std::int64_t total, std::uint64_t seed,
                    const char* argument) {
  const std::int64_t rest = total - longest;
  if (b < 1 || rest < 0 || rest > (b - 1) * longest) {
    throw Error(argument, std::to_string(total) + " for b=" + std::to_string(b),
                "between the longest sequence, " + std::to_string(longest) + ", and b times it");
  }
  Dims lengths(static_cast<std::size_t>(b));
  const std::size_t chosen = seed % static_cast<std::uint64_t>(b);
  for (std::int64_t n = 0, shared = 0; n < b; ++n) {
    const auto index = static_cast<std::size_t>(n);
    if (index == chosen) {
      lengths[index] = longest;
    } else {
      lengths[index] = rest / (b - 1) + (shared < rest % (b - 1));
      ++shared;
    }
  }
  return lengths;
}

Dims cumulated(const Dims& lengths) {
  Dims sums{0};
  for (std::int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

Tensor index_tensor(const Dims& values, std::uint64_t seed, Placement placement) {
  const bool wide = seed % 2 == 0;
  Tensor tensor(wide ? DType::i64 : DType::i32, Layout(Dims{static_cast<std::int64_t>(values.size())}), placement);
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    const std::int64_t value = values[static_cast<std::size_t>(i)];
    if (wide) tensor.at<std::int64_t>({i}) = value;
    else tensor.at<std::int32_t>({i}) = static_cast<std::int32_t>(value);
  }
  return tensor;
}

void fill_normal(Tensor& tensor, std::mt19937_64 generator) {
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = normal(generator);
}

}  // namespace rapt::testing
