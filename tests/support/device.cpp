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

// A NaN of every type.
std::byte poison(std::size_t i) {
  return std::byte(i % 2 == 0 ? 0xfe : 0x7f);
}

}  // namespace

// The bytes from the first to the last element of a tensor.
class DeviceCall::Copy {
 public:
  Copy(const TensorView& view, std::byte* output) : input_(static_cast<const std::byte*>(view.data)), output_(output) {
    std::size_t last = 0;
    bool empty = false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i) {
      empty |= view.shape[i] == 0;
      last += static_cast<std::size_t>(std::max<std::int64_t>(view.shape[i] - 1, 0) * view.strides[i]);
    }
    bytes_ = empty ? 0 : (last + 1) * size_of(view.dtype);
    offset_ = kGuard + reinterpret_cast<std::uintptr_t>(view.data) % 256;
    std::vector<std::byte> image(offset_ + bytes_ + kGuard);
    for (std::size_t i = 0; i < image.size(); ++i) image[i] = poison(i);
    if (bytes_ > 0) std::memcpy(image.data() + offset_, input_, bytes_);
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&memory_), image.size()));
    check_cuda(cudaMemcpy(memory_, image.data(), image.size(), cudaMemcpyHostToDevice));
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  ~Copy() { cudaFree(memory_); }

  std::byte* data() const { return memory_ + offset_; }

  void finish() const {
    std::vector<std::byte> image(offset_ + bytes_ + kGuard);
    check_cuda(cudaMemcpy(image.data(), memory_, image.size(), cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < image.size(); ++i)
      if ((i < offset_ || i >= offset_ + bytes_) && image[i] != poison(i))
        throw std::logic_error("a kernel wrote beside a tensor");
    if (bytes_ == 0) return;
    if (output_) std::memcpy(output_, image.data() + offset_, bytes_);
    else if (std::memcmp(image.data() + offset_, input_, bytes_) != 0)
      throw std::logic_error("a kernel wrote to an input");
  }

 private:
  const std::byte* input_;
  std::byte* output_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0, offset_ = 0;
};

DeviceCall::DeviceCall(const AttentionArgs& host, Lengths lengths) : args_(host) {
  // Nobody can see there that lengths are equal; here they are, or this throws.
  if (lengths == Lengths::checked && AttentionProblem::of(host).align == AttentionProblem::Align::none)
    args_.score.align = Align::top_left();
  KvSource& kv = args_.kv;
  ScoreSpec& score = args_.score;
  for (TensorView* t :
       {&args_.q, &kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero, &kv.k_tail, &kv.seqlens,
        &kv.cu_seqlens, &kv.block_table, &score.bias, &score.mask, &score.alibi, &score.sinks, &args_.cu_seqlens_q})
    if (*t) move(*t, false);
  for (MutableTensorView* t : {&args_.out, &args_.lse})
    if (*t) move(*t, true);
}

DeviceCall::~DeviceCall() = default;

template <class View>
void DeviceCall::move(View& view, bool output) {
  auto* host = const_cast<std::byte*>(static_cast<const std::byte*>(view.data));
  copies_.push_back(std::make_unique<Copy>(view, output ? host : nullptr));
  view.data = copies_.back()->data();
  view.device = {DeviceType::cuda, 0};
}

void DeviceCall::finish() const {
  check_cuda(cudaDeviceSynchronize());
  for (const auto& copy : copies_) copy->finish();
}

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
