# The lists of operations, of score modifiers and of kinds of keys, and the headers that include what each of them has by its name.
# rapt_read_list(<variable> <file> <macro>): the names of the list, which CMake reads again when it changes.
function(rapt_read_list variable file macro)
  set(file ${CMAKE_CURRENT_SOURCE_DIR}/include/rapt/${file})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(STRINGS ${file} lines REGEX "^${macro}")
  list(TRANSFORM lines REPLACE "^${macro}\\(([a-z0-9_]+),.*" "\\1")
  set(${variable} ${lines} PARENT_SCOPE)
endfunction()
rapt_read_list(rapt_operations operations.def RAPT_OPERATION)
rapt_read_list(rapt_score_modifiers score_modifiers.def RAPT_SCORE_MODIFIER)
rapt_read_list(rapt_kv_kinds kv_kinds.def RAPT_KV_KIND)

# Headers that are made: those that users see, and those of the library, whose folder nobody else gets.
set(rapt_generated_dir ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(rapt_public_dir ${rapt_generated_dir}/include)
set(rapt_private_dir ${rapt_generated_dir}/src)
# rapt_include_each(<header> <comment> <before> <after> <name>...): <header> includes <before>name<after> for each name.
function(rapt_include_each header comment before after)
  set(text "${comment}\n#pragma once\n\n")
  foreach(name IN LISTS ARGN)
    string(APPEND text "#include \"${before}${name}${after}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${rapt_generated_dir}/${header} CONTENT "${text}" @ONLY)
endfunction()
function(rapt_include_operations)
  rapt_include_each(${ARGV} ${rapt_operations})
endfunction()
rapt_include_operations(include/rapt/operations.hpp "// Every operation." rapt/ .hpp)
rapt_include_operations(include/rapt/operations.h "/* The arguments of every operation. */" rapt/ .h)
rapt_include_operations(src/operations/all.hpp "// What every operation says of itself." operations/ /operation.hpp)
rapt_include_operations(src/operations/all_params.hpp "// What the kernels of every operation get." operations/ /params.hpp)
rapt_include_operations(src/operations/all_kernels.hpp "// The CPU kernels of every operation." operations/ /kernels.hpp)
rapt_include_operations(src/cpu/kernels/all_tables.hpp "// The kernels of this ISA." cpu/kernels/ _table.hpp)
rapt_include_operations(tests/support/all_cases.hpp "// The case of every operation." operations/ /case.hpp)
rapt_include_each(src/operations/attention/all_modifiers.hpp "// Every score modifier." operations/attention/modifier_ .hpp
                  ${rapt_score_modifiers})
rapt_include_each(src/operations/attention/all_kinds.hpp "// Every kind of keys." operations/attention/kind_ .hpp ${rapt_kv_kinds})
rapt_include_each(tests/operations/attention/all_layouts.hpp "// What tests do with every kind of keys."
                  operations/attention/layout_ .hpp ${rapt_kv_kinds})
rapt_include_each(tests/operations/attention/case_all_modifiers.hpp "// What tests do with every score modifier."
                  operations/attention/case_ .hpp ${rapt_score_modifiers})
