// The kernel tables this machine can run, for tests that reach inside the library.
#pragma once

#include <vector>

#include "cpu/machine.hpp"
#include "rapt/plan.hpp"

inline std::vector<const rapt::cpu::IsaKernels*> usable_tables() {
  std::vector<const rapt::cpu::IsaKernels*> tables;
  for (const rapt::cpu::BuiltIsa& built : rapt::cpu::machine().isas)
    if (built.unusable.empty() && (!built.denied || built.denied(true).empty())) tables.push_back(built.kernels);
  return tables;
}
