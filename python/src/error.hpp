// Refusals and how they look in Python.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "rapt/types.hpp"

namespace rapt::python {

/// What an argument should have been. Both throw; `argument` is the name in Python.
[[noreturn]] void refuse_type(const std::string& argument, const std::string& got, const std::string& wanted);
[[noreturn]] void refuse_value(const std::string& argument, const std::string& got, const std::string& wanted);

/// Throws std::logic_error, in Python a RuntimeError: the package called the extension with too many arguments, or too
/// few. Callers that fall back on TypeError or ValueError do not catch it.
[[noreturn]] void refuse_count(std::size_t got, std::size_t wanted);

/// Pairs of the library's name of an argument and Python's. Others are called alike.
using PythonNames = std::span<const std::pair<std::string_view, std::string_view>>;
/// Throws what `error` is in Python: a TypeError where a dtype is wrong, else a ValueError.
[[noreturn]] void refuse(const Error& error, const PythonNames& names);

/// From now on a rapt::Error arrives in Python as a TypeError where a dtype is wrong, else as a ValueError, and names
/// the argument as Python does.
void register_errors();

}  // namespace rapt::python
