# Kernels are compiled once per instruction set, in namespace rapt::cpu::<isa>.

add_library(rapt_warnings INTERFACE)
target_compile_options(rapt_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow $<$<BOOL:${RAPT_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms of GCC 12 on std::string's operator+ (GCC bug 105651).
  target_compile_options(rapt_warnings INTERFACE -Wno-restrict)
endif()

set(RAPT_MARCH_generic x86-64)
set(RAPT_MARCH_avx2 x86-64-v3)
set(RAPT_MARCH_avx512 x86-64-v4)
set(RAPT_MARCH_amx x86-64-v4 -mavx512vbmi -mavx512vbmi2 -mavx512bf16)
set(RAPT_MARCH_avx512bf16 ${RAPT_MARCH_amx})
set(RAPT_MARCH_neon armv8-a)
set(RAPT_MARCH_neonbf16 armv8.2-a+bf16)

set(RAPT_ISAS "" CACHE STRING "Instruction sets to build kernels for, such as \"avx2;avx512\"; empty: all of the architecture")
# RAPT_AMX_MODEL=<isa> replaces AMX's tile instructions by a software model beside the vectors of that ISA, so that the
# kernels' logic can be tested on any machine that has it. Slow.
set(RAPT_AMX_MODEL "" CACHE STRING "Test AMX kernels by a software model, with the vectors of this ISA: avx2, avx512, neon, ...")

set(RAPT_KERNEL_OPTIMISE "" CACHE STRING "For developers: how much to optimise kernels, such as -O1")
mark_as_advanced(RAPT_KERNEL_OPTIMISE)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(rapt_isas generic avx2 avx512 avx512bf16 amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(rapt_isas neon neonbf16)
  if(RAPT_AMX_MODEL)
    list(APPEND rapt_isas amx)
  endif()
else()
  message(FATAL_ERROR "rapt has no kernels for ${CMAKE_SYSTEM_PROCESSOR}; it knows x86-64 and aarch64")
endif()
if(NOT RAPT_ISAS)
  set(RAPT_ISAS ${rapt_isas})
endif()
list(REMOVE_DUPLICATES RAPT_ISAS)
foreach(isa IN LISTS RAPT_ISAS)
  if(NOT isa IN_LIST rapt_isas)
    message(FATAL_ERROR "RAPT_ISAS has ${isa}; it must list some of ${rapt_isas}")
  endif()
endforeach()
# Tile kernels hand rows over to those of an ISA of vectors: AVX-512, NEON, or the model's.
set(rapt_bf16_isas avx512bf16 neonbf16 amx)
set(rapt_vectors_of_avx512bf16 avx512)
set(rapt_vectors_of_neonbf16 neon)
set(rapt_vectors_of_amx avx512)
if(RAPT_AMX_MODEL)
  if(NOT RAPT_AMX_MODEL IN_LIST RAPT_ISAS OR RAPT_AMX_MODEL IN_LIST rapt_bf16_isas)
    set(wanted ${RAPT_ISAS})
    list(REMOVE_ITEM wanted ${rapt_bf16_isas})
    message(FATAL_ERROR "RAPT_AMX_MODEL is ${RAPT_AMX_MODEL}; it must be one of ${wanted}")
  endif()
  if(NOT "amx" IN_LIST RAPT_ISAS)
    message(FATAL_ERROR "RAPT_AMX_MODEL is ${RAPT_AMX_MODEL}, but RAPT_ISAS is ${RAPT_ISAS}; it must list amx")
  endif()
  set(rapt_vectors_of_amx ${RAPT_AMX_MODEL})
  if(NOT RAPT_AMX_MODEL STREQUAL "avx512")
    set(RAPT_MARCH_amx ${RAPT_MARCH_${RAPT_AMX_MODEL}})
  endif()
endif()
foreach(isa IN LISTS rapt_bf16_isas)
  if(isa IN_LIST RAPT_ISAS AND NOT rapt_vectors_of_${isa} IN_LIST RAPT_ISAS)
    message(FATAL_ERROR "RAPT_ISAS has ${isa}; it must list ${rapt_vectors_of_${isa}} too, whose kernels take over where ${isa}'s cannot")
  endif()
endforeach()

# The first of the build's ISAs, in the order of rapt_isas, whose vectors need no other.
foreach(isa IN LISTS rapt_isas)
  if(isa IN_LIST RAPT_ISAS AND NOT isa IN_LIST rapt_bf16_isas)
    set(rapt_plainest_isa ${isa})
    break()
  endif()
endforeach()

# rapt_add_isa_library(<name> <isa> <source>...): an object library of kernel sources for one instruction set.
# Always optimised (with sanitizers a little: -O2 compiles for minutes then) and never with LTO: an inline function that
# is left out of line could be the copy the linker keeps for the whole program, and would then run on CPUs that lack the
# instructions (tests/gates/isa_purity.py checks).
# No exceptions, so that no object needs the run-time library's unwinder, which is a weak symbol of its own.
# No contraction: a fused multiply-add is written where it is meant, so every ISA rounds where the source says.
function(rapt_add_isa_library name isa)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON INTERPROCEDURAL_OPTIMIZATION OFF)
  target_compile_definitions(${name} PRIVATE RAPT_ISA=${isa})
  if(isa STREQUAL "amx" AND RAPT_AMX_MODEL)
    target_compile_definitions(${name} PRIVATE RAPT_AMX_MODEL=${RAPT_AMX_MODEL})
  endif()
  set(optimise -O3)
  if(RAPT_KERNEL_OPTIMISE)
    set(optimise ${RAPT_KERNEL_OPTIMISE})
  elseif(RAPT_SANITIZE)
    set(optimise -O1)
  endif()
  target_compile_options(${name} PRIVATE -march=${RAPT_MARCH_${isa}} ${optimise} -fno-lto -ffp-contract=off -fno-exceptions)
  # Three checks of pointers take more than half of the time that kernels compile, and find nothing that
  # AddressSanitizer does not. libFuzzer looks for new paths through the framework.
  if(RAPT_SANITIZE MATCHES "address.*undefined|undefined.*address")
    target_compile_options(${name} PRIVATE -fno-sanitize=null,object-size,pointer-overflow)
  endif()
  if(RAPT_SANITIZE MATCHES "fuzzer")
    target_compile_options(${name} PRIVATE -fno-sanitize=fuzzer-no-link)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Vector types as template arguments and by value; and GCC's false alarms on its own _mm512_undefined_*().
    target_compile_options(${name} PRIVATE -Wno-psabi -Wno-ignored-attributes -Wno-uninitialized
                           -Wno-maybe-uninitialized)
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${rapt_public_dir}
                             ${rapt_private_dir})
  target_include_directories(${name} SYSTEM PRIVATE ${RAPT_XSIMD_INCLUDE_DIR})
  target_link_libraries(${name} PRIVATE rapt_warnings)
endfunction()
