// Calls on a GPU's memory for tests whose tensors are the host's.
#pragma once

#include <memory>

#include "rapt/attention.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// A call's tensors in the memory of GPU 0, every one between guard bands and aligned as on the host. What CUDA refuses
/// throws std::runtime_error. Of builds with CUDA.
class DeviceCall {
 public:
  /// `senseless`: lengths and tables may hold anything; else the call is one that the host would take.
  enum class Lengths { checked, senseless };
  explicit DeviceCall(const AttentionArgs& host, Lengths lengths = Lengths::checked);
  ~DeviceCall();

  const AttentionArgs& args() const { return args_; }
  /// Waits for the GPU and copies the outputs to the host's. Throws std::logic_error when an input or a guard band was
  /// written.
  void finish() const;

 private:
  class Copy;
  template <class View>
  void move(View& view, bool output);

  AttentionArgs args_;
  std::vector<std::unique_ptr<Copy>> copies_;
};

/// attention(args, context), for an entry that runs on a GPU by way of a DeviceCall.
void run(const AttentionArgs& args, const Forced& context);
void run(const AttentionArgs& args, const std::string& entry);

}  // namespace rapt::testing
