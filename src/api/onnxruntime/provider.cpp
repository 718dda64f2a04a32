// The execution provider for ONNX Runtime: claims nodes that rapt computes, and makes their kernels.
#include <exception>
#include <new>
#include <string>

#include "api/onnxruntime/operator.hpp"

namespace rapt::onnx {
namespace {

constexpr const char* kName = "RaptExecutionProvider";
constexpr const Operator* kOperators[] = {&kAttention, &kMultiHeadAttention, &kGroupQueryAttention, &kLinearAttention,
                                          &kOnnxLinearAttention};

// Runs `work`, whose exceptions become a status.
template <class Work>
OrtStatus* status_of(const Work& work) noexcept {
  try {
    work();
    return nullptr;
  } catch (const Ort::Exception& error) {
    return Ort::GetApi().CreateStatus(error.GetOrtErrorCode(), error.what());
  } catch (const Error& error) {
    return Ort::GetApi().CreateStatus(ORT_INVALID_ARGUMENT, (std::string("rapt: ") + error.what()).c_str());
  } catch (const std::exception& error) {
    return Ort::GetApi().CreateStatus(ORT_EP_FAIL, (std::string("rapt: ") + error.what()).c_str());
  } catch (...) {
    return Ort::GetApi().CreateStatus(ORT_EP_FAIL, "rapt: unknown exception");
  }
}

class KernelOfNode final : public OrtKernelImpl {
 public:
  KernelOfNode(std::unique_ptr<const Kernel> kernel, const Context& context)
      : OrtKernelImpl{}, kernel_(std::move(kernel)), context_(context) {
    ort_version_supported = kOrtVersion;
    Compute = [](OrtKernelImpl* self, OrtKernelContext* ort) noexcept {
      return status_of([&] {
        const auto* me = static_cast<const KernelOfNode*>(self);
        Call call(ort, me->context_);
        me->kernel_->compute(call);
      });
    };
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<KernelOfNode*>(self); };
  }

 private:
  std::unique_ptr<const Kernel> kernel_;
  Context context_;
};

// State from which ONNX Runtime makes an operator's kernels.
struct Maker {
  const Operator* op;
  Context context;
};

class Provider final : public OrtEp {
 public:
  explicit Provider(const OrtLogger* logger) : OrtEp{}, logger_(logger), context_(options()) {
    ort_version_supported = kOrtVersion;
    GetName = [](const OrtEp*) noexcept { return kName; };
    GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* claims) noexcept {
      return status_of([&] { static_cast<Provider*>(self)->claim(Ort::ConstGraph(graph), claims); });
    };
    GetKernelRegistry = [](OrtEp* self, const OrtKernelRegistry** registry) noexcept -> OrtStatus* {
      *registry = static_cast<Provider*>(self)->registry_;
      return nullptr;
    };
    makers_.reserve(std::size(kOperators));
    for (const Operator* op : kOperators) add(makers_.emplace_back(Maker{op, context_}));
  }

 private:
  static ContextOptions options() {
    ContextOptions options;
    options.executor = session_executor();
    return options;
  }

  static const OrtDataType* tensor_of(ONNXTensorElementDataType type) {
    const OrtDataType* tensor = nullptr;
    Ort::ThrowOnError(Ort::GetEpApi().GetTensorDataType(type, &tensor));
    return tensor;
  }

  void add(Maker& maker) {
    const Ort::KernelDef definition =
        Ort::KernelDefBuilder()
            .SetOperatorType(maker.op->type)
            .SetDomain(maker.op->domain)
            .SetSinceVersion(maker.op->first_version, maker.op->last_version)
            .SetExecutionProvider(kName)
            .AddTypeConstraint(maker.op->float_type, {tensor_of(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT),
                                                      tensor_of(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16),
                                                      tensor_of(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16)})
            .Build();
    const auto make = [](void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel) noexcept {
      return status_of([&] {
        const auto& [op, context] = *static_cast<const Maker*>(state);
        try {
          *kernel = new KernelOfNode(op->make(Attributes(Ort::ConstKernelInfo(info))), context);
        } catch (const Refusal& refusal) {  // claimed nodes have attributes that rapt takes
          throw Error(op->type, refusal.reason, "a node that rapt claimed");
        }
      });
    };
    Ort::ThrowOnError(registry_.AddKernel(definition, make, &maker));
  }

  void claim(Ort::ConstGraph graph, OrtEpGraphSupportInfo* claims) const {
    for (const Ort::ConstNode& node : graph.GetNodes()) {
      const std::string type = node.GetOperatorType(), domain = node.GetDomain();
      for (const Operator* op : kOperators) {
        if (type != op->type || domain != op->domain) continue;
        const std::string why = refusal(*op, node, claims);
        log((why.empty() ? "rapt computes " : "rapt leaves ") + type + " \"" + node.GetName() + "\"" +
            (why.empty() ? "" : " to ONNX Runtime: " + why));
        if (why.empty()) Ort::ThrowOnError(Ort::GetEpApi().EpGraphSupportInfo_AddSingleNode(claims, node));
      }
    }
  }

  // Why rapt does not compute a node; empty if it does.
  static std::string refusal(const Operator& op, Ort::ConstNode node, OrtEpGraphSupportInfo* claims) {
    try {
      op.make(Attributes(node))->check(Node(node));
    } catch (const Refusal& refusal) {
      return refusal.reason;
    }
    const OrtKernelDef* kernel = nullptr;
    Ort::ThrowOnError(Ort::GetEpApi().EpGraphSupportInfo_LookUpKernel(claims, node, &kernel));
    return kernel ? "" : "its version " + std::to_string(node.GetSinceVersion()) + " is unknown to rapt";
  }

  void log(const std::string& line) const {
    // A failed log line is not an error.
    (void)logger_.LogMessage(ORT_LOGGING_LEVEL_VERBOSE, ORT_FILE, __LINE__, "rapt", line.c_str());
  }

  Ort::Logger logger_;
  Context context_;
  std::vector<Maker> makers_;
  Ort::KernelRegistry registry_;
};

class Factory final : public OrtEpFactory {
 public:
  Factory() : OrtEpFactory{} {
    ort_version_supported = kOrtVersion;
    GetName = [](const OrtEpFactory*) noexcept { return kName; };
    GetVendor = [](const OrtEpFactory*) noexcept { return "rapt"; };
    GetVendorId = [](const OrtEpFactory*) noexcept { return std::uint32_t{0}; };
    GetVersion = [](const OrtEpFactory*) noexcept { return RAPT_SEMANTIC_VERSION; };
    GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const* devices, std::size_t count,
                             OrtEpDevice** found, std::size_t room, std::size_t* found_count) noexcept {
      return status_of([&] {
        *found_count = 0;
        for (std::size_t i = 0; i < count && *found_count < room; ++i)
          if (Ort::GetApi().HardwareDevice_Type(devices[i]) == OrtHardwareDeviceType_CPU) {
            Ort::ThrowOnError(Ort::GetEpApi().CreateEpDevice(self, devices[i], nullptr, nullptr, &found[*found_count]));
            ++*found_count;
          }
      });
    };
    CreateEp = [](OrtEpFactory*, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, std::size_t,
                  const OrtSessionOptions*, const OrtLogger* logger,
                  OrtEp** provider) noexcept { return status_of([&] { *provider = new Provider(logger); }); };
    ReleaseEp = [](OrtEpFactory*, OrtEp* provider) noexcept { delete static_cast<Provider*>(provider); };
    // Tensors lie in ONNX Runtime's own memory.
    CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                         OrtAllocator** allocator) noexcept -> OrtStatus* { return *allocator = nullptr, nullptr; };
    ReleaseAllocator = [](OrtEpFactory*, OrtAllocator*) noexcept {};
    CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
      return *transfer = nullptr, nullptr;
    };
    IsStreamAware = [](const OrtEpFactory*) noexcept { return false; };
    CreateSyncStreamForDevice = [](OrtEpFactory*, const OrtMemoryDevice*, const OrtKeyValuePairs*,
                                   OrtSyncStreamImpl** stream) noexcept -> OrtStatus* {
      return *stream = nullptr, nullptr;
    };
  }
};

}  // namespace
}  // namespace rapt::onnx

extern "C" {

__attribute__((visibility("default"))) OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base,
                                                                    const OrtLogger*, OrtEpFactory** factories,
                                                                    std::size_t room, std::size_t* count) {
  const OrtApi* const api = base->GetApi(rapt::onnx::kOrtVersion);
  if (!api) return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, "rapt needs ONNX Runtime 1.24 or newer");
  Ort::InitApi(api);
  if (room < 1) return api->CreateStatus(ORT_INVALID_ARGUMENT, "rapt: no room for its factory");
  return rapt::onnx::status_of([&] { factories[0] = new rapt::onnx::Factory, *count = 1; });
}

__attribute__((visibility("default"))) OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
  delete static_cast<rapt::onnx::Factory*>(factory);
  return nullptr;
}

}  // extern "C"
