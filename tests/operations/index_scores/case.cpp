#include "operations/index_scores/case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "operations/select_topk/case.hpp"

namespace rapt::testing {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Layout layout(const Dims& shape, Spacing spacing, std::mt19937_64& random) {
  Dims order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (spacing == Spacing::dense) return layout_of(shape, order);
  const int64_t inner = 1 + static_cast<int64_t>(random() % 2);
  std::shuffle(order.begin(), order.end() - (inner == 1 ? 1 : 0), random);  // rows in one piece have theirs together
  return layout_of(shape, order, inner, 3);
}

Tensor integers(const Dims& shape, const Dims& values, Spacing spacing, Placement placement, std::mt19937_64& random) {
  const bool wide = random() % 2;
  Tensor tensor(wide ? DType::i64 : DType::i32, spaced(shape, spacing), placement);
  for (int64_t i = 0; i < tensor.size(); ++i) {
    const int64_t value = values[static_cast<std::size_t>(i)];
    if (wide) tensor.flat<int64_t>(i) = value;
    else tensor.flat<std::int32_t>(i) = static_cast<std::int32_t>(value);
  }
  return tensor;
}

/// What is wrong with the indices of a query of which only these scores are known; empty if nothing.
std::string violation(const std::vector<std::int32_t>& indices, const IndexScoresRow& known) {
  const auto number = [](std::size_t i) { return std::to_string(i); };
  const auto& scores = known.scores;  // clang 14 captures no structured bindings
  const auto& bounds = known.bounds;
  const auto at_most = [&](std::size_t j) { return std::isnan(scores[j]) ? kInfinity : scores[j] + bounds[j]; };
  std::vector<bool> selected(scores.size());
  std::size_t count = 0;
  for (; count < indices.size() && indices[count] >= 0; ++count) {
    const auto j = static_cast<std::size_t>(indices[count]);
    if (j >= scores.size() || scores[j] == -kInfinity) return "key " + number(j) + " is selected, which is not visible";
    if (selected[j]) return "key " + number(j) + " is selected twice";
    selected[j] = true;
    if (count == 0) continue;
    const auto before = static_cast<std::size_t>(indices[count - 1]);
    const bool is_nan = std::isnan(scores[j]), was_nan = std::isnan(scores[before]);
    const bool in_order = was_nan ? !is_nan || before < j : !is_nan && at_most(before) >= scores[j] - bounds[j];
    if (!in_order) return "key " + number(j) + " is selected after key " + number(before);
  }
  for (std::size_t i = count; i < indices.size(); ++i)
    if (indices[i] != -1) return "index " + number(i) + " is not -1";
  std::size_t visible = 0;
  for (const double score : scores) visible += score != -kInfinity;
  if (count != std::min(indices.size(), visible))
    return number(count) + " keys are selected, of " + number(visible) + " that are visible";
  // Every one of these is no worse than any that is left, as far as is known.
  double worst = kInfinity, best = -kInfinity;
  bool has_nan = false, all_nan = true;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    if (scores[j] == -kInfinity) continue;
    const bool is_nan = std::isnan(scores[j]);
    if (selected[j]) worst = std::min(worst, at_most(j)), all_nan = all_nan && is_nan;
    else if (is_nan) has_nan = true;
    else best = std::max(best, scores[j] - bounds[j]);
  }
  if (worst < best || (has_nan && !all_nan)) return "a key is left out that is better than one that is selected";
  return {};
}

}  // namespace

IndexScoresCase::IndexScoresCase(const IndexScoresProblem& given, std::uint64_t seed, Placement placement,
                                 Spacing spacing, LengthsAre lengths)
    : problem(given) {
  const IndexScoresProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 40);
  lengths_.assign(static_cast<std::size_t>(p.b), p.sk);
  if (p.lengths) {
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const std::uint64_t choice = (i + seed) % 4;
      if (lengths == LengthsAre::full) continue;
      if (p.causal && p.align == IndexScoresProblem::Align::none) lengths_[i] = p.sq;
      else if (choice < 2) lengths_[i] = choice == 0 ? p.sk : 0;
      else lengths_[i] = static_cast<int64_t>(random() % static_cast<std::uint64_t>(p.sk + 1));
    }
    seqlens = integers({p.b}, lengths_, spacing, placement, random);
  }
  q = Tensor(p.q_dtype, layout({p.b, p.sq, p.h, p.d}, spacing, random), placement);
  weights = Tensor(DType::f32, layout({p.b, p.sq, p.h}, spacing, random), placement);
  fill_normal(q, std::mt19937_64(seed * 64)), fill_normal(weights, std::mt19937_64(seed * 64 + 1));
  if (random() % 3 == 0) scale = random() % 2 ? 0.3f : -0.7f;
  make_keys(seed, placement, spacing);
  if (p.key_ranges) make_ranges(seed, placement, spacing);
  if (p.scores) scores = Tensor(DType::f32, layout({p.b, p.sq, p.sk}, spacing, random), placement);
  if (p.topk > 0) indices = Tensor(DType::i32, layout({p.b, p.sq, p.topk}, spacing, random), placement);
}

void IndexScoresCase::make_keys(std::uint64_t seed, Placement placement, Spacing spacing) {
  const IndexScoresProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 41);
  int64_t entries = p.b;
  const int64_t rows = p.page_size > 0 ? p.page_size : p.sk, columns = p.page_size > 0 ? p.sk / p.page_size : 0;
  if (p.page_size > 0) {
    entries = 2;
    for (const int64_t length : lengths_) entries += (length + rows - 1) / rows;
    Dims order(static_cast<std::size_t>(entries));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::size_t next = 0;
    for (const int64_t length : lengths_)
      for (int64_t m = 0; m < columns; ++m)
        pages_.push_back(m * rows < length ? order[next++] : m % 2 ? entries : -1);  // or no page
    block_table = integers({p.b, columns}, pages_, spacing, placement, random);
  }
  k = Tensor(p.k_dtype, layout({entries, rows, p.d}, spacing, random), placement);
  if (p.scales) k_scale = Tensor(DType::f32, layout({entries, rows}, spacing, random), placement);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(-1, 1);
  const bool codes = p.k_dtype == DType::i8;
  for (int64_t i = 0; i < p.b; ++i)
    for (int64_t j = 0; j < length(i); ++j) {
      const int64_t own = entry(i, j), at = row(j);
      for (int64_t c = 0; c < p.d; ++c) k.at({own, at, c}) = normal(random) * (codes ? 40.f : 1.f);
      if (p.scales) k_scale.at({own, at}) = std::exp2(uniform(random)) / (codes ? 40.f : 1.f);
    }
}

void IndexScoresCase::make_ranges(std::uint64_t seed, Placement placement, Spacing spacing) {
  const IndexScoresProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 42);
  Dims begins, ends;
  const auto between = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int64_t row = 0; row < p.b * p.sq; ++row) {
    const int64_t begin = between(-p.sk, p.sk + 5), end = between(begin - 3, 2 * p.sk + 5);
    begins.push_back(row % 5 == 4 ? std::numeric_limits<std::int32_t>::min() : begin);
    ends.push_back(row % 7 == 6 ? std::numeric_limits<std::int32_t>::max() : end);
  }
  const std::uint64_t which = seed % 3;  // 0: no end, 1: no begin
  if (which != 1) key_begin = integers({p.b, p.sq}, begins, spacing, placement, random);
  if (which != 0) key_end = integers({p.b, p.sq}, ends, spacing, placement, random);
}

int64_t IndexScoresCase::entry(int64_t sequence, int64_t j) const {
  if (problem.page_size == 0) return sequence;
  return pages_[static_cast<std::size_t>(sequence * (problem.sk / problem.page_size) + j / problem.page_size)];
}

void IndexScoresCase::repeat_keys(int64_t period) {
  for (int64_t i = 0; i < problem.b; ++i)
    for (int64_t j = period; j < length(i); ++j) {
      for (int64_t c = 0; c < problem.d; ++c)
        k.at({entry(i, j), row(j), c}) = k.at({entry(i, j % period), row(j % period), c});
      if (k_scale) k_scale.at({entry(i, j), row(j)}) = k_scale.at({entry(i, j % period), row(j % period)});
    }
}

IndexScoresArgs IndexScoresCase::args() {
  IndexScoresArgs args;
  args.q = q.view(), args.k = k.view(), args.weights = weights.view(), args.k_scale = k_scale.view();
  args.scores = scores.mutable_view(), args.indices = indices.mutable_view();
  args.seqlens = seqlens.view(), args.block_table = block_table.view();
  args.key_begin = key_begin.view(), args.key_end = key_end.view();
  args.scale = scale, args.relu = problem.relu, args.causal = problem.causal;
  args.align = align_of(problem);
  return args;
}

void IndexScoresCase::protect_inputs() {
  for (Tensor* tensor : {&q, &k, &weights, &k_scale, &seqlens, &block_table, &key_begin, &key_end})
    tensor->buffer().protect();
}

void IndexScoresCase::clear() {
  scores.poison(), indices.poison();
}

std::vector<Tensor*> IndexScoresCase::outputs() {
  std::vector<Tensor*> tensors;
  if (scores) tensors.push_back(&scores);
  if (indices) tensors.push_back(&indices);
  return tensors;
}

Verdict IndexScoresCase::verdict(int64_t row_step) {
  const IndexScoresProblem& p = problem;
  IndexScoresOracle oracle(args());
  Tally tally;
  const int64_t rows = p.b * p.sq;
  for (int64_t row = 0; row < rows; row = next_row(row, row_step, rows)) {
    const IndexScoresRow wanted = oracle.row(row / p.sq, row % p.sq);
    std::vector<float> written;
    for (int64_t j = 0; scores && j < p.sk; ++j) {
      const auto at = static_cast<std::size_t>(j);
      written.push_back(scores.flat<float>(row * p.sk + j));
      tally.add(static_cast<double>(written.back()), wanted.scores[at], wanted.bounds[at]);
    }
    if (!indices) continue;
    std::vector<std::int32_t> selected;
    for (int64_t i = 0; i < p.topk; ++i) selected.push_back(indices.flat<std::int32_t>(row * p.topk + i));
    const std::string where = " (query " + std::to_string(row % p.sq) + " of sequence " + std::to_string(row / p.sq);
    if (scores && selected != sorted_topk(written, p.topk))
      tally.violate("the indices are not those of the scores" + where + ")");
    if (const std::string what = violation(selected, wanted); !scores && !what.empty())
      tally.violate(what + where + ")");
  }
  for (const Tensor* tensor : outputs())
    if (!tensor->gaps_intact()) tally.violate("memory between the elements of an output was written");
  return tally.verdict();
}

std::vector<DType> CaseOf<IndexScoresProblem>::types(const IndexScoresProblem& p) {
  return {p.q_dtype, p.k_dtype};
}
double CaseOf<IndexScoresProblem>::tensor_bytes(const IndexScoresProblem& p) {
  const double rows = real(p.b) * real(p.sq);
  return rows * real(p.h) * (real(p.d) * bytes_of(p.q_dtype) + 4) +
         real(p.b) * real(p.sk) * (real(p.d) * bytes_of(p.k_dtype) + (p.scales ? 4 : 0)) +
         rows * (real(p.topk) + (p.scores ? real(p.sk) : 0)) * 4;
}
CaseOf<IndexScoresProblem>::Sizes CaseOf<IndexScoresProblem>::sizes(const IndexScoresProblem& p) {
  return {{"b", p.b}, {"h", p.h}, {"sq", p.sq}, {"sk", p.sk}, {"d", p.d}, {"topk", p.topk}, {"causal", p.causal}};
}
bool CaseOf<IndexScoresProblem>::is_large(const IndexScoresProblem& p) {
  constexpr double kMaxProducts = 256 << 20;
  return real(p.b * p.sq) * real(p.h * p.d) * real(p.sk) > kMaxProducts;
}

void move_tensors(IndexScoresArgs& args, DeviceTensors& tensors) {
  tensors.move(args.scores), tensors.move(args.indices);
  for (TensorView* t : {&args.q, &args.k, &args.weights, &args.k_scale, &args.seqlens, &args.block_table,
                        &args.key_begin, &args.key_end})
    tensors.move(*t);
}

}  // namespace rapt::testing
