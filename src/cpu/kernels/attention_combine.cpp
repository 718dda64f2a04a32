// attention_combine: merges the partial results of rows over splits of their keys (split-KV), in the order of the
// splits:
#include "cpu/kernels/attention_table.hpp"
#include "cpu/tile/epilogue.hpp"

namespace rapt::cpu::RAPT_ISA {

// So many splits are summed before they are added to the row's sum: the rounding error of a sum grows with its length.
constexpr std::int64_t kShortSum = 8;

void attention_combine(const AttentionParams& p, const WorkItem& item, std::int64_t splits,
                       std::int64_t split_rows) noexcept {
  const FlushDenormals flush;
  const Head head(p, item);
  const std::int64_t rows = item.row_end - item.row_begin, stride = partial_floats(p.dv);
  for (std::int64_t r = 0; r < rows; ++r) {
    // [dv] of O, then -m, then l.
    const auto partial = [&](std::int64_t i) { return item.partial + (i * split_rows + r) * stride; };
    Row row;
    find_rows(head, item.row_begin + r, 1, &row);
    float sink_neg_m, sink_l;
    start_row(head, row, sink_neg_m, sink_l);
    bool any = sink_l != 0;
    float neg_m = sink_neg_m;
    for (std::int64_t i = 0; i < splits; ++i) {
      if (partial(i)[p.dv + 1] == 0) continue;  // saw no key
      const float neg_m_i = partial(i)[p.dv];
      neg_m = any && neg_m < neg_m_i ? neg_m : neg_m_i;
      any = true;
    }
    alignas(64) float factor[kMaxSplits];
    double all = sink_l == 0 ? 0 : static_cast<double>(sink_l * __builtin_exp2f(neg_m - sink_neg_m));
    for (std::int64_t i = 0; i < splits; ++i) {
      const float weight = partial(i)[p.dv + 1];
      if (weight == 0) continue;
      factor[i] = __builtin_exp2f(neg_m - partial(i)[p.dv]);
      all += static_cast<double>(factor[i]) * static_cast<double>(weight);
    }
    const auto l = static_cast<float>(all);
    const vec scale(l == 0 ? 0.f : 1 / l);
    with_float_type(p.out_type, [&](auto element) {
      auto* const out = static_cast<decltype(element)*>(p.out) + row_at(p.out_stride, head, row);
      for (std::int64_t c = 0; c < p.dv; c += kLanes) {  // partial results have room for whole vectors
        vec sum(0.f);
        for (std::int64_t first = 0; first < splits; first += kShortSum) {
          vec short_sum(0.f);
          for (std::int64_t i = first; i < min(first + kShortSum, splits); ++i) {
            if (partial(i)[p.dv + 1] == 0) continue;
            const vec x = load(partial(i) + c);
            const vec added = fma(vec(factor[i]), x, short_sum);
            short_sum = xsimd::select(x - x == vec(0.f), added,
                                      short_sum + x);  // a factor that has vanished hides no infinity
          }
          sum = sum + short_sum;
        }
        store_strided(out + c * p.out_stride.d, p.out_stride.d, min(kLanes, p.dv - c), sum * scale);
      }
    });
    if (p.lse) p.lse[row_at(p.lse_stride, head, row)] = lse_of(head, row, neg_m, l);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
