# cmake -DCXX=<compiler> -DPREFIX=<installed rapt> -DWORK=<folder> [-DSTATIC=ON] -P pkg_config.cmake
# Compiles and runs the consumer as a Makefile would: what pkg-config prints goes straight to the compiler.
find_program(PKG_CONFIG pkg-config REQUIRED)
file(GLOB_RECURSE pc ${PREFIX}/*/rapt.pc)
cmake_path(GET pc PARENT_PATH pc_dir)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})

function(pkg_config result)
  execute_process(COMMAND ${PKG_CONFIG} ${ARGN} rapt OUTPUT_VARIABLE words OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(words UNIX_COMMAND "${words}")
  set(${result} ${words} PARENT_SCOPE)
endfunction()

set(static "")
if(STATIC)
  set(static --static)
endif()
pkg_config(cflags --cflags)
pkg_config(libs --libs ${static})
pkg_config(libdir --variable=libdir)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
execute_process(COMMAND ${CXX} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/consumer.cpp -o ${WORK}/consumer ${cflags} ${libs}
                        -Wl,-rpath,${libdir}
                COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${WORK}/consumer COMMAND_ERROR_IS_FATAL ANY)
