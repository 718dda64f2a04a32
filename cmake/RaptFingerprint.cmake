# The fingerprint of what librapt and librapt_cuda are both made of, which must be equal (src/dispatch/cuda_library.hpp): builds
# of different sources have different ones, and builds of the same sources have the same, wherever they are. CPU kernels do
# not count. The header is written where it changes, so that only the files that include it are compiled again.
#
# As a script, for the build: cmake -DROOT=<rapt> -DHEADER=<file> -P RaptFingerprint.cmake
block()
set(depends "")
if(CMAKE_SCRIPT_MODE_FILE)
  cmake_minimum_required(VERSION 3.25)
else()
  set(ROOT ${PROJECT_SOURCE_DIR})
  set(HEADER ${rapt_private_dir}/dispatch/fingerprint.hpp)
  set(depends CONFIGURE_DEPENDS)
endif()

set(patterns "")
foreach(suffix IN ITEMS hpp h def cpp cuh cu)
  list(APPEND patterns ${ROOT}/include/*.${suffix} ${ROOT}/src/*.${suffix})
endforeach()
file(GLOB_RECURSE files RELATIVE ${ROOT} ${depends} ${patterns})
list(FILTER files EXCLUDE REGEX "^src/cpu/")
set(hashes "")
foreach(file IN LISTS files)
  file(SHA256 ${ROOT}/${file} hash)
  string(APPEND hashes "${file} ${hash}\n")
endforeach()
if(NOT hashes)
  message(FATAL_ERROR "rapt: no sources in ${ROOT}: a path with [ or ] cannot be searched")
endif()
string(SHA256 fingerprint "${hashes}")
string(SUBSTRING ${fingerprint} 0 16 fingerprint)
# The compiler and its settings decide how the standard library's types lie in memory.
file(CONFIGURE OUTPUT ${HEADER} @ONLY CONTENT "// Made by cmake/RaptFingerprint.cmake.
#pragma once

#include <string>

#ifdef _GLIBCXX_DEBUG
#define RAPT_DEBUG_CONTAINERS \", debug\"
#else
#define RAPT_DEBUG_CONTAINERS \"\"
#endif
#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#define RAPT_OLD_STRINGS \", old ABI\"
#else
#define RAPT_OLD_STRINGS \"\"
#endif

namespace rapt {
inline constexpr char kBuild[] = \"sources @fingerprint@, compiler \" __VERSION__ RAPT_OLD_STRINGS RAPT_DEBUG_CONTAINERS;
}  // namespace rapt
")

if(CMAKE_SCRIPT_MODE_FILE)
  cmake_minimum_required(VERSION 3.25)
else()
  list(TRANSFORM files PREPEND ${ROOT}/)
  add_custom_command(OUTPUT ${HEADER} DEPENDS ${files} COMMENT "Comparing the sources with their fingerprint" VERBATIM
                     COMMAND ${CMAKE_COMMAND} -DROOT=${ROOT} -DHEADER=${HEADER} -P ${CMAKE_CURRENT_LIST_FILE})
  add_custom_target(rapt_fingerprint DEPENDS ${HEADER})
endif()
endblock()
