// attention_backward of gathered keys: from the sums of a pool's rows to their gradients.
#include "cpu/kernels/backward_pool.hpp"
#include "cpu/tile/dtype.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Stores row i of `to`, n elements, from the row's sums at offset `at`.
void store_pool_row(const Gradient& to, const PoolItem& item, const PoolSums& pool, std::int64_t i, std::int64_t at,
                    std::int64_t n, float scale) {
  const float* const sums = pool.row(i) + at;
  const bool is_listed = pool.counts[i] > 0, has_accum = pool.accum_at > 0 && pool.counts[i] > kPoolInterval;
  with_float_type(to.type, [&](auto element) {
    auto* const row =
        static_cast<decltype(element)*>(to.data) + item.pool * to.stride.b + item.hk * to.stride.h + i * to.stride.s;
    for (std::int64_t c = 0; c < n; c += kLanes) {
      vec x(0.f);
      if (is_listed) {
        x = load(sums + c);
        if (has_accum) x = load(sums + pool.accum_at + c) + x;
        x = fma(x, vec(scale), vec(0.f));
      }
      store_strided(row + c * to.stride.d, to.stride.d, min(kLanes, n - c), x);
    }
  });
}

}  // namespace

void store_pool(const AttentionBackwardParams& p, const PoolItem& item, const PoolSums& pool) noexcept {
  const FloatEnvironment environment;
  for (std::int64_t i = item.begin; i < item.end; ++i) {
    if (p.grad_k) store_pool_row(p.grad_k, item, pool, i, 0, p.d, p.scale);
    if (p.grad_v) store_pool_row(p.grad_v, item, pool, i, pool.dv_at, p.dv, 1);
    pool.counts[i] = 0;
  }
}

}  // namespace rapt::cpu::RAPT_ISA
