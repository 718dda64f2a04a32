#include "operations/index_scores/oracle.hpp"

#include <algorithm>
#include <cmath>

namespace rapt::testing {
namespace {

using namespace inputs;
using std::int64_t;

constexpr double kSmallest = 0x1p-126;  // normal number of fp32: kernels may take those below it for 0

int64_t read_integer(const TensorView& t, std::initializer_list<int64_t> index) {
  const int64_t at = offset_of(t, index);
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const std::int32_t*>(t.data)[at];
}

}  // namespace

int64_t IndexScoresOracle::length(int64_t i) const {
  if (args_.seqlens) return read_integer(args_.seqlens, {i});
  return args_.k.shape[1];
}

Range IndexScoresOracle::seen(int64_t i, int64_t token) const {
  const int64_t keys = length(i);
  int64_t begin = 0, end = keys;
  if (args_.causal) {
    int64_t offset = 0;
    if (args_.align && args_.align->kind == Align::Kind::bottom_right) offset = keys - args_.q.shape[1];
    if (args_.align && args_.align->kind == Align::Kind::offset) offset = args_.align->value;
    end = std::min(end, token + offset + 1);
  }
  if (args_.key_begin) begin = std::max(begin, read_integer(args_.key_begin, {i, token}));
  if (args_.key_end) end = std::min(end, read_integer(args_.key_end, {i, token}));
  return begin < end ? Range{begin, end - begin} : Range{};
}

void IndexScoresOracle::read_keys(int64_t i) {
  sequence_ = i;
  int64_t first = length(i), last = 0;
  for (int64_t token = 0; token < args_.q.shape[1]; ++token) {
    const Range range = seen(i, token);
    if (range.length == 0) continue;
    first = std::min(first, range.begin), last = std::max(last, range.begin + range.length);
  }
  const int64_t count = std::max<int64_t>(last - first, 0), d = args_.q.shape[3];
  first_ = first;
  keys_.resize(d, count), sizes_.resize(d, count);
  key_scales_.assign(static_cast<std::size_t>(count), 1), key_sums_.assign(static_cast<std::size_t>(count), 0);
  for (int64_t j = 0; j < count; ++j) {
    int64_t entry = i, row = first + j;
    if (args_.block_table) {
      const int64_t page_size = args_.k.shape[1];
      entry = read_integer(args_.block_table, {i, row / page_size}), row %= page_size;
    }
    const auto at = static_cast<std::size_t>(j);
    for (int64_t c = 0; c < d; ++c) {
      const double code = read_float(args_.k, {entry, row, c});
      keys_(c, j) = code, sizes_(c, j) = std::abs(code);
      key_sums_[at] += std::abs(code);
    }
    if (args_.k_scale) key_scales_[at] = read_float(args_.k_scale, {entry, row});
  }
}

IndexScoresRow IndexScoresOracle::row(int64_t i, int64_t token) {
  if (i != sequence_) read_keys(i);
  const int64_t h = args_.q.shape[2], d = args_.q.shape[3], count = keys_.cols();
  const auto sk =
      static_cast<std::size_t>(args_.block_table ? args_.block_table.shape[1] * args_.k.shape[1] : args_.k.shape[1]);
  IndexScoresRow result{std::vector<double>(sk, -kInfinity), std::vector<double>(sk)};
  const Range range = seen(i, token);
  if (range.length == 0) return result;
  Matrix q(h, d), q_sizes(h, d);
  for (int64_t head = 0; head < h; ++head)
    for (int64_t c = 0; c < d; ++c) {
      q(head, c) = read_float(args_.q, {i, token, head, c});
      q_sizes(head, c) = std::abs(q(head, c));
    }
  const Matrix products = times(q, keys_), sizes = times(q_sizes, sizes_);
  std::vector<double> weights, q_sums;
  for (int64_t head = 0; head < h; ++head) {
    weights.push_back(read_float(args_.weights, {i, token, head}));
    q_sums.push_back(q_sizes.row(head).sum());
  }
  const double scale = args_.scale ? static_cast<double>(*args_.scale) : 1 / std::sqrt(static_cast<double>(d));
  for (int64_t j = range.begin - first_; j < std::min(range.begin - first_ + range.length, count); ++j) {
    const auto own = static_cast<std::size_t>(j), at = static_cast<std::size_t>(first_ + j);
    double sum = 0, magnitude = 0, of_products = 0, lost = 0;
    for (int64_t head = 0; head < h; ++head) {
      const double product = products(head, j), weight = weights[static_cast<std::size_t>(head)];
      const double kept = args_.relu && product < 0 ? 0 : product;  // a NaN is neither
      sum += weight * kept;
      if (!std::isfinite(product)) continue;
      magnitude += std::abs(weight * kept);
      of_products += std::abs(weight) * sizes(head, j);
      lost += std::abs(weight) * (q_sums[static_cast<std::size_t>(head)] + key_sums_[own] + static_cast<double>(d)) +
              std::abs(kept) + 1;
    }
    const double factor = scale * key_scales_[own];
    result.scores[at] = factor * sum;
    result.bounds[at] = std::abs(factor) * (static_cast<double>(d + 2) * kUnit * of_products +
                                            static_cast<double>(h + 5) * kUnit * magnitude) +
                        kSmallest * (1 + std::abs(key_scales_[own])) * (1 + std::abs(scale)) * lost;
    if (!std::isfinite(result.scores[at])) result.bounds[at] = 0;
  }
  return result;
}

}  // namespace rapt::testing
