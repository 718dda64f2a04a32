#include "error.hpp"

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "rapt/types.hpp"

namespace rapt::python {
namespace nb = nanobind;
namespace {

std::string text(const std::string& argument, std::string_view got, const std::string& wanted) {
  return argument + ": got " + std::string(got) + "; wanted " + wanted;
}

// The library's name of an argument in Python.
std::string python_name(const std::string& argument) {
  if (argument == "kv.cu_seqlens") return "cu_seqlens_k";
  if (argument == "kv.seqlens" || argument == "seqlens") return "cache_seqlens";
  if (argument == "score.dropout") return "dropout_p";
  for (const std::string_view group : {"score.", "kv.", "cache."})
    if (argument.starts_with(group)) return argument.substr(group.size());
  return argument;
}

// What a refusal says in Python, and of which class it is.
struct Refusal {
  std::string message;
  PyObject* type;
};
template <class Name>
Refusal refusal_of(const Error& error, const Name& name_of) {
  // what() is "<argument>: <got>; wanted <wanted>".
  std::string reason(std::string_view(error.what()).substr(error.argument().size() + 2));
  constexpr std::string_view kShared = "memory shared with ";
  if (reason.starts_with(kShared)) {
    const std::size_t end = reason.find(';');
    const std::string other = reason.substr(kShared.size(), end - kShared.size());
    reason = std::string(kShared) + name_of(other) + reason.substr(end);
  }
  constexpr std::string_view kCache = "cache.";  // a tensor of append_kv, which has no such prefix here
  for (std::size_t at; (at = reason.find(kCache)) != std::string::npos;) reason.erase(at, kCache.size());
  return {name_of(error.argument()) + ": got " + reason,
          reason.starts_with("dtype ") ? PyExc_TypeError : PyExc_ValueError};
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const auto [message, type] = refusal_of(error, python_name);
    PyErr_SetString(type, message.c_str());
  }
}

}  // namespace

void refuse_type(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw nb::type_error(text(argument, got, wanted).c_str());
}
void refuse_value(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw nb::value_error(text(argument, got, wanted).c_str());
}
void refuse_count(std::size_t got, std::size_t wanted) {
  throw std::logic_error("got " + std::to_string(got) + " arguments; wanted " + std::to_string(wanted));
}

void refuse(const Error& error, const PythonNames& names) {
  const auto [message, type] = refusal_of(error, [&](const std::string& argument) {
    for (const auto& [known_as, name] : names)
      if (argument == known_as) return std::string(name);
    return argument;
  });
  if (type == PyExc_TypeError) throw nb::type_error(message.c_str());
  throw nb::value_error(message.c_str());
}

void register_errors() {
  nb::register_exception_translator(translate);
}

}  // namespace rapt::python
