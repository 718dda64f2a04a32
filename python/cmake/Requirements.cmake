# Who runs pip sees the last lines of this only: name all that is missing at once, and how to get it.
find_package(TBB QUIET)
find_path(RAPT_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp)
set(missing "")
if(NOT TBB_FOUND)
  list(APPEND missing "oneTBB (libtbb-dev)")
endif()
if(NOT RAPT_XSIMD_INCLUDE_DIR)
  list(APPEND missing "xsimd 8.1 or newer, headers only (libxsimd-dev)")
endif()
if(missing)
  list(JOIN missing " and " missing)
  message(FATAL_ERROR "Building rapt's Python package from source needs ${missing}; on Debian and Ubuntu "
                      "'apt install g++ libtbb-dev libxsimd-dev' has all it needs. Where they lie elsewhere, "
                      "CMAKE_PREFIX_PATH=<folder> pip install ... finds them.")
endif()
