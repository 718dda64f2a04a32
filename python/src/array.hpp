// Python's arrays and tensors as views of their memory. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include "rapt/tensor.hpp"

namespace rapt::python {
namespace nb = nanobind;

/// Teaches array() to read PyTorch's tensors by their own methods, which takes a tenth of the time of DLPack. Call it
/// once with the module `torch`; nothing here imports it.
void adopt_torch(nb::handle torch);

/// str(object), and the name of its type ("numpy.ndarray"), for messages.
std::string text_of(nb::handle object);
std::string type_text(nb::handle object);

/// A view, and what keeps DLPack's description of it alive. The memory itself lives as long as the Python object.
struct Array {
  MutableTensorView view;  ///< ndim 0: no tensor was given. Not to be written unless the array was asked to be writable
  nb::ndarray<nb::ro> owner;
};

/// What elements an argument has; `any`: of any type, as the library decides.
enum class Elements { any, boolean, integers, f32, floats };

/// How an array may be read. Where `bytes` is given its elements are uint8, and stand for this type.
struct Reading {
  bool writable = false;
  std::optional<DType> bytes = {};
  Elements elements = Elements::any;
};

/// The memory of a NumPy array, a PyTorch tensor or anything that speaks DLPack; None gives no tensor. Refuses
/// (TypeError, ValueError naming `argument`) what is no array, lies elsewhere than in the CPU's memory (PyTorch's
/// tensors: or in a GPU's that this build knows), has 0 or more than 4 dimensions or elements rapt has no type for or
/// `reading` does not take, and, if asked, what is read-only.
Array array(const char* argument, nb::handle object, const Reading& reading = {});

/// Arguments by name, read as arrays and kept.
class Arrays {
 public:
  explicit Arrays(const nb::dict& arguments) : arguments_(arguments) {}
  MutableTensorView take(const char* name, const Reading& reading = {});
  nb::object operator[](const char* name) const { return arguments_[name]; }
  /// Names of the arrays that were given and taken to be written.
  const std::vector<std::string>& written() const { return written_; }

 private:
  nb::dict arguments_;
  std::vector<nb::ndarray<nb::ro>> owners_;
  std::vector<std::string> written_;
};

}  // namespace rapt::python
