// The ISAs and cache sizes of this CPU, probed once. This file needs no ISA flags.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/registry.hpp"
#include "rapt/types.hpp"

namespace rapt::cpu {

// An ISA that this build has kernels for, and whether this machine runs it.
struct IsaSupport {
  Isa isa;
  const char* name;  // in the names of its entries
  const IsaKernels* kernels;
  std::string unusable;          // the missing CPU or OS feature; empty if usable
  const char* opt_in = nullptr;  // why its kernels run only where they are named; null if dispatch may choose them
  std::string_view (*denied)(bool ask) = nullptr;  // why the OS denies it to this process, as Entry has it
  bool multiplies_int8 = false;                    // int8_chains can run
};

struct CpuMachine {
  std::vector<IsaSupport> isas;    // best first
  std::size_t l2_bytes;            // of one core; a conservative guess where the OS does not say
  std::string small_signal_stack;  // why AMX is denied to a process with one
};

const CpuMachine& machine();

// "this CPU lacks AVX-512 VBMI and BF16": those features of a family that are false; empty if there are none.
std::string lacking(std::string_view family, std::initializer_list<std::pair<std::string_view, bool>> features);

// The CPU's model name; empty where the OS does not say.
std::string cpu_model();

}  // namespace rapt::cpu
