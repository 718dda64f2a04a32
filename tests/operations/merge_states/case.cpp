#include "operations/merge_states/case.hpp"

#include <algorithm>
#include <cmath>

#include "operations/attention/case.hpp"

namespace rapt::testing {
namespace {

using std::int64_t;

/// The half of a unit in the last place of 1.
double roundoff(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

}  // namespace

MergeCase::MergeCase(const MergeStatesProblem& given, std::uint64_t seed, Placement placement, Spacing spacing)
    : problem(given) {
  const MergeStatesProblem& p = problem;
  const Dims rows = rows_in(p.rows, 1 + seed % 3);
  Dims shape = rows;
  shape.push_back(p.dv);
  const auto first =
      static_cast<std::size_t>(std::find(kFloatTypes.begin(), kFloatTypes.end(), p.dtype) - kFloatTypes.begin());
  std::mt19937_64 random(seed);
  std::vector<bool> empty(static_cast<std::size_t>(p.rows));
  for (std::size_t row = 0; row < empty.size(); ++row) empty[row] = random() % 16 == 0;
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < p.count; ++i) {
    const bool other = spacing == Spacing::gaps && i > 0;
    outs.emplace_back(other ? kFloatTypes[(first + static_cast<std::size_t>(i)) % kFloatTypes.size()] : p.dtype,
                      spaced(shape, spacing), placement);
    lses.emplace_back(DType::f32, spaced(rows, spacing), placement);
    for (int64_t row = 0; row < p.rows; ++row) {
      const float around = row % 5 == 0 ? 1000.f : row % 5 == 1 ? -1000.f : 0.f;
      const bool no_keys = empty[static_cast<std::size_t>(row)] || random() % 8 == 0;
      lses.back().flat(row) = no_keys ? -kInf : around + 3 * normal(random);
      for (int64_t c = 0; !no_keys && c < p.dv; ++c) outs.back().flat(row * p.dv + c) = normal(random);
    }
  }
  out = Tensor(p.out_dtype, spaced(shape, spacing), placement);
  if (p.lse) lse = Tensor(DType::f32, spaced(rows, spacing), placement);
}

MergeStatesArgs MergeCase::args() {
  out_views_.clear(), lse_views_.clear();
  for (const Tensor& tensor : outs) out_views_.push_back(tensor.view());
  for (const Tensor& tensor : lses) lse_views_.push_back(tensor.view());
  return {out_views_, lse_views_, out.mutable_view(), lse.mutable_view()};
}

void MergeCase::protect_inputs() {
  for (std::vector<Tensor>* tensors : {&outs, &lses})
    for (Tensor& tensor : *tensors) tensor.buffer().protect();
}

void MergeCase::clear() {
  out.poison(), lse.poison();
}

Verdict MergeCase::verdict(int64_t row_step) const {
  const auto count = outs.size();
  const double denormal = out.dtype() == DType::f16 ? 0x1p-24 : 1e-37;
  Tally tally;
  std::vector<double> weight(count);
  for (int64_t row = 0; row < problem.rows; row = next_row(row, row_step, problem.rows)) {
    double largest = -HUGE_VAL, sum = 0;
    for (const Tensor& state : lses) largest = std::max<double>(largest, state.flat(row));
    for (const Tensor& state : lses)
      if (largest > -HUGE_VAL) sum += std::exp(static_cast<double>(state.flat(row)) - largest);
    const double total = largest > -HUGE_VAL ? largest + std::log(sum) : -HUGE_VAL;
    for (std::size_t i = 0; i < count; ++i)
      weight[i] = total > -HUGE_VAL ? std::exp(static_cast<double>(lses[i].flat(row)) - total) : 0;
    const double lost = total > -HUGE_VAL ? (std::fabs(total) + static_cast<double>(count) + 2) * 0x1p-24 : 0;
    for (int64_t c = 0; c < problem.dv; ++c) {
      double wanted = 0, magnitude = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if (weight[i] == 0) continue;  // whatever it holds
        const double term = weight[i] * static_cast<double>(outs[i].flat(row * problem.dv + c));
        wanted += term, magnitude += std::fabs(term);
      }
      const double bound = lost * magnitude + roundoff(out.dtype()) * std::fabs(wanted) + denormal;
      tally.add(static_cast<double>(out.flat(row * problem.dv + c)), wanted, total > -HUGE_VAL ? bound : 0);
    }
    if (lse) tally.add_lse(static_cast<double>(lse.flat(row)), total, 0x1.01p-24 * std::fabs(total) + 1e-12);
  }
  if (!out.gaps_intact() || (lse && !lse.gaps_intact()))
    tally.violate("memory between the elements of an output was written");
  return tally.verdict();
}

std::vector<DType> CaseOf<MergeStatesProblem>::types(const MergeStatesProblem& p) {
  return {p.dtype, p.out_dtype};
}
double CaseOf<MergeStatesProblem>::tensor_bytes(const MergeStatesProblem& p) {
  return real(p.rows) *
         (real(p.count) * (real(p.dv) * bytes_of(p.dtype) + 4) + real(p.dv) * bytes_of(p.out_dtype) + (p.lse ? 4 : 0));
}
CaseOf<MergeStatesProblem>::Sizes CaseOf<MergeStatesProblem>::sizes(const MergeStatesProblem& p) {
  return {{"rows", p.rows}, {"dv", p.dv}, {"count", p.count}};
}

void move_tensors(MergeStatesArgs& args, DeviceTensors& tensors) {
  tensors.move(args.outs), tensors.move(args.lses);
  tensors.move(args.out), tensors.move(args.lse);
}

}  // namespace rapt::testing
