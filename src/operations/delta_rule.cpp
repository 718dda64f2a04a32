// delta_rule: arguments -> Call, or an Error that names the argument; and its problem's text. Nothing is written, and
// nothing is read but starts and slots.
#include "rapt/delta_rule.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/dtypes.hpp"
#include "core/fields.hpp"
#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/call.hpp"
#include "operations/delta_rule_check.hpp"

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
    {"dtype", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.dtype != DType::f32) print_word(text, key, to_string(p.dtype));
     },
     [](P& p, const Word& word) { p.dtype = p.out_dtype = word.dtype(); }},
    dtype_field_like<P, &P::out_dtype, &P::dtype>("out"),
    dtype_field<P, &P::state_dtype>("state_dtype"),
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

bool has_delta(UpdateRule rule) {
  return rule == UpdateRule::delta || rule == UpdateRule::gated_delta;
}
bool has_decay(UpdateRule rule) {
  return rule == UpdateRule::gated || rule == UpdateRule::gated_delta;
}
bool divides(int64_t a, int64_t b) {
  return a > 0 && b > 0 && b % a == 0;
}

class Validator {
 public:
  Validator(const DeltaRuleArgs& args, DeltaRuleParams& params, std::vector<Checked>& all)
      : args_(args), ragged_(args.cu_seqlens), f_(params), all_(all) {}

  P run() {
    inputs();
    f_.out = rows("out", args_.out, 4, true);
    agree("out", args_.out, {p_.b, p_.t, std::max(p_.hq, f_.h), p_.dv}, 4);
    states();
    return finish(args_.out.dtype);
  }
  // Gradients of the results in their place; either may be empty.
  P run_backward(const TensorView& dout, const TensorView& dfinal_state) {
    inputs();
    if (dout) {
      f_.out = rows("dout", dout, 4);
      agree("dout", dout, {p_.b, p_.t, std::max(p_.hq, f_.h), p_.dv}, 4);
    }
    states();
    if (dfinal_state) f_.final = state("dfinal_state", dfinal_state, false);
    return finish(dout ? dout.dtype : args_.v.dtype);
  }

 private:
  void inputs() {
    if (static_cast<std::size_t>(args_.rule) >= kRules.size())
      throw Error("rule", std::to_string(static_cast<int>(args_.rule)), "one of UpdateRule");
    f_.q = rows("q", args_.q, 4), f_.k = rows("k", args_.k, 4), f_.v = rows("v", args_.v, 4);
    sizes();
    decay();
    if (args_.beta) {
      if (!has_delta(args_.rule)) throw Error("beta", "a tensor", "none with a rule that predicts nothing");
      f_.beta = rows("beta", args_.beta, 3);
      agree("beta", args_.beta, {p_.b, p_.t, f_.h}, 3);
    } else if (args_.beta_sigmoid || args_.beta_double) {
      throw Error("beta", "no tensor", "one for beta_sigmoid or beta_double");
    }
  }
  P finish(DType out_dtype) {
    p_.dtype = args_.q.dtype;
    for (const DType dtype : {args_.k.dtype, args_.v.dtype})
      if (p_.dtype == DType::f32) p_.dtype = dtype;
    p_.out_dtype = out_dtype, p_.rule = args_.rule;
    p_.beta = static_cast<bool>(args_.beta), p_.l2norm = args_.l2norm_qk;
    check(p_);
    f_.d = p_.d, f_.dv = p_.dv, f_.t = p_.t, f_.steps = p_.steps, f_.decay = p_.decay;
    f_.scale = args_.scale.value_or(1.f / std::sqrt(static_cast<float>(p_.d)));
    if (!std::isfinite(f_.scale)) throw Error("scale", shortest(f_.scale), "a finite number");
    f_.has_delta = has_delta(args_.rule), f_.l2norm = args_.l2norm_qk;
    f_.beta_sigmoid = args_.beta_sigmoid, f_.beta_double = args_.beta_double;
    return p_;
  }

  // [b, t, h, d] or, of rank 3, [b, t, h]; ragged ones have one dimension less. Any float type.
  TokenRows rows(const char* name, const TensorView& t, int rank, bool written = false) {
    if (!t) throw Error(name, "no tensor", "[b, t, heads, head size] or, with cu_seqlens, [total, heads, head size]");
    take(all_, name, t, written);
    check_float(name, t.dtype);
    const int wanted = rank - (ragged_ ? 1 : 0);
    if (t.ndim != wanted)
      throw Error(name, "shape " + shape_text(t),
                  std::to_string(wanted) + " dimensions: " + (ragged_ ? "total" : "b, t") + ", heads" +
                      (rank == 4 ? ", head size" : ""));
    return token_rows(t, ragged_);
  }
  void agree(const char* name, const TensorView& t, std::array<int64_t, 4> wanted, int rank) const {
    const std::size_t skipped = ragged_ ? 1 : 0, n = static_cast<std::size_t>(rank) - skipped;
    if (ragged_) wanted[1] = p_.ragged;
    if (std::equal(t.shape.begin(), t.shape.begin() + n, wanted.begin() + skipped)) return;
    Layout layout;
    layout.ndim = static_cast<int>(n);
    std::copy_n(wanted.begin() + skipped, n, layout.shape.begin());
    throw Error(name, "shape " + shape_text(t), shape_text(layout));
  }

  void sizes() {
    const std::size_t heads = ragged_ ? 1 : 2;
    p_.b = ragged_ ? 0 : args_.q.shape[0], p_.t = ragged_ ? 0 : args_.q.shape[1];
    if (ragged_) {
      p_.ragged = f_.total = args_.q.shape[0];
      check_list("cu_seqlens", args_.cu_seqlens);
      take(all_, "cu_seqlens", args_.cu_seqlens, false);
      if (args_.cu_seqlens.shape[0] < 1) throw Error("cu_seqlens", "shape " + shape_text(args_.cu_seqlens), "[b + 1]");
      p_.b = args_.cu_seqlens.shape[0] - 1;
      f_.begin = integers_of(args_.cu_seqlens);
      p_.t = check_starts("cu_seqlens", f_.begin, args_.cu_seqlens.shape[0], p_.ragged);
    }
    p_.hq = args_.q.shape[heads], p_.hk = args_.k.shape[heads], p_.hv = args_.v.shape[heads];
    p_.d = args_.q.shape[heads + 1], p_.dv = args_.v.shape[heads + 1];
    agree("k", args_.k, {p_.b, p_.t, p_.hk, p_.d}, 4);
    agree("v", args_.v, {p_.b, p_.t, p_.hv, p_.dv}, 4);
    check(p_);
    f_.b = p_.b, f_.h = p_.state_heads();
    f_.k_group = p_.hk > 0 ? f_.h / p_.hk : 1, f_.v_group = p_.hv > 0 ? f_.h / p_.hv : 1;
    f_.q_group = std::max<int64_t>(p_.hq > 0 ? f_.h / p_.hq : 1, 1);
    f_.reads = std::max<int64_t>(f_.h > 0 ? p_.hq / f_.h : 1, 1);
  }

  void decay() {
    const TensorView& g = args_.g;
    const int dims = ragged_ ? 1 : 2;  // before the heads
    f_.gate = p_.gate = args_.gate;
    if (!g) {
      if (args_.gate) throw Error("g", "no tensor", "one for the gate");
    } else {
      if (!has_decay(args_.rule)) throw Error("g", "a tensor", "none with a rule without decay");
      if (g.ndim == 1) {
        p_.decay = Decay::constant;
        take(all_, "g", g, false);
        check_float("g", g.dtype);
        if (g.shape[0] != f_.h) throw Error("g", "shape " + shape_text(g), "[h], h = " + std::to_string(f_.h));
        f_.g = {g.data, g.dtype, {0, g.strides[0], 0, 0}};
      } else {
        const int rank = g.ndim == dims + 2 ? 4 : 3;
        p_.decay = rank == 4 ? Decay::channel : Decay::head;
        f_.g = rows("g", g, rank);
        agree("g", g, {p_.b, p_.t, f_.h, p_.d}, rank);
      }
    }
    if (!args_.gate) {
      for (const auto& [name, given] : {std::pair{"a_log", static_cast<bool>(args_.a_log)},
                                        {"dt_bias", static_cast<bool>(args_.dt_bias)},
                                        {"gate_lower_bound", args_.gate_lower_bound.has_value()}})
        if (given) throw Error(name, "a value", "none without gate");
      return;
    }
    f_.is_gate_bounded = args_.gate_lower_bound.has_value();
    f_.gate_lower_bound = args_.gate_lower_bound.value_or(0.f);
    if (!(f_.gate_lower_bound <= 0) || std::isinf(f_.gate_lower_bound))
      throw Error("gate_lower_bound", shortest(f_.gate_lower_bound), "a number that is not above 0");
    if (args_.a_log) {
      heads_of("a_log", args_.a_log, false);
      f_.a_log = static_cast<const float*>(args_.a_log.data), f_.a_log_stride = args_.a_log.strides[0];
    }
    if (args_.dt_bias) {
      const bool channels = p_.decay == Decay::channel;
      heads_of("dt_bias", args_.dt_bias, channels);
      f_.dt_bias = static_cast<const float*>(args_.dt_bias.data), f_.dt_bias_stride_h = args_.dt_bias.strides[0];
      f_.dt_bias_stride_d = channels ? args_.dt_bias.strides[1] : 0;
    }
  }
  // f32 [h] or [h, d].
  void heads_of(const char* name, const TensorView& t, bool channels) {
    take(all_, name, t, false);
    check_f32(name, t.dtype);
    if (t.ndim != (channels ? 2 : 1) || t.shape[0] != f_.h || (channels && t.shape[1] != p_.d))
      throw Error(name, "shape " + shape_text(t),
                  "[" + std::to_string(f_.h) + (channels ? ", " + std::to_string(p_.d) : "") + "]");
  }

  void states() {
    const TensorView &initial = args_.initial_state, final = args_.final_state;
    slots();
    const bool in_place = initial && final && initial.data == final.data && same_shape(initial, final) &&
                          initial.dtype == final.dtype && initial.device == final.device &&
                          std::equal(initial.strides.begin(), initial.strides.begin() + 4, final.strides.begin());
    if (final) f_.final = state("final_state", final, true);
    if (in_place) f_.initial = f_.final;
    else if (initial) f_.initial = state("initial_state", initial, false);
  }
  StateRows state(const char* name, const TensorView& t, bool written) {
    take(all_, name, t, written);
    check_state(name, t.dtype);
    if (t.dtype != DType::f32) p_.state_dtype = t.dtype;
    p_.state = true;
    const bool pool = static_cast<bool>(args_.state_slots);
    const int64_t states = pool && t.ndim > 0 ? f_.slot_count : p_.b;
    if (t.ndim != 4 || t.shape[0] != states || t.shape[1] != f_.h || t.shape[2] != p_.d || t.shape[3] != p_.dv)
      throw Error(name, "shape " + shape_text(t),
                  std::string("[") + (pool ? "slots" : "b") + ", h, d, dv] = [" + std::to_string(states) + ", " +
                      std::to_string(f_.h) + ", " + std::to_string(p_.d) + ", " + std::to_string(p_.dv) + "]");
    return {const_cast<void*>(t.data), t.dtype, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  }
  void slots() {
    const TensorView& t = args_.state_slots;
    if (!t) {
      if (args_.accepted) throw Error("accepted", "a tensor", "none without state_slots [b, n]");
      return;
    }
    const TensorView pool = args_.final_state ? TensorView(args_.final_state) : args_.initial_state;
    if (!pool) throw Error("state_slots", "a tensor", "none without a pool of states");
    f_.slot_count = pool.shape[0];
    p_.slots = true;
    take(all_, "state_slots", t, false);
    check_integers("state_slots", t);
    if ((t.ndim != 1 && t.ndim != 2) || t.shape[0] != p_.b)
      throw Error("state_slots", "shape " + shape_text(t), "[b] or [b, n], b = " + std::to_string(p_.b));
    const int64_t n = t.ndim == 2 ? t.shape[1] : 1;
    p_.steps = t.ndim == 2 ? n : 0;
    if (t.ndim == 2 && (n < 1 || p_.t > n))
      throw Error("state_slots", "shape " + shape_text(t), "a slot for each of " + std::to_string(p_.t) + " tokens");
    f_.slots = {t.data, t.ndim == 2 ? t.strides[1] : 0, t.dtype == DType::i64};
    f_.slots_stride_b = t.strides[0];
    std::vector<int64_t> used;
    for (int64_t b = 0; b < p_.b; ++b)
      for (int64_t i = 0; i < n; ++i) {
        const int64_t slot = f_.slots.element(b * f_.slots_stride_b + i * f_.slots.stride);
        if (slot >= f_.slot_count)
          throw Error("state_slots", "slot " + std::to_string(slot), "less than " + std::to_string(f_.slot_count));
        if (slot >= 0) used.push_back(slot);
      }
    std::sort(used.begin(), used.end());
    if (const auto twice = std::adjacent_find(used.begin(), used.end()); twice != used.end())
      throw Error("state_slots", "slot " + std::to_string(*twice) + " twice", "a slot of its own for each state");
    if (!args_.accepted) return;
    if (t.ndim != 2) throw Error("accepted", "a tensor", "none without state_slots [b, n]");
    check_list("accepted", args_.accepted, p_.b);
    take(all_, "accepted", args_.accepted, false);
    f_.accepted = integers_of(args_.accepted);
    for (int64_t b = 0; b < p_.b; ++b)
      if (const int64_t count = f_.accepted[b]; count < 1 || count > n)
        throw Error("accepted", std::to_string(count) + " of sequence " + std::to_string(b),
                    "1 to " + std::to_string(n));
  }

  const DeltaRuleArgs& args_;
  const bool ragged_;
  P p_{};
  DeltaRuleParams& f_;
  std::vector<Checked>& all_;
};

}  // namespace

std::span<const Field<DeltaRuleProblem>> delta_rule_fields() {
  return kFields;
}
void complete(const Words& words, DeltaRuleProblem& p) {
  if (!words.has("hk")) p.hk = p.hq;
  if (!words.has("hv")) p.hv = p.hk;
  if (!words.has("dv")) p.dv = p.d;
}

// fp16 ends at 65504, which sums over many tokens pass.
void check_state(std::string_view name, DType dtype) {
  if (dtype != DType::f32 && dtype != DType::bf16)
    throw Error(std::string(name), "dtype " + std::string(to_string(dtype)), "f32 or bf16");
}

TokenRows token_rows(const TensorView& t, bool ragged) {
  if (!t) return {};
  const std::size_t token = ragged ? 0 : 1;
  const bool has_elements = t.ndim == static_cast<int>(token) + 3;
  return {t.data,
          t.dtype,
          {ragged ? 0 : t.strides[0], t.strides[token + 1], t.strides[token], has_elements ? t.strides[token + 2] : 0}};
}

DeltaRuleProblem check_forward(const DeltaRuleArgs& args, const TensorView& dout, const TensorView& dfinal_state,
                               DeltaRuleParams& params, std::vector<Checked>& all) {
  return Validator(args, params, all).run_backward(dout, dfinal_state);
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

DeltaRuleProblem DeltaRuleProblem::of(const DeltaRuleArgs& args) {
  return std::get<DeltaRuleProblem>(validate(args).problem);
}

void check(const DeltaRuleProblem& p) {
  for (const auto& [name, dtype] : {std::pair{"q", p.dtype}, {"out", p.out_dtype}}) check_float(name, dtype);
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"t", p.t}, {"hq", p.hq}, {"hk", p.hk}, {"hv", p.hv}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  for (const auto& [name, size] : {std::pair{"q", p.d}, {"v", p.dv}})
    if (size < 1 || size > kMaxStateSize) throw Error(name, "head size " + std::to_string(size), "1 to 256");
  if (!divides(p.hk, p.hv) && !divides(p.hv, p.hk) && (p.hk | p.hv) != 0)
    throw Error("v", std::to_string(p.hv) + " heads", "a multiple or a divisor of k's " + std::to_string(p.hk));
  const int64_t h = p.state_heads();
  if (!divides(p.hq, h) && !divides(h, p.hq) && (p.hq | h) != 0)
    throw Error("q", std::to_string(p.hq) + " heads", "a multiple or a divisor of the states' " + std::to_string(h));
  int64_t rows = 0;
  const auto at_least_1 = [](int64_t size) {
    return std::max<int64_t>(size, 1);
  };  // a size of 0 must not hide the others
  if (__builtin_mul_overflow(at_least_1(p.b), at_least_1(std::max(p.hq, h)), &rows) ||
      __builtin_mul_overflow(rows, at_least_1(p.t), &rows) || rows > kMaxOffset)
    throw Error("q", "more than 2^52 rows", "a smaller problem");
  if (p.ragged < -1 || p.ragged > kMaxSize) throw Error("cu_seqlens", std::to_string(p.ragged), "0 to 2^48 tokens");
  if (p.ragged >= 0 && (p.ragged < p.t || (p.t > 0 ? (p.ragged - 1) / p.t >= p.b : p.ragged > 0)))
    throw Error("cu_seqlens", std::to_string(p.ragged) + " tokens", "between the longest sequence's and b times it");
  if (p.steps < 0 || (p.steps > 0 && (!p.slots || p.t > p.steps)))
    throw Error("steps", std::to_string(p.steps), "0, or with slots as many as tokens or more");
  check_state("state_dtype", p.state_dtype);
  if (p.state_dtype != DType::f32 && !p.state) throw Error("state_dtype", "no state", "a state of this type");
  if (p.slots && !p.state) throw Error("slots", "no state", "slots with a state");
  if (p.decay != Decay::none && !has_decay(p.rule)) throw Error("decay", "one", "none with a rule without decay");
  if (p.beta && !has_delta(p.rule)) throw Error("beta", "one", "none with a rule that predicts nothing");
  if (p.gate && p.decay == Decay::none) throw Error("gate", "no decay", "one to be computed");
}

Call validate(const DeltaRuleArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;  // for the default scale
  DeltaRuleParams params{};
  std::vector<Checked> all;
  const P problem = Validator(args, params, all).run();
  check_overlaps(all);
  check_apart(workspace, all);
  return {problem, params, {}, writes_nothing(all), nullptr};
}

}  // namespace rapt
