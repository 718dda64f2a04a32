# The CUDA backend: RAPT_CUDA decides, rapt_have_cuda says what came of it, and rapt_cuda holds its kernels.
set(rapt_cuda_default OFF)  # within another project, that project's choice
if(PROJECT_IS_TOP_LEVEL)
  set(rapt_cuda_default AUTO)
endif()
set(RAPT_CUDA ${rapt_cuda_default} CACHE STRING "Build the CUDA backend: AUTO (with a CUDA Toolkit of 12.4 or newer), ON or OFF")
set_property(CACHE RAPT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(RAPT_CUDA_ARCHITECTURES "" CACHE STRING
    "Compute capabilities to build for, by number as in CMAKE_CUDA_ARCHITECTURES; empty: PTX of the oldest that nvcc knows, and sm_90a")

set(rapt_have_cuda OFF)
if(RAPT_CUDA STREQUAL "AUTO" AND (RAPT_SANITIZE OR CMAKE_CROSSCOMPILING))
  return()
endif()
if(RAPT_CUDA AND RAPT_SANITIZE)
  message(FATAL_ERROR "RAPT_CUDA is ${RAPT_CUDA} and RAPT_SANITIZE ${RAPT_SANITIZE}: nvcc has no sanitizers")
endif()
if(RAPT_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # the target says
    enable_language(CUDA)
    find_package(CUDAToolkit)
  endif()
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4)
    set(rapt_have_cuda ON)
  elseif(NOT RAPT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "RAPT_CUDA is ON, but no CUDA Toolkit of 12.4 or newer was found (nvcc: "
                        "${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION})")
  endif()
endif()
message(STATUS "rapt: CUDA backend ${rapt_have_cuda}")
if(NOT rapt_have_cuda)
  return()
endif()

set(rapt_cuda_architectures ${RAPT_CUDA_ARCHITECTURES})
if(NOT rapt_cuda_architectures)
  set(rapt_cuda_architectures 70-virtual 90a-real)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(rapt_cuda_architectures 75-virtual 90a-real)
  endif()
endif()
string(REGEX MATCHALL "[0-9]+" numbers "${rapt_cuda_architectures}")
if(NOT numbers)
  message(FATAL_ERROR "RAPT_CUDA_ARCHITECTURES is ${rapt_cuda_architectures}; it must list numbers, such as 80-real;90a-real")
endif()
list(SORT numbers COMPARE NATURAL)
list(GET numbers 0 RAPT_CUDA_LEAST_ARCHITECTURE)

# How kernels are compiled, tests' own too.
function(rapt_set_cuda_properties target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                                             CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                                             CUDA_ARCHITECTURES "${rapt_cuda_architectures}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${target} PRIVATE NDEBUG)  # a device assert is a call, which wgmma cannot overlap
  target_compile_options(${target} PRIVATE $<$<BOOL:${RAPT_WERROR}>:-Werror=all-warnings>)
endfunction()

add_library(rapt_cuda OBJECT src/cuda/kernels/attention_naive.cu src/cuda/kernels/attention_simt.cu)
rapt_set_cuda_properties(rapt_cuda)
set(rapt_cuda_objects $<TARGET_OBJECTS:rapt_cuda>)

# Hopper's own instructions are in no other GPU's set.
set(rapt_have_sm90a OFF)
if("${rapt_cuda_architectures}" MATCHES "90a")
  set(rapt_have_sm90a ON)
  add_library(rapt_cuda_sm90a OBJECT src/cuda/kernels/attention_wgmma.cu src/cuda/kernels/attention_wgmma_f32.cu)
  rapt_set_cuda_properties(rapt_cuda_sm90a)
  set_target_properties(rapt_cuda_sm90a PROPERTIES CUDA_ARCHITECTURES 90a-real)
  list(APPEND rapt_cuda_objects $<TARGET_OBJECTS:rapt_cuda_sm90a>)
endif()
