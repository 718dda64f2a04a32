#include "rapt/tensor.hpp"

#include <algorithm>
#include <string>

namespace rapt {

// Of a rank that can be, shape and strides are there already.
void Layout::complete(std::size_t sizes, std::size_t steps) {
  if (sizes < 1 || sizes > kMaxDims)
    throw Error("shape", std::to_string(sizes) + " dimensions", "1 to " + std::to_string(kMaxDims));
  if (steps != 0 && steps != sizes)
    throw Error("strides", std::to_string(steps) + " strides for " + std::to_string(sizes) + " dimensions",
                "as many as dimensions, or none");
  ndim = static_cast<int>(sizes);
  if (steps != 0) return;
  std::int64_t step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[static_cast<std::size_t>(i)] = step;
    const std::int64_t size = std::max<std::int64_t>(shape[static_cast<std::size_t>(i)], 1);
    if (__builtin_mul_overflow(step, size, &step)) throw Error("shape", "a size past int64", "a smaller tensor");
  }
}

}  // namespace rapt
