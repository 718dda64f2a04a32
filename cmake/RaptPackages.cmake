# Debian packages, by `cpack` in a build folder, as `tools/dev deb` makes them: of the shared library, of the GPU kernels if they
# are built, of what is needed to compile against the library, and of the rapt command (-DCMAKE_INSTALL_PREFIX=/usr); of the Python package, where that is built
# (-DCMAKE_INSTALL_PREFIX=/usr/lib/python3/dist-packages).

# rapt_debian_package(<component> <name> <section> <description> NEEDS <component>... NOTICES <file>...): NOTICES are of what is
# compiled into the package.
set(CPACK_COMPONENTS_ALL "")
macro(rapt_debian_package component name section description)
  cmake_parse_arguments(package "" "" "NEEDS;NOTICES" ${ARGN})
  string(TOUPPER ${component} upper)
  list(APPEND CPACK_COMPONENTS_ALL ${component})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${description}")
  set(CPACK_COMPONENT_${upper}_DEPENDS ${package_NEEDS})
  # In Debian's machine-readable form: lines of texts are indented, and empty lines are dots.
  set(licenses Apache-2.0)
  set(texts "")
  foreach(file IN ITEMS LICENSE ${package_NOTICES})
    cmake_path(GET file STEM license)
    if(file STREQUAL LICENSE)
      set(license Apache-2.0)
    else()
      string(APPEND licenses " and ${license}")
    endif()
    file(READ ${file} text)
    string(STRIP "${text}" text)
    string(REGEX REPLACE "\n([ \t]*\n)+" "\n.\n" text "${text}")
    string(REPLACE "\n" "\n " text "${text}")
    string(APPEND texts "\nLicense: ${license}\n ${text}\n")
  endforeach()
  set(copyright ${PROJECT_BINARY_DIR}/copyright_${component})
  file(WRITE ${copyright} "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: rapt\n\n"
       "Files: *\nCopyright: the rapt authors, and those that the licenses name\nLicense: ${licenses}\n${texts}")
  # Not a path below the prefix, which for Python is a folder of modules.
  install(FILES ${copyright} DESTINATION /usr/share/doc/${name} RENAME copyright COMPONENT ${component} EXCLUDE_FROM_ALL)
endmacro()

set(command_notices notices/CLI11.txt notices/Eigen3.txt notices/fmt.txt notices/nlohmann_json.txt)
if(RAPT_PYTHON)
  rapt_debian_package(python python3-rapt python "attention kernels for CPUs: Python package\nFor NumPy, PyTorch and transformers."
                      NOTICES notices/nanobind.txt notices/robin_map.txt notices/xsimd.txt ${command_notices})
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(rapt_python ${Python_VERSION_MAJOR}.${Python_VERSION_MINOR})
  math(EXPR rapt_next_python "${Python_VERSION_MINOR} + 1")
  set(CPACK_DEBIAN_PYTHON_PACKAGE_DEPENDS
      "python3 (>= ${rapt_python}), python3 (<< ${Python_VERSION_MAJOR}.${rapt_next_python}), python3-numpy")
  # Modules compile themselves into __pycache__ when root imports them: files that dpkg does not know.
  file(WRITE ${PROJECT_BINARY_DIR}/prerm "#!/bin/sh\nset -e\npy3clean -p python3-rapt\n")
  set(CPACK_DEBIAN_PYTHON_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/prerm)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_CONTROL_STRICT_PERMISSION ON)
  install(DIRECTORY python/rapt DESTINATION . COMPONENT python EXCLUDE_FROM_ALL FILES_MATCHING PATTERN "*.py" PATTERN "*.pyi"
          PATTERN py.typed PATTERN __pycache__ EXCLUDE PATTERN sets EXCLUDE)
  # In the source a link, which packages must not have.
  install(DIRECTORY bench/sets DESTINATION rapt/bench COMPONENT python EXCLUDE_FROM_ALL)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_RECOMMENDS rapt-tools)  # the `rapt` command
  # What pip and importlib.metadata read, and by whose entry point vLLM finds the plug-in: of pyproject.toml, as in a wheel.
  # Only packaging needs scikit-build-core.
  set(metadata ${PROJECT_BINARY_DIR}/metadata)
  install(CODE "file(REMOVE_RECURSE \"${metadata}\")
                file(MAKE_DIRECTORY \"${metadata}\")
                execute_process(COMMAND \"${Python_EXECUTABLE}\" -c
                                \"from scikit_build_core.build import *; prepare_metadata_for_build_wheel('${metadata}')\"
                                WORKING_DIRECTORY \"${PROJECT_SOURCE_DIR}\" COMMAND_ERROR_IS_FATAL ANY)
                file(GLOB info \"${metadata}/*.dist-info\")
                file(WRITE \"\${info}/INSTALLER\" debian\\n)"
          COMPONENT python EXCLUDE_FROM_ALL)
  install(DIRECTORY ${metadata}/ DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
else()
  rapt_debian_package(rapt_library librapt${rapt_soversion} libs "attention kernels for CPUs: shared library\nFor programs that are linked with it: see librapt-dev."
                      NOTICES notices/xsimd.txt)
  rapt_debian_package(rapt_development librapt-dev libdevel
                      "attention kernels for CPUs: development files\nHeaders for C++20 and C11, and rapt's files for CMake and pkg-config."
                      NEEDS rapt_library)
  set(CPACK_DEBIAN_RAPT_DEVELOPMENT_PACKAGE_SUGGESTS libeigen3-dev)  # rapt/interop/eigen.hpp
  if(rapt_have_cuda)
    set(terms python/cuda/NOTICE)
    if(RAPT_CUDA_EULA)
      list(APPEND terms ${RAPT_CUDA_EULA})
    endif()
    rapt_debian_package(rapt_cuda librapt-cuda${rapt_soversion} libs
                        "attention kernels for NVIDIA GPUs\nThe library loads them at the first use of a GPU. Contains NVIDIA's CUDA runtime."
                        NEEDS rapt_library NOTICES ${terms})
  endif()
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
  if(TARGET rapt_cli)
    rapt_debian_package(rapt_tools rapt-tools science
                        "attention kernels for CPUs: the rapt command\nLists a machine's kernels, checks them against float64, and times them."
                        NEEDS rapt_library NOTICES ${command_notices})
    if(NOT CMAKE_CROSSCOMPILING)
      set(man ${PROJECT_BINARY_DIR}/rapt.1)
      install(CODE "execute_process(COMMAND ${CMAKE_COMMAND} -DRAPT=$<TARGET_FILE:rapt_cli> -DTO=${man} -P ${CMAKE_CURRENT_LIST_DIR}/man.cmake
                    COMMAND_ERROR_IS_FATAL ANY)\nexecute_process(COMMAND gzip -9nf ${man} COMMAND_ERROR_IS_FATAL ANY)"
              COMPONENT rapt_tools EXCLUDE_FROM_ALL)
      install(FILES ${man}.gz DESTINATION /usr/share/man/man1 COMPONENT rapt_tools EXCLUDE_FROM_ALL)
    endif()
  endif()
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME rapt)
string(REPLACE ".dev" "~dev" CPACK_PACKAGE_VERSION ${rapt_version})  # dpkg sorts 0.3.0~dev0 before 0.3.0
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")  # it would be the first line of every package's description
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX ${CMAKE_INSTALL_PREFIX})
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "the rapt maintainers <maintainers@rapt.invalid>")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR})  # the command's librapt
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS ON)
include(CPack)
