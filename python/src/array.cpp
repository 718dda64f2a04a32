#include "array.hpp"

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <utility>

#include "error.hpp"

namespace rapt::python {
namespace {

constexpr const char* kArray = "a NumPy array, a PyTorch tensor or an array with __dlpack__";
constexpr const char* kTypes = "float32, bfloat16, float16 (masks: bool; lengths: int32, int64)";

// Never freed: the interpreter may be gone when static objects die.
struct Torch {
  PyObject* tensor;
  std::array<std::pair<PyObject*, DType>, 6> dtypes;
};
const Torch* torch_types = nullptr;

// The names of torch's attributes, made once.
PyObject* interned(const char* name) {
  return PyUnicode_InternFromString(name);
}

void check_rank(const char* argument, std::int64_t ndim) {
  if (ndim < 1 || ndim > kMaxDims)
    refuse_value(argument, std::to_string(ndim) + " dimensions", "1 to " + std::to_string(kMaxDims));
}

// A tuple of integers, as `shape` and `stride()` are. Returns how many there are, of which it copies the first
// kMaxDims.
std::int64_t copy_sizes(nb::handle tuple, std::array<std::int64_t, kMaxDims>& to) {
  const auto n = PyTuple_Size(tuple.ptr());
  for (Py_ssize_t i = 0; i < n && i < kMaxDims; ++i)
    to[static_cast<std::size_t>(i)] = PyLong_AsLongLong(PyTuple_GetItem(tuple.ptr(), i));
  if (PyErr_Occurred()) throw nb::python_error();
  return n;
}

MutableTensorView read_torch(const char* argument, nb::handle tensor) {
  static PyObject *const is_cpu = interned("is_cpu"), *const device = interned("device"),
                         *const dtype = interned("dtype"), *const shape = interned("shape"),
                         *const stride = interned("stride"), *const is_neg = interned("is_neg"),
                         *const data_ptr = interned("data_ptr");
  const auto checked = [](PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
  };
  const auto get = [&](PyObject* name) { return checked(PyObject_GetAttr(tensor.ptr(), name)); };
  const auto call = [&](PyObject* name) {
    PyObject* self = tensor.ptr();
    return checked(PyObject_VectorcallMethod(name, &self, 1, nullptr));
  };
  try {
    if (get(is_cpu).ptr() != Py_True) refuse_value(argument, "a tensor on " + text_of(get(device)), "one on the cpu");
    MutableTensorView view;
    const nb::object type = get(dtype);
    const auto* known = torch_types->dtypes.begin();
    while (known != torch_types->dtypes.end() && known->first != type.ptr()) ++known;
    if (known == torch_types->dtypes.end()) refuse_type(argument, "dtype " + text_of(type), kTypes);
    view.dtype = known->second;
    const std::int64_t rank = copy_sizes(get(shape), view.shape);
    check_rank(argument, rank);
    view.ndim = static_cast<int>(rank);
    copy_sizes(call(stride), view.strides);
    if (call(is_neg).ptr() == Py_True)
      refuse_value(argument, "a tensor that is negated when it is read", "one after .resolve_neg()");
    view.data = PyLong_AsVoidPtr(call(data_ptr).ptr());
    if (PyErr_Occurred()) throw nb::python_error();
    return view;
  } catch (nb::python_error& error) {  // sparse, nested, fake, batched by vmap, ...
    refuse_type(argument, type_text(tensor) + " without strided memory (" + text_of(error.value()) + ")",
                "a dense tensor");
  }
}

std::optional<DType> dtype_of(const nb::dlpack::dtype& type) {
  using Code = nb::dlpack::dtype_code;
  if (type.lanes != 1) return {};
  const auto is = [&](Code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits;
  };
  if (is(Code::Float, 32)) return DType::f32;
  if (is(Code::Float, 16)) return DType::f16;
  if (is(Code::Bfloat, 16)) return DType::bf16;
  if (is(Code::Bool, 8)) return DType::boolean;
  if (is(Code::Int, 32)) return DType::i32;
  if (is(Code::Int, 64)) return DType::i64;
  return {};
}

std::string dtype_text(nb::handle object, const nb::dlpack::dtype& type) {
  if (nb::hasattr(object, "dtype")) return text_of(object.attr("dtype"));
  return "DLPack code " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits";
}

// NumPy has no bfloat16 of its own, and neither its DLPack nor its buffers know that of ml_dtypes: it passes as uint16.
bool is_numpy_bfloat16(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  const nb::object kind = nb::getattr(dtype, "kind", nb::none());  // only NumPy's; V is for foreign types
  return kind.equal(nb::str("V")) && text_of(dtype) == "bfloat16";
}

// What an object that cannot be read is: "numpy.ndarray of >f4".
std::string object_text(nb::handle object) {
  return type_text(object) + (nb::hasattr(object, "dtype") ? " of " + text_of(object.attr("dtype")) : "");
}

}  // namespace

void adopt_torch(nb::handle torch) {
  if (torch_types != nullptr) return;
  const auto get = [&](const char* name) { return nb::object(torch.attr(name)).release().ptr(); };
  torch_types = new Torch{get("Tensor"),
                          {{{get("float32"), DType::f32},
                            {get("float16"), DType::f16},
                            {get("bfloat16"), DType::bf16},
                            {get("bool"), DType::boolean},
                            {get("int32"), DType::i32},
                            {get("int64"), DType::i64}}}};
}

std::string text_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object));
}
std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  return text_of(type.attr("__module__")) + "." + text_of(type.attr("__qualname__"));
}

Array array(const char* argument, nb::handle object, bool writable) {
  Array result;
  if (object.is_none()) return result;
  if (torch_types != nullptr && PyObject_IsInstance(object.ptr(), torch_types->tensor) == 1) {
    result.view = read_torch(argument, object);
    return result;
  }
  const bool bfloat16 = is_numpy_bfloat16(object);
  const nb::object readable = bfloat16 ? object.attr("view")("uint16") : nb::borrow(object);
  nb::ndarray<> writes;
  if (!nb::try_cast(readable, result.owner)) refuse_type(argument, object_text(object), kArray);
  if (writable && !nb::try_cast(readable, writes))
    refuse_value(argument, "a read-only array", "one that can be written");
  const nb::ndarray<nb::ro>& from = result.owner;
  if (from.device_type() != nb::device::cpu::value)
    refuse_value(argument, "an array on DLPack device " + std::to_string(from.device_type()), "one on the cpu");
  check_rank(argument, static_cast<std::int64_t>(from.ndim()));
  const std::optional<DType> dtype = bfloat16 ? DType::bf16 : dtype_of(from.dtype());
  if (!dtype) refuse_type(argument, "dtype " + dtype_text(object, from.dtype()), kTypes);
  MutableTensorView& view = result.view;
  view.data = const_cast<void*>(from.data());
  view.dtype = *dtype;
  view.ndim = static_cast<int>(from.ndim());
  for (std::size_t i = 0; i < from.ndim(); ++i) {
    view.shape[i] = static_cast<std::int64_t>(from.shape(i));
    view.strides[i] = from.stride(i);
  }
  return result;
}

}  // namespace rapt::python
