#include "scalar.hpp"

#include <nanobind/stl/string.h>

#include "array.hpp"
#include "error.hpp"

namespace rapt::python {

std::string shown(nb::handle object) {
  return text_of(nb::repr(object));
}

bool truth(const char* argument, nb::handle object) {
  bool value = false;
  // NumPy's own bool is no Python bool.
  if (nb::try_cast(object, value, false)) return value;
  if (type_text(object).starts_with("numpy.bool")) return PyObject_IsTrue(object.ptr()) == 1;
  refuse_type(argument, shown(object), "True or False");
}

std::int64_t integer(const char* argument, nb::handle object, const char* wanted) {
  PyObject* number = PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr());
  if (number == nullptr) {
    PyErr_Clear();
    refuse_type(argument, shown(object), wanted);
  }
  std::int64_t value = 0;
  if (!nb::try_cast(nb::steal(number), value)) refuse_value(argument, shown(object), "a number of 64 bits");
  return value;
}

std::uint64_t unsigned_integer(const char* argument, nb::handle object) {
  constexpr const char* kWanted = "an int from 0 to 2**64 - 1";
  PyObject* number = PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr());
  if (number == nullptr) {
    PyErr_Clear();
    refuse_type(argument, shown(object), kWanted);
  }
  std::uint64_t value = 0;
  if (!nb::try_cast(nb::steal(number), value)) refuse_value(argument, shown(object), kWanted);
  return value;
}

std::optional<float> real(const char* argument, nb::handle object) {
  if (object.is_none()) return {};
  PyObject* number =
      PyBool_Check(object.ptr()) || PyUnicode_Check(object.ptr()) ? nullptr : PyNumber_Float(object.ptr());
  if (number == nullptr) {
    PyErr_Clear();
    refuse_type(argument, shown(object), "a number");
  }
  return static_cast<float>(nb::cast<double>(nb::steal(number)));
}

}  // namespace rapt::python
