// The inputs of the delta_rule kernels: rows of a token as fp32, normalised if asked for; decays and beta computed
// from a model's projections. Rows are padded to whole vectors, with 0; decays with 1.
#pragma once

#include "cpu/registry.hpp"
#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {

// 1 / x to about 1 ulp if that is a normal number; exact for powers of 2.
[[gnu::always_inline]] inline vec inverse_of(vec x) {
#if defined(RAPT_HAVE_RCP14)
  const vec y = rcp14(x);
  return fma(y, fma(vec(0.f) - x, y, vec(1.f)), y);
#else
  return vec(1.f) / x;
#endif
}
// e^x to about 1 ulp, and 0 below the normal numbers. From x = 88.02 on it stays at e^88.02, nearly 2^127: products
// with it overflow anyway.
[[gnu::always_inline]] inline vec exp_of(vec x) {
  x = xsimd::min(vec(88.02f), xsimd::max(vec(-200.f), x));  // in this order NaN stays
  const vec rounded = x * vec(kLog2e);
  constexpr auto kLow = static_cast<float>(rapt::kLog2e - static_cast<double>(kLog2e));
  const vec rest = fma(x, vec(kLog2e), vec(0.f) - rounded) + x * vec(kLow);
  const vec power = exp2(rounded);
  return fma(power * rest, vec(static_cast<float>(kLn2)), power);
}
// Flushes denormals to 0 on every ISA, since a gate's rate, which may be as large as fp32 allows, may multiply the
// result.
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

// Kernels keep Z = S / e, where e is the product of each channel's decays since the window of tokens began. A token
// that would take some e out of [kWindowMin, kWindowMax] begins a new window, in which e starts from kWindowStart. A
// window spans 2^72, ten tokens that decay by e^-5 each. A number divided by e grows by less than 2^49.
inline constexpr float kWindowStart = 0x1p24f, kWindowMin = 0x1p-48f, kWindowMax = 0x1p28f;
// Computes e of a token, [n], from the `decay` of its channels and the e `before` it. Returns true if the token begins
// a window; then Z must be multiplied by `z_factor`, which is the e before it over kWindowStart, and by the decay.
[[gnu::always_inline]] inline bool next_e(const float* before, const float* decay, std::int64_t n, bool is_first,
                                          float* e, float* z_factor) {
  vec smallest(kWindowStart), largest(kWindowStart);
  for (std::int64_t c = 0; c < n; c += kLanes) {
    const vec x = load(before + c) * load(decay + c);
    smallest = xsimd::min(smallest, x), largest = xsimd::max(largest, x);
    store(e + c, x);
  }
  if (!is_first && !xsimd::any(vec(kWindowMin) > smallest) && !xsimd::any(largest > vec(kWindowMax))) return false;
  for (std::int64_t c = 0; c < n; c += kLanes) {
    store(z_factor + c, load(before + c) * vec(1 / kWindowStart));
    store(e + c, vec(kWindowStart));
  }
  return true;
}

// The rows of one head's tokens in a tensor, and of the heads that follow it.
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

// The tokens of one state head of one sequence.
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
    // Kept finite, so that a gate of 0 stays 0.
    constexpr double kMax = 0x1.fffffep127;
    const double rate = __builtin_exp(static_cast<double>(p.a_log[h * p.a_log_stride]));
    rate_ = static_cast<float>(rate > kMax ? kMax : rate);
  }
  std::int64_t count() const { return range_.count; }

  // A token's row: in place if it is whole vectors of contiguous fp32, else copied to `scratch`.
  const float* k(std::int64_t token, float* scratch) const { return row(k_, token, 0, 0, p_.d, scratch); }
  // The row of query head `r` of the state head.
  const float* q(std::int64_t token, std::int64_t r, float* scratch) const {
    return row(q_, token, r, 0, p_.d, scratch);
  }
  // Columns [begin, end).
  const float* v(std::int64_t token, std::int64_t begin, std::int64_t end, float* scratch) const {
    return row(v_, token, 0, begin, end - begin, scratch);
  }
  // A row of the gradient of out (the backward reads it where the forward writes out).
  const float* out(std::int64_t token, std::int64_t r, float* scratch) const {
    return row(out_, token, r, 0, p_.dv, scratch);
  }
  // Prefetches the rows of a token into L2. They are far apart in memory, which hardware prefetchers do not follow.
  // Always inline, because GCC drops calls that only prefetch.
  [[gnu::always_inline]] void prefetch_inputs(std::int64_t token, bool v, bool others) const {
    prefetch(k_, token, 0, p_.d);
    if (p_.decay == Decay::channel) prefetch(g_, token, 0, p_.d);
    if (v) prefetch(v_, token, 0, p_.dv);
    if (!others) return;
    for (std::int64_t r = 0; r < p_.reads; ++r) prefetch(q_, token, r, p_.d), prefetch(out_, token, r, p_.dv);
  }
  // Prefetches the rows of the token kAhead tokens later.
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
  // The factor that gives a row of q or k a norm of 1, if normalisation is asked for, else 1.
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
  // This sequence's rows of a tensor, of head `head` and those after it.
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

  // The chain rule for the computations above. row_gradient: `dx` is the gradient of the row times its factor on
  // entry, and of the row as given on return.
  void row_gradient(const float* row, float factor, float* dx) const {
    vec sum(0.f);
    for (std::int64_t c = 0; c < padded_; c += kLanes) sum = fma(load_any(row + c), load(dx + c), sum);
    const vec along(sum_of(sum) * factor * factor);
    for (std::int64_t c = 0; c < padded_; c += kLanes)
      store(dx + c, (load(dx + c) - load_any(row + c) * along) * vec(factor));
  }
  // The gradient of beta as given.
  float beta_gradient(std::int64_t token, float dbeta) const {
    if (p_.beta_double) dbeta *= 2;
    if (!p_.beta_sigmoid) return dbeta;
    const float share = first_of(sigmoid_of(vec(number(beta_, token))));
    return dbeta * share * (1 - share);
  }
  // The gradient of g as given, from that of each channel's log decay: [d], or one number where g is not given per
  // channel. Adds to `a_log` its share of the gradient of a_log.
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
  // The index of a token's head in [tokens of all sequences][heads].
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
  // The log decay of channels [c, c + kLanes), from their g.
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
  // From the gradient of the log decay, that of g. Adds to `a_log` its share of the gradient of a_log. A gradient of 0
  // gives 0, even where the gate is infinite.
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

// Calls f(T()) for the type of a state.
template <class F>
auto with_state_type(DType type, const F& f) {
  return type == DType::bf16 ? f(bf16()) : f(float());
}
template <class T>
T* state_at(const StateRows& s, std::int64_t slot, std::int64_t head) {
  return static_cast<T*>(s.data) + s.at(slot, head);
}
// Loads columns [begin, begin + n) of a row of a state; `state` is the result of s.at().
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
