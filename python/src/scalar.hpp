// Python's numbers and flags. Who is no number is refused by a TypeError that names `argument`.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

namespace rapt::python {
namespace nb = nanobind;

std::string shown(nb::handle object);  ///< repr(object), for messages

bool truth(const char* argument, nb::handle object);
std::int64_t integer(const char* argument, nb::handle object, const char* wanted);
std::uint64_t unsigned_integer(const char* argument, nb::handle object);  ///< refuses what has no 64 bits
std::optional<float> real(const char* argument, nb::handle object);       ///< None is not given

}  // namespace rapt::python
