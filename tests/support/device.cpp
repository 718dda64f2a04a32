#include "support/device.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#ifdef RAPT_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace rapt::testing {

#ifdef RAPT_HAVE_CUDA
namespace {

void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

constexpr std::size_t kGuard = 512;

// The bytes from the first to the last element of a tensor, in a GPU's memory at the same alignment.
class DeviceTensor {
 public:
  explicit DeviceTensor(const TensorView& host) : host_(static_cast<const std::byte*>(host.data)) {
    std::size_t last = 0;
    bool empty = false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(host.ndim); ++i) {
      empty |= host.shape[i] == 0;
      last += static_cast<std::size_t>(std::max<std::int64_t>(host.shape[i] - 1, 0) * host.strides[i]);
    }
    bytes_ = empty ? 0 : (last + 1) * size_of(host.dtype);
    offset_ = kGuard + reinterpret_cast<std::uintptr_t>(host.data) % 256;
    std::vector<std::byte> image(offset_ + bytes_ + kGuard);
    for (std::size_t i = 0; i < image.size(); ++i) image[i] = poison(i);
    if (bytes_ > 0) std::memcpy(image.data() + offset_, host_, bytes_);
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&memory_), image.size()));
    check_cuda(cudaMemcpy(memory_, image.data(), image.size(), cudaMemcpyHostToDevice));
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { cudaFree(memory_); }

  std::byte* data() const { return memory_ + offset_; }

  // What has become of it, to `host` if that is given.
  void check_and_copy(std::byte* host) const {
    std::vector<std::byte> image(offset_ + bytes_ + kGuard);
    check_cuda(cudaMemcpy(image.data(), memory_, image.size(), cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < image.size(); ++i)
      if ((i < offset_ || i >= offset_ + bytes_) && image[i] != poison(i))
        throw std::logic_error("a kernel wrote beside a tensor");
    if (!host && bytes_ > 0 && std::memcmp(image.data() + offset_, host_, bytes_) != 0)
      throw std::logic_error("a kernel wrote to an input");
    if (host && bytes_ > 0) std::memcpy(host, image.data() + offset_, bytes_);
  }

 private:
  // A NaN of every type.
  static std::byte poison(std::size_t i) { return std::byte(i % 2 == 0 ? 0xfe : 0x7f); }

  const std::byte* host_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0, offset_ = 0;
};

// Copies of a call's tensors.
class DeviceCall {
 public:
  explicit DeviceCall(const AttentionArgs& host) : args_(host) {
    KvSource& kv = args_.kv;
    ScoreSpec& score = args_.score;
    for (TensorView* t :
         {&args_.q, &kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero, &kv.seqlens, &kv.cu_seqlens,
          &kv.block_table, &score.bias, &score.mask, &score.alibi, &score.sinks, &args_.cu_seqlens_q})
      if (*t) move(*t);
    for (MutableTensorView* t : {&args_.out, &args_.lse})
      if (*t) {
        outputs_.emplace_back(copies_.size(), static_cast<std::byte*>(t->data));
        move(*t);
      }
  }
  const AttentionArgs& args() const { return args_; }
  void finish() const {
    check_cuda(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      std::byte* host = nullptr;
      for (const auto& [at, data] : outputs_)
        if (at == i) host = data;
      copies_[i]->check_and_copy(host);
    }
  }

 private:
  template <class View>
  void move(View& view) {
    copies_.push_back(std::make_unique<DeviceTensor>(view));
    view.data = copies_.back()->data();
    view.device = {DeviceType::cuda, 0};
  }

  AttentionArgs args_;
  std::vector<std::unique_ptr<DeviceTensor>> copies_;
  std::vector<std::pair<std::size_t, std::byte*>> outputs_;
};

}  // namespace

void run(const AttentionArgs& args, const Forced& context) {
  if (device_of(context.entry) == DeviceType::cpu) return attention(args, context);
  const DeviceCall call(args);
  attention(call.args(), context);
  call.finish();
}
#else
void run(const AttentionArgs& args, const Forced& context) {
  attention(args, context);
}
#endif

void run(const AttentionArgs& args, const std::string& entry) {
  run(args, forced(entry));
}

}  // namespace rapt::testing
