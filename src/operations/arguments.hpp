// The argument table of an operation: the one place that says what its tensors are. Validation, the C interface,
// guards, costs and tests' inputs read it.
//
// Rows are constexpr data behind function pointers that are made of members, so that what goes over a table is compiled
// once for all operations.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/dtypes.hpp"
#include "operations/shape.hpp"
#include "rapt/rapt.h"
#include "rapt/tensor.hpp"

namespace rapt {

struct Bound;

inline constexpr unsigned kAlways = ~0u;  // whatever a call's features

// A tensor or list of tensors of a call, or a step between them.
struct Argument {
  const char* name = "";  // in errors, "kv.k_scale"
  bool is_written = false;
  DTypeSet types = 0;
  const char* wanted_types = nullptr;  // where the types' own text says too little
  Shapes shapes = "";
  unsigned needed_in = kAlways, only_in = kAlways, written_in = kAlways;  // of calls that have any of these features
  const char* like_name = nullptr;                                        // the argument whose type it has
  std::int8_t like = -1;
  bool is_packed = false;              // i4x2 has two elements of the last dimension in a byte
  bool allows_minus_infinity = false;  // guards accept -inf
  const char* of_name = nullptr;       // the argument that it is the gradient of: of its shape, and none without it
  std::int8_t of = -1;
  bool is_of_forward = false;  // in C, of the forward's arguments
  bool is_unchecked = false;   // callers may give it, and the call neither reads nor writes it

  // Of the arguments of a call, given as void*. A list has a count.
  const TensorView* (*get)(const void* args, std::size_t i) = nullptr;
  std::size_t (*count)(const void* args) = nullptr;
  void (*set)(void* args, std::span<const TensorView> tensors) = nullptr;
  // In C: the tensor, or the first of `count_of_c` tensors.
  const rapt_tensor* (*of_c)(const void* c_args) = nullptr;
  std::size_t (*count_of_c)(const void* c_args) = nullptr;
  // No tensor: sizes that follow from others, and what a row cannot say.
  void (*step)(const void* args, Bound& bound) = nullptr;

  template <class T>
  constexpr Argument with(T Argument::*member, std::type_identity_t<T> value) const {
    Argument a = *this;
    a.*member = value;
    return a;
  }
  constexpr Argument optional() const { return needed(0); }
  constexpr Argument needed(unsigned features) const { return with(&Argument::needed_in, features); }
  // Given only in calls with any of these features; `is_needed`: always then.
  constexpr Argument in(unsigned features, bool is_needed = false) const {
    return with(&Argument::only_in, features).needed(is_needed ? features : 0);
  }
  // Of what is written: read by calls with none of these features.
  constexpr Argument written_only_in(unsigned features) const { return with(&Argument::written_in, features); }
  constexpr Argument type_of(const char* other) const { return with(&Argument::like_name, other); }
  constexpr Argument with_types(const char* text) const { return with(&Argument::wanted_types, text); }
  constexpr Argument packed() const { return with(&Argument::is_packed, true); }
  constexpr Argument minus_infinity_allowed() const { return with(&Argument::allows_minus_infinity, true); }
  constexpr Argument of_forward() const { return with(&Argument::is_of_forward, true); }
  // Of that argument's shape, and given only with it.
  constexpr Argument gradient_of(const char* other) const { return with(&Argument::of_name, other); }
  constexpr Argument unchecked() const {
    return optional().with(&Argument::is_unchecked, true).with(&Argument::is_written, false);
  }

  // How many tensors a call gives for it: one, unless it is a list.
  std::size_t count_in(const void* args) const { return count ? count(args) : 1; }
  // "lses[2]".
  std::string name_of(std::size_t i) const { return count ? name + ("[" + std::to_string(i) + "]") : name; }
  constexpr bool is_output(unsigned features) const { return is_written && (written_in & features) != 0; }
  constexpr bool is_needed(unsigned features) const { return needed_in == kAlways || (needed_in & features) != 0; }
};

namespace detail {

template <auto... kPath>
constexpr auto& member(auto& args) {
  // clang-format off
  return (args .* ... .* kPath);
  // clang-format on
}
template <class M>
struct OwnerOf;
template <class T, class A>
struct OwnerOf<T A::*> {
  using type = A;
};
template <auto kMember>
using Owner = typename OwnerOf<decltype(kMember)>::type;

template <auto kC, auto kFirst, auto... kRest>
constexpr Argument argument(const char* name, bool is_written, DTypeSet types, const Shapes& shapes) {
  using A = Owner<kFirst>;
  using C = Owner<kC>;
  using T = std::remove_reference_t<decltype(member<kFirst, kRest...>(std::declval<A&>()))>;
  Argument a;
  a.name = name, a.is_written = is_written, a.types = types, a.shapes = shapes;
  if constexpr (std::is_same_v<T, TensorView> || std::is_same_v<T, MutableTensorView>) {
    // Alike but for the pointer's constness, so that both are read as one.
    static_assert(sizeof(TensorView) == sizeof(MutableTensorView));
    if (is_written != std::is_same_v<T, MutableTensorView>) throw "what is written is a MutableTensorView";
    a.get = [](const void* args, std::size_t) {
      return reinterpret_cast<const TensorView*>(&member<kFirst, kRest...>(*static_cast<const A*>(args)));
    };
    a.set = [](void* args, std::span<const TensorView> tensors) {
      const TensorView& from = tensors[0];
      if constexpr (std::is_same_v<T, TensorView>) member<kFirst, kRest...>(*static_cast<A*>(args)) = from;
      else
        member<kFirst, kRest...>(*static_cast<A*>(args)) = {const_cast<void*>(from.data), from.dtype, from,
                                                            from.device};
    };
    a.of_c = [](const void* c_args) { return &(static_cast<const C*>(c_args)->*kC); };
  } else {
    a.get = [](const void* args, std::size_t i) { return &member<kFirst, kRest...>(*static_cast<const A*>(args))[i]; };
    a.count = [](const void* args) { return member<kFirst, kRest...>(*static_cast<const A*>(args)).size(); };
    a.set = [](void* args, std::span<const TensorView> tensors) {
      member<kFirst, kRest...>(*static_cast<A*>(args)) = tensors;
    };
    a.of_c = [](const void* c_args) { return static_cast<const C*>(c_args)->*kC; };
    a.count_of_c = [](const void* c_args) { return std::size_t{static_cast<const C*>(c_args)->count}; };
  }
  return a;
}

}  // namespace detail

// kC: the member of the C structure; kPath: that of the arguments, from the outside.
template <auto kC, auto... kPath>
constexpr Argument read(const char* name, DTypeSet types, const Shapes& shapes) {
  return detail::argument<kC, kPath...>(name, false, types, shapes);
}
template <auto kC, auto... kPath>
constexpr Argument written(const char* name, DTypeSet types, const Shapes& shapes) {
  return detail::argument<kC, kPath...>(name, true, types, shapes);
}
// The gradient of the argument `of`, optional.
template <auto kC, auto... kPath>
constexpr Argument gradient(const char* name, DTypeSet types, const char* of) {
  return written<kC, kPath...>(name, types, "").optional().gradient_of(of);
}
constexpr Argument step(void (*function)(const void* args, Bound& bound)) {
  Argument a;
  a.step = function;
  return a;
}
template <std::size_t n>
constexpr std::array<Argument, n> of_forward(std::array<Argument, n> rows) {
  for (Argument& row : rows) row.is_of_forward = true;
  return rows;
}

// The elements of several arrays in one.
template <class T, std::size_t... kSizes>
constexpr std::array<T, (kSizes + ... + 0)> join(const std::array<T, kSizes>&... parts) {
  std::array<T, (kSizes + ... + 0)> all{};
  std::size_t n = 0;
  const auto add = [&](const auto& part) {
    for (const T& element : part) all[n++] = element;
  };
  (add(parts), ...);
  return all;
}

inline constexpr std::size_t kMaxDimensions = 24;  // that a table may name

// Any table, as what goes over it sees it.
struct ArgumentList {
  std::span<const Argument> arguments;
  std::span<const std::string_view> dimensions;
  std::span<const char* const> feature_names;  // from the lowest bit on
};

template <std::size_t kArguments>
struct ArgumentTable {
  std::array<Argument, kArguments> arguments{};
  std::array<std::string_view, kMaxDimensions> dimensions{};
  std::size_t count = 0;  // of dimensions

  // Of arguments, and of arrays of them that several tables share.
  template <class... Rows>
  constexpr explicit ArgumentTable(const Rows&... rows) {
    std::size_t n = 0;
    (add(rows, n), ...);
    for (Argument& a : arguments) {
      if (a.like_name) a.like = find(a.like_name);
      if (a.of_name) a.of = find(a.of_name), a.shapes = arguments[static_cast<std::size_t>(a.of)].shapes;
      for (Shape& shape : a.shapes.all)
        for (Dimension& dim : shape.dims)
          if (!dim.name.empty()) dim.id = static_cast<std::int8_t>(number(dim.name));
    }
  }

  consteval int id(std::string_view name) const {
    for (std::size_t i = 0; i < count; ++i)
      if (dimensions[i] == name) return static_cast<int>(i);
    throw "no such dimension";
  }

 private:
  constexpr void add(const Argument& row, std::size_t& n) { arguments[n++] = row; }
  template <std::size_t count_of_rows>
  constexpr void add(const std::array<Argument, count_of_rows>& rows, std::size_t& n) {
    for (const Argument& row : rows) arguments[n++] = row;
  }
  constexpr std::int8_t find(std::string_view name) const {
    for (std::size_t i = 0; i < kArguments; ++i)
      if (arguments[i].name == name) return static_cast<std::int8_t>(i);
    throw "no argument has this name";
  }
  constexpr std::size_t number(std::string_view name) {
    std::size_t i = 0;
    while (i < count && dimensions[i] != name) ++i;
    if (i == count) dimensions[count++] = name;  // past kMaxDimensions: does not compile
    return i;
  }
};
template <class T>
inline constexpr std::size_t kRowsOf = 1;
template <std::size_t n>
inline constexpr std::size_t kRowsOf<std::array<Argument, n>> = n;
template <class... Rows>
ArgumentTable(Rows...) -> ArgumentTable<(kRowsOf<Rows> + ...)>;

}  // namespace rapt
