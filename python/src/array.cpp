#include "array.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "error.hpp"
#include "rapt/plan.hpp"
#include "torch.hpp"

namespace rapt::python {
namespace {

constexpr const char* kArray = "a NumPy array, a PyTorch tensor or an array with __dlpack__";
constexpr const char* kTypes =
    "float32, bfloat16, float16 (queries: float8_e4m3fn; caches: int8, float8_e4m3fn, float8_e5m2, or uint8 with "
    "kv_dtype; masks: bool; lengths: int32, int64)";

// Why calls on a GPU's memory cannot run; "" if rapt has a backend for them. Asked for at the first such tensor.
const std::string& missing_cuda() {
  static const std::string missing = backends().at(1).missing;
  return missing;
}

// What elements are. Bytes are what the caller says, as no type here has that name.
struct Element {
  std::optional<DType> dtype;
};
constexpr Element kBytes{};

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

const char* wanted_types(const ReadOptions& options) {
  if (options.elements == Elements::boolean) return "bool (additive masks are a bias)";
  if (options.elements == Elements::integers) return "int32 or int64";
  if (options.elements == Elements::f32) return "float32";
  if (options.elements == Elements::floats) return "float32, bfloat16 or float16";
  if (options.elements == Elements::keys) return "float32, bfloat16, float16, int8, float8_e4m3fn or float8_e5m2";
  return options.bytes_of ? "uint8, as kv_dtype is given" : kTypes;
}

bool takes(Elements elements, DType dtype) {
  if (elements == Elements::boolean) return dtype == DType::boolean;
  if (elements == Elements::integers) return dtype == DType::i32 || dtype == DType::i64;
  const bool is_float = dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
  if (elements == Elements::floats) return is_float;
  if (elements == Elements::keys)
    return is_float || dtype == DType::i8 || dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
  return elements == Elements::any || dtype == DType::f32;
}

// What elements count as; those of no type that rapt has are no Element. `name` makes their type's name for the
// message.
template <class Name>
DType dtype_as(const char* argument, const std::optional<Element>& element, const Name& name,
               const ReadOptions& options) {
  if (element && element->dtype.has_value() != options.bytes_of.has_value()) {
    const DType dtype = options.bytes_of ? *options.bytes_of : *element->dtype;
    if (takes(options.elements, dtype)) return dtype;
  }
  refuse_type(argument, "dtype " + name(), wanted_types(options));
}

std::optional<Element> element_of(const nb::dlpack::dtype& type) {
  using Code = nb::dlpack::dtype_code;
  constexpr int kFloat8E4m3fn = 10, kFloat8E5m2 = 12;  // of DLPack 1.1
  if (type.lanes != 1) return {};
  const auto is = [&](auto code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits;
  };
  if (is(Code::Float, 32)) return Element{DType::f32};
  if (is(Code::Float, 16)) return Element{DType::f16};
  if (is(Code::Bfloat, 16)) return Element{DType::bf16};
  if (is(Code::Bool, 8)) return Element{DType::boolean};
  if (is(Code::Int, 32)) return Element{DType::i32};
  if (is(Code::Int, 64)) return Element{DType::i64};
  if (is(Code::Int, 8)) return Element{DType::i8};
  if (is(kFloat8E4m3fn, 8)) return Element{DType::f8e4m3};
  if (is(kFloat8E5m2, 8)) return Element{DType::f8e5m2};
  if (is(Code::UInt, 8)) return kBytes;
  return {};
}

std::string dtype_text(nb::handle object, const nb::dlpack::dtype& type) {
  if (nb::hasattr(object, "dtype")) return text_of(object.attr("dtype"));
  return "DLPack code " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits";
}

// The numpy.dtype or torch.dtype of each type of elements.
using Types = std::array<std::pair<PyObject*, Element>, 10>;

std::optional<Element> element_in(const Types& types, nb::handle dtype) {
  for (const auto& [type, element] : types)
    if (type == dtype.ptr()) return element;
  return {};
}

std::optional<Element> torch_element(nb::handle dtype) {
  const auto get = [](const char* name) {
    return nb::object(nb::module_::import_("torch").attr(name)).release().ptr();
  };
  return element_in(once([&] {
                      return Types{{{get("float32"), {DType::f32}},
                                    {get("float16"), {DType::f16}},
                                    {get("bfloat16"), {DType::bf16}},
                                    {get("bool"), {DType::boolean}},
                                    {get("int32"), {DType::i32}},
                                    {get("int64"), {DType::i64}},
                                    {get("int8"), {DType::i8}},
                                    {get("float8_e4m3fn"), {DType::f8e4m3}},
                                    {get("float8_e5m2"), {DType::f8e5m2}},
                                    {get("uint8"), kBytes}}};
                    }),
                    dtype);
}

// A view whose dtype is not set yet.
struct UntypedView {
  MutableTensorView view;
  Element element;
};

// Reads a tensor that is_plain() through PyTorch's table of C functions. Returns nothing for a tensor without memory of
// its own (sparse, nested, batched by vmap, all zeros), on a device that rapt does not know, or with the negative bit
// set; `resolved` skips the last check.
std::optional<UntypedView> tensor_by_table(const Torch& torch, nb::handle tensor, bool resolved = false) {
  if (torch.read == nullptr) return {};
  nb::dlpack::dltensor read;
  if (torch.read(tensor.ptr(), &read) != 0) {
    PyErr_Clear();
    return {};
  }
  const std::optional<Element> element = element_of(read.dtype);
  const bool cuda = read.device.device_type == nb::device::cuda::value;
  if (!element || read.ndim < 1 || read.ndim > kMaxDims || read.data == nullptr ||
      !(cuda ? missing_cuda().empty() : read.device.device_type == nb::device::cpu::value))
    return {};
  PyObject* self = tensor.ptr();
  if (!resolved && checked(PyObject_Vectorcall(torch.is_neg.ptr(), &self, 1, nullptr)).ptr() == Py_True) return {};
  UntypedView memory{{}, *element};
  memory.view.data = static_cast<std::byte*>(read.data) + read.byte_offset;
  if (cuda) memory.view.device = {DeviceType::cuda, read.device.device_id};
  memory.view.ndim = read.ndim;
  std::copy_n(read.shape, read.ndim, memory.view.shape.begin());
  std::copy_n(read.strides, read.ndim, memory.view.strides.begin());
  return memory;
}

struct Numpy {
  PyObject* array;
  Types types;
};

const Numpy& numpy() {
  return once([] {
    const nb::module_ module = nb::module_::import_("numpy");
    const auto type = [&](const char* name) { return module.attr("dtype")(name).release().ptr(); };
    return Numpy{nb::object(module.attr("ndarray")).release().ptr(),
                 {{{type("float32"), {DType::f32}},
                   {type("float16"), {DType::f16}},
                   {type("bool"), {DType::boolean}},
                   {type("int32"), {DType::i32}},
                   {type("int64"), {DType::i64}},
                   {type("int8"), {DType::i8}},
                   {type("uint8"), kBytes}}}};
  });
}

// An array of exactly numpy.ndarray, by the buffer protocol. Its memory lives as long as it does, exported or not.
std::optional<UntypedView> ndarray_by_buffer(nb::handle array, bool writable) {
  static PyObject* const dtype = interned("dtype");
  const std::optional<Element> element = element_in(numpy().types, checked(PyObject_GetAttr(array.ptr(), dtype)));
  if (!element) return {};
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, writable ? PyBUF_STRIDES | PyBUF_WRITABLE : PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    return {};
  }
  UntypedView memory{{}, *element};
  memory.view.data = buffer.buf;
  memory.view.ndim = buffer.ndim;
  bool whole = buffer.ndim >= 1 && buffer.ndim <= kMaxDims;
  for (int i = 0; whole && i < buffer.ndim; ++i) {
    const auto at = static_cast<std::size_t>(i);
    memory.view.shape[at] = buffer.shape[i];
    memory.view.strides[at] = buffer.strides[i] / buffer.itemsize;
    whole = buffer.strides[i] % buffer.itemsize == 0;
  }
  PyBuffer_Release(&buffer);
  return whole ? std::optional(memory) : std::nullopt;
}

// By its attributes, which know why not.
MutableTensorView read_torch(const char* argument, nb::handle tensor, const ReadOptions& options) {
  static PyObject *const is_cpu = interned("is_cpu"), *const device = interned("device"),
                         *const dtype = interned("dtype"), *const shape = interned("shape"),
                         *const stride = interned("stride"), *const is_neg = interned("is_neg"),
                         *const data_ptr = interned("data_ptr");
  const auto get = [&](PyObject* name) { return checked(PyObject_GetAttr(tensor.ptr(), name)); };
  const auto call = [&](PyObject* name) { return call_method(tensor, name); };
  try {
    MutableTensorView view;
    if (get(is_cpu).ptr() != Py_True) {
      const nb::object where = get(device);
      if (text_of(where).rfind("cuda:", 0) != 0)
        refuse_value(argument, "a tensor on " + text_of(where), "one on the cpu or on cuda");
      if (!missing_cuda().empty())
        refuse_value(argument, "a tensor on " + text_of(where), "one on the cpu (" + missing_cuda() + ")");
      view.device = {DeviceType::cuda, nb::cast<int>(where.attr("index"))};
    }
    const nb::object type = get(dtype);
    view.dtype = dtype_as(
        argument, torch_element(type), [&] { return text_of(type); }, options);
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

// NumPy has no bfloat16 and no 8-bit floats of its own, and neither its DLPack nor its buffers know those of ml_dtypes:
// they pass as integers.
struct MlDtype {
  const char* name;
  const char* viewed_as;
  DType dtype;
};
constexpr std::array<MlDtype, 3> kMlDtypes{{{"bfloat16", "uint16", DType::bf16},
                                            {"float8_e4m3fn", "uint8", DType::f8e4m3},
                                            {"float8_e5m2", "uint8", DType::f8e5m2}}};
const MlDtype* ml_dtype_of(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  constexpr int kFirstUserType = 256;  // NPY_USERDEF
  int number = 0;
  if (!nb::try_cast(nb::getattr(dtype, "num", nb::none()), number) || number < kFirstUserType) return nullptr;
  const std::string name = text_of(dtype);
  const auto* found =
      std::find_if(kMlDtypes.begin(), kMlDtypes.end(), [&](const MlDtype& f) { return name == f.name; });
  return found == kMlDtypes.end() ? nullptr : found;
}

// What an object that cannot be read is: "numpy.ndarray of >f4".
std::string object_text(nb::handle object) {
  return type_text(object) + (nb::hasattr(object, "dtype") ? " of " + text_of(object.attr("dtype")) : "");
}

// Whether `object` says that its memory may be written: as a buffer, or by DLPack 1.0, which has a flag for memory that
// may not. Older exports cannot say it: those of JAX's immutable arrays look as if they were for writing.
bool says_writable(nb::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_STRIDES | PyBUF_WRITABLE) == 0) {
    PyBuffer_Release(&buffer);
    return true;
  }
  PyErr_Clear();
  try {
    const nb::object capsule =
        object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 0), nb::arg("copy") = false);
    return PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") == 1;
  } catch (nb::python_error&) {  // takes no such arguments, or would copy
    return false;
  }
}

// A GPU's arrays are PyTorch's: a result must be made by somebody, on a stream that somebody knows.
[[noreturn]] void refuse_device(const char* argument, nb::handle object, const nb::ndarray<nb::ro>& array) {
  const bool cuda = array.device_type() == nb::device::cuda::value;
  std::string where = "DLPack device " + std::to_string(array.device_type()), wanted = "an array on the cpu";
  if (cuda) {
    where = "cuda:" + std::to_string(array.device_id());
    wanted += missing_cuda().empty() ? ", or torch.from_dlpack(" + std::string(argument) + "), which shares its memory"
                                     : " (" + missing_cuda() + ")";
  }
  refuse_value(argument, type_text(object) + " on " + where, wanted);
}

// Where nobody has imported numpy.ma, which NumPy does not do by itself, there are none.
bool is_masked(nb::handle object) {
  static PyObject* const name = interned("numpy.ma");
  const nb::object module = loaded_module(name);
  return module.is_valid() && nb::isinstance(object, module.attr("MaskedArray"));
}

// What a result's shape is made of must have one.
void check_shape(const char* argument, nb::handle object) {
  const nb::object shape = nb::getattr(object, "shape", nb::none());
  if (shape.is_none() || nb::len(shape) == 0) refuse_type(argument, type_text(object) + " without a shape", "an array");
}

}  // namespace

std::string text_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object));
}
std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  return text_of(type.attr("__module__")) + "." + text_of(type.attr("__qualname__"));
}

bool is_ndarray(nb::handle object) {
  return object.type().ptr() == numpy().array;
}

std::optional<MutableTensorView> view_by_table(const Torch& torch, nb::handle tensor, bool resolved) {
  if (!torch.is_plain(tensor)) return {};
  std::optional<UntypedView> memory = tensor_by_table(torch, tensor, resolved);
  if (!memory || !memory->element.dtype) return {};
  memory->view.dtype = *memory->element.dtype;
  return memory->view;
}

MutableTensorView new_view(const Torch& torch, nb::handle tensor) {
  const std::optional<UntypedView> memory =
      torch.is_plain(tensor) ? tensor_by_table(torch, tensor, true) : std::nullopt;
  if (!memory || !memory->element.dtype) return array("out", tensor).view;
  MutableTensorView view = memory->view;
  view.dtype = *memory->element.dtype;
  return view;
}

Array array(const char* argument, nb::handle object, const ReadOptions& options) {
  Array result;
  if (object.is_none() && !options.shaped) return result;
  const Torch* torch = loaded_torch();
  const bool plain = torch != nullptr && torch->is_plain(object);
  std::optional<UntypedView> memory;
  if (plain) memory = tensor_by_table(*torch, object);
  else if (is_ndarray(object)) memory = ndarray_by_buffer(object, options.writable);
  if (memory) {
    result.view = memory->view;
    result.view.dtype = dtype_as(
        argument, memory->element, [&] { return text_of(object.attr("dtype")); }, options);
    result.is_tensor = plain;
    return result;
  }
  if (options.shaped) check_shape(argument, object);
  if (plain || (torch != nullptr && nb::isinstance(object, torch->tensor))) {
    result.view = read_torch(argument, object, options);
    result.is_tensor = true;
    return result;
  }
  if (is_masked(object)) refuse_type(argument, "a masked array", "a plain one, and `mask` for what is attended");
  const MlDtype* ml_dtype = ml_dtype_of(object);
  const nb::object readable = ml_dtype != nullptr ? object.attr("view")(ml_dtype->viewed_as) : nb::borrow(object);
  nb::ndarray<> writes;
  if (!nb::try_cast(readable, result.owner)) refuse_type(argument, object_text(object), kArray);
  if (options.writable && !nb::try_cast(readable, writes))
    refuse_value(argument, "a read-only array", "one that can be written");
  const nb::ndarray<nb::ro>& from = result.owner;
  if (from.device_type() != nb::device::cpu::value) refuse_device(argument, object, from);
  if (options.writable && !says_writable(readable))
    refuse_value(argument, type_text(object) + ", which does not say whether it can be written",
                 "a NumPy array, a PyTorch tensor or an array of DLPack 1.0");
  check_rank(argument, static_cast<std::int64_t>(from.ndim()));
  const std::optional<Element> element = ml_dtype != nullptr ? Element{ml_dtype->dtype} : element_of(from.dtype());
  MutableTensorView& view = result.view;
  view.data = const_cast<void*>(from.data());
  view.dtype = dtype_as(
      argument, element, [&] { return dtype_text(object, from.dtype()); }, options);
  view.ndim = static_cast<int>(from.ndim());
  for (std::size_t i = 0; i < from.ndim(); ++i) {
    view.shape[i] = static_cast<std::int64_t>(from.shape(i));
    view.strides[i] = from.stride(i);
  }
  return result;
}

MutableTensorView Arrays::read(const char* name, nb::handle object, const ReadOptions& options) {
  Array read = array(name, object, options);
  if (read.owner.is_valid()) owners_.push_back(std::move(read.owner));
  if (read.is_tensor) {
    if (!has_tensors_) grad_enabled_ = is_grad_enabled();
    has_tensors_ = true;
    refuse_grad(name, object, grad_enabled_);
    if (options.writable) written_.push_back(object);
  }
  return read.view;
}

void Arrays::mark_written() const {
  if (!written_.empty()) python::mark_written(written_);
}

}  // namespace rapt::python
