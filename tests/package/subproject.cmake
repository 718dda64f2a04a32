# cmake -DRAPT_SOURCE=<rapt> -DWORK=<folder> -DGENERATOR=<name> -DCXX=<compiler> -P subproject.cmake
# As a part of another project rapt leaves that project's build type alone, and installs nothing unless it is told to.
file(REMOVE_RECURSE ${WORK})
execute_process(COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/add_subdirectory -B ${WORK}/build -G ${GENERATOR}
                        -DRAPT_SOURCE=${RAPT_SOURCE} -DCMAKE_CXX_COMPILER=${CXX} --no-warn-unused-cli
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
load_cache(${WORK}/build READ_WITH_PREFIX got_ CMAKE_BUILD_TYPE)
if(got_CMAKE_BUILD_TYPE)
  message(FATAL_ERROR "CMAKE_BUILD_TYPE became ${got_CMAKE_BUILD_TYPE}")
endif()
execute_process(COMMAND ${CMAKE_COMMAND} --install ${WORK}/build --prefix ${WORK}/prefix COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE installed ${WORK}/prefix/*)
if(installed)
  message(FATAL_ERROR "installed: ${installed}")
endif()
# Kernels are built for instruction sets that there are, and with those that they need beside them.
foreach(isa IN ITEMS abacus amx)
  execute_process(COMMAND ${CMAKE_COMMAND} -DRAPT_ISAS=${isa} ${WORK}/build
                  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE errors)
  if(status EQUAL 0 OR NOT errors MATCHES "RAPT_ISAS has ${isa}; it must list")
    message(FATAL_ERROR "RAPT_ISAS=${isa} gives ${status}: ${errors}")
  endif()
endforeach()
# What is missing is named, with what installs it.
execute_process(COMMAND ${CMAKE_COMMAND} -S ${RAPT_SOURCE} -B ${WORK}/without_tbb -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
                        -DCMAKE_DISABLE_FIND_PACKAGE_TBB=ON -DRAPT_BUILD_TESTS=OFF -DRAPT_BUILD_TOOLS=OFF
                RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE errors)
string(REGEX REPLACE "[ \n]+" " " errors "${errors}")
if(status EQUAL 0 OR NOT errors MATCHES "does not find oneTBB \\(libtbb-dev\\)\\..* 'apt install libtbb-dev libxsimd-dev'")
  message(FATAL_ERROR "without oneTBB: ${status}, ${errors}")
endif()
