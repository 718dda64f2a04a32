#include "operations/attention/case_modifiers.hpp"

#include <cstddef>
#include <limits>
#include <random>

#include "support/fill.hpp"

namespace rapt::testing {
namespace {

using Generator = std::mt19937_64;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// [b or 1, hq or 1, sq or 1, sk or 1]; every second seed leaves out leading dimensions of size 1.
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

/// Calls set(position, masked) for every element; whole rows are masked now and then, but never row 0.
template <class Set>
void fill_mask(const Tensor& tensor, double masked_share, Generator generator, Set set) {
  const std::int64_t sk = tensor.layout().shape[static_cast<std::size_t>(tensor.layout().ndim - 1)];
  const std::int64_t rows = sk ? tensor.size() / sk : 0;
  std::uniform_real_distribution<double> uniform(0, 1);
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool whole = uniform(generator) < 1.0 / 16 && row != 0;
    for (std::int64_t j = 0; j < sk; ++j)
      set(row * sk + j, whole || (uniform(generator) < masked_share && (sk > 1 || row > 0)));
  }
}

}  // namespace

void ModifierTensors::make_modifiers(const AttentionProblem& p, std::uint64_t seed, Placement placement) {
  const auto generator = [seed](std::uint64_t tensor) { return Generator(seed * 64 + tensor); };
  Generator numbers = generator(11);
  dropout = {p.dropout, numbers(), numbers()};
  if (p.bias != AttentionProblem::kNone) {
    bias = Tensor(p.bias_dtype, broadcast_layout(p, p.bias, seed), placement);
    fill_normal(bias, generator(4));
    fill_mask(bias, 0.04, generator(5), [&](std::int64_t i, bool masked) {
      if (masked) bias.flat(i) = -kInfinity;
    });
  }
  if (p.mask != AttentionProblem::kNone) {
    mask = Tensor(DType::boolean, broadcast_layout(p, p.mask, seed + 1), placement);
    fill_mask(mask, 0.2, generator(6), [&](std::int64_t i, bool masked) { mask.flat<bool>(i) = !masked; });
  }
  if (p.alibi) {
    const bool per_batch = seed % 2 == 0;
    alibi = Tensor(p.bias_dtype, Layout(per_batch ? Dims{p.b, p.hq} : Dims{p.hq}), placement);
    for (std::int64_t i = 0; i < alibi.size(); ++i) {
      const std::int64_t h = i % p.hq, n = i / p.hq;
      alibi.flat(i) =
          std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(p.hq)) / static_cast<float>(n + 1);
    }
  }
  if (p.sinks) {
    sinks = Tensor(p.bias_dtype, Layout(Dims{p.hq}), placement);
    fill_normal(sinks, generator(7));
    if (p.hq > 1) sinks.flat(static_cast<std::int64_t>(seed % static_cast<std::uint64_t>(p.hq))) = -kInfinity;
  }
}

}  // namespace rapt::testing
