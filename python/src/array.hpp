// Python's arrays and tensors as views of their memory. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include "rapt/tensor.hpp"
#include "torch.hpp"

namespace rapt::python {
namespace nb = nanobind;

/// str(object), and the name of its type ("numpy.ndarray"), for messages.
std::string text_of(nb::handle object);
std::string type_text(nb::handle object);

/// A view, and what keeps DLPack's description of it alive. The memory itself lives as long as the Python object.
struct Array {
  MutableTensorView view;  ///< ndim 0: no tensor was given. Not to be written unless the array was asked to be writable
  nb::ndarray<nb::ro> owner;
  bool is_tensor = false;  ///< PyTorch's
};

/// What elements an argument has; `any`: of any type, as the library decides; `keys`: numbers, quantised or not, that
/// need no other word for what they are.
enum class Elements { any, boolean, integers, f32, floats, keys };

/// How an array may be read. Where `bytes_of` is given, the array's elements are uint8, the bytes of this type.
struct ReadOptions {
  bool writable = false;
  std::optional<DType> bytes_of = {};
  Elements elements = Elements::any;
  bool shaped = false;  ///< a result's shape depends on it: what has none is refused as such, and so is None
};

/// The memory of a NumPy array, a PyTorch tensor or anything that speaks DLPack; None gives no tensor. Refuses
/// (TypeError, ValueError naming `argument`) what is no array, lies elsewhere than in the CPU's memory (PyTorch's
/// tensors: or in a GPU's that this build knows), has 0 or more than 4 dimensions or elements rapt has no type for or
/// `options` does not take, and, if asked, what is read-only.
Array array(const char* argument, nb::handle object, const ReadOptions& options = {});

/// Whether it is a numpy.ndarray, and of no class derived from that.
bool is_ndarray(nb::handle object);

/// The memory of a tensor of rapt's types; nothing where array() would have to look closer. `resolved`: it is known not
/// to be negated when it is read.
std::optional<MutableTensorView> view_by_table(const Torch& torch, nb::handle tensor, bool resolved = false);
/// That of one that PyTorch has just made.
MutableTensorView new_view(const Torch& torch, nb::handle tensor);

/// The arrays of one call, read and kept. Refuses tensors that require grad.
class Arrays {
 public:
  MutableTensorView read(const char* name, nb::handle object, const ReadOptions& options = {});
  bool has_tensors() const { return has_tensors_; }  ///< whether one was PyTorch's
  void mark_written() const;                         ///< tells autograd of those that were taken to be written

 private:
  std::vector<nb::ndarray<nb::ro>> owners_;
  std::vector<nb::handle> written_;
  bool has_tensors_ = false, grad_enabled_ = false;
};

}  // namespace rapt::python
