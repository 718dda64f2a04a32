#include "torch.hpp"

#include <array>
#include <string_view>

#include "error.hpp"

namespace rapt::python {
namespace {

// The head of DLPack's DLPackExchangeAPI, of version 1.
struct ExchangeTable {
  std::uint32_t major, minor;
  ExchangeTable* previous;
  void *allocate, *to_managed, *from_managed;
  int (*to_dltensor)(void* tensor, nb::dlpack::dltensor* to);
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** stream);
};

const ExchangeTable* exchange_table(nb::handle tensor_type) {
  const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (table != nullptr && table->major != 1) table = table->previous;
  return table;
}

std::atomic<Torch*> known_torch = nullptr;
std::atomic<bool> by_table = true;

void choose_table(Torch& torch) {
  const ExchangeTable* table = by_table ? exchange_table(torch.tensor) : nullptr;
  torch.read = table == nullptr ? nullptr : table->to_dltensor;
  torch.current_stream = table == nullptr ? nullptr : table->current_stream;
}

}  // namespace

const Torch* loaded_torch() {
  static PyObject* const name = interned("torch");
  if (const Torch* known = known_torch) return known;
  const nb::object torch = loaded_module(name);
  if (!torch.is_valid() || !nb::hasattr(torch, "autograd") || !nb::hasattr(torch, "nn"))
    return nullptr;  // not imported, or still importing
  auto found = std::make_unique<Torch>();
  found->tensor = held(torch.attr("Tensor"));
  found->parameter = held(torch.attr("nn").attr("Parameter"));
  found->is_neg = held(found->tensor.attr("is_neg"));
  found->empty_like = held(torch.attr("empty_like"));
  found->is_grad_enabled = held(torch.attr("is_grad_enabled"));
  found->get_num_threads = held(torch.attr("get_num_threads"));
  found->float32 = held(torch.attr("float32"));
  found->bfloat16 = held(torch.attr("bfloat16"));
  found->increment_version = held(torch.attr("autograd").attr("graph").attr("increment_version"));
  choose_table(*found);
  Torch* first = nullptr;  // of threads that come here at the same time
  if (known_torch.compare_exchange_strong(first, found.get())) first = found.release();
  return first;
}

void read_torch_by_table(bool wanted) {
  by_table = wanted;
  if (Torch* known = known_torch) choose_table(*known);
}

int torch_threads(const Torch& torch) {
  return nb::cast<int>(checked(PyObject_CallNoArgs(torch.get_num_threads.ptr())));
}

void* torch_stream(Device device) {
  if (device.type != DeviceType::cuda) return nullptr;
  if (const auto by_table = loaded_torch()->current_stream) {
    void* stream = nullptr;
    if (by_table(nb::device::cuda::value, device.index, &stream) != 0) throw nb::python_error();
    return stream;
  }
  const nb::handle current =
      once([] { return held(nb::module_::import_("torch").attr("_C").attr("_cuda_getCurrentRawStream")); });
  return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(current(device.index)));
}

nb::object new_empty(nb::handle tensor, std::span<const std::int64_t> sizes, nb::handle dtype) {
  static PyObject *const name = interned("new_empty"), *const names = PyTuple_Pack(1, interned("dtype"));
  const nb::object shape = tuple_of(sizes);
  const std::array<PyObject*, 3> arguments{tensor.ptr(), shape.ptr(), dtype.ptr()};
  return checked(PyObject_VectorcallMethod(name, arguments.data(), 2, dtype.is_valid() ? names : nullptr));
}

nb::object new_like(nb::handle tensor) {
  PyObject* argument = tensor.ptr();
  return checked(PyObject_Vectorcall(loaded_torch()->empty_like.ptr(), &argument, 1, nullptr));
}

nb::object tuple_of(std::span<const std::int64_t> numbers) {
  nb::object tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  Py_ssize_t i = 0;
  for (const std::int64_t number : numbers) PyTuple_SetItem(tuple.ptr(), i++, PyLong_FromLongLong(number));
  return tuple;
}

nb::object loaded_module(PyObject* name) {
  PyObject* module = PyImport_GetModule(name);
  if (module == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return nb::steal(module);
}

PyObject* interned(const char* name) {
  return PyUnicode_InternFromString(name);
}

nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

nb::object call_method(nb::handle object, PyObject* name) {
  PyObject* self = object.ptr();
  return checked(PyObject_VectorcallMethod(name, &self, 1, nullptr));
}

bool is_grad_enabled() {
  return checked(PyObject_CallNoArgs(loaded_torch()->is_grad_enabled.ptr())).ptr() == Py_True;
}

void refuse_grad(const char* argument, nb::handle tensor, bool recorded) {
  static PyObject* const requires_grad = interned("requires_grad");
  const bool is_out = argument == std::string_view("out");
  if (!(is_out || recorded) || checked(PyObject_GetAttr(tensor.ptr(), requires_grad)).ptr() != Py_True) return;
  if (is_out) refuse_value(argument, "a tensor that requires grad", "one that does not");
  refuse_value(argument, "a tensor that requires grad",
               "one that does not, as rapt's own functions have no backward (use those of rapt.torch, "
               "torch.no_grad() or .detach())");
}

void mark_written(std::span<const nb::handle> tensors) {
  nb::object all = checked(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  Py_ssize_t i = 0;
  for (const nb::handle tensor : tensors) PyTuple_SetItem(all.ptr(), i++, tensor.inc_ref().ptr());
  PyObject* argument = all.ptr();
  checked(PyObject_Vectorcall(loaded_torch()->increment_version.ptr(), &argument, 1, nullptr));
}

}  // namespace rapt::python
