// The CUDA backend: kernels on the memory of one GPU, queued on the context's stream.
#include "backend.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "cuda/device.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/nvtx.hpp"
#include "dtypes.hpp"

namespace rapt {
namespace cuda {
namespace {

// The GPUs of this machine. The driver is looked for at first use, so that programs that stay on the CPU never wake it.
struct Machine {
  std::string unusable;  // why none of them can be used; empty if one can
  std::string no_sm90a = "needs GPUs of compute capability 9.0";
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) cudaGetLastError();
  return value;
}

Machine look() {
  Machine machine;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();  // or the program's next look at it finds this one
  if (status == cudaErrorInsufficientDriver)
    machine.unusable = "no CUDA device: no NVIDIA driver, or one older than CUDA " +
                       std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) +
                       " needs";
  else if (status != cudaSuccess) machine.unusable = std::string("no CUDA device: ") + cudaGetErrorString(status);
  else if (count == 0) machine.unusable = "no CUDA device";
  if (!machine.unusable.empty()) return machine;
  bool any = false, all_sm90 = true;
  for (int device = 0; device < count; ++device) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
    any |= 10 * major + minor >= RAPT_CUDA_LEAST_ARCHITECTURE;
    all_sm90 &= major == 9 && minor == 0;
  }
  if (!any) machine.unusable = "only GPUs older than RAPT_CUDA_ARCHITECTURES";
  if (all_sm90) machine.no_sm90a.clear();
  return machine;
}

// The sizes, which are all that plans need.
AttentionParams sizes(const Problem& p) {
  AttentionParams a{};
  a.q_type = p.q_dtype, a.kv_type = p.kv_dtype, a.out_type = p.out_dtype;
  a.total_q = p.ragged_q, a.total_k = p.ragged_k;
  a.page_size = p.ring ? p.sk : p.page_size, a.ring = p.ring;
  a.b = p.b, a.hk = p.hk, a.group = p.hk > 0 ? std::max<std::int64_t>(p.hq / p.hk, 1) : 1;
  a.sq = p.sq, a.sk = p.sk, a.d = p.d, a.dv = p.dv;
  return a;
}

AttentionParams attention_params(const Call& call) {
  AttentionParams a = sizes(call.problem);
  a.q = call.q.data, a.k = call.k.data, a.v = call.v.data, a.out = call.out.data;
  a.lse = static_cast<float*>(call.lse.data);
  a.q_stride = strides(call.q);
  a.k_stride = strides(call.k);
  a.v_stride = strides(call.v);
  a.out_stride = strides(call.out);
  a.lse_stride = strides(call.lse);
  a.q_begin = call.q_begin, a.k_begin = call.k_begin, a.k_len = call.k_len;
  a.pages = call.pages, a.pages_stride_b = call.pages_stride_b, a.page_count = call.page_count;
  if (a.page_size > 0 && !a.ring && a.page_count == 0) a.sk = 0;  // no key can be there, whatever the lengths say
  a.term_rows = call.term_rows, a.term_keys = call.term_keys;
  a.score = score_params(call);
  return a;
}

struct Kernel {
  const char* name;
  bool sm90a;  // Hopper's own instructions
  std::string_view (*refuse)(const AttentionParams&);
  std::size_t (*workspace)(const AttentionParams&);
  std::int64_t (*work_items)(const AttentionParams&);
  cudaError_t (*run)(const AttentionParams&, void* workspace, cudaStream_t);
};

constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();

#ifdef RAPT_HAVE_SM90A
template <DType kType>
constexpr Kernel wgmma(const char* name) {
  return {name,
          true,
          [](const AttentionParams& a) -> std::string_view {
            if (a.q_type != kType || a.kv_type != kType) return "takes other element types";
            return wgmma_takes(a) ? "" : "takes head sizes of at most 256, and fewer than 2^30 rows and keys";
          },
          wgmma_workspace,
          simt_tiles,
          [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
            return attention_wgmma(a, static_cast<std::byte*>(workspace), stream);
          }};
}
#endif

const Kernel kKernels[] = {
#ifdef RAPT_HAVE_SM90A
    wgmma<DType::bf16>("attention_wgmma.bf16.cuda.sm90a"),
    wgmma<DType::f16>("attention_wgmma.f16.cuda.sm90a"),
    {"attention_wgmma.f32.cuda.sm90a", true,
     [](const AttentionParams& a) -> std::string_view {
       if (a.q_type != DType::f32 || a.kv_type != DType::f32) return "takes other element types";
       return wgmma_f32_takes(a) ? "" : "takes head sizes of 16 to 256, and fewer than 2^28 rows and keys";
     },
     wgmma_f32_workspace, simt_tiles,
     [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
       return attention_wgmma_f32(a, static_cast<std::byte*>(workspace), stream);
     }},
#endif
    {"attention_simt.f32.cuda.q64k64", false,
     [](const AttentionParams& a) -> std::string_view {
       if (a.dv > kSimtMaxValueSize) return "takes value heads of at most 576";
       return simt_tiles(a) > kMostBlocks ? "more tiles than a grid has blocks" : "";
     },
     [](const AttentionParams&) -> std::size_t { return 0; }, simt_tiles,
     [](const AttentionParams& a, void*, cudaStream_t stream) { return attention_simt(a, stream); }},
    {"attention_naive.f32.cuda", false,
     [](const AttentionParams& a) -> std::string_view {
       const double scores = static_cast<double>(naive_rows(a)) * static_cast<double>(a.sk);
       return naive_rows(a) > kMostBlocks || scores > 0x1p34 ? "its S x S matrix would be past 64 GiB" : "";
     },
     naive_workspace, naive_rows,
     [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
       return attention_naive(a, static_cast<float*>(workspace), stream);
     }},
};

struct CudaSchedule final : Schedule {
  std::string note() const override { return std::to_string(work_items) + " tiles or rows of work"; }
};

class CudaBackend final : public Backend {
 public:
  CudaBackend() {
    const Machine machine = look();
    for (const Kernel& kernel : kKernels) {
      const bool other = machine.unusable.empty() && kernel.sm90a;
      entries_.push_back(
          {kernel.name, other ? machine.no_sm90a : machine.unusable, "", Isa{}, static_cast<int>(entries_.size())});
    }
  }

  std::string_view name() const noexcept override { return "cuda"; }
  std::span<const Entry> entries() const noexcept override { return entries_; }

  std::string_view refuse(const Entry& entry, const Problem& p, const Context::Impl&) const override {
    if (!is_float(p.kv_dtype)) return "takes other element types";
    return kernel(entry).refuse(sizes(p));
  }

  std::unique_ptr<Schedule> plan(const Entry& entry, const Problem& p, const Context::Impl&) const override {
    auto schedule = std::make_unique<CudaSchedule>();
    schedule->workspace_bytes = kernel(entry).workspace(sizes(p));
    schedule->work_items = kernel(entry).work_items(sizes(p));
    return schedule;
  }
  std::size_t max_workspace_bytes(const Entry& entry, const Problem& largest, const Context::Impl&) const override {
    return kernel(entry).workspace(sizes(largest));
  }

  void run(const Entry& entry, const Schedule& schedule, const Call& call, const Context::Impl& context,
           std::byte* workspace) const override {
    const NvtxRange range([&] { return entry.name + " " + call.problem.to_string(); });
    const DeviceGuard guard(call.device);
    const auto stream = static_cast<cudaStream_t>(context.options.stream);
    const AttentionParams params = attention_params(call);
    std::optional<StreamMemory> own;
    if (workspace == nullptr && schedule.workspace_bytes > 0)
      own.emplace(schedule.workspace_bytes, call.device, stream);
    check_cuda(kernel(entry).run(params, own ? own->data() : workspace, stream), "starting a kernel");
  }

 private:
  static const Kernel& kernel(const Entry& entry) { return kKernels[entry.id]; }

  std::vector<Entry> entries_;
};

}  // namespace
}  // namespace cuda

const Backend& cuda_backend() {
  static const cuda::CudaBackend backend;
  return backend;
}

}  // namespace rapt
