// The shapes that an operation's arguments may have, as text that the compiler reads: "b hq sq d".
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "rapt/tensor.hpp"

namespace rapt {

// One dimension. Arguments whose shapes name the same dimension have the same size there.
//
//     sk     the size of the dimension sk
//     sk|1   that size, or 1: it broadcasts
//     sk|1>  that size or more, or 1
//     b?     that size, or 1, or missing: only in front; sq?> or more
//     b~     that size, or missing: only in front
//     b+1    the size of b plus 1
//     1      the size 1
struct Dimension {
  std::string_view name;  // empty: a size that is always `plus`
  std::int8_t id = -1;    // among the dimensions of the operation's table
  std::int8_t plus = 0;
  bool broadcastable = false, optional = false, at_least = false;
};

// The dimensions of an argument, outermost first. "..." in front stands for any number of dimensions, which are the
// same in all arguments that have it.
struct Shape {
  unsigned features = 0;  // holds for calls that have all of these features
  bool has_rows = false;
  std::int8_t count = 0, optional_count = 0;
  std::array<Dimension, kMaxDims> dims{};

  constexpr Shape(std::string_view text = "", unsigned when = 0) : features(when) {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find(' '), text.size());
      add(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  }
  constexpr void append(const Shape& more) {
    for (std::int8_t i = 0; i < more.count; ++i) push(more.dims[static_cast<std::size_t>(i)]);
  }
  constexpr std::span<const Dimension> dimensions() const { return {dims.data(), static_cast<std::size_t>(count)}; }

 private:
  constexpr void push(const Dimension& dim) {
    if (count == kMaxDims) throw "more than four dimensions";
    if (dim.optional && optional_count++ != count) throw "only dimensions in front may be missing";
    dims[static_cast<std::size_t>(count++)] = dim;
  }
  constexpr void add(std::string_view word) {
    if (word == "...") {
      if (count > 0 || has_rows) throw "... comes first";
      has_rows = true;
      return;
    }
    Dimension dim;
    std::size_t n = 0;
    while (n < word.size() && (word[n] == '_' || (word[n] >= 'a' && word[n] <= 'z'))) ++n;
    dim.name = word.substr(0, n), word.remove_prefix(n);
    if (dim.name.empty() && word == "1") dim.plus = 1;  // NOLINT(bugprone-branch-clone): the order of checks
    else if (dim.name.empty()) throw "a dimension without a name";
    else if (word == "+1") dim.plus = 1;
    else if (word == "|1" || word == "|1>") dim.broadcastable = true, dim.at_least = word.size() == 3;
    else if (word == "?" || word == "?>") dim.broadcastable = dim.optional = true, dim.at_least = word.size() == 2;
    else if (word == "~") dim.optional = true;
    else if (!word.empty()) throw "what follows a dimension's name is |1, |1>, ?, ?>, ~ or +1";
    push(dim);
  }
};

// An argument's shapes, by the features of the call. The first one holds where no other does; of others the first that
// fits.
struct Shapes {
  std::array<Shape, 5> all{};
  std::uint8_t count = 1;

  constexpr Shapes(const char* text) { all[0] = Shape(text); }
  constexpr Shapes when(unsigned features, const char* text) const {
    Shapes result = *this;
    result.all[result.count++] = Shape(text, features);
    return result;
  }
  constexpr Shapes operator+(const char* more) const {
    Shapes result = *this;
    for (std::uint8_t i = 0; i < count; ++i) result.all[i].append(Shape(more));
    return result;
  }
  // Every dimension may be 1, but for this one.
  constexpr Shapes broadcast_but(std::string_view kept) const {
    Shapes result = *this;
    for (Shape& shape : result.all)
      for (Dimension& dim : shape.dims) dim.broadcastable = dim.name != kept;
    return result;
  }
  constexpr const Shape& in(unsigned features) const {
    for (std::uint8_t i = 1; i < count; ++i)
      if ((all[i].features & features) == all[i].features) return all[i];
    return all[0];
  }
};

}  // namespace rapt
