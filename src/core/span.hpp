// What a view spans in memory, whether two views share some of it, and checks of single arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/pod.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

inline constexpr std::int64_t kMaxOffset = std::int64_t{1} << 52;  // of positions
inline constexpr std::int64_t kMaxHeadDim = 1 << 13;               // scratch is proportional to it

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

// The integers along a dimension of a tensor that has no others.
inline Integers integers_of(const TensorView& t, std::size_t dim = 0) {
  return {t.data, t.strides[dim], t.dtype == DType::i64};
}
// Throws Error for `count` starts that do not rise from 0 to `total`. Returns the longest step.
std::int64_t check_starts(const std::string& name, const Integers& starts, std::int64_t count, std::int64_t total);

// Throws Error unless `total` rows can be those of `b` ragged sequences, the longest of `longest`. -1: not ragged.
void check_ragged(const char* name, std::int64_t total, const char* rows, std::int64_t b, std::int64_t longest);
// Throws Error that names q for more than 2^52 rows: one for each batch entry, head and token.
void check_row_count(std::int64_t b, std::int64_t heads, std::int64_t tokens);

// Throws Error for an entry of the table that is none of the `count` pages of the tensor `keys`. place() says where it
// stands.
[[noreturn]] void refuse_page(const char* table, const char* keys, std::int64_t count, std::int64_t page,
                              const std::string& place);
template <class Place>
void check_page(const char* table, const char* keys, std::int64_t count, std::int64_t page, const Place& place) {
  if (page < 0 || page >= count) refuse_page(table, keys, count, page, place());
}

}  // namespace rapt
