// Calls on a GPU's memory for tests whose tensors are the host's.
#pragma once

#include <memory>
#include <vector>

#include "rapt/attention.hpp"
#include "rapt/append_kv.hpp"
#include "rapt/merge_states.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// Tensors in the memory of GPU 0, every one between guard bands and aligned as on the host; one that lies in another's
/// memory does there, too. What CUDA refuses throws std::runtime_error. Of builds with CUDA.
class DeviceTensors {
 public:
  DeviceTensors();
  ~DeviceTensors();
  DeviceTensors(DeviceTensors&&) noexcept;

  /// Makes a view of the host's memory one of the GPU's.
  void move(TensorView& view);
  void move(MutableTensorView& view);
  /// Waits for the GPU and copies the outputs to the host's. Throws std::logic_error when an input or a guard band was
  /// written.
  void finish() const;

 private:
  class Copy;
  std::byte* place(const TensorView& view, bool output);

  std::vector<std::unique_ptr<Copy>> copies_;
};

/// A call's tensors there.
template <class Args>
class DeviceCallOf {
 public:
  /// `senseless`: lengths and tables may hold anything; else the call is one that the host would take.
  enum class Lengths { checked, senseless };
  explicit DeviceCallOf(const Args& host, Lengths lengths = Lengths::checked);

  const Args& args() const { return args_; }
  void finish() const { tensors_.finish(); }

 private:
  Args args_;
  DeviceTensors tensors_;
  std::vector<TensorView> outs_, lses_;  // of merge_states
};
template <>
DeviceCallOf<AttentionArgs>::DeviceCallOf(const AttentionArgs& host, Lengths lengths);
template <>
DeviceCallOf<AppendKvArgs>::DeviceCallOf(const AppendKvArgs& host, Lengths lengths);
template <>
DeviceCallOf<MergeStatesArgs>::DeviceCallOf(const MergeStatesArgs& host, Lengths lengths);
using DeviceCall = DeviceCallOf<AttentionArgs>;

/// The call in `context`, for an entry that runs on a GPU by way of a DeviceCall.
void run(const AttentionArgs& args, const Forced& context);
void run(const AppendKvArgs& args, const Forced& context);
void run(const MergeStatesArgs& args, const Forced& context);
void run(const AttentionArgs& args, const std::string& entry);

}  // namespace rapt::testing
