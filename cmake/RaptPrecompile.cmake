# rapt_precompile_headers(<target> <header>...): parses these once for all of the target's C++ files; up to half of the
# time that a small file takes to compile is for what it includes. A header of the standard library in <>. Files include what
# they use all the same: with CMAKE_DISABLE_PRECOMPILE_HEADERS they compile without.
function(rapt_precompile_headers target)
  list(TRANSFORM ARGN REPLACE "^<(.*)>$" "<\\1$<ANGLE-R>")
  list(TRANSFORM ARGN REPLACE "^(.+)$" "$<$<COMPILE_LANGUAGE:CXX>:\\1>")
  target_precompile_headers(${target} PRIVATE ${ARGN})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")  # a cache of compiled files gives back their contents, not their times
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # The false alarms on std::string's operator+ (cmake/RaptIsa.cmake) have more names where its header is precompiled.
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds;-Wno-stringop-overflow>")
  endif()
endfunction()

# Sets <out> to the objects of <target>. CMake counts precompiled headers among them.
function(rapt_objects_of target out)
  set(${out} "$<FILTER:$<TARGET_OBJECTS:${target}>,EXCLUDE,cmake_pch>" PARENT_SCOPE)
endfunction()

# What most files of the library include, and change seldom.
set(rapt_standard_headers "<algorithm>" "<array>" "<cmath>" "<functional>" "<limits>" "<memory>" "<optional>" "<span>" "<string>" "<tuple>"
    "<utility>" "<vector>")
