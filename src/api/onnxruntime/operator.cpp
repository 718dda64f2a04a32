#include "api/onnxruntime/operator.hpp"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

namespace rapt::onnx {
namespace {

DType dtype_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return DType::f32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return DType::f16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return DType::bf16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return DType::boolean;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return DType::i32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return DType::i64;
    default:
      throw Error("type", std::to_string(type), "a type that rapt claimed");
  }
}

const OrtMemoryInfo* cpu_memory() {
  // Never released: at the end of the process ONNX Runtime may be gone.
  static const OrtMemoryInfo* const info = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault).release();
  return info;
}

thread_local OrtKernelContext* running_kernel = nullptr;

class SessionExecutor final : public Executor {
 public:
  std::string_view name() const noexcept override { return "onnxruntime"; }
  // ONNX Runtime does not tell how many threads a session has. Workers beyond them find no work left.
  int concurrency() const override {
    static const int cpus = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    return cpus;
  }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    struct Workers {
      void (*work)(void*, int);
      void* argument;
    } all{work, argument};
    const auto one = [](void* data, std::size_t worker) {
      const auto* those = static_cast<const Workers*>(data);
      those->work(those->argument, static_cast<int>(worker));
    };
    if (workers == 1) work(argument, 0);
    else Ort::KernelContext(running_kernel).ParallelFor(one, static_cast<std::size_t>(workers), 0, &all);
  }
};

}  // namespace

template <class T>
T Attributes::read(const char* name, T otherwise) const {
  if (info_ == nullptr) {
    Ort::ConstOpAttr attribute{nullptr};
    T value{};
    if (node_.GetAttributeByName(name, attribute).IsOK() && attribute != nullptr && attribute.GetValue(value).IsOK())
      return value;
    return otherwise;
  }
  try {
    return info_.GetAttribute<T>(name);
  } catch (const Ort::Exception&) {  // the node lacks it
    return otherwise;
  }
}
template std::int64_t Attributes::read(const char*, std::int64_t) const;
template float Attributes::read(const char*, float) const;
template std::string Attributes::read(const char*, std::string) const;

namespace {

// Null if the value is absent or no tensor.
Ort::ConstTensorTypeAndShapeInfo tensor_of(const std::vector<Ort::ConstValueInfo>& values, std::size_t i) {
  if (i >= values.size() || values[i] == nullptr) return Ort::ConstTensorTypeAndShapeInfo{nullptr};
  const Ort::ConstTypeInfo type = values[i].TypeInfo();
  if (type == nullptr || type.GetONNXType() != ONNX_TYPE_TENSOR) return Ort::ConstTensorTypeAndShapeInfo{nullptr};
  return type.GetTensorTypeAndShapeInfo();
}

ONNXTensorElementDataType type_of(const std::vector<Ort::ConstValueInfo>& values, std::size_t i) {
  const auto tensor = tensor_of(values, i);
  return tensor == nullptr ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED : tensor.GetElementType();
}

}  // namespace

ONNXTensorElementDataType Node::type(std::size_t input) const {
  return type_of(inputs_, input);
}
ONNXTensorElementDataType Node::output_type(std::size_t output) const {
  return type_of(outputs_, output);
}

int Node::rank(std::size_t input) const {
  const auto tensor = tensor_of(inputs_, input);
  return tensor == nullptr || !tensor.HasShape() ? -1 : static_cast<int>(tensor.GetDimensionsCount());
}

std::int64_t Node::last_size(std::size_t input) const {
  return rank(input) > 0 ? tensor_of(inputs_, input).GetShape().back() : -1;
}

bool is_float(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ||
         type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
}

void need_one_float_type(const Node& node, std::initializer_list<std::size_t> inputs) {
  const ONNXTensorElementDataType first = node.type(*inputs.begin());
  if (!is_float(first)) throw Refusal{"queries are neither float, float16 nor bfloat16"};
  for (std::size_t i : inputs)
    if (node.has_input(i) && node.type(i) != first)
      throw Refusal{"input " + std::to_string(i) + " has another type than the queries"};
}

void check_softcap(float softcap) {
  if (softcap != 0 && !(softcap >= 1e-30f && softcap <= 1e30f))
    throw Refusal{"softcap is neither 0 nor in 1e-30 .. 1e30"};
}

TensorView Input::view() const {
  return TensorView(data, dtype, std::span<const std::int64_t>(shape.data(), static_cast<std::size_t>(rank)));
}

void need_rank(const Input& input, const char* name, std::initializer_list<int> ranks) {
  if (std::find(ranks.begin(), ranks.end(), input.rank) != ranks.end()) return;
  std::string wanted;
  for (int rank : ranks) wanted += (wanted.empty() ? "" : " or ") + std::to_string(rank);
  throw Error(name, input ? std::to_string(input.rank) + " dimensions" : "nothing", wanted + " dimensions");
}

TensorView heads_of(const Input& rows, const char* name, std::int64_t heads) {
  need_rank(rows, name, {3});
  if (heads <= 0 || rows.shape[2] % heads != 0)
    throw Error(name, "rows of " + std::to_string(rows.shape[2]), "a multiple of " + std::to_string(heads) + " heads");
  return heads_of(rows, name, heads, rows.shape[2] / heads, 0);
}

TensorView heads_of(const Input& rows, const char* name, std::int64_t heads, std::int64_t d, std::int64_t first) {
  need_rank(rows, name, {3});
  const std::int64_t row = rows.shape[2];
  if (heads <= 0 || d <= 0 || first + heads * d > row)
    throw Error(name, "rows of " + std::to_string(row), std::to_string(heads) + " heads of " + std::to_string(d));
  const auto* data = static_cast<const std::byte*>(rows.data) + static_cast<std::size_t>(first) * size_of(rows.dtype);
  return TensorView(data, rows.dtype, {rows.shape[0], heads, rows.shape[1], d}, {rows.shape[1] * row, d, row, 1});
}

Call::Call(OrtKernelContext* context, const Context& rapt)
    : ort_(context), rapt_(rapt), before_(std::exchange(running_kernel, context)) {}

Call::~Call() {
  running_kernel = before_;
  for (void* block : blocks_) allocator_->Free(allocator_, block);
  if (allocator_) Ort::GetApi().ReleaseAllocator(allocator_);
}

Input Call::input(std::size_t i) const {
  Input input;
  if (i >= ort_.GetInputCount()) return input;
  const Ort::ConstValue value = ort_.GetInput(i);
  if (value == nullptr) return input;
  ONNXTensorElementDataType type;
  const std::int64_t* shape = nullptr;
  std::size_t rank = 0;
  Ort::ThrowOnError(Ort::GetApi().GetTensorElementTypeAndShapeDataReference(value, &type, &shape, &rank));
  if (rank > input.shape.size())
    throw Error("input " + std::to_string(i), std::to_string(rank) + " dimensions", "at most 5");
  input.data = value.GetTensorRawData();
  input.dtype = dtype_of(type);
  input.rank = static_cast<int>(rank);
  std::copy_n(shape, rank, input.shape.begin());
  return input;
}

MutableTensorView Call::output(std::size_t i, std::span<const std::int64_t> shape) {
  if (i >= ort_.GetOutputCount()) return {};
  Ort::UnownedValue value = ort_.GetOutput(i, shape.data(), shape.size());
  if (value == nullptr) return {};
  ONNXTensorElementDataType type;
  const std::int64_t* same_shape = nullptr;
  std::size_t rank = 0;
  Ort::ThrowOnError(Ort::GetApi().GetTensorElementTypeAndShapeDataReference(value, &type, &same_shape, &rank));
  return {value.GetTensorMutableRawData(), dtype_of(type), shape};
}

MutableTensorView Call::output_rows(std::size_t i, DType dtype, std::int64_t b, std::int64_t heads, std::int64_t s,
                                    std::int64_t d) {
  return {output(i, std::array{b, s, heads * d}).data, dtype, {b, heads, s, d}, {s * heads * d, d, heads * d, 1}};
}

OrtAllocator* Call::allocator() {
  if (!allocator_)
    Ort::ThrowOnError(Ort::GetApi().KernelContext_GetAllocator(ort_.GetOrtKernelContext(), cpu_memory(), &allocator_));
  return allocator_;
}

void* Call::scratch(std::size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  void* const block = allocator()->Alloc(allocator(), std::max<std::size_t>(bytes, 1));
  if (!block) throw std::bad_alloc();
  blocks_.push_back(block);
  return block;
}

MutableTensorView Call::output_or_scratch(std::size_t i, DType dtype, std::span<const std::int64_t> shape) {
  if (const MutableTensorView tensor = output(i, shape); tensor.data) return tensor;
  const std::int64_t elements = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  return MutableTensorView(scratch(static_cast<std::size_t>(elements) * size_of(dtype)), dtype, shape);
}

void Call::for_each(std::size_t n, std::size_t bytes, const std::function<void(std::size_t)>& work) const {
  constexpr std::size_t kWorth = 128 << 10;  // about 10 us of copying, which is what waking a thread takes
  if (n > 1 && bytes > kWorth) {
    const auto one = [](void* data, std::size_t i) {
      (*static_cast<const std::function<void(std::size_t)>*>(data))(i);
    };
    ort_.ParallelFor(one, n, 0, const_cast<std::function<void(std::size_t)>*>(&work));
  } else {
    for (std::size_t i = 0; i < n; ++i) work(i);
  }
}

std::shared_ptr<Executor> session_executor() {
  static const auto executor = std::make_shared<SessionExecutor>();
  return executor;
}

}  // namespace rapt::onnx
