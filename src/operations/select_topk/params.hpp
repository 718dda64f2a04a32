// What select_topk's kernels get: plain data, filled once, by validate().
#pragma once

#include "core/pod.hpp"

namespace rapt {

struct SelectTopkParams {
  const float* scores;  // [b, h, s, sk]
  std::int32_t* indices;
  Strides scores_stride, indices_stride;
  std::int64_t b, h, s, sk, n;  // b * h * s rows
};

}  // namespace rapt
