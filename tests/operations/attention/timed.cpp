// The tensors of attention problems that are timed, and what the rapt command asks of attention.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/attention/layouts.hpp"
#include "operations/attention/oracle.hpp"
#include "support/cache.hpp"

namespace rapt::testing {
namespace {

using Generator = std::mt19937_64;

/// All that a cache has no part in.
AttentionProblem without_cache(AttentionProblem p) {
  p.kv_dtype = DType::f32;
  p.hk = 1;
  p.k_groups = p.v_groups = p.k_tail = 0;
  p.zeros = p.head_scales = p.kv_lengths = p.latent = false;
  lay_in_order(p);
  return p;
}

Tensor integers(const Layout& layout, const std::vector<std::int64_t>& values) {
  Tensor tensor(DType::i64, layout);
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat<std::int64_t>(i) = values[static_cast<std::size_t>(i)];
  return tensor;
}

/// [b, sq, n]: each token's list full of different rows of `pool`, in random order; of fewer rows, of all of them.
Tensor full_lists(const AttentionProblem& p, std::int64_t pool, Generator& generator) {
  Tensor lists(DType::i32, Layout(std::array{p.b, p.sq, p.sk}));
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
Cache filled(const AttentionProblem& p, DType dtype, std::int64_t own_rows, std::int64_t d, std::int64_t groups,
             const std::vector<std::int64_t>& pages, Generator& generator) {
  constexpr std::uint64_t kOwnZeros = 3;  // such a seed gives every row that has scales of its own zeros, too
  const Cache::Shared shared{p.head_scales, p.head_scales && p.page_size > 0};
  const std::int64_t rows = p.page_size > 0 ? p.page_size : own_rows;
  const std::int64_t entries = p.page_size > 0 ? static_cast<std::int64_t>(pages.size()) : p.b;
  const std::int64_t shape[] = {entries, p.hk, rows, dtype == DType::i4x2 ? d / 2 : d};
  const std::int64_t plain[] = {p.b, p.hk, own_rows, d};
  Tensor values(DType::f32, Layout(plain));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < values.size(); ++i) values.flat(i) = normal(generator);
  Cache cache(dtype, Layout(shape), groups, shared, p.zeros && groups > 0, kOwnZeros, Placement::heap);
  const auto slot = [&](std::int64_t n, std::int64_t j) -> Slot {
    if (p.page_size == 0) return {n, j};
    return {pages[static_cast<std::size_t>((n * p.sk + j) / p.page_size)], j % p.page_size};
  };
  cache.fill(values, slot, generator);
  return cache;
}

/// The part of `t` at `index` of dimension `dim`.
template <class View>
View slice(View t, int dim, std::int64_t index) {
  if (!t) return t;
  const auto at = static_cast<std::size_t>(dim);
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(t.data)>>, const std::byte, std::byte>;
  const std::int64_t offset = index * t.strides[at] * static_cast<std::int64_t>(size_of(t.dtype));
  t.data = static_cast<Byte*>(t.data) + offset;
  t.shape[at] = 1;
  return t;
}

/// The call for query head h alone.
AttentionArgs one_head(AttentionArgs args, std::int64_t h) {
  const std::int64_t group = args.q.shape[1] / args.kv.k.shape[1];
  KvSource& kv = args.kv;
  for (TensorView* t : {&kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero, &kv.k_tail})
    *t = slice(*t, 1, h / group);
  args.q = slice(args.q, 1, h), args.q_scale = slice(args.q_scale, 1, h);
  args.out = slice(args.out, 1, h);
  args.lse = slice(args.lse, 1, h);
  for (TensorView* t : {&args.score.bias, &args.score.mask}) {
    const int dim = t->ndim - 3;
    if (dim >= 0 && t->shape[static_cast<std::size_t>(dim)] != 1) *t = slice(*t, dim, h);
  }
  args.score.alibi = slice(args.score.alibi, args.score.alibi.ndim - 1, h);
  args.score.sinks = slice(args.score.sinks, 0, h);
  return args;
}

}  // namespace

Case timed_case(const AttentionProblem& problem, std::uint64_t seed, std::optional<std::int64_t> given_pool) {
  const AttentionProblem& p = problem;
  const std::int64_t pool = given_pool.value_or(8 * p.sk);
  const bool cached = !lies_in_order(p) || p.k_groups > 0 || p.v_groups > 0;
  if (!cached || p.ragged_k >= 0 || p.layout != AttentionProblem::Layout::bhsd)
    return Case(p, seed, Placement::heap, pool);
  Case inputs(without_cache(p), seed);
  inputs.problem = p;
  const std::int64_t own_rows = has_positions(p) ? p.sk : pool;
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
  if (!has_positions(p)) inputs.indices = full_lists(p, pool, generator);
  Cache k = filled(p, p.kv_dtype, own_rows, p.d - p.k_tail, p.k_groups, pages, generator);
  inputs.k = std::move(k.rows), inputs.k_scale = std::move(k.scale), inputs.k_zero = std::move(k.zero);
  Cache v = filled(p, p.kv_dtype, own_rows, p.dv, p.v_groups, pages, generator);
  inputs.v = std::move(v.rows), inputs.v_scale = std::move(v.scale), inputs.v_zero = std::move(v.zero);
  inputs.shares_coding = Case::can_share_coding(p);
  if (p.k_tail > 0) inputs.k_tail = filled(p, p.k_tail_dtype, own_rows, p.k_tail, 0, pages, generator).rows;
  return inputs;
}

std::vector<DType> CaseOf<AttentionProblem>::types(const AttentionProblem& p) {
  return {p.q_dtype, p.kv_dtype, p.out_dtype};
}
double CaseOf<AttentionProblem>::tensor_bytes(const AttentionProblem& p) {
  const double queries = real(p.hq) * (p.ragged_q >= 0 ? real(p.ragged_q) : real(p.b) * real(p.sq));
  const double keys = real(p.hk) * (p.ragged_k >= 0 ? real(p.ragged_k) : real(p.b) * real(p.sk));
  const auto term = [&](std::uint8_t dims, double size) {
    if (dims == AttentionProblem::kNone) return 0.0;
    return size * (dims & AttentionProblem::kFullB ? real(p.b) : 1) *
           (dims & AttentionProblem::kFullH ? real(p.hq) : 1) * (dims & AttentionProblem::kFullQ ? real(p.sq) : 1) *
           (dims & AttentionProblem::kFullK ? real(p.sk) : 1);
  };
  const double scales = p.head_scales ? 0 : real(p.k_groups + p.v_groups);
  return queries * (real(p.d) * bytes_of(p.q_dtype) + real(p.dv) * bytes_of(p.out_dtype) +
                    (p.q_scale ? bytes_of(DType::f32) : 0)) +
         keys * (real(p.d - p.k_tail + p.dv) * bytes_of(p.kv_dtype) + real(p.k_tail) * bytes_of(p.k_tail_dtype) +
                 scales * (p.zeros ? 8 : 4)) +
         term(p.bias, 4) + term(p.mask, 1) + (p.lse ? 4 * queries : 0);
}
CaseOf<AttentionProblem>::Sizes CaseOf<AttentionProblem>::sizes(const AttentionProblem& p) {
  return {{"b", p.b},   {"hq", p.hq}, {"hk", p.hk}, {"sq", p.sq},
          {"sk", p.sk}, {"d", p.d},   {"dv", p.dv}, {"causal", p.causal}};
}

bool CaseOf<AttentionProblem>::is_large(const AttentionProblem& p) {
  constexpr std::int64_t kMaxScores = 8 << 20;
  return p.b * p.hq * p.sq * p.sk > kMaxScores;
}

Verdict CaseOf<AttentionProblem>::verify(Case& inputs, const Context& context, std::int64_t rows) {
  inputs.poison_outputs();
  const AttentionArgs args = inputs.args();
  attention(args, context);
  const std::int64_t step = step_over(inputs.problem.sq, rows);
  const bool intact = inputs.out.gaps_intact() && inputs.lse.gaps_intact();
  const auto verdict_of = [&](const AttentionArgs& part) -> Verdict {
    const Errors errors = compare(part, oracle(part, step));
    const std::string violation = violation_of(errors);
    const bool only_gaps = violation.empty() && !intact;
    return {errors, only_gaps ? "memory between the elements of an output was written" : violation};
  };
  const AttentionProblem& p = inputs.problem;
  const double of_head = static_cast<double>(p.b) * static_cast<double>(p.sk) * static_cast<double>(p.d + p.dv);
  // Past so many elements of keys and values, each counted for all the heads that read it, heads are sampled as well.
  constexpr double kMaxElements = 32 << 20;
  const double heads = std::max(2.0, std::floor(kMaxElements / of_head));
  if (rows == 0 || static_cast<double>(p.hq) <= heads) return verdict_of(args);
  Verdict verdict;
  const std::int64_t stride = (p.hq / static_cast<std::int64_t>(heads)) | 1;
  for (std::int64_t h = 0; h < p.hq && verdict.violation.empty(); h += stride) {
    const Verdict head = verdict_of(one_head(args, h));
    take_worst(verdict.errors, head.errors);
    verdict.violation = head.violation.empty() ? "" : "head " + std::to_string(h) + ": " + head.violation;
  }
  return verdict;
}

}  // namespace rapt::testing
