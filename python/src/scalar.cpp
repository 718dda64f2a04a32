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

namespace {

template <class Integer>
Integer integer_of(const char* argument, nb::handle object, const char* wanted, const char* out_of_range) {
  PyObject* number = PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr());
  if (number == nullptr) {
    PyErr_Clear();
    refuse_type(argument, shown(object), wanted);
  }
  Integer value = 0;
  if (!nb::try_cast(nb::steal(number), value)) refuse_value(argument, shown(object), out_of_range);
  return value;
}

}  // namespace

std::int64_t integer(const char* argument, nb::handle object, const char* wanted) {
  return integer_of<std::int64_t>(argument, object, wanted, "a number of 64 bits");
}

std::uint64_t unsigned_integer(const char* argument, nb::handle object) {
  constexpr const char* kWanted = "an int from 0 to 2**64 - 1";
  return integer_of<std::uint64_t>(argument, object, kWanted, kWanted);
}

std::optional<float> real(const char* argument, nb::handle object) {
  if (object.is_none()) return {};
  // float() reads text and bytes, too.
  const bool is_text = PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr());
  const bool is_number = PyNumber_Check(object.ptr()) != 0 && !PyBool_Check(object.ptr()) && !is_text;
  PyObject* number = is_number ? PyNumber_Float(object.ptr()) : nullptr;
  if (number == nullptr) {
    const bool is_too_large = PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    if (is_too_large) refuse_value(argument, shown(object), "a number that a float holds");
    refuse_type(argument, shown(object), "a number");
  }
  return static_cast<float>(nb::cast<double>(nb::steal(number)));
}

}  // namespace rapt::python
