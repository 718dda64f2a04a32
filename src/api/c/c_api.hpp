// What every part of the C interface needs: exceptions end in guard(), and C's values become C++'s.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtypes.hpp"
#include "operations/c_values.hpp"
#include "rapt/rapt.h"
#include "rapt/rapt.hpp"

struct rapt_context {
  rapt::Context value;
};

struct rapt_plan {
  rapt::Plan value;
  std::string entry{value.entry()};
  std::string backend{value.backend()};
  std::vector<rapt_candidate> candidates;

  explicit rapt_plan(rapt::Plan plan) : value(std::move(plan)) {
    for (const auto& c : value.candidates()) candidates.push_back({c.entry.c_str(), c.refusal.c_str()});
  }
};

namespace rapt::c {

/// Records the thread's message; returns `status`.
rapt_status fail(rapt_status status, const char* argument, const char* message) noexcept;

/// Runs `body`; whatever it throws becomes a status and the thread's message.
template <class Body>
rapt_status guard(Body&& body) noexcept {
  try {
    body();
    return RAPT_OK;
  } catch (const Error& error) {
    return fail(RAPT_INVALID_ARGUMENT, error.argument().c_str(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(RAPT_OUT_OF_MEMORY, "", "out of memory");
  } catch (const std::exception& error) {
    return fail(RAPT_INTERNAL_ERROR, "", error.what());
  } catch (...) {
    return fail(RAPT_INTERNAL_ERROR, "", "unknown exception");
  }
}

/// `*pointer`, or an Error when it is NULL.
template <class T>
T& non_null(T* pointer, const char* name) {
  if (!pointer) throw Error(name, "NULL", "a pointer");
  return *pointer;
}

/// `given`, of the size that its caller knows, as the Struct of this version. Members that an older caller does not
/// have become zero. Throws Error for an impossible size, and where a newer caller has set members that this version
/// lacks.
template <class Struct>
Struct to_this_version(const Struct& given, const std::string& name) {
  constexpr std::size_t kMaxBytes = 4096;  // so that little is read where the size was never set
  const std::size_t size = given.struct_size;
  if (size < sizeof size || size > kMaxBytes || size % alignof(Struct) != 0)
    throw Error("struct_size", std::to_string(size), "what " + name + "_init() sets");
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  for (std::size_t i = sizeof(Struct); i < size; ++i)
    if (bytes[i] != 0)
      throw Error("struct_size", std::to_string(size) + " with more than zeros past " + std::to_string(sizeof(Struct)),
                  "nothing asked for that rapt " + std::string(version()) + " does not know");
  Struct result{};
  std::memcpy(&result, bytes, std::min(size, sizeof(Struct)));
  return result;
}

inline const Context& to_context(const rapt_context* context) {
  return context ? context->value : default_context();
}

inline std::span<std::byte> to_workspace(void* workspace, std::size_t bytes) {
  if (bytes > 0) non_null(static_cast<std::byte*>(workspace), "workspace");
  return {static_cast<std::byte*>(workspace), bytes};
}

/// The text functions of rapt.h.
void copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* size);

inline MutableTensorView to_view(const rapt_tensor& t, const std::string& name) {
  if (t.ndim == 0 && !t.data) return {};
  if (t.ndim < 1 || t.ndim > kMaxDims) throw Error(name, std::to_string(t.ndim) + " dimensions", "1 to 4");
  const auto ndim = static_cast<std::size_t>(t.ndim);
  const auto device = t.device_type == 0 ? DeviceType::cpu : DeviceType(t.device_type);
  return {t.data,
          to_enum(t.dtype, kLastDType, name + ".dtype"),
          Layout({t.shape, ndim}, {t.strides, ndim}),
          {device, t.device_index}};
}

}  // namespace rapt::c
