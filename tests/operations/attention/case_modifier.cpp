#include "operations/attention/case_modifier.hpp"

#include <cstddef>
#include <cstdint>

#include "support/fill.hpp"

namespace rapt::testing::modifiers {

Layout broadcast_layout(const AttentionProblem& p, std::uint8_t full, std::uint64_t seed) {
  Dims shape{full & AttentionProblem::kFullB ? p.b : 1, full & AttentionProblem::kFullH ? p.hq : 1,
             full & AttentionProblem::kFullQ ? p.sq : 1, full & AttentionProblem::kFullK ? p.sk : 1};
  if (seed % 2 == 0) {
    std::size_t skip = 0;
    while (skip < 3 && !(full & (1u << skip))) ++skip;
    shape.erase(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(skip));
  }
  Dims order(shape.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  return p.layout == AttentionProblem::Layout::other ? layout_of(shape, order, 1, 3) : Layout(shape);
}

}  // namespace rapt::testing::modifiers
