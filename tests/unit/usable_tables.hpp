// The kernel tables this machine can run, for tests that reach inside the library.
#pragma once

#include <vector>

#include "cpu/machine.hpp"
#include "rapt/plan.hpp"

inline std::vector<const rapt::cpu::IsaKernels*> usable_tables() {
  std::vector<const rapt::cpu::IsaKernels*> tables;
  for (const rapt::cpu::IsaSupport& support : rapt::cpu::machine().isas)
    if (support.unusable.empty() && (!support.denied || support.denied(true).empty()))
      tables.push_back(support.kernels);
  return tables;
}
