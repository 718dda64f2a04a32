// What the kernels of delta_rule do before the rule: rows of a token as fp32, normalised, and decays and beta out of
// what models project. Rows are filled up to whole vectors: with 0, and with decays of 1.
#pragma once

#include "cpu/registry.hpp"
#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {

// 1 / x to about 1 ulp, for numbers whose inverse is a normal number; exact for powers of 2.
[[gnu::always_inline]] inline vec inverse_of(vec x) {
#if defined(RAPT_HAVE_RCP14)
  const vec y = rcp14(x);
  return fma(y, fma(vec(0.f) - x, y, vec(1.f)), y);
#else
  return vec(1.f) / x;
#endif
}
// e^x to about 1 ulp, 0 below the normal numbers. Past 88.02 it stays at e^88.02, nearly 2^127: what it multiplies
// overflows soon enough.
[[gnu::always_inline]] inline vec exp_of(vec x) {
  x = xsimd::min(vec(88.02f), xsimd::max(vec(-200.f), x));  // in this order NaN stays
  const vec rounded = x * vec(kLog2e);
  constexpr auto kLow = static_cast<float>(rapt::kLog2e - static_cast<double>(kLog2e));
  const vec rest = fma(x, vec(kLog2e), vec(0.f) - rounded) + x * vec(kLow);
  const vec power = exp2(rounded);
  return fma(power * rest, vec(static_cast<float>(kLn2)), power);
}
// 0 below the normal numbers on every ISA: a gate's rate may multiply it by as much as fp32 has.
[[gnu::always_inline]] inline vec sigmoid_of(vec x) {
  const vec share = inverse_of(vec(1.f) + exp_of(vec(0.f) - x));
  return xsimd::select(vec(0x1p-126f) > share, vec(0.f), share);
}
// log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x|; log1p(u) = 2 artanh(u / (2 + u)) as a series.
[[gnu::always_inline]] inline vec softplus_of(vec x) {
  const vec u = exp_of(vec(0.f) - xsimd::abs(x)), s = u * inverse_of(u + vec(2.f)), square = s * s;
  vec series(1.f / 15);
  for (const float term : {1.f / 13, 1.f / 11, 1.f / 9, 1.f / 7, 1.f / 5, 1.f / 3, 1.f})
    series = fma(series, square, vec(term));
  return fma(s * vec(2.f), series, xsimd::max(vec(0.f), x));
}

inline float sum_of(vec x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}
inline float first_of(vec x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  return lane[0];
}

// States are kept divided by e, the product of each channel's decays since its window of tokens began. A token that
// would take some e out of [kWindowMin, kWindowMax] begins a new window, in which e starts from kWindowStart: a
// window spans 2^72, ten tokens that decay by e^-5 each, and what it divides by e stays below 2^49 times what it was.
inline constexpr float kWindowStart = 0x1p24f, kWindowMin = 0x1p-48f, kWindowMax = 0x1p28f;
// Makes e of a token, [n], from the `decay` of its channels and e `before` it. True: it begins a window, and `opening`
// is e before over kWindowStart: what the state kept so far is to be multiplied by, beside the decay.
[[gnu::always_inline]] inline bool next_e(const float* before, const float* decay, std::int64_t n, bool is_first,
                                          float* e, float* opening) {
  vec smallest(kWindowStart), largest(kWindowStart);
  for (std::int64_t c = 0; c < n; c += kLanes) {
    const vec x = load(before + c) * load(decay + c);
    smallest = xsimd::min(smallest, x), largest = xsimd::max(largest, x);
    store(e + c, x);
  }
  if (!is_first && !xsimd::any(vec(kWindowMin) > smallest) && !xsimd::any(largest > vec(kWindowMax))) return false;
  for (std::int64_t c = 0; c < n; c += kLanes) {
    store(opening + c, load(before + c) * vec(1 / kWindowStart));
    store(e + c, vec(kWindowStart));
  }
  return true;
}

// The rows of one head's tokens, and of the heads after it.
struct HeadRows {
  const std::byte* first;                       // null: the tensor is not given
  std::int64_t token_step, head_step, element;  // bytes
  std::int64_t inner;                           // the stride of d, in elements
  DType type;

  HeadRows(const TokenRows& rows, std::int64_t b, std::int64_t token, std::int64_t head)
      : element(rows.type == DType::f32 ? 4 : 2), inner(rows.stride.d), type(rows.type) {
    const auto* const data = static_cast<const std::byte*>(rows.data);
    first = data ? data + token_at(rows.stride, b, token, head) * element : nullptr;
    token_step = rows.stride.s * element, head_step = rows.stride.h * element;
  }
  explicit operator bool() const { return first != nullptr; }
  const std::byte* at(std::int64_t token, std::int64_t head) const {
    return first + token * token_step + head * head_step;
  }
};

// One state head of one sequence.
class DeltaTokens {
 public:
  DeltaTokens(const DeltaRuleParams& p, std::int64_t b, std::int64_t h)
      : p_(p),
        range_(tokens_of(p, b)),
        b_(p.begin ? 0 : b),
        h_(h),
        padded_(round_up(p.d, kLanes)),
        q_(rows_of(p.q, h / p.q_group * p.reads)),
        k_(rows_of(p.k, h / p.k_group)),
        v_(rows_of(p.v, h / p.v_group)),
        g_(rows_of(p.g, h)),
        beta_(rows_of(p.beta, h)),
        out_(rows_of(p.out, h * p.reads)) {
    if (!p.a_log) return;
    // Finite, so that a gate of 0 stays 0.
    constexpr double kMax = 0x1.fffffep127;
    const double rate = __builtin_exp(static_cast<double>(p.a_log[h * p.a_log_stride]));
    rate_ = static_cast<float>(rate > kMax ? kMax : rate);
  }
  std::int64_t count() const { return range_.count; }

  // Rows of a token: as they lie if that is whole vectors of fp32, else copied to `scratch`.
  const float* k(std::int64_t token, float* scratch) const { return row(k_, token, 0, 0, p_.d, scratch); }
  // Of the state head's query head `r`.
  const float* q(std::int64_t token, std::int64_t r, float* scratch) const {
    return row(q_, token, r, 0, p_.d, scratch);
  }
  // Columns [begin, end).
  const float* v(std::int64_t token, std::int64_t begin, std::int64_t end, float* scratch) const {
    return row(v_, token, 0, begin, end - begin, scratch);
  }
  // Of what the results are, as an input: their gradient.
  const float* out(std::int64_t token, std::int64_t r, float* scratch) const {
    return row(out_, token, r, 0, p_.dv, scratch);
  }
  // Fetches the rows of a token into L2: they lie far apart, which the hardware's prefetchers do not follow. Inline,
  // for GCC drops calls that do nothing but prefetch.
  [[gnu::always_inline]] void prefetch_inputs(std::int64_t token, bool v, bool others) const {
    prefetch(k_, token, 0, p_.d);
    if (p_.decay == Decay::channel) prefetch(g_, token, 0, p_.d);
    if (v) prefetch(v_, token, 0, p_.dv);
    if (!others) return;
    for (std::int64_t r = 0; r < p_.reads; ++r) prefetch(q_, token, r, p_.d), prefetch(out_, token, r, p_.dv);
  }
  // Those of a token that comes a while after this one.
  [[gnu::always_inline]] void prefetch_ahead_of(std::int64_t token) const {
    constexpr std::int64_t kAhead = 8;
    if (token + kAhead < count()) prefetch_inputs(token + kAhead, true, true);
  }
  template <int kWrites = 0>
  [[gnu::always_inline]] static void prefetch(const HeadRows& rows, std::int64_t token, std::int64_t head,
                                              std::int64_t n) {
    if (!rows || rows.inner != 1) return;
    const std::byte* const from = rows.at(token, head);
    for (std::int64_t i = 0; i < n * rows.element; i += 64) __builtin_prefetch(from + i, kWrites, 2);
  }
  // What a row of q or k is multiplied by to have a norm of 1, where that is asked for.
  float factor(const float* row) const {
    if (!p_.l2norm) return 1;
    vec sum(0.f);
    for (std::int64_t c = 0; c < padded_; c += kLanes) sum = fma(load_any(row + c), load_any(row + c), sum);
    return 1 / __builtin_sqrtf(sum_of(sum) + 1e-6f);
  }
  void write_out(std::int64_t token, std::int64_t r, std::int64_t begin, std::int64_t end, const float* from) const {
    write(out_, token, r, begin, end, from);
  }
  static void write(const HeadRows& rows, std::int64_t token, std::int64_t head, std::int64_t begin, std::int64_t end,
                    const float* from) {
    with_float_type(rows.type, [&](auto element) {
      const std::int64_t n = end - begin, inner = rows.inner;
      auto* const to =
          reinterpret_cast<decltype(element)*>(const_cast<std::byte*>(rows.at(token, head))) + begin * inner;
      for (std::int64_t c = 0; c < n; c += kLanes)
        store_strided(to + c * inner, inner, min(kLanes, n - c), load(from + c));
    });
  }
  // The rows of this sequence in a tensor of the call, of heads from this one on.
  HeadRows rows_of(const TokenRows& rows, std::int64_t head) const { return {rows, b_, range_.first, head}; }

  // The decay, e^g, of every channel.
  void decay(std::int64_t token, float* to) const {
    if (p_.decay == Decay::channel) {
      const float* const g = row(g_, token, 0, 0, p_.d, to);
      for (std::int64_t c = 0; c < padded_; c += kLanes) store(to + c, exp_of(log_decay(load_any(g + c), c)));
      for (std::int64_t c = p_.d; c < padded_; ++c) to[c] = 1;
      return;
    }
    const vec all = p_.decay == Decay::none ? vec(1.f) : vec(first_of(exp_of(log_decay(vec(number(g_, token)), 0))));
    for (std::int64_t c = 0; c < padded_; c += kLanes) store(to + c, all);
  }
  float beta(std::int64_t token) const {
    if (!p_.beta) return 1;
    const float beta = number(beta_, token);
    const float share = p_.beta_sigmoid ? first_of(sigmoid_of(vec(beta))) : beta;
    return p_.beta_double ? 2 * share : share;
  }

  // The chain rule back through what is computed here. For a row: `dx` is the gradient of the row times its factor, and
  // becomes that of the row as given; ...
  void row_gradient(const float* row, float factor, float* dx) const {
    vec sum(0.f);
    for (std::int64_t c = 0; c < padded_; c += kLanes) sum = fma(load_any(row + c), load(dx + c), sum);
    const vec along(sum_of(sum) * factor * factor);
    for (std::int64_t c = 0; c < padded_; c += kLanes)
      store(dx + c, (load(dx + c) - load_any(row + c) * along) * vec(factor));
  }
  // ... of beta; ...
  float beta_gradient(std::int64_t token, float dbeta) const {
    if (p_.beta_double) dbeta *= 2;
    if (!p_.beta_sigmoid) return dbeta;
    const float share = first_of(sigmoid_of(vec(number(beta_, token))));
    return dbeta * share * (1 - share);
  }
  // ... of g, from that of each channel's logarithm of a decay: [d], or one where g is not given for channels. What
  // a_log's gradient gets is added to `a_log`.
  void decay_gradient(std::int64_t token, const float* dlog, float* dg, double& a_log) const {
    vec of_a_log(0.f);
    if (p_.decay == Decay::channel) {
      const float* const g = row(g_, token, 0, 0, p_.d, dg);
      for (std::int64_t c = 0; c < padded_; c += kLanes)
        store(dg + c, gate_gradient(load(dlog + c), load_any(g + c), c, of_a_log));
      a_log += static_cast<double>(sum_of(of_a_log));
      return;
    }
    vec sum(0.f);
    for (std::int64_t c = 0; c < padded_; c += kLanes) sum = sum + load(dlog + c);
    store(dg, gate_gradient(vec(sum_of(sum)), vec(number(g_, token)), 0, of_a_log));
    a_log += static_cast<double>(first_of(of_a_log));
  }
  // Where the row of a token's head lies in [tokens of all sequences][heads].
  std::int64_t index(std::int64_t token, std::int64_t head, std::int64_t heads) const {
    return (b_ * p_.t + range_.first + token) * heads + head;
  }

 private:
  static const float* row(const HeadRows& rows, std::int64_t token, std::int64_t head, std::int64_t begin,
                          std::int64_t n, float* scratch) {
    const std::byte* const from = rows.at(token, head) + begin * rows.inner * rows.element;
    if (rows.type == DType::f32 && rows.inner == 1 && n % kLanes == 0) return reinterpret_cast<const float*>(from);
    with_float_type(rows.type, [&](auto element) {
      pack_row(reinterpret_cast<const decltype(element)*>(from), rows.inner, n, scratch);
    });
    return scratch;
  }
  static float number(const HeadRows& rows, std::int64_t token) {
    const std::byte* const from = rows.at(token, 0);
    return rows.type == DType::f32 ? *reinterpret_cast<const float*>(from) : number_at(from, rows.type, 0);
  }
  // The logarithm of the decay of channels [c, c + kLanes), whose g is given.
  vec log_decay(vec g, std::int64_t c) const {
    if (!p_.gate) return g;
    const vec z = biased(g, c);
    if (p_.is_gate_bounded) return vec(p_.gate_lower_bound) * sigmoid_of(vec(rate_) * z);
    return vec(-rate_) * softplus_of(z);
  }
  vec biased(vec g, std::int64_t c) const {
    if (!p_.dt_bias) return g;
    const float* const bias = p_.dt_bias + h_ * p_.dt_bias_stride_h + c * p_.dt_bias_stride_d;
    return g +
           (p_.decay == Decay::channel ? load_strided(bias, p_.dt_bias_stride_d, min(kLanes, p_.d - c)) : vec(*bias));
  }
  // Of the gradient of the logarithm, that of g; what a_log's gets is added to `a_log`. A gradient of 0 gives 0, also
  // where the gate is at infinity.
  vec gate_gradient(vec dlog, vec g, std::int64_t c, vec& a_log) const {
    if (!p_.gate) return dlog;
    const vec z = biased(g, c), zero(0.f);
    if (p_.is_gate_bounded) {
      const vec share = sigmoid_of(vec(rate_) * z);
      const vec dz = dlog * vec(p_.gate_lower_bound) * (share * (vec(1.f) - share)) * vec(rate_);
      a_log = a_log + xsimd::select(dz == zero, zero, dz * z);
      return dz;
    }
    a_log = a_log + xsimd::select(dlog == zero, zero, dlog * log_decay(g, c));
    return dlog * vec(-rate_) * sigmoid_of(z);
  }

  const DeltaRuleParams& p_;
  const TokenRange range_;
  const std::int64_t b_, h_, padded_;
  const HeadRows q_, k_, v_, g_, beta_, out_;
  float rate_ = 1;
};

// f(T()) for the types that states can have.
template <class F>
auto with_state_type(DType type, F f) {
  return type == DType::bf16 ? f(bf16()) : f(float());
}
template <class T>
T* state_at(const StateRows& s, std::int64_t slot, std::int64_t head) {
  return static_cast<T*>(s.data) + s.at(slot, head);
}
// Columns [begin, begin + n) of a row of a state. `state` is s.at().
inline vec load_state(const StateRows& s, std::int64_t state, std::int64_t row, std::int64_t begin, std::int64_t n) {
  return with_state_type(s.type, [&](auto element) {
    const auto* const from = static_cast<const decltype(element)*>(s.data) + state;
    return load_strided(from + row * s.d_stride + begin * s.dv_stride, s.dv_stride, n);
  });
}
inline void store_state(const StateRows& s, std::int64_t state, std::int64_t row, std::int64_t begin, std::int64_t n,
                        vec x) {
  with_state_type(s.type, [&](auto element) {
    auto* const to = static_cast<decltype(element)*>(s.data) + state;
    store_strided(to + row * s.d_stride + begin * s.dv_stride, s.dv_stride, n, x);
  });
}

}  // namespace rapt::cpu::RAPT_ISA
