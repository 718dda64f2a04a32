# vcpkg's port of rapt, over the checkout that it lies in:
#
#     vcpkg install rapt --overlay-ports=tools/packaging/vcpkg --no-binarycaching
#
# vcpkg's cache does not know of the checkout's changes.
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)
vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURES_OF_RAPT
  FEATURES
    cuda RAPT_CUDA
    openmp RAPT_OPENMP
    tools RAPT_BUILD_TOOLS
)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS ${FEATURES_OF_RAPT} -DRAPT_BUILD_TESTS=OFF -DRAPT_ITT=OFF
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/rapt)
vcpkg_fixup_pkgconfig()
if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES rapt AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
set(terms "${SOURCE_PATH}/LICENSE" "${SOURCE_PATH}/notices/xsimd.txt")
if("tools" IN_LIST FEATURES)
  foreach(name IN ITEMS CLI11 Eigen3 fmt nlohmann_json)
    list(APPEND terms "${SOURCE_PATH}/notices/${name}.txt")
  endforeach()
endif()
if("cuda" IN_LIST FEATURES)  # librapt_cuda contains the CUDA runtime
  list(APPEND terms "${SOURCE_PATH}/python/cuda/NOTICE")
endif()
vcpkg_install_copyright(FILE_LIST ${terms})
