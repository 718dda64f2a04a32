#pragma once

namespace rapt::testing {

/// The largest relative error of the kernels' 2^x over every float32 from -126 to 0, against float64. Needs a GPU;
/// throws std::runtime_error when CUDA fails.
double largest_error_of_exp2();

}  // namespace rapt::testing
