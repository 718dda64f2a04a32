# The list of operations, and the headers that include what each of them has by its name.
set(rapt_operations_def ${CMAKE_CURRENT_SOURCE_DIR}/include/rapt/operations.def)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${rapt_operations_def})
file(STRINGS ${rapt_operations_def} lines REGEX "^RAPT_OPERATION")
set(rapt_operations "")
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^RAPT_OPERATION\\(([a-z0-9_]+),.*" "\\1" name "${line}")
  list(APPEND rapt_operations ${name})
endforeach()

# Headers that are made: users see those in rapt/.
set(rapt_generated_dir ${CMAKE_CURRENT_BINARY_DIR}/generated)
# rapt_include_each(<header> <comment> <before> <after>): <header> includes <before>operation<after> for each.
function(rapt_include_each header comment before after)
  set(text "${comment}\n#pragma once\n\n")
  foreach(name IN LISTS rapt_operations)
    string(APPEND text "#include \"${before}${name}${after}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${rapt_generated_dir}/${header} CONTENT "${text}" @ONLY)
endfunction()
rapt_include_each(rapt/operations.hpp "// Every operation." rapt/ .hpp)
rapt_include_each(rapt/operations.h "/* The arguments of every operation. */" rapt/ .h)
rapt_include_each(operations/all.hpp "// What every operation says of itself." operations/ /operation.hpp)
rapt_include_each(tests/support/all_cases.hpp "// The case of every operation." operations/ /case.hpp)
