// The kernels of rotary_append_kv that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/rotary_append_kv/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
extern const RotaryAppendKvKernel kRotaryAppendKv;
#endif

[[gnu::always_inline]] constexpr RotaryAppendKvKernels rotary_append_kv_kernels() {
  return {
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
    &kRotaryAppendKv
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
