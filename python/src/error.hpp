// Refusals and how they look in Python.
#pragma once

#include <string>

namespace rapt::python {

/// What an argument should have been. Both throw; `argument` is the name in Python.
[[noreturn]] void refuse_type(const std::string& argument, const std::string& got, const std::string& wanted);
[[noreturn]] void refuse_value(const std::string& argument, const std::string& got, const std::string& wanted);

/// From now on a rapt::Error arrives in Python as a TypeError where a dtype is wrong, else as a ValueError, and names
/// the argument as Python does.
void register_errors();

}  // namespace rapt::python
