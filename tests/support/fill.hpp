// What the tensors of a case are made of: layouts, lengths and numbers.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "support/tensor.hpp"

namespace rapt::testing {

using Dims = std::vector<std::int64_t>;

/// Strides for `shape` whose dimensions lie in memory in `order` (outermost first), the innermost `inner` elements
/// apart, with `gap` unused elements after each of the others.
Layout layout_of(const Dims& shape, const Dims& order, std::int64_t inner = 1, std::int64_t gap = 0);

/// Whether elements lie one after another, or two apart with unused ones between them and between rows and heads.
enum class Spacing { dense, gaps };
/// The row-major layout of `shape` with this spacing.
Layout spaced(const Dims& shape, Spacing spacing);
/// `rows` in 1 to 3 dimensions, as many of more than one row as its factors 3, 2 and 5 allow.
Dims rows_in(std::int64_t rows, std::size_t dims);

/// One sequence of length `longest`, the rest of `total` spread evenly over the others. Throws Error, naming
/// `argument`, when b sequences cannot have that total.
Dims ragged_lengths(std::int64_t b, std::int64_t longest, std::int64_t total, std::uint64_t seed, const char* argument);
/// [0, l[0], l[0] + l[1], ...].
Dims cumulated(const Dims& lengths);
/// As i32 or i64, depending on the seed.
Tensor index_tensor(const Dims& values, std::uint64_t seed, Placement placement);
void fill_normal(Tensor& tensor, std::mt19937_64 generator);

}  // namespace rapt::testing
