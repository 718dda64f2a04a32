// The kernels of index_scores that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/index_scores/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_DOTS)
extern const IndexScoresKernel kIndexScores;
#endif

[[gnu::always_inline]] constexpr IndexScoresKernels index_scores_kernels() {
  return {
#if !defined(RAPT_HAVE_DOTS)
    &kIndexScores
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
