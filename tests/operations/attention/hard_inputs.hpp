// Inputs on which attention is known to lose digits, for the tests of kernels and `rapt check`.
#pragma once

#include <span>

#include "operations/attention/case.hpp"

namespace rapt::testing {

struct HardInputs {
  const char* name;
  const char* problem;
  void (*fill)(Case&);  ///< changes what the problem's case holds
};

std::span<const HardInputs> hard_inputs();

/// The problem's case, filled.
Case make_case(const HardInputs& inputs);

}  // namespace rapt::testing
