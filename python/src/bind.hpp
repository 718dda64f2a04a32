// How the functions of rapt._core come to be: each operation adds its own.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <bit>
#include <cstddef>

#include "error.hpp"

namespace rapt::python {
namespace nb = nanobind;

/// Adds the functions of an operation to rapt._core. Defined in the operation's own file.
#define RAPT_OPERATION(name, Name, NAME) void bind_##name(nb::module_& m);
#include "rapt/operations.def"

/// The arguments of a Python function, which hands on all of them in the order of `Arguments`: a struct of handles.
template <class Arguments>
Arguments arguments_of(const nb::tuple& given) {
  constexpr std::size_t n = sizeof(Arguments) / sizeof(nb::handle);
  if (given.size() != n) refuse_count(given.size(), n);
  std::array<nb::handle, n> arguments;
  for (std::size_t i = 0; i < n; ++i) arguments[i] = PyTuple_GetItem(given.ptr(), static_cast<Py_ssize_t>(i));
  return std::bit_cast<Arguments>(arguments);
}

}  // namespace rapt::python
