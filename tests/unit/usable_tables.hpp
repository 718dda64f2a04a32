// The kernel tables this machine can run, for tests that reach inside the library.
#pragma once

#include <vector>

#include "cpu/registry.hpp"
#include "rapt/plan.hpp"

inline std::vector<const rapt::cpu::KernelTable*> usable_tables() {
  std::vector<const rapt::cpu::KernelTable*> tables;
  for (rapt::Isa isa : rapt::usable_isas()) {
#if defined(__x86_64__)
    if (isa == rapt::Isa::generic) tables.push_back(&rapt::cpu::generic::kTable);
    if (isa == rapt::Isa::avx2) tables.push_back(&rapt::cpu::avx2::kTable);
    if (isa == rapt::Isa::avx512) tables.push_back(&rapt::cpu::avx512::kTable);
#else
    if (isa == rapt::Isa::neon) tables.push_back(&rapt::cpu::neon::kTable);
#endif
  }
  return tables;
}
