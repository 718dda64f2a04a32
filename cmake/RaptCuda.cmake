# The CUDA backend, librapt_cuda: RAPT_CUDA decides, and rapt_have_cuda says what came of it. rapt_cuda holds the kernels.
set(rapt_cuda_default OFF)  # within another project, that project's choice
if(PROJECT_IS_TOP_LEVEL)
  set(rapt_cuda_default AUTO)
endif()
set(RAPT_CUDA ${rapt_cuda_default} CACHE STRING "Build the CUDA backend: AUTO (with a CUDA Toolkit of 12.4 or newer), ON or OFF")
set_property(CACHE RAPT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(RAPT_CUDA_ARCHITECTURES "" CACHE STRING
    "Compute capabilities to build for, as in CMAKE_CUDA_ARCHITECTURES but numbers only, 90a among them for Hopper's tensor cores; empty: PTX of the oldest that rapt takes, and 90a-real")

rapt_read_switch(rapt_cuda_wanted RAPT_CUDA)
set(rapt_have_cuda OFF)
if(rapt_cuda_wanted STREQUAL "AUTO" AND (RAPT_SANITIZE OR CMAKE_CROSSCOMPILING))
  return()
endif()
if(rapt_cuda_wanted AND RAPT_SANITIZE)
  message(FATAL_ERROR "RAPT_CUDA is ${RAPT_CUDA} and RAPT_SANITIZE ${RAPT_SANITIZE}: nvcc has no sanitizers")
endif()
if(rapt_cuda_wanted)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # the target says
    enable_language(CUDA)
    find_package(CUDAToolkit)
  endif()
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4)
    set(rapt_have_cuda ON)
  elseif(NOT rapt_cuda_wanted STREQUAL "AUTO")
    message(FATAL_ERROR "RAPT_CUDA is ${RAPT_CUDA}, but no CUDA Toolkit of 12.4 or newer was found (nvcc: "
                        "${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}); nvcc must be on PATH, or named by CUDACXX")
  endif()
endif()
if(NOT rapt_have_cuda)
  message(STATUS "rapt: CUDA backend OFF")
  return()
endif()

set(rapt_cuda_architectures ${RAPT_CUDA_ARCHITECTURES})
if(NOT rapt_cuda_architectures)
  set(rapt_cuda_architectures 70-virtual 90a-real)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(rapt_cuda_architectures 75-virtual 90a-real)
  endif()
endif()
foreach(architecture IN LISTS rapt_cuda_architectures)
  if(NOT architecture MATCHES "^[0-9]+[af]?(-real|-virtual)?$")
    message(FATAL_ERROR "RAPT_CUDA_ARCHITECTURES has ${architecture}; it must list numbers, such as 80-real;90a-real")
  endif()
endforeach()
string(REGEX MATCHALL "[0-9]+" numbers "${rapt_cuda_architectures}")
list(SORT numbers COMPARE NATURAL)
list(GET numbers 0 RAPT_CUDA_MIN_ARCHITECTURE)
if(RAPT_CUDA_MIN_ARCHITECTURE LESS 70)
  message(FATAL_ERROR "RAPT_CUDA_ARCHITECTURES has ${RAPT_CUDA_MIN_ARCHITECTURE}; the oldest that rapt takes is 70 (75 from CUDA 13 on)")
endif()

# How kernels are compiled, tests' own too.
function(rapt_set_cuda_properties target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                                             CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                                             CUDA_ARCHITECTURES "${rapt_cuda_architectures}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${target} PRIVATE NDEBUG)  # a device assert is a call, which wgmma cannot overlap
  target_compile_options(${target} PRIVATE $<$<BOOL:${RAPT_WERROR}>:-Werror=all-warnings>)
endfunction()

file(GLOB rapt_cuda_kernels CONFIGURE_DEPENDS src/cuda/kernels/*.cu)
list(FILTER rapt_cuda_kernels EXCLUDE REGEX "/attention_|/delta_rule_|/index_scores_")  # most of those are Hopper's
add_library(rapt_cuda OBJECT ${rapt_cuda_kernels} src/cuda/kernels/attention_backward_naive.cu
            src/cuda/kernels/attention_naive.cu src/cuda/kernels/attention_simt.cu)
rapt_set_cuda_properties(rapt_cuda)
set(rapt_cuda_objects $<TARGET_OBJECTS:rapt_cuda>)

# Hopper's own instructions are in no other GPU's set.
set(rapt_have_sm90a OFF)
if("${rapt_cuda_architectures}" MATCHES "90a")
  set(rapt_have_sm90a ON)
  add_library(rapt_cuda_sm90a OBJECT src/cuda/kernels/attention_backward.cu src/cuda/kernels/attention_backward_bits.cu
              src/cuda/kernels/attention_backward_scores.cu src/cuda/kernels/attention_combine.cu src/cuda/kernels/attention_decode.cu
              src/cuda/kernels/attention_decode_f32.cu src/cuda/kernels/attention_decode_m64.cu
              src/cuda/kernels/attention_latent.cu src/cuda/kernels/attention_prefill.cu
              src/cuda/kernels/attention_prefill_modified.cu
              src/cuda/kernels/attention_prefill_f32.cu src/cuda/kernels/attention_prefill_f8.cu
              src/cuda/kernels/delta_rule_decode.cu src/cuda/kernels/delta_rule_prefill.cu
              src/cuda/kernels/index_scores_tiles.cu)
  rapt_set_cuda_properties(rapt_cuda_sm90a)
  set(rapt_sm90a_architectures ${rapt_cuda_architectures})
  list(FILTER rapt_sm90a_architectures INCLUDE REGEX "^90a")
  set_target_properties(rapt_cuda_sm90a PROPERTIES CUDA_ARCHITECTURES "${rapt_sm90a_architectures}")
  list(APPEND rapt_cuda_objects $<TARGET_OBJECTS:rapt_cuda_sm90a>)
endif()

# The host's side.
file(GLOB rapt_cuda_hosts CONFIGURE_DEPENDS src/cuda/*.cpp src/operations/*/cuda*.cpp)
list(REMOVE_ITEM rapt_cuda_hosts ${PROJECT_SOURCE_DIR}/src/cuda/library.cpp)
list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND "-isystem" OUTPUT_VARIABLE rapt_cuda_includes)
add_library(rapt_cuda_host OBJECT ${rapt_cuda_hosts})
set_target_properties(rapt_cuda_host PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_options(rapt_cuda_host PRIVATE ${rapt_cuda_includes})
target_compile_definitions(rapt_cuda_host PRIVATE RAPT_CUDA_MIN_ARCHITECTURE=${RAPT_CUDA_MIN_ARCHITECTURE}
                           $<$<BOOL:${rapt_have_sm90a}>:RAPT_HAVE_SM90A>)

# A shared library in static builds, too, with the CUDA runtime within it: that finds a driver, or not, when it runs. One
# file, without links for its versions, which Python's wheels could not hold.
add_library(rapt_cuda_library SHARED src/cuda/library.cpp $<TARGET_OBJECTS:rapt_cuda_host> ${rapt_cuda_objects})
add_library(rapt::cuda ALIAS rapt_cuda_library)
add_dependencies(rapt_cuda_library rapt_fingerprint)
foreach(target IN ITEMS rapt_cuda_host rapt_cuda_library)
  target_include_directories(${target} PRIVATE include src ${rapt_public_dir} ${rapt_private_dir})
  target_link_libraries(${target} PRIVATE rapt_warnings)
endforeach()
target_compile_definitions(rapt_cuda_library PRIVATE RAPT_VERSION="${rapt_version}")
target_link_libraries(rapt_cuda_library PRIVATE CUDA::cudart_static Threads::Threads ${CMAKE_DL_LIBS})
set(rapt_cuda_exports ${PROJECT_SOURCE_DIR}/cmake/rapt_cuda.map)
# -z defs: a function of rapt that it lacks fails here, not in users' programs (src/dispatch/cuda_library.hpp).
target_link_options(rapt_cuda_library PRIVATE LINKER:-z,defs LINKER:--version-script=${rapt_cuda_exports})
set_target_properties(rapt_cuda_library PROPERTIES OUTPUT_NAME rapt_cuda VERSION ${rapt_soversion} SOVERSION ${rapt_soversion}
                      LINKER_LANGUAGE CXX LINK_DEPENDS ${rapt_cuda_exports})
message(STATUS "rapt: CUDA backend ON for ${rapt_cuda_architectures}; Hopper's tensor cores (90a): ${rapt_have_sm90a}")
