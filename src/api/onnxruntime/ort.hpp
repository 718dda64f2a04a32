// ONNX Runtime's headers, used with a table of functions that ONNX Runtime hands over when it loads the provider.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

namespace rapt::onnx {

/// The oldest interface that has kernel registries for providers. Newer versions of ONNX Runtime keep it.
inline constexpr std::uint32_t kOrtVersion = 24;

}  // namespace rapt::onnx
