#include "operations/select_topk/case.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

namespace rapt::testing {
namespace {

using std::int64_t;

float some_nan(std::mt19937_64& random) {
  const auto bits = static_cast<std::uint32_t>(random());
  return std::bit_cast<float>((bits & 0x80000000u) | 0x7f800000u | std::max(bits & 0x7fffffu, 1u));
}

float score_of(ScoreRow kind, int64_t j, float same, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  const std::uint64_t choice = random();
  const float sign = choice % 2 ? 1.f : -1.f;
  switch (kind) {
    case ScoreRow::normal:
      return normal(random);
    case ScoreRow::few_values:
      return static_cast<float>(choice % 5) - 2;
    case ScoreRow::zeros:
      return choice % 50 == 0 ? normal(random) : std::copysign(0.f, choice % 3 ? 1.f : -1.f);
    case ScoreRow::rising:
      return static_cast<float>(j) - 100.5f;
    case ScoreRow::falling:
      return 100.5f - static_cast<float>(j);
    case ScoreRow::same:
      return same;
    case ScoreRow::mostly_hidden:
      return choice % 20 == 0 ? normal(random) : -kInf;
    case ScoreRow::hidden:
      return -kInf;
    case ScoreRow::nonfinite:
      return choice % 8 == 0   ? some_nan(random)
             : choice % 8 == 1 ? sign * kInf
             : choice % 8 == 2 ? sign * std::numeric_limits<float>::denorm_min()
                               : normal(random);
    case ScoreRow::mostly_nan:
      break;
  }
  return choice % 50 == 0 ? normal(random) : some_nan(random);
}

}  // namespace

std::vector<std::int32_t> sorted_topk(const std::vector<float>& scores, int64_t n) {
  std::vector<std::int32_t> positions;
  for (std::size_t j = 0; j < scores.size(); ++j)
    if (scores[j] != -kInf) positions.push_back(static_cast<std::int32_t>(j));
  std::stable_sort(positions.begin(), positions.end(), [&](std::int32_t a, std::int32_t b) {
    const float x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return std::isnan(x) ? !std::isnan(y) : x > y;
  });
  positions.resize(static_cast<std::size_t>(n), -1);
  return positions;
}

SelectTopkCase::SelectTopkCase(const SelectTopkProblem& given, std::uint64_t seed, Placement placement, Spacing spacing)
    : problem(given) {
  const SelectTopkProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 50);
  Dims shape = p.rows == 1 && seed % 4 == 0 ? Dims{} : rows_in(p.rows, 1 + seed % 3);
  shape.push_back(0);
  const auto layout = [&](int64_t last) {
    shape.back() = last;
    Dims order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    if (spacing == Spacing::dense) return layout_of(shape, order);
    std::shuffle(order.begin(), order.end(), random);
    return layout_of(shape, order, random() % 2 ? 2 : 1, 3);
  };
  scores = Tensor(DType::f32, layout(p.sk), placement);
  indices = Tensor(DType::i32, layout(p.n), placement);
  for (int64_t row = 0; row < p.rows; ++row) {
    const auto kind = static_cast<ScoreRow>((static_cast<std::uint64_t>(row) + seed) % kScoreRows);
    const float same = static_cast<float>(random() % 3) - 1;
    for (int64_t j = 0; j < p.sk; ++j) scores.flat<float>(row * p.sk + j) = score_of(kind, j, same, random);
  }
}

SelectTopkArgs SelectTopkCase::args() {
  return {scores.view(), indices.mutable_view()};
}

void SelectTopkCase::protect_inputs() {
  scores.buffer().protect();
}

void SelectTopkCase::clear() {
  indices.poison();
}

Verdict SelectTopkCase::verdict(int64_t row_step) const {
  Tally tally;
  std::vector<float> row_scores(static_cast<std::size_t>(problem.sk));
  for (int64_t row = 0; row < problem.rows; row = next_row(row, row_step, problem.rows)) {
    for (int64_t j = 0; j < problem.sk; ++j)
      row_scores[static_cast<std::size_t>(j)] = scores.flat<float>(row * problem.sk + j);
    const std::vector<std::int32_t> wanted = sorted_topk(row_scores, problem.n);
    for (int64_t i = 0; i < problem.n; ++i) {
      const auto got = indices.flat<std::int32_t>(row * problem.n + i);
      if (const auto want = wanted[static_cast<std::size_t>(i)]; got != want)
        tally.violate("index " + std::to_string(i) + " of row " + std::to_string(row) + " is " + std::to_string(got) +
                      " in place of " + std::to_string(want));
    }
  }
  if (!indices.gaps_intact()) tally.violate("memory between the elements of an output was written");
  return tally.verdict();
}

std::vector<DType> CaseOf<SelectTopkProblem>::types(const SelectTopkProblem&) {
  return {DType::f32};
}
double CaseOf<SelectTopkProblem>::tensor_bytes(const SelectTopkProblem& p) {
  return real(p.rows) * (real(p.sk) + real(p.n)) * 4;
}
CaseOf<SelectTopkProblem>::Sizes CaseOf<SelectTopkProblem>::sizes(const SelectTopkProblem& p) {
  return {{"rows", p.rows}, {"sk", p.sk}, {"n", p.n}};
}
SelectTopkCase CaseOf<SelectTopkProblem>::timed(const SelectTopkProblem& problem, std::uint64_t seed) {
  SelectTopkCase inputs(problem, seed);
  fill_normal(inputs.scores, std::mt19937_64(seed));
  return inputs;
}

void move_tensors(SelectTopkArgs& args, DeviceTensors& tensors) {
  tensors.move(args.scores), tensors.move(args.indices);
}

}  // namespace rapt::testing
