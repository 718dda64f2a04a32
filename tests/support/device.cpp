#include "support/device.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/all_cases.hpp"

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

// What a guard band holds, from byte `first` of the memory on: a NaN of every type.
std::vector<std::byte> poison(std::size_t first, std::size_t bytes) {
  std::vector<std::byte> band(bytes);
  for (std::size_t i = 0; i < bytes; ++i) band[i] = std::byte((first + i) % 2 == 0 ? 0xfe : 0x7f);
  return band;
}

}  // namespace

// The bytes from the first to the last element of a tensor.
class DeviceTensors::Copy {
 public:
  Copy(const TensorView& view, bool output) : host_(static_cast<const std::byte*>(view.data)), output_(output) {
    bytes_ = bytes_of(view);
    offset_ = kGuard + reinterpret_cast<std::uintptr_t>(view.data) % 256;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&memory_), offset_ + bytes_ + kGuard));
    for (const auto& [first, bytes] : guards())
      check_cuda(cudaMemcpy(memory_ + first, poison(first, bytes).data(), bytes, cudaMemcpyHostToDevice));
    check_cuda(cudaMemcpy(data(), host_, bytes_, cudaMemcpyHostToDevice));
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  ~Copy() { cudaFree(memory_); }

  std::byte* data() const { return memory_ + offset_; }
  // Where a view that lies within the copied memory has its first element here; else null.
  std::byte* find(const TensorView& view) const {
    const auto* const first = static_cast<const std::byte*>(view.data);
    const std::size_t bytes = bytes_of(view);
    if (bytes == 0 || first < host_ || first + bytes > host_ + bytes_) return nullptr;
    return data() + (first - host_);
  }

  void finish() const {
    for (const auto& [first, bytes] : guards())
      if (read(first, bytes) != poison(first, bytes)) throw std::logic_error("a kernel wrote beside a tensor");
    if (bytes_ == 0) return;
    const std::vector<std::byte> now = read(offset_, bytes_);
    if (std::memcmp(now.data(), host_, bytes_) == 0) return;  // the host's may be protected
    if (!output_) throw std::logic_error("a kernel wrote to an input");
    std::memcpy(const_cast<std::byte*>(host_), now.data(), bytes_);
  }

 private:
  // Where they begin, and their sizes.
  std::array<std::pair<std::size_t, std::size_t>, 2> guards() const {
    return {{{0, offset_}, {offset_ + bytes_, kGuard}}};
  }
  std::vector<std::byte> read(std::size_t first, std::size_t bytes) const {
    std::vector<std::byte> copy(bytes);
    check_cuda(cudaMemcpy(copy.data(), memory_ + first, bytes, cudaMemcpyDeviceToHost));
    return copy;
  }
  static std::size_t bytes_of(const TensorView& view) {
    std::size_t last = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i) {
      if (view.shape[i] == 0) return 0;
      last += static_cast<std::size_t>(view.shape[i] - 1) * static_cast<std::size_t>(view.strides[i]);
    }
    return (last + 1) * size_of(view.dtype);
  }

  const std::byte* host_;
  bool output_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0, offset_ = 0;
};

std::byte* DeviceTensors::place(const TensorView& view, bool output) {
  for (const auto& copy : copies_)
    if (std::byte* const found = copy->find(view)) return found;
  copies_.push_back(std::make_unique<Copy>(view, output));
  return copies_.back()->data();
}
void DeviceTensors::finish() const {
  check_cuda(cudaDeviceSynchronize());
  for (const auto& copy : copies_) copy->finish();
}

#else
class DeviceTensors::Copy {};
std::byte* DeviceTensors::place(const TensorView&, bool) {
  throw std::logic_error("a build without CUDA");
}
void DeviceTensors::finish() const {}
#endif

DeviceTensors::DeviceTensors() = default;
DeviceTensors::~DeviceTensors() = default;
DeviceTensors::DeviceTensors(DeviceTensors&&) noexcept = default;

void DeviceTensors::move(TensorView& view) {
  if (!view) return;
  view.data = place(view, false);
  view.device = {DeviceType::cuda, 0};
}
void DeviceTensors::move(MutableTensorView& view) {
  if (!view) return;
  view.data = place(view, true);
  view.device = {DeviceType::cuda, 0};
}
void DeviceTensors::move(std::span<const TensorView>& views) {
  std::vector<TensorView>& moved = views_.emplace_back(views.begin(), views.end());
  for (TensorView& view : moved) move(view);
  views = moved;
}

namespace {

template <class Args>
void run_where_it_works(const Args& args, const Forced& context,
                        void (*call)(const Args&, const Context&, std::span<std::byte>)) {
  if constexpr (requires(Args moved, DeviceTensors tensors) { move_tensors(moved, tensors); }) {
    if (device_of(context.entry) != DeviceType::cpu) {
      const DeviceCallOf<Args> there(args);
      call(there.args(), context, {});
      return there.finish();
    }
  }
  call(args, context, {});
}

}  // namespace

#define RAPT_OPERATION(name, Name, NAME)                       \
  void run(const Name##Args& args, const Forced& context) {    \
    run_where_it_works<Name##Args>(args, context, rapt::name); \
  }
#include "rapt/operations.def"

void run(const AttentionArgs& args, const std::string& entry) {
  run(args, forced(entry));
}

}  // namespace rapt::testing
