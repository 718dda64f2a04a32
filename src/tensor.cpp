#include "rapt/tensor.hpp"

#include <algorithm>
#include <string>

namespace rapt {

Layout::Layout(std::span<const std::int64_t> sizes, std::span<const std::int64_t> steps) {
  if (sizes.empty() || sizes.size() > kMaxDims)
    throw Error("shape", std::to_string(sizes.size()) + " dimensions", "1 to " + std::to_string(kMaxDims));
  if (!steps.empty() && steps.size() != sizes.size())
    throw Error("strides",
                std::to_string(steps.size()) + " strides for " + std::to_string(sizes.size()) + " dimensions",
                "as many as dimensions, or none");
  ndim = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), shape.begin());
  if (!steps.empty()) {
    std::copy(steps.begin(), steps.end(), strides.begin());
    return;
  }
  std::int64_t step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[static_cast<std::size_t>(i)] = step;
    const std::int64_t size = std::max<std::int64_t>(shape[static_cast<std::size_t>(i)], 1);
    if (__builtin_mul_overflow(step, size, &step)) throw Error("shape", "a size past int64", "a smaller tensor");
  }
}

}  // namespace rapt
