// What a view spans in memory, and whether two views share some of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/pod.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 48;    // of a dimension: products of a few fit int64
inline constexpr std::int64_t kMaxOffset = std::int64_t{1} << 52;  // of positions
inline constexpr std::int64_t kMaxHeadSize = 1 << 13;              // scratch is proportional to it

std::string shape_text(const Layout& layout);

// The bytes from the first element to the end of the last; 0 without elements. Throws Error naming `name` for a view
// that is none: negative sizes or strides, overflow, null or misaligned memory, and with `writable` elements that
// overlap.
std::int64_t span_of(const std::string& name, const TensorView& view, bool writable);

// Whether views with these spans may have a byte in common. Interleaved ones (columns of one matrix; rows of k and v,
// or of codes and scales, in turn) are told apart where they step alike.
bool may_overlap(const TensorView& a, std::int64_t a_bytes, const TensorView& b, std::int64_t b_bytes);

// A tensor of a call, by its name there.
struct Checked {
  std::string name;
  TensorView view;
  std::int64_t bytes;
  bool written;
};
// Checks a tensor in host memory and adds it to `all`.
void take(std::vector<Checked>& all, const std::string& name, const TensorView& view, bool written);
// Throws Error naming a tensor that is written and shares memory with another of `all`.
void check_overlaps(std::span<const Checked> all);

// Whether no element of any is written.
bool writes_nothing(std::span<const Checked> all);

// Throws Error for a workspace that shares memory with one of `all`: it is written while every tensor is in use.
void check_apart(std::span<const std::byte> workspace, std::span<const Checked> all);

// Throws Error for a tensor that is not i32 or i64.
void check_integers(const std::string& name, const TensorView& view);
// Throws Error for a tensor that is no list of integers, of `count` if that is known.
void check_list(const std::string& name, const TensorView& view, std::optional<std::int64_t> count = {});
// Throws Error for `count` starts that do not rise from 0 to `total`. Returns the longest step.
std::int64_t check_starts(const std::string& name, const Integers& starts, std::int64_t count, std::int64_t total);

}  // namespace rapt
