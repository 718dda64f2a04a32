// What a view spans in memory, whether two views share some of it, and what validate() asks of tensors one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/pod.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 48;    // of a dimension: products of a few fit int64
inline constexpr std::int64_t kMaxOffset = std::int64_t{1} << 52;  // of positions
inline constexpr std::int64_t kMaxHeadSize = 1 << 13;              // scratch is proportional to it

std::string shape_text(const Layout& layout);
bool same_shape(const Layout& a, const Layout& b);

// The bytes from the first element to the end of the last; 0 without elements. Throws Error naming `name` for a view
// that is none: negative sizes or strides, overflow, null or misaligned memory, and with `writable` elements that
// overlap.
std::int64_t span_of(const std::string& name, const TensorView& view, bool writable);
// The same at less cost where nothing is wrong; -1 where span_of() has to look closer.
std::int64_t plain_span_of(const TensorView& view, bool writable);

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
// Checks a tensor, which has to be on `device`, and adds it to `all`.
void take(std::vector<Checked>& all, const std::string& name, const TensorView& view, bool written,
          const Device& device = {});
// Throws Error naming a tensor that is written and shares memory with another of `all`.
void check_overlaps(std::span<const Checked> all);

// Whether no element of any is written.
bool writes_nothing(std::span<const Checked> all);

// Throws Error for a workspace that shares memory with one of `all`: it is written while every tensor is in use.
void check_apart(std::span<const std::byte> workspace, std::span<const Checked> all);

// Throw Error for a type that is not taken: for others than f32; than f32, bf16 and f16; than those that caches have.
void check_f32(std::string_view name, DType dtype);
void check_float(std::string_view name, DType dtype);
void check_query_type(std::string_view name, DType dtype);
void check_cache_type(std::string_view name, DType dtype);
// Throws Error unless the dimension has this size, which is `what`.
void check_size(std::string_view name, const Layout& layout, int dim, std::int64_t wanted, std::string_view what);

// The integers along a dimension of a tensor that has no others.
inline Integers integers_of(const TensorView& t, std::size_t dim = 0) {
  return {t.data, t.strides[dim], t.dtype == DType::i64};
}
// Throws Error for a tensor that is not i32 or i64.
void check_integers(const std::string& name, const TensorView& view);
// Throws Error for a tensor that is no list of integers, of `count` if that is known.
void check_list(const std::string& name, const TensorView& view, std::optional<std::int64_t> count = {});
// Throws Error for `count` starts that do not rise from 0 to `total`. Returns the longest step.
std::int64_t check_starts(const std::string& name, const Integers& starts, std::int64_t count, std::int64_t total);

}  // namespace rapt
