// delta_rule: arguments -> Call, or an Error that names the argument; and its problem's text. Nothing is written, and
// nothing is read but starts and slots, on a device not even these.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/c_values.hpp"
#include "operations/delta_rule/operation.hpp"
#include "rapt/delta_rule.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = DeltaRuleProblem;

constexpr int64_t kMaxStateSize = 256;  // of d and dv: a state stays in L2
constexpr std::array<std::string_view, 4> kRules = {"linear", "gated", "delta", "gated_delta"};
constexpr std::array<std::string_view, 4> kDecays = {"none", "constant", "head", "channel"};

// A field of one of `names`; the enumerator of kDefault is left out of the text.
template <auto kMember, auto kNames, auto kDefault>
constexpr Field<P> name_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember != kDefault) print_word(text, name, (*kNames)[static_cast<std::size_t>(p.*kMember)]);
          },
          [](P& p, const Word& word) {
            const auto* const found = std::find(kNames->begin(), kNames->end(), word.value);
            if (found == kNames->end()) {
              std::string wanted;
              for (const std::string_view name : *kNames) wanted.append(wanted.empty() ? "" : ", ").append(name);
              word.refuse("one of " + wanted);
            }
            p.*kMember = static_cast<std::remove_cvref_t<decltype(p.*kMember)>>(found - kNames->begin());
          }};
}

constexpr Field<P> kFields[] = {
    dtype_field<P, &P::dtype, &P::out_dtype>("dtype"),
    dtype_field_like<P, &P::out_dtype, &P::dtype>("out"),
    dtype_field<P, &P::state_dtype>("state_dtype"),
    device_field<P>(),
    name_field<&P::rule, &kRules, UpdateRule::gated_delta>("rule"),
    name_field<&P::decay, &kDecays, Decay::none>("decay"),
    size_field<P, &P::b>("b"),
    size_field<P, &P::hq>("hq"),
    size_field_like<P, &P::hk, &P::hq>("hk"),
    size_field_like<P, &P::hv, &P::hk>("hv"),
    size_field<P, &P::t>("t"),
    size_field<P, &P::d>("d"),
    size_field_like<P, &P::dv, &P::d>("dv"),
    integer_field<P, &P::ragged, -1>("ragged"),
    flag_field<P, &P::beta>("beta"),
    flag_field<P, &P::gate>("gate"),
    flag_field<P, &P::l2norm>("l2norm"),
    flag_field<P, &P::state>("state"),
    flag_field<P, &P::slots>("slots"),
    integer_field<P, &P::steps, 0>("steps"),
};

bool has_decay(UpdateRule rule) {
  return rule == UpdateRule::gated || rule == UpdateRule::gated_delta;
}
bool divides(int64_t a, int64_t b) {
  return a > 0 && b > 0 && b % a == 0;
}

consteval int id(std::string_view dimension) {
  return dimension_of<DeltaRuleArgs>(dimension);
}

P sizes_of(const Bound& bound) {
  P p{};
  p.b = bound[id("b")], p.t = bound[id("t")], p.ragged = bound[id("total")];
  p.hq = bound[id("hq")], p.hk = bound[id("hk")], p.hv = bound[id("hv")];
  p.d = bound[id("d")], p.dv = bound[id("dv")];
  return p;
}

void bind_gate(const DeltaRuleArgs& args, DeltaRuleParams& f) {
  f.gate = args.gate;
  if (!args.gate) {
    if (args.gate_lower_bound) throw Error("gate_lower_bound", "a value", "none without gate");
    return;
  }
  f.is_gate_bounded = args.gate_lower_bound.has_value();
  f.gate_lower_bound = args.gate_lower_bound.value_or(0.f);
  if (!(f.gate_lower_bound <= 0) || std::isinf(f.gate_lower_bound))
    throw Error("gate_lower_bound", shortest(f.gate_lower_bound), "a number that is not above 0");
  if (const TensorView& t = args.a_log) f.a_log = static_cast<const float*>(t.data), f.a_log_stride = t.strides[0];
  if (const TensorView& t = args.dt_bias) {
    f.dt_bias = static_cast<const float*>(t.data), f.dt_bias_stride_h = t.strides[0];
    f.dt_bias_stride_d = t.ndim == 2 ? t.strides[1] : 0;
  }
}

void bind_slots(const DeltaRuleArgs& args, P& p, const Bound& bound, DeltaRuleParams& f) {
  const TensorView& t = args.state_slots;
  if (!p.state) throw Error("state_slots", "a tensor", "none without a pool of states");
  p.slots = true;
  f.slot_count = bound[id("slots")];
  const bool has_steps = t.ndim == 2;
  const int64_t n = has_steps ? t.shape[1] : 1;
  if (has_steps) p.steps = n;
  if (has_steps && (n < 1 || p.t > n))
    throw Error("state_slots", "shape " + shape_text(t), "a slot for each of " + std::to_string(p.t) + " tokens");
  f.slots = {t.data, has_steps ? t.strides[1] : 0, t.dtype == DType::i64};
  f.slots_stride_b = t.strides[0];
  if (args.accepted) f.accepted = integers_of(args.accepted);
  if (p.device != DeviceType::cpu) return;  // values cannot be read here
  std::vector<int64_t> used;
  for (int64_t b = 0; b < p.b; ++b)
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slot = f.slots.element(b * f.slots_stride_b + i * f.slots.stride);
      if (slot >= f.slot_count)
        throw Error("state_slots", "slot " + std::to_string(slot), "less than " + std::to_string(f.slot_count));
      if (slot >= 0) used.push_back(slot);
    }
  std::sort(used.begin(), used.end());
  if (const auto twice = std::adjacent_find(used.begin(), used.end()); twice != used.end())
    throw Error("state_slots", "slot " + std::to_string(*twice) + " twice", "a slot of its own for each state");
  for (int64_t b = 0; f.accepted && b < p.b; ++b)
    if (const int64_t count = f.accepted[b]; count < 1 || count > n)
      throw Error("accepted", std::to_string(count) + " of sequence " + std::to_string(b), "1 to " + std::to_string(n));
}

bool is_in_place(const DeltaRuleArgs& args) {
  const TensorView &initial = args.initial_state, final = args.final_state;
  return initial && final && initial.data == final.data && same_shape(initial, final) &&
         initial.strides == final.strides && initial.dtype == final.dtype && initial.device == final.device;
}

}  // namespace

std::span<const Field<DeltaRuleProblem>> delta_rule_fields() {
  return kFields;
}
void complete(const Words& words, DeltaRuleProblem& p) {
  if (!words.has("hk")) p.hk = p.hq;
  if (!words.has("hv")) p.hv = p.hk;
  if (!words.has("dv")) p.dv = p.d;
}

TokenRows token_rows(const TensorView& t, bool ragged) {
  if (!t) return {};
  const std::size_t token = ragged ? 0 : 1;
  const bool has_elements = t.ndim == static_cast<int>(token) + 3;
  return {t.data,
          t.dtype,
          {ragged ? 0 : t.strides[0], t.strides[token + 1], t.strides[token], has_elements ? t.strides[token + 2] : 0}};
}

StateRows state_rows(const TensorView& t) {
  if (!t) return {};
  return {const_cast<void*>(t.data), t.dtype, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
}

unsigned DeltaRuleFeatures::of(const DeltaRuleArgs& args) {
  unsigned features = args.cu_seqlens ? ragged : dense;
  if (has_decay(args.rule)) features |= decays;
  if (has_delta(args.rule)) features |= predicts;
  if (args.gate) features |= gate;
  if (args.state_slots) features |= slots;
  if (args.state_slots.ndim == 2) features |= steps;
  if (args.g.ndim == 1) features |= constant_g;
  if (args.g.ndim == (args.cu_seqlens ? 3 : 4)) features |= channel_g;
  if (args.beta_sigmoid || args.beta_double) features |= beta_used;
  return features;
}

void derive_delta_rule_sizes(const DeltaRuleArgs& args, Bound& bound) {
  if (static_cast<std::size_t>(args.rule) >= kRules.size())
    throw Error("rule", std::to_string(static_cast<int>(args.rule)), "one of UpdateRule");
  if (args.cu_seqlens) {
    const int64_t total = bound[id("total")];
    const auto longest = [&] {
      if (bound.device.type == DeviceType::cpu)
        return check_starts("cu_seqlens", integers_of(args.cu_seqlens), args.cu_seqlens.shape[0], total);
      return args.state_slots.ndim == 2 ? std::min(total, args.state_slots.shape[1]) : total;
    };
    bound.derive(id("t"), longest());
  }
  const P p = sizes_of(bound);
  check(p);
  bound.derive(id("h"), p.state_heads());
  bound.derive(id("h_out"), std::max(p.hq, p.state_heads()));
}

DeltaRuleProblem bind_delta_rule(const DeltaRuleArgs& args, const TensorView& out, const TensorView& final,
                                 const Bound& bound, DeltaRuleParams& f) {
  const bool is_ragged = bound.features & DeltaRuleFeatures::ragged;
  P p = sizes_of(bound);
  p.device = bound.device.type;
  p.dtype = args.q.dtype;
  for (const DType dtype : {args.k.dtype, args.v.dtype})
    if (p.dtype == DType::f32) p.dtype = dtype;
  p.out_dtype = out ? out.dtype : args.v.dtype, p.rule = args.rule;
  p.beta = static_cast<bool>(args.beta), p.gate = args.gate, p.l2norm = args.l2norm_qk;
  if (args.g) p.decay = args.g.ndim == 1 ? Decay::constant : Decay::head;
  if (bound.features & DeltaRuleFeatures::channel_g) p.decay = Decay::channel;
  for (const TensorView* t : {&final, &args.initial_state}) {
    if (*t) p.state = true;
    if (*t && t->dtype != DType::f32) p.state_dtype = t->dtype;
  }

  f.q = token_rows(args.q, is_ragged), f.k = token_rows(args.k, is_ragged), f.v = token_rows(args.v, is_ragged);
  f.beta = token_rows(args.beta, is_ragged), f.out = token_rows(out, is_ragged);
  if (p.decay == Decay::constant) f.g = {args.g.data, args.g.dtype, {0, args.g.strides[0], 0, 0}};
  else f.g = token_rows(args.g, is_ragged);
  f.initial = state_rows(args.initial_state), f.final = state_rows(final);
  bind_gate(args, f);
  if (is_ragged) f.begin = integers_of(args.cu_seqlens), f.total = p.ragged;
  if (args.state_slots) bind_slots(args, p, bound, f);
  check(p);

  f.b = p.b, f.t = p.t, f.h = p.state_heads(), f.d = p.d, f.dv = p.dv, f.steps = p.steps, f.decay = p.decay;
  f.k_group = p.hk > 0 ? f.h / p.hk : 1, f.v_group = p.hv > 0 ? f.h / p.hv : 1;
  f.q_group = std::max<int64_t>(p.hq > 0 ? f.h / p.hq : 1, 1);
  f.reads = std::max<int64_t>(f.h > 0 ? p.hq / f.h : 1, 1);
  f.scale = args.scale.value_or(1.f / std::sqrt(static_cast<float>(p.d)));
  if (!std::isfinite(f.scale)) throw Error("scale", shortest(f.scale), "a finite number");
  f.has_delta = has_delta(p.rule), f.l2norm = args.l2norm_qk;
  f.beta_sigmoid = args.beta_sigmoid, f.beta_double = args.beta_double;
  return p;
}

std::string DeltaRuleProblem::to_string() const {
  return print_fields("delta_rule", *this, kFields);
}

DeltaRuleProblem DeltaRuleProblem::parse(std::string_view text) {
  const Words words(text, "delta_rule");
  DeltaRuleProblem p;
  words.read(p, kFields);
  complete(words, p);
  return p;
}

void check(const DeltaRuleProblem& p) {
  for (const auto& [name, dtype] : {std::pair{"q", p.dtype}, {"out", p.out_dtype}})
    check_type(name, dtype, kFloatTypes);
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"t", p.t}, {"hq", p.hq}, {"hk", p.hk}, {"hv", p.hv}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  for (const auto& [name, size] : {std::pair{"q", p.d}, {"v", p.dv}})
    if (size < 1 || size > kMaxStateSize) throw Error(name, "head dimension " + std::to_string(size), "1 to 256");
  if (!divides(p.hk, p.hv) && !divides(p.hv, p.hk) && (p.hk | p.hv) != 0)
    throw Error("v", std::to_string(p.hv) + " heads", "a multiple or a divisor of k's " + std::to_string(p.hk));
  const int64_t h = p.state_heads();
  if (!divides(p.hq, h) && !divides(h, p.hq) && (p.hq | h) != 0)
    throw Error("q", std::to_string(p.hq) + " heads", "a multiple or a divisor of the states' " + std::to_string(h));
  check_row_count(p.b, std::max(p.hq, h), p.t);
  if (p.ragged < -1 || p.ragged > kMaxSize) throw Error("cu_seqlens", std::to_string(p.ragged), "0 to 2^48 tokens");
  check_ragged("cu_seqlens", p.ragged, "tokens", p.b, p.t);
  if (p.steps < 0 || (p.steps > 0 && (!p.slots || p.t > p.steps)))
    throw Error("steps", std::to_string(p.steps), "0, or with slots as many as tokens or more");
  // fp16 ends at 65504, which sums over many tokens pass.
  check_type("state_dtype", p.state_dtype, kStateTypes);
  if (p.state_dtype != DType::f32 && !p.state) throw Error("state_dtype", "no state", "a state of this type");
  if (p.slots && !p.state) throw Error("slots", "no state", "slots with a state");
  if (p.decay != Decay::none && !has_decay(p.rule)) throw Error("decay", "one", "none with a rule without decay");
  if (p.beta && !has_delta(p.rule)) throw Error("beta", "one", "none with a rule that predicts nothing");
  if (p.gate && p.decay == Decay::none) throw Error("gate", "no decay", "one to be computed");
}

Call OperationOf<DeltaRuleArgs>::bind(const Args& args, Bound& bound) {
  DeltaRuleParams params{};
  const P problem = bind_delta_rule(args, args.out, args.final_state, bound, params);
  if (is_in_place(args)) bound.set_alias("initial_state");
  return {problem, params, bound.device, bound.writes_nothing(), nullptr};
}

void OperationOf<DeltaRuleArgs>::set_scalars(const C& c, Args& args) {
  args.rule = c::to_enum(c.rule, UpdateRule::gated_delta, "rule");
  if (c.has_scale) args.scale = c.scale;
  args.l2norm_qk = c.l2norm_qk != 0;
  args.beta_sigmoid = c.beta_sigmoid != 0;
  args.beta_double = c.beta_double != 0;
  args.gate = c.gate != 0;
  if (c.has_gate_lower_bound) args.gate_lower_bound = c.gate_lower_bound;
}

Needs needs_of(const DeltaRuleProblem& p) {
  return {set_of(p.dtype), p.d, p.dv};
}

std::vector<Problem> OperationOf<DeltaRuleArgs>::corners(const DeltaRuleProblem& largest) {
  DeltaRuleProblem one_token = largest;
  one_token.t = std::min<std::int64_t>(largest.t, 1);
  return {largest, one_token};
}

}  // namespace rapt
