// An operator of the execution provider, and its views of a node and of a call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "api/onnxruntime/ort.hpp"
#include "rapt/rapt.hpp"

namespace rapt::onnx {

/// Why rapt leaves a node to ONNX Runtime.
struct Refusal {
  std::string reason;
};

/// The attributes of a node, when rapt is asked for the node and when its kernel is made.
class Attributes {
 public:
  explicit Attributes(Ort::ConstNode node) : node_(node) {}
  explicit Attributes(Ort::ConstKernelInfo info) : info_(info) {}

  std::int64_t integer(const char* name, std::int64_t otherwise) const { return read(name, otherwise); }
  float real(const char* name, float otherwise) const { return read(name, otherwise); }
  std::string text(const char* name, const std::string& otherwise) const { return read(name, otherwise); }

 private:
  template <class T>
  T read(const char* name, T otherwise) const;
  Ort::ConstNode node_{nullptr};
  Ort::ConstKernelInfo info_{nullptr};
};

/// The inputs and outputs of a node, without their values.
class Node {
 public:
  explicit Node(Ort::ConstNode node) : inputs_(node.GetInputs()), outputs_(node.GetOutputs()) {}
  bool has_input(std::size_t i) const { return i < inputs_.size() && inputs_[i] != nullptr; }
  bool has_output(std::size_t i) const { return i < outputs_.size() && outputs_[i] != nullptr; }
  ONNXTensorElementDataType type(std::size_t input) const;  ///< of elements; undefined if the input is absent
  ONNXTensorElementDataType output_type(std::size_t output) const;
  int rank(std::size_t input) const;                ///< -1: absent, or unknown before the model runs
  std::int64_t last_size(std::size_t input) const;  ///< of the last dimension; -1: absent, or unknown

 private:
  std::vector<Ort::ConstValueInfo> inputs_, outputs_;
};

/// f32, f16 or bf16.
bool is_float(ONNXTensorElementDataType type);
/// Throws Refusal unless the inputs that are present have one type, a float one.
void need_one_float_type(const Node& node, std::initializer_list<std::size_t> inputs);
/// Throws Refusal for a softcap that rapt does not compute.
void check_softcap(float softcap);

/// An input. Shapes have as many dimensions as ONNX Runtime's packed tensors, one more than rapt's.
struct Input {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int rank = -1;  ///< -1: the node lacks the input
  std::array<std::int64_t, 5> shape{};

  explicit operator bool() const { return rank >= 0; }
  std::int64_t last() const { return shape[static_cast<std::size_t>(rank - 1)]; }
  TensorView view() const;  ///< contiguous, of up to 4 dimensions
  template <class T>
  const T* values() const {
    return static_cast<const T*>(data);
  }
};

/// Throws Error, which names the input, unless the input has one of these ranks.
void need_rank(const Input& input, const char* name, std::initializer_list<int> ranks);
/// Heads that lie side by side in the rows of a tensor [b, s, row]: a view [b, heads, s, d] of the whole rows, or of
/// their columns from `first` on. Throws Error if the row does not have them.
TensorView heads_of(const Input& rows, const char* name, std::int64_t heads);
TensorView heads_of(const Input& rows, const char* name, std::int64_t heads, std::int64_t d, std::int64_t first);

/// A call of a kernel. Runs rapt on the thread pool of ONNX Runtime: until it ends, session_executor() uses the session
/// of this kernel on this thread.
class Call {
 public:
  Call(OrtKernelContext* context, const Context& rapt);
  ~Call();
  Call(const Call&) = delete;

  Input input(std::size_t i) const;
  /// An output in memory that ONNX Runtime allocates: contiguous, of up to 4 dimensions. Its data is null if the node
  /// lacks it.
  MutableTensorView output(std::size_t i, std::span<const std::int64_t> shape);
  /// Memory until the end of the call.
  void* scratch(std::size_t bytes);
  /// The output [b, s, heads * d], seen as [b, heads, s, d].
  MutableTensorView output_rows(std::size_t i, DType dtype, std::int64_t b, std::int64_t heads, std::int64_t s,
                                std::int64_t d);
  /// A contiguous tensor in an output, or in scratch memory if the node lacks the output.
  MutableTensorView output_or_scratch(std::size_t i, DType dtype, std::span<const std::int64_t> shape);
  /// Runs work(i) for every i below n on the pool, if they move so many bytes that this pays.
  void for_each(std::size_t n, std::size_t bytes, const std::function<void(std::size_t)>& work) const;

  void attention(const AttentionArgs& args) const { rapt::attention(args, rapt_); }
  void delta_rule(const DeltaRuleArgs& args) const { rapt::delta_rule(args, rapt_); }
  void append_kv(const AppendKvArgs& args) const { rapt::append_kv(args, rapt_); }
  void rotary_append_kv(const RotaryAppendKvArgs& args) const { rapt::rotary_append_kv(args, rapt_); }

 private:
  OrtAllocator* allocator();
  Ort::KernelContext ort_;
  const Context& rapt_;
  OrtKernelContext* before_;  // the kernel whose call this one interrupts on the thread, if any
  OrtAllocator* allocator_ = nullptr;
  std::vector<void*> blocks_;
};

/// An executor on the thread pool of the session whose kernel runs on the calling thread.
std::shared_ptr<Executor> session_executor();

/// One node's translation into calls of rapt.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void check(const Node& node) const = 0;  ///< throws Refusal
  virtual void compute(Call& call) const = 0;      ///< throws Error for shapes and values that the operator forbids
};

/// An operator that rapt computes.
struct Operator {
  const char* domain;
  const char* type;
  int first_version, last_version;
  const char* float_type;                                    ///< the name of the schema's type of queries
  std::unique_ptr<const Kernel> (*make)(const Attributes&);  ///< throws Refusal
};
template <class K>
std::unique_ptr<const Kernel> make(const Attributes& attributes) {
  return std::make_unique<const K>(attributes);
}
extern const Operator kAttention, kMultiHeadAttention, kGroupQueryAttention, kLinearAttention, kOnnxLinearAttention;

}  // namespace rapt::onnx
