// PyTorch as it is seen from here: found where somebody has imported it, never imported and never linked with.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "rapt/tensor.hpp"

namespace rapt::python {
namespace nb = nanobind;

/// What is looked up in the module `torch` once, and kept for good: the interpreter may be gone when static objects
/// die.
struct Torch {
  nb::handle tensor, parameter;  ///< types
  nb::handle is_neg;             ///< Tensor.is_neg
  nb::handle empty_like, is_grad_enabled, get_num_threads, increment_version, float32, bfloat16;
  /// Fills a description of a tensor's memory without allocating any; null before PyTorch 2.10.
  int (*read)(void* tensor, nb::dlpack::dltensor* to) = nullptr;
  /// The stream of a DLPack device that work is queued on; likewise.
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** stream) = nullptr;

  /// Whether `object` is of one of the types whose tensors are what their memory says, and of no class derived from
  /// them.
  bool is_plain(nb::handle object) const {
    return object.type().ptr() == tensor.ptr() || object.type().ptr() == parameter.ptr();
  }
};

/// Null where PyTorch has not been imported.
const Torch* loaded_torch();

/// Whether tensors are read through PyTorch's table of C functions, where it has one, or by their attributes. For
/// tests.
void read_torch_by_table(bool wanted);

int torch_threads(const Torch& torch);  ///< torch.get_num_threads()
/// The cudaStream_t that PyTorch queues work on `device` on; null for the CPU.
void* torch_stream(Device device);

/// tensor.new_empty(sizes), or tensor.new_empty(sizes, dtype=dtype)
nb::object new_empty(nb::handle tensor, std::span<const std::int64_t> sizes, nb::handle dtype = {});
/// torch.empty_like(tensor), in half the time of new_empty.
nb::object new_like(nb::handle tensor);

/// A reference that is never given back.
inline nb::handle held(nb::object object) {
  return object.release();
}
/// What `make` gives, made once and kept for good. No static initialiser: a thread that waits for one holds the GIL,
/// which the thread inside it may need to go on. Two threads may both make it; the first result stays.
template <class Make>
const auto& once(const Make& make) {
  using Made = decltype(make());
  static std::atomic<const Made*> kept = nullptr;
  if (const Made* known = kept) return *known;
  auto made = std::make_unique<const Made>(make());
  const Made* first = nullptr;
  if (kept.compare_exchange_strong(first, made.get())) first = made.release();
  return *first;
}

/// The module of this name; invalid where nobody has imported it.
nb::object loaded_module(PyObject* name);

/// The name of an attribute, made once.
PyObject* interned(const char* name);
nb::object tuple_of(std::span<const std::int64_t> numbers);
/// `object`, a new reference that a call has returned. Throws the error there is where it is null.
nb::object checked(PyObject* object);
/// The method without arguments `name`.
nb::object call_method(nb::handle object, PyObject* name);

/// Whether PyTorch, which is loaded, records gradients.
bool is_grad_enabled();
/// Refuses (ValueError) a tensor that requires grad where gradients are `recorded`; `out` wherever they are.
void refuse_grad(const char* argument, nb::handle tensor, bool recorded);
/// Tells autograd that tensors were changed in place: what it had saved of them is stale.
void mark_written(std::span<const nb::handle> tensors);

}  // namespace rapt::python
