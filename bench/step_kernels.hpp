// The three steps of attention on rows of one head, compiled once per ISA of vectors: Eigen's products and exponential.
#pragma once

#include <cstdint>

namespace rapt::bench {

/// Matrices are row-major and contiguous.
struct StepKernels {
  /// scores [rows, keys] = q [rows, d] . k [keys, d]
  void (*scores)(const float* q, const float* k, float* scores, std::int64_t rows, std::int64_t keys, std::int64_t d);
  /// scores = softmax(scale * scores) in place. The first row sees `visible` keys, each that follows one more, and none
  /// more than all; 0 is written for the others. scale > 0, visible > 0.
  void (*softmax)(float* scores, std::int64_t rows, std::int64_t keys, std::int64_t visible, float scale);
  /// out [rows, dv] = scores [rows, keys] . v [keys, dv]
  void (*values)(const float* scores, const float* v, float* out, std::int64_t rows, std::int64_t keys,
                 std::int64_t dv);
};

}  // namespace rapt::bench
