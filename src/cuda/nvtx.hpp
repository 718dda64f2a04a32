// Ranges for profilers: one for each call, in the domain "rapt". Nothing without a tool, or where NVTX's header is not.
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace rapt::cuda {

// From here to the end of the block.
class NvtxRange {
 public:
  // name() returns a std::string; it is called where a tool listens.
  template <class Name>
  explicit NvtxRange(const Name& name) {
    if (domain() == nullptr) return;
    const auto text = name();
    nvtxEventAttributes_t range{};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = text.c_str();
    nvtxDomainRangePushEx(domain(), &range);
  }
  ~NvtxRange() {
    if (domain() != nullptr) nvtxDomainRangePop(domain());
  }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;

 private:
  // Null where no tool was there at the first call. Never destroyed: tools flush after static objects.
  static nvtxDomainHandle_t domain() {
    static const nvtxDomainHandle_t created = nvtxDomainCreateA("rapt");
    return created;
  }
};

}  // namespace rapt::cuda
#else
namespace rapt::cuda {

struct NvtxRange {
  template <class Name>
  explicit NvtxRange(const Name&) {}
};

}  // namespace rapt::cuda
#endif
