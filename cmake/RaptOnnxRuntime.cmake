# librapt_onnxruntime, the execution provider for ONNX Runtime: built if RAPT_ONNXRUNTIME has the headers.
set(RAPT_ONNXRUNTIME "" CACHE PATH
    "Folder of onnxruntime_cxx_api.h, of ONNX Runtime 1.24 or newer, to build its execution provider; empty: do not")
if(NOT RAPT_ONNXRUNTIME)
  message(STATUS "rapt: ONNX Runtime's execution provider OFF")
  return()
endif()
if(NOT EXISTS ${RAPT_ONNXRUNTIME}/onnxruntime_ep_c_api.h OR NOT EXISTS ${RAPT_ONNXRUNTIME}/onnxruntime_cxx_api.h)
  message(FATAL_ERROR "RAPT_ONNXRUNTIME is ${RAPT_ONNXRUNTIME}, which has no onnxruntime_cxx_api.h and "
                      "onnxruntime_ep_c_api.h of ONNX Runtime 1.24 or newer")
endif()
file(STRINGS ${RAPT_ONNXRUNTIME}/onnxruntime_c_api.h rapt_ort_version REGEX "^#define ORT_API_VERSION [0-9]+")
string(REGEX MATCH "[0-9]+" rapt_ort_version "${rapt_ort_version}")
if(NOT rapt_ort_version GREATER_EQUAL 24)
  message(FATAL_ERROR "RAPT_ONNXRUNTIME is ${RAPT_ONNXRUNTIME}, of ONNX Runtime 1.${rapt_ort_version}; "
                      "rapt needs 1.24 or newer")
endif()

file(GLOB rapt_onnxruntime_sources CONFIGURE_DEPENDS src/api/onnxruntime/*.cpp)
add_library(rapt_onnxruntime MODULE ${rapt_onnxruntime_sources})
set_target_properties(rapt_onnxruntime PROPERTIES INSTALL_RPATH "$ORIGIN"
                      LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/rapt_onnxruntime.map)
target_include_directories(rapt_onnxruntime PRIVATE src)
target_include_directories(rapt_onnxruntime SYSTEM PRIVATE ${RAPT_ONNXRUNTIME})
string(REPLACE ".dev" "-dev" semantic_version ${rapt_version})
target_compile_definitions(rapt_onnxruntime PRIVATE RAPT_SEMANTIC_VERSION="${semantic_version}")
target_link_libraries(rapt_onnxruntime PRIVATE rapt rapt_warnings)
target_link_options(rapt_onnxruntime PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/rapt_onnxruntime.map
                    LINKER:-z,defs)
if(SKBUILD)
  install(TARGETS rapt_onnxruntime LIBRARY DESTINATION rapt COMPONENT python)
elseif(RAPT_INSTALL)
  install(TARGETS rapt_onnxruntime LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT rapt_library)
endif()
