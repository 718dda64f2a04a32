// How the functions of rapt._core come to be: each operation adds its own.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <utility>

namespace rapt::python {
namespace nb = nanobind;

/// Adds the functions of an operation to rapt._core. Defined in the operation's own file.
#define RAPT_OPERATION(name, Name, NAME) void bind_##name(nb::module_& m);
#include "rapt/operations.def"

/// The arguments of a Python function, which hands on all of them in its order.
template <class Arguments>
Arguments arguments_of(const nb::tuple& given) {
  constexpr std::size_t n = sizeof(Arguments) / sizeof(nb::handle);
  if (given.size() != n) throw nb::type_error(("wanted " + std::to_string(n) + " arguments").c_str());
  const auto at = [&](std::size_t i) { return nb::handle(PyTuple_GetItem(given.ptr(), static_cast<Py_ssize_t>(i))); };
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return Arguments{at(I)...};
  }
  (std::make_index_sequence<n>());
}

}  // namespace rapt::python
