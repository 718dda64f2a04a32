// Calls on a GPU's memory for tests whose tensors are the host's.
#pragma once

#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rapt/operations.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// Tensors in the memory of GPU 0, each between guard bands and aligned as on the host. Tensors that share memory on
/// the host share it on the GPU. Needs a build with CUDA. Throws std::runtime_error for CUDA's errors.
class DeviceTensors {
 public:
  DeviceTensors();
  ~DeviceTensors();
  DeviceTensors(DeviceTensors&&) noexcept;

  /// Makes a view of the host's memory one of the GPU's.
  void move(TensorView& view);
  void move(MutableTensorView& view);
  void move(std::span<const TensorView>& views);
  /// Waits for the GPU and copies the outputs to the host's. Throws std::logic_error when an input or a guard band was
  /// written.
  void finish() const;

 private:
  class Copy;
  std::byte* place(const TensorView& view, bool output);

  std::vector<std::unique_ptr<Copy>> copies_;
  std::list<std::vector<TensorView>> views_;
};

/// A call's tensors there. An operation that runs on GPUs has move_tensors(args, tensors) beside its case, which moves
/// every view of `args`.
template <class Args>
class DeviceCallOf {
 public:
  explicit DeviceCallOf(const Args& host) : args_(host) { move_tensors(args_, tensors_); }

  const Args& args() const { return args_; }
  void finish() const { tensors_.finish(); }

 private:
  Args args_;
  DeviceTensors tensors_;
};

using DeviceCall = DeviceCallOf<AttentionArgs>;

/// The call in `context`, for an entry that runs on a GPU by way of a DeviceCallOf.
#define RAPT_OPERATION(name, Name, NAME) void run(const Name##Args& args, const Forced& context);
#include "rapt/operations.def"
void run(const AttentionArgs& args, const std::string& entry);

}  // namespace rapt::testing
