#include "operations/index_scores/case.hpp"
#include "support/dtypes.hpp"
#include "support/random.hpp"

namespace rapt::testing {

IndexScoresProblem sample_index_scores(Random& random) {
  IndexScoresProblem p;
  const bool bf16 = one_in(random, 2);  // which most kernels take
  p.q_dtype = bf16 ? DType::bf16 : static_cast<DType>(between(random, 0, 2));
  constexpr auto kLast = static_cast<std::int64_t>(kIndexKeyTypes.size()) - 1,
                 kFirstCode = static_cast<std::int64_t>(kFloatTypes.size());
  p.k_dtype = one_in(random, 3)
                  ? p.q_dtype
                  : kIndexKeyTypes[static_cast<std::size_t>(between(random, bf16 ? kFirstCode : 0, kLast))];
  p.scales = is_integer(p.k_dtype) || (between(random, 0, 1) == 1 && is_quantized(p.k_dtype));
  p.b = between(random, 1, 3);
  p.sq = one_in(random, 3) ? 1 : between(random, 1, 40);
  p.sk = one_in(random, 4) ? between(random, 1000, 3000) : between(random, 1, 400);
  p.h = one_in(random, 3) ? pick(random, {1, 16, 32, 64}) : between(random, 1, 70);
  p.d = one_in(random, 2) ? pick(random, {32, 64, 96, 128}) : between(random, 1, 200);
  while (p.b * p.sq * p.sk * p.h * p.d > std::int64_t{1} << 24 && (p.b > 1 || p.sq > 1 || p.h > 1)) {
    if (p.b > 1) --p.b;
    else if (p.sq > 1) p.sq = (p.sq + 1) / 2;
    else p.h = (p.h + 1) / 2;
  }
  p.lengths = one_in(random, 2);
  if (p.lengths && one_in(random, 2)) {
    p.page_size = pick(random, {1, 7, 16, 32, 48, 64});
    p.sk = (p.sk + p.page_size - 1) / p.page_size * p.page_size;
  }
  p.causal = !one_in(random, 3);
  if (p.causal || one_in(random, 4)) p.align = static_cast<IndexScoresProblem::Align>(between(random, 1, 3));
  if (p.align == IndexScoresProblem::Align::offset) p.align_offset = between(random, -p.sq, p.sk);
  if (p.causal && one_in(random, 5) && (p.sk == p.sq || (p.lengths && p.sk >= p.sq)))
    p.align = IndexScoresProblem::Align::none, p.align_offset = 0;
  p.relu = !one_in(random, 3);
  p.key_ranges = one_in(random, 3);
  if (!one_in(random, 4)) p.topk = one_in(random, 4) ? between(random, 1000, 2100) : between(random, 1, 300);
  p.scores = p.topk == 0 || one_in(random, 2);
  return p;
}

}  // namespace rapt::testing
