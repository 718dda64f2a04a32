#include "operations/attention/oracle_inputs.hpp"

namespace rapt::testing::inputs {

Matrix times(const Matrix& a, const Matrix& b) {
  return a * b;
}

FloatMatrix times_fp32(const FloatMatrix& a, const FloatMatrix& b) {
  return a * b;
}

}  // namespace rapt::testing::inputs
