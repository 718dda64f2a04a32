// Compiled once per ISA of vectors, and each time Eigen's namespace has another name (bench/CMakeLists.txt): or the
// linker would keep one copy of Eigen's templates for all.
#include "step_kernels.hpp"

#include <Eigen/Core>

namespace rapt::bench::RAPT_ISA {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix>;
using Out = Eigen::Map<Matrix>;

void scores(const float* q, const float* k, float* s, std::int64_t rows, std::int64_t keys, std::int64_t d) {
  Out(s, rows, keys).noalias() = In(q, rows, d) * In(k, keys, d).transpose();
}

void softmax(float* s, std::int64_t rows, std::int64_t keys, std::int64_t visible, float scale) {
  for (std::int64_t i = 0; i < rows; ++i, s += keys) {
    const std::int64_t n = visible + i < keys ? visible + i : keys;
    Eigen::Map<Eigen::ArrayXf> row(s, n);
    row = (scale * (row - row.maxCoeff())).exp();
    row *= 1 / row.sum();
    Eigen::Map<Eigen::ArrayXf>(s + n, keys - n).setZero();
  }
}

void values(const float* s, const float* v, float* out, std::int64_t rows, std::int64_t keys, std::int64_t dv) {
  Out(out, rows, dv).noalias() = In(s, rows, keys) * In(v, keys, dv);
}

}  // namespace

extern const StepKernels kSteps;
const StepKernels kSteps = {scores, softmax, values};

}  // namespace rapt::bench::RAPT_ISA
