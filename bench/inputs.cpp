#include "inputs.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "support/cache.hpp"

namespace rapt::bench {
namespace {

using Generator = std::mt19937_64;

/// All that a cache has no part in.
AttentionProblem without_cache(AttentionProblem p) {
  p.kv_dtype = DType::f32;
  p.hk = 1;
  p.k_groups = p.v_groups = p.page_size = p.k_tail = 0;
  p.zeros = p.head_scales = p.ring = p.kv_lengths = p.gathered = p.latent = false;
  return p;
}

testing::Tensor integers(const Layout& layout, const std::vector<std::int64_t>& values) {
  testing::Tensor tensor(DType::i64, layout);
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat<std::int64_t>(i) = values[static_cast<std::size_t>(i)];
  return tensor;
}

/// [b, sq, n]: each token's list full of different rows of `pool`, in random order; of fewer rows, of all of them.
testing::Tensor full_lists(const AttentionProblem& p, std::int64_t pool, Generator& generator) {
  testing::Tensor lists(DType::i32, Layout(std::array{p.b, p.sq, p.sk}));
  std::vector<std::int32_t> rows(static_cast<std::size_t>(std::max(pool, p.sk)));
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<std::int64_t>(i) < pool ? static_cast<std::int32_t>(i) : -1;
  for (std::int64_t i = 0; i < lists.size(); ++i) {
    // The first n of a shuffle; the next token goes on with what this one leaves.
    const auto at = static_cast<std::size_t>(i % p.sk);
    std::swap(rows[at], rows[at + generator() % (rows.size() - at)]);
    lists.flat<std::int32_t>(i) = rows[at];
  }
  return lists;
}

/// Keys (or values) of d elements in pages, or in entries of `own_rows` rows of their own.
testing::Cache filled(const AttentionProblem& p, DType dtype, std::int64_t own_rows, std::int64_t d,
                      std::int64_t groups, const std::vector<std::int64_t>& pages, Generator& generator) {
  constexpr std::uint64_t kOwnZeros = 3;  // such a seed gives every row that has scales of its own zeros, too
  const testing::Cache::Shared shared{p.head_scales, p.head_scales && p.page_size > 0};
  const std::int64_t rows = p.page_size > 0 ? p.page_size : own_rows;
  const std::int64_t entries = p.page_size > 0 ? static_cast<std::int64_t>(pages.size()) : p.b;
  const std::int64_t shape[] = {entries, p.hk, rows, dtype == DType::i4x2 ? d / 2 : d};
  const std::int64_t plain[] = {p.b, p.hk, own_rows, d};
  testing::Tensor values(DType::f32, Layout(plain));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < values.size(); ++i) values.flat(i) = normal(generator);
  testing::Cache cache(dtype, Layout(shape), groups, shared, p.zeros && groups > 0, kOwnZeros,
                       testing::Placement::heap);
  const auto slot = [&](std::int64_t n, std::int64_t j) -> testing::Slot {
    if (p.page_size == 0) return {n, j};
    return {pages[static_cast<std::size_t>((n * p.sk + j) / p.page_size)], j % p.page_size};
  };
  cache.fill(values, slot, generator);
  return cache;
}

}  // namespace

testing::Case timed_inputs(const AttentionProblem& problem, std::uint64_t seed,
                           std::optional<std::int64_t> given_pool) {
  const AttentionProblem& p = problem;
  const std::int64_t pool = given_pool.value_or(8 * p.sk);
  const bool cached = p.page_size > 0 || p.ring || p.gathered || p.k_groups > 0 || p.v_groups > 0;
  if (!cached || p.ragged_k >= 0 || p.layout != AttentionProblem::Layout::bhsd)
    return testing::Case(p, seed, testing::Placement::heap, pool);
  testing::Case inputs(without_cache(p), seed);
  inputs.problem = p;
  const std::int64_t own_rows = p.gathered ? pool : p.sk;
  Generator generator(seed);
  std::vector<std::int64_t> pages;
  if (p.kv_lengths)
    inputs.seqlens = integers(Layout(std::array{p.b}), std::vector(static_cast<std::size_t>(p.b), p.sk));
  if (p.page_size > 0) {
    pages.resize(static_cast<std::size_t>(p.b * (p.sk / p.page_size)));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), generator);
    inputs.block_table = integers(Layout(std::array{p.b, p.sk / p.page_size}), pages);
  }
  if (p.gathered) inputs.indices = full_lists(p, pool, generator);
  testing::Cache k = filled(p, p.kv_dtype, own_rows, p.d - p.k_tail, p.k_groups, pages, generator);
  inputs.k = std::move(k.rows), inputs.k_scale = std::move(k.scale), inputs.k_zero = std::move(k.zero);
  testing::Cache v = filled(p, p.kv_dtype, own_rows, p.dv, p.v_groups, pages, generator);
  inputs.v = std::move(v.rows), inputs.v_scale = std::move(v.scale), inputs.v_zero = std::move(v.zero);
  inputs.shares_coding = testing::Case::can_share_coding(p);
  if (p.k_tail > 0) inputs.k_tail = filled(p, p.k_tail_dtype, own_rows, p.k_tail, 0, pages, generator).rows;
  return inputs;
}

}  // namespace rapt::bench
