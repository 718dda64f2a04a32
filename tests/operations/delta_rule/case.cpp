#include "operations/delta_rule/case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "support/entries.hpp"

namespace rapt::testing {
namespace {

using std::int64_t;

float uniform(std::mt19937_64& random, float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(random);
}

float log_decay(std::mt19937_64& random, Decays decays) {
  const bool rare = random() % 20 == 0;
  switch (decays) {
    case Decays::weak:
      return uniform(random, -0.02f, 0);
    case Decays::some:
      return uniform(random, -1, 0);
    case Decays::strong:
      return -5;
    case Decays::mostly_weak:
      return rare ? uniform(random, -70, -5) : uniform(random, -0.02f, 0);
    case Decays::resets:
      break;
  }
  return rare ? -600 : uniform(random, -0.02f, 0);
}

std::uint32_t bits_of(const Tensor& state, int64_t at) {
  return state.dtype() == DType::f32 ? state.flat<std::uint32_t>(at) : state.flat<std::uint16_t>(at);
}

void fill(Tensor& tensor, std::mt19937_64 random, float size) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = size * normal(random);
}

}  // namespace

DeltaRuleCase::DeltaRuleCase(const DeltaRuleProblem& given, std::uint64_t seed, Placement placement, Spacing spacing,
                             std::optional<Decays> decays)
    : problem(given) {
  const DeltaRuleProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 30);
  const int64_t h = p.state_heads();
  lengths_.assign(static_cast<std::size_t>(p.b), p.t);
  if (p.ragged >= 0) {
    if (p.b > 0) lengths_ = ragged_lengths(p.b, p.t, p.ragged, seed, "ragged");
    cu_seqlens = index_tensor(cumulated(lengths_), seed, placement);
  }
  // One of q, k and v at least has the problem's type.
  const std::size_t typed = random() % 3;
  const auto type = [&](std::size_t i) {
    return p.dtype != DType::f32 && i != typed && spacing == Spacing::gaps && random() % 3 == 0 ? DType::f32 : p.dtype;
  };
  const auto make = [&](DType dtype, const Dims& rest) {
    return Tensor(dtype, layout(rest, random() % 2 == 0, spacing), placement);
  };
  q = make(type(0), {p.hq, p.d}), k = make(type(1), {p.hk, p.d}), v = make(type(2), {p.hv, p.dv});
  out = make(p.out_dtype, {std::max(p.hq, h), p.dv});
  const float size = 1 / std::sqrt(static_cast<float>(std::max<int64_t>(p.d, 1)));
  fill(q, std::mt19937_64(seed * 64), p.l2norm ? 3 : size),
      fill(k, std::mt19937_64(seed * 64 + 1), p.l2norm ? 3 : size);
  if (!p.l2norm) {  // the delta rule with keys longer than 1 grows without end
    for (int64_t row = 0; row < k.size() / std::max<int64_t>(p.d, 1); ++row) {
      float sum = 0;
      for (int64_t c = 0; c < p.d; ++c) sum += k.flat(row * p.d + c) * k.flat(row * p.d + c);
      for (int64_t c = 0; sum > 1 && c < p.d; ++c) k.flat(row * p.d + c) *= 0.999f / std::sqrt(sum);
    }
  }
  fill_normal(v, std::mt19937_64(seed * 64 + 2));
  if (random() % 3 == 0) scale = 0.3f;
  if (p.beta) {
    beta = Tensor(random() % 2 ? p.dtype : DType::f32, layout({h}, random() % 2 == 0, spacing), placement);
    beta_sigmoid = random() % 2, beta_double = random() % 3 == 0;
    std::mt19937_64 own(seed * 64 + 4);
    for (int64_t i = 0; i < beta.size(); ++i)
      beta.flat(i) = beta_sigmoid ? uniform(own, -6, 6) : uniform(own, 0.01f, 0.99f);
  }
  if (p.decay != Decay::none)
    make_decay(seed, decays.value_or(static_cast<Decays>(seed % kDecays)), placement, spacing);
  if (p.state) make_states(seed, placement, spacing);
  clear();
}

Layout DeltaRuleCase::layout(const Dims& rest, bool heads_first, Spacing spacing) const {
  Dims shape = problem.ragged >= 0 ? Dims{problem.ragged} : Dims{problem.b, problem.t};
  const auto token = static_cast<int64_t>(shape.size()) - 1;
  shape.insert(shape.end(), rest.begin(), rest.end());
  Dims order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (heads_first) std::swap(order[static_cast<std::size_t>(token)], order[static_cast<std::size_t>(token + 1)]);
  return spacing == Spacing::gaps ? layout_of(shape, order, 2, 3) : layout_of(shape, order);
}

void DeltaRuleCase::make_decay(std::uint64_t seed, Decays decays, Placement placement, Spacing spacing) {
  const DeltaRuleProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 31);
  const int64_t h = p.state_heads();
  const DType dtype = random() % 3 ? DType::f32 : p.dtype;
  if (p.decay == Decay::constant) g = Tensor(dtype, spaced({h}, spacing), placement);
  else
    g = Tensor(dtype, layout(p.decay == Decay::channel ? Dims{h, p.d} : Dims{h}, random() % 2 == 0, spacing),
               placement);
  std::mt19937_64 own(seed * 64 + 3);
  for (int64_t i = 0; i < g.size(); ++i) g.flat(i) = p.gate ? uniform(own, -6, 3) : log_decay(own, decays);
  if (!p.gate) return;
  if (random() % 4) {
    a_log = Tensor(DType::f32, spaced({h}, spacing), placement);
    for (int64_t i = 0; i < h; ++i) a_log.flat(i) = std::log(uniform(own, 0.1f, 16));
  }
  if (random() % 4) {
    dt_bias = Tensor(DType::f32, spaced(p.decay == Decay::channel ? Dims{h, p.d} : Dims{h}, spacing), placement);
    fill_normal(dt_bias, std::mt19937_64(seed * 64 + 5));
  }
  if (random() % 2) gate_lower_bound = decays == Decays::strong ? -600.f : -5.f;
}

void DeltaRuleCase::make_states(std::uint64_t seed, Placement placement, Spacing spacing) {
  const DeltaRuleProblem& p = problem;
  std::mt19937_64 random(seed * 64 + 32);
  const std::size_t n = static_cast<std::size_t>(std::max<int64_t>(p.steps, 1)), count = lengths_.size() * n;
  slots_.resize(count);
  std::iota(slots_.begin(), slots_.end(), 0);
  int64_t states = p.b;
  if (p.slots) {
    states = static_cast<int64_t>(count) + 3;
    Dims all(static_cast<std::size_t>(states));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    std::copy_n(all.begin(), count, slots_.begin());
    if (count > 1 && random() % 2) slots_[random() % count] = -1;
    const bool wide = random() % 2;
    state_slots = Tensor(wide ? DType::i64 : DType::i32, spaced(p.steps > 0 ? Dims{p.b, p.steps} : Dims{p.b}, spacing),
                         placement);
    for (std::size_t i = 0; i < count; ++i) {
      if (wide) state_slots.flat<int64_t>(static_cast<int64_t>(i)) = slots_[i];
      else state_slots.flat<std::int32_t>(static_cast<int64_t>(i)) = static_cast<std::int32_t>(slots_[i]);
    }
  }
  accepted_.assign(lengths_.size(), 1);
  if (p.steps > 0 && random() % 3) {
    for (int64_t& a : accepted_) a = 1 + static_cast<int64_t>(random() % n);
    accepted = index_tensor(accepted_, seed, placement);
  }
  const std::uint64_t which = (seed + seed / 5 + 2) % 5;  // 0: no initial state, 1: no final one
  in_place = which > 2;
  const Dims shape{states, p.state_heads(), p.d, p.dv}, order = random() % 2 ? Dims{0, 1, 3, 2} : Dims{0, 1, 2, 3};
  const Layout layout = spacing == Spacing::gaps ? layout_of(shape, order, 2, 3) : layout_of(shape, order);
  // With both states, apart, one may be f32.
  const std::uint64_t f32 = which == 2 && spacing == Spacing::gaps ? std::mt19937_64(seed * 64 + 34)() % 4 : 0;
  if (which != 0) {
    initial = Tensor(f32 == 1 ? DType::f32 : p.state_dtype, layout, placement);
    std::normal_distribution<float> normal;
    const int64_t elements = states > 0 ? initial.size() / states : 0;
    for (int64_t b = 0; b < p.b; ++b) {
      const int64_t from = slot(b, accepted_[static_cast<std::size_t>(b)] - 1);
      for (int64_t i = 0; from >= 0 && i < elements; ++i) initial.flat(from * elements + i) = 0.5f * normal(random);
    }
  }
  if (which != 1) final = Tensor(f32 == 2 ? DType::f32 : p.state_dtype, layout, placement);
}

int64_t DeltaRuleCase::slot(int64_t sequence, int64_t step) const {
  return slots_[static_cast<std::size_t>(sequence * std::max<int64_t>(problem.steps, 1) + step)];
}
int64_t DeltaRuleCase::length(int64_t sequence) const {
  return lengths_[static_cast<std::size_t>(sequence)];
}

DeltaRuleArgs DeltaRuleCase::args() {
  DeltaRuleArgs args;
  args.q = q.view(), args.k = k.view(), args.v = v.view(), args.g = g.view(), args.beta = beta.view();
  args.out = out.mutable_view();
  args.initial_state = in_place ? TensorView(final.mutable_view()) : initial.view();
  args.final_state = final.mutable_view();
  args.cu_seqlens = cu_seqlens.view(), args.rule = problem.rule, args.scale = scale;
  args.state_slots = state_slots.view(), args.accepted = accepted.view();
  args.l2norm_qk = problem.l2norm, args.beta_sigmoid = beta_sigmoid, args.beta_double = beta_double;
  args.gate = problem.gate, args.a_log = a_log.view(), args.dt_bias = dt_bias.view();
  args.gate_lower_bound = gate_lower_bound;
  return args;
}

void DeltaRuleCase::protect_inputs() {
  for (Tensor* tensor : {&q, &k, &v, &g, &beta, &a_log, &dt_bias, &cu_seqlens, &state_slots, &accepted, &initial})
    tensor->buffer().protect();
}

std::vector<Tensor*> DeltaRuleCase::outputs() {
  if (final) return {&out, &final};
  return {&out};
}

void DeltaRuleCase::clear() {
  out.poison();
  if (!final) return;
  final.poison();
  if (in_place && final.buffer().size() > 0)
    std::memcpy(final.buffer().data(), initial.buffer().data(), final.buffer().size());
}

DeltaRuleReference DeltaRuleCase::reference(const DeltaRuleSubset& subset) {
  return oracle_delta_rule(args(), initial.view(), subset, operands);
}

void DeltaRuleCase::run(const Context& context) {
  const Plan plan(args(), context);
  operands = operands_of(plan.entry());
  plan.run(args());
}

void DeltaRuleCase::run(const Forced& context) {
  operands = operands_of(context.entry);
  testing::run(args(), context);
}

Verdict DeltaRuleCase::verdict(const DeltaRuleSubset& subset) {
  return verdict(reference(subset));
}

Verdict DeltaRuleCase::verdict(const DeltaRuleReference& r) const {
  const DeltaRuleProblem& p = problem;
  Tally tally;
  double variance = 0, squares = 0, elements = 0;
  const auto add = [&](double got, double want, double sigma, double drift, DType dtype) {
    const double bound = delta_rule_bound(want, sigma, drift, dtype);
    tally.add(got, want, bound);
    if (!std::isfinite(want)) return;
    squares += want * want, elements += 1;
    variance += sigma * sigma + std::pow(0x1p-24 * drift, 2) + std::pow(delta_rule_bound(want, 0, 0, dtype), 2);
  };
  for (int64_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (r.computed[at]) add(out.flat(i), r.out[at], r.out_sigma[at], r.out_drift[at], out.dtype());
  }
  if (final) {
    const int64_t state = p.state_heads() * p.d * p.dv, n = std::max<int64_t>(p.steps, 1);
    std::vector<char> written(static_cast<std::size_t>(final.layout().shape[0]));
    for (int64_t b = 0; b < p.b; ++b)
      for (int64_t step = 0; step < n; ++step) {
        const int64_t to = slot(b, step);
        if (to < 0 || (p.steps > 0 && step >= length(b))) continue;
        written[static_cast<std::size_t>(to)] = 1;
        for (int64_t i = 0; i < state; ++i) {
          const auto at = static_cast<std::size_t>((b * n + step) * state + i);
          if (r.state_computed[at])
            add(final.flat(to * state + i), r.state[at], r.state_sigma[at], r.state_drift[at], final.dtype());
        }
      }
    Tensor fresh;  // what slots that are nobody's hold
    if (!in_place) fresh = Tensor(final.dtype(), final.layout());
    const Tensor& before = in_place ? initial : fresh;
    for (std::size_t slot = 0; slot < written.size(); ++slot)
      for (int64_t i = 0; !written[slot] && i < state; ++i) {
        const int64_t at = static_cast<int64_t>(slot) * state + i;
        if (bits_of(final, at) != bits_of(before, at)) tally.violate("a slot that is nobody's was written");
      }
  }
  if (!out.gaps_intact() || (final && !final.gaps_intact()))
    tally.violate("memory between the elements of an output was written");
  Verdict verdict = tally.verdict();
  if (squares > 0) {
    // Heads share the errors of a decay: then a norm may well be twice what is likely.
    verdict.errors.frobenius_limit =
        2e-7 + std::sqrt(variance / squares) * (2 + 2 / std::sqrt(elements)) + 1e-36 * std::sqrt(elements / squares);
    if (verdict.violation.empty()) verdict.violation = violation_of(verdict.errors);
  }
  return verdict;
}

std::vector<DType> CaseOf<DeltaRuleProblem>::types(const DeltaRuleProblem& p) {
  return {p.dtype, p.out_dtype};
}
double CaseOf<DeltaRuleProblem>::tensor_bytes(const DeltaRuleProblem& p) {
  const double tokens = p.ragged >= 0 ? real(p.ragged) : real(p.b) * real(p.t), h = real(p.state_heads()),
               state = p.state ? real(p.d) * real(p.dv) * bytes_of(p.state_dtype) * h * real(p.b) *
                                     real(std::max<std::int64_t>(p.steps, 1))
                               : 0;
  const double g = p.decay == Decay::channel ? real(p.d) : p.decay == Decay::head ? 1 : 0;
  return tokens * ((real(p.hq + p.hk) * real(p.d) + real(p.hv) * real(p.dv)) * bytes_of(p.dtype) +
                   std::max(real(p.hq), h) * real(p.dv) * bytes_of(p.out_dtype) + h * (g + (p.beta ? 1 : 0)) * 4) +
         state;
}
CaseOf<DeltaRuleProblem>::Sizes CaseOf<DeltaRuleProblem>::sizes(const DeltaRuleProblem& p) {
  return {{"b", p.b}, {"hq", p.hq}, {"hk", p.hk}, {"hv", p.hv}, {"t", p.t}, {"d", p.d}, {"dv", p.dv}};
}
double CaseOf<DeltaRuleProblem>::updates(const DeltaRuleProblem& p) {
  return real(p.ragged >= 0 ? p.ragged : p.b * p.t) * real(p.state_heads() * p.d * p.dv);
}
Verdict CaseOf<DeltaRuleProblem>::verify(DeltaRuleCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  if (rows == 0) return inputs.verdict();
  const DeltaRuleProblem& p = inputs.problem;
  return inputs.verdict({std::max<std::int64_t>(p.b * p.state_heads() - 1, 1), step_over(p.dv, rows)});
}

void move_tensors(DeltaRuleArgs& args, DeviceTensors& tensors) {
  tensors.move(args.final_state), tensors.move(args.out);  // before what is in their memory
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.a_log, &args.dt_bias, &args.initial_state,
                        &args.cu_seqlens, &args.state_slots, &args.accepted})
    tensors.move(*t);
}

}  // namespace rapt::testing
