// delta_rule_backward: the recurrence of delta_rule.cpp, Z = S / e, differentiated block by block, so that all but a
// few triangles are products of matrices. With Y = G e, where G is the gradient of S, both ends of a window are linear
// in what its tokens write, and e is part of kd, ku and qd alone. For the tokens i of a window, from Z at its beginning
// and Y at its end,
//
//   du_i  =  Y^T ku_i + sum_j>=i (qd_j . ku_i) dout_j - sum_j>i (kd_j . ku_i) dw_j,     dw_i = beta_i du_i
//   dqd_i =  Z dout_i + sum_j<=i (dout_i . u_j) ku_j
//  -dkd_i =  Z dw_i   + sum_j<i (dw_i . u_j) ku_j
//   dku_i =  Y u_i    + sum_j>=i (dout_j . u_i) qd_j   - sum_j>i (dw_j . u_i) kd_j
//   Y    +=  sum_i qd_i dout_i^T - kd_i dw_i^T
//
// The rows [qd; -kd] and [dout; dw] go everywhere together: they are `left` and `right` here, in the order of their
// tokens. The gradient of a log decay is that of e's logarithm and of all later ones in the window, a sum from its end;
// of a window's first token it is rowsum(Y Z) at its beginning, so that errors of the sum end with the window, and
// decays to 0 get 0.
//
// begin() runs forward, keeps Z at the beginning of each block, transposed, and what each token's prediction misses.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/delta_rule.hpp"
#include "cpu/tile/matmul.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlock = kDeltaBackwardTokens;
constexpr std::int64_t kBlockLanes = (kBlock + kLanes - 1) / kLanes * kLanes;
constexpr std::int64_t kTokensOfTile = 8;  // of a triangle: products past its last token are left out

struct Scratch {
  std::int64_t d, dv, per_token;  // padded to whole vectors; rows of `left` and `right`
  // Of all tokens: v less the prediction [tokens][dv], where the rule predicts. Of all blocks: Z^T [dv][d], and e of
  // the token before [d].
  float *missed, *starts, *e_before;
  float *z, *y, *y_t;         // [d][dv]; y_t [dv][d]
  float* window_z;            // [kBlock - 1][dv][d]: Z^T where later windows of a block begin
  float *e, *carry, *anchor;  // [d]: of the last token; gradients of log decays, of later tokens and as rowsum(Y Z)
  // Of a block's tokens; `opening` is e before a window, over kWindowStart.
  float *kd, *ku, *e_of, *decay, *opening;  // [kBlock][d]
  float *u, *du;                            // [kBlock][dv]
  float *beta, *k_factor, *q_factor;        // [kBlock]; [kBlock][reads]
  float *left, *right, *dleft;              // [kBlock][per_token][d], dv, d
  float* dku;                               // [kBlock][d]
  float *ku_t, *u_t;                        // [d][kBlockLanes], [dv][kBlockLanes]
  float *left_ku, *right_u;                 // [kBlock][per_token][kBlockLanes]
  float *row, *gradient, *bias;             // [max(d, dv)]; [max(d, dv)]; [d]
  vec* dbeta;                               // [kBlock], as parts
  std::int64_t* windows;                    // [kBlock + 1]: first tokens, and n

  Scratch(Carver& carver, const DeltaRuleBackwardShape& shape, bool predicts)
      : d(round_up(shape.d, kLanes)), dv(round_up(shape.dv, kLanes)), per_token(shape.reads + predicts) {
    const std::int64_t blocks = (shape.tokens + kBlock - 1) / kBlock, longer = d > dv ? d : dv;
    for (float** state : {&z, &y, &y_t}) *state = carver.take<float>(d * dv);
    for (float** one : {&e, &carry, &anchor, &bias}) *one = carver.take<float>(d);
    for (float** one : {&row, &gradient}) *one = carver.take<float>(longer);
    for (float** rows : {&kd, &ku, &e_of, &decay, &opening, &dku}) *rows = carver.take<float>(kBlock * d);
    for (float** rows : {&u, &du}) *rows = carver.take<float>(kBlock * dv);
    for (float** one : {&beta, &k_factor}) *one = carver.take<float>(kBlock);
    q_factor = carver.take<float>(kBlock * shape.reads);
    for (float** rows : {&left, &dleft}) *rows = carver.take<float>(kBlock * per_token * d);
    right = carver.take<float>(kBlock * per_token * dv);
    ku_t = carver.take<float>(d * kBlockLanes), u_t = carver.take<float>(dv * kBlockLanes);
    for (float** rows : {&left_ku, &right_u}) *rows = carver.take<float>(kBlock * per_token * kBlockLanes);
    dbeta = carver.take<vec>(kBlock);
    windows = carver.take<std::int64_t>(kBlock + 1);
    e_before = carver.take<float>(blocks * d);
    missed = carver.take<float>(predicts ? shape.tokens * dv : 0);
    starts = carver.take<float>(blocks * d * dv);
    window_z = carver.take<float>((kBlock - 1) * d * dv);
  }
};

// f(integral_constant<int, vectors>, first column) for panels of up to 8 vectors: enough sums under way.
template <int kMost = kRegisters == 32 ? 16 : 8, class F>
void with_columns(std::int64_t columns, F f, std::int64_t c = 0) {
  for (; columns - c >= kMost * kLanes; c += kMost * kLanes) f(std::integral_constant<int, kMost>(), c);
  if constexpr (kMost > 1) with_columns<kMost / 2>(columns, f, c);
}

class Item {
 public:
  Item(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch)
      : p_(p),
        item_(item),
        carver_(scratch),
        tokens_(p, item.b, item.h),
        w_(carver_, {p.d, p.dv, p.reads, tokens_.count()}, p.has_delta) {}

  void begin() {
    for_each_column([&](std::int64_t i, std::int64_t c, std::int64_t n) {
      const StateRows& s = p_.initial;
      store(w_.z + i * w_.dv + c, s ? load_state(s, s.at(item_.b, item_.h), i, c, n) : vec(0.f));
    });
    fill(w_.z + p_.d * w_.dv, (w_.d - p_.d) * w_.dv, 0), fill(w_.e, w_.d, 1);
    for (std::int64_t t = 0; t < tokens_.count(); t += kBlock) run_forward(t);
    fill(w_.carry, w_.d, 0), fill(w_.y, w_.d * w_.dv, 0);
    if (const StateRows& s = p_.final) {
      for_each_column([&](std::int64_t i, std::int64_t c, std::int64_t n) {
        store(w_.y + i * w_.dv + c, load_state(s, s.at(item_.b, item_.h), i, c, n) * vec(w_.e[i]));
      });
      for (std::int64_t i = 0; i < p_.d; ++i) {
        vec sum(0.f);
        for (std::int64_t c = 0; c < w_.dv; c += kLanes)
          sum = fma(load(w_.y + i * w_.dv + c), load(w_.z + i * w_.dv + c), sum);
        w_.carry[i] = sum_of(sum);
      }
    }
    transpose_rows({w_.y, w_.dv}, w_.d, w_.dv, w_.y_t, w_.d);
    for (std::int64_t i = 0; i < 2 + p_.d; ++i) item_.head_sums[i] = 0;
  }

  void add_block(std::int64_t block) {
    const std::int64_t first = block * kBlock, n = min(kBlock, tokens_.count() - first);
    copy(w_.e_before + block * w_.d, w_.d, w_.e);
    const std::int64_t windows = prepare(first, n);
    prepare_rest(first, n);
    const float* start = w_.starts + block * w_.d * w_.dv;
    for (std::int64_t i = 1; i < windows; ++i) {
      float* const next = w_.window_z + (i - 1) * w_.d * w_.dv;
      const std::int64_t begin = w_.windows[i - 1], end = w_.windows[i];
      copy(start, w_.d * w_.dv, next);
      multiply<true, true>({w_.u + begin * w_.dv, w_.dv}, {w_.ku + begin * w_.d, w_.d}, next, w_.d, w_.dv, w_.d,
                           end - begin);
      open_columns(end, next);
      start = next;
    }
    fill(w_.bias, w_.d, 0);
    for (std::int64_t i = windows - 1; i >= 0; --i) {
      const std::int64_t begin = w_.windows[i], end = w_.windows[i + 1];
      add_window(first, begin, end - begin,
                 i > 0 ? w_.window_z + (i - 1) * w_.d * w_.dv : w_.starts + block * w_.d * w_.dv);
      for (std::int64_t t = end - 1; t >= begin; --t) finish(first, t, t == begin);
      open_rows(begin, w_.y), open_columns(begin, w_.y_t);
    }
    if (p_.grad_dt_bias)
      for (std::int64_t c = 0; c < p_.d; ++c) item_.head_sums[2 + c] += static_cast<double>(w_.bias[c]);
  }

  void end() const {
    const StateRows& s = p_.grad_initial;
    if (!s) return;
    for_each_column([&](std::int64_t i, std::int64_t c, std::int64_t n) {
      store_state(s, s.at(item_.b, item_.h), i, c, n, load(w_.y + i * w_.dv + c));
    });
  }

 private:
  // f(row of the state, column, columns there) for whole vectors of columns.
  template <class F>
  void for_each_column(F f) const {
    for (std::int64_t i = 0; i < p_.d; ++i)
      for (std::int64_t c = 0; c < w_.dv; c += kLanes) f(i, c, min(kLanes, p_.dv - c));
  }
  static void fill(float* to, std::int64_t n, float x) {
    for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, vec(x));
  }
  static void copy_any(const float* from, std::int64_t n, float* to) {
    for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, load_any(from + i));
  }
  static void copy(const float* from, std::int64_t n, float* to) {
    for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, load(from + i));
  }
  // What a window that begins at this token of the block makes of a state before it, [d][dv] or [dv][d]. One factor
  // after the other: their product may lie below what fp32 has.
  void open_rows(std::int64_t token, float* state) const {
    for (std::int64_t i = 0; i < w_.d; ++i) {
      const vec opening(w_.opening[token * w_.d + i]), decay(w_.decay[token * w_.d + i]);
      for (std::int64_t c = 0; c < w_.dv; c += kLanes, state += kLanes) store(state, load(state) * opening * decay);
    }
  }
  void open_columns(std::int64_t token, float* state) const {
    for (std::int64_t i = 0; i < w_.dv; ++i)
      for (std::int64_t c = token * w_.d; c < (token + 1) * w_.d; c += kLanes, state += kLanes)
        store(state, load(state) * load(w_.opening + c) * load(w_.decay + c));
  }

  // Windows of a block of tokens, and kd, ku and beta. A block begins a window. Returns how many there are.
  std::int64_t prepare(std::int64_t first, std::int64_t n) {
    std::int64_t windows = 0;
    for (std::int64_t t = 0; t < n; ++t) {
      float* const decay = w_.decay + t * w_.d;
      tokens_.decay(first + t, decay);
      vec least(kWindowStart), most(kWindowStart);
      for (std::int64_t c = 0; c < w_.d; c += kLanes) {
        const vec e = load(w_.e + c) * load(decay + c);
        least = xsimd::min(least, e), most = xsimd::max(most, e);
      }
      const bool opens = t == 0 || xsimd::any(vec(kWindowLeast) > least) || xsimd::any(most > vec(kWindowMost));
      if (opens) w_.windows[windows++] = t;
      const float* const k = tokens_.k(first + t, w_.row);
      const float factor = w_.k_factor[t] = tokens_.factor(k);
      for (std::int64_t c = 0; c < w_.d; c += kLanes) {
        const std::int64_t at = t * w_.d + c;
        const vec before = load(w_.e + c), e = opens ? vec(kWindowStart) : before * load(decay + c);
        const vec x = load_any(k + c) * vec(factor);
        if (opens) store(w_.opening + at, before * vec(1 / kWindowStart));
        store(w_.e + c, e), store(w_.e_of + at, e);
        store(w_.kd + at, x * e), store(w_.ku + at, x / e);
      }
      w_.beta[t] = tokens_.beta(first + t);
    }
    w_.windows[windows] = n;
    return windows;
  }
  // The rows of `left` and `right` but dw, and u.
  void prepare_rest(std::int64_t first, std::int64_t n) {
    for (std::int64_t t = 0; t < n; ++t) {
      float *left = w_.left + t * w_.per_token * w_.d, *right = w_.right + t * w_.per_token * w_.dv;
      for (std::int64_t r = 0; r < p_.reads; ++r, left += w_.d, right += w_.dv) {
        const float* const q = tokens_.q(first + t, r, w_.row);
        const float factor = w_.q_factor[t * p_.reads + r] = tokens_.factor(q);
        const vec scale(p_.scale * factor);
        for (std::int64_t c = 0; c < w_.d; c += kLanes)
          store(left + c, load_any(q + c) * (load(w_.e_of + t * w_.d + c) * scale));
        if (p_.out) copy_any(tokens_.out(first + t, r, w_.row), w_.dv, right);
        else fill(right, w_.dv, 0);
      }
      float* const u = w_.u + t * w_.dv;
      if (!p_.has_delta) {
        write_u(first + t, t);
        continue;
      }
      for (std::int64_t c = 0; c < w_.d; c += kLanes) store(left + c, vec(0.f) - load(w_.kd + t * w_.d + c));
      for (std::int64_t c = 0; c < w_.dv; c += kLanes)
        store(u + c, load(w_.missed + (first + t) * w_.dv + c) * vec(w_.beta[t]));
    }
  }
  // u of a token is its v.
  void write_u(std::int64_t token, std::int64_t t) {
    copy_any(tokens_.v(token, 0, p_.dv, w_.row), w_.dv, w_.u + t * w_.dv);
  }

  void run_forward(std::int64_t first) {
    const std::int64_t n = min(kBlock, tokens_.count() - first), block = first / kBlock;
    copy(w_.e, w_.d, w_.e_before + block * w_.d);
    const std::int64_t windows = prepare(first, n);
    for (std::int64_t i = 0; i < windows; ++i) {
      const std::int64_t begin = w_.windows[i], count = w_.windows[i + 1] - begin;
      open_rows(begin, w_.z);
      if (i == 0) transpose_rows({w_.z, w_.dv}, w_.d, w_.dv, w_.starts + block * w_.d * w_.dv, w_.d);
      for (std::int64_t t = begin; t < begin + count; ++t) write_u(first + t, t);
      const Rows ku{w_.ku + begin * w_.d, w_.d}, u{w_.u + begin * w_.dv, w_.dv};
      if (p_.has_delta) predict(first, begin, count);
      multiply<true, true>(ku, u, w_.z, w_.dv, w_.d, w_.dv, count);
    }
  }
  // u of a window's tokens, from v: beta times what the prediction misses.
  void predict(std::int64_t first, std::int64_t begin, std::int64_t n) {
    const Rows kd{w_.kd + begin * w_.d, w_.d};
    multiply<false, false>(kd, {w_.z, w_.dv}, w_.du, w_.dv, n, w_.dv, w_.d);
    transpose_rows({w_.ku + begin * w_.d, w_.d}, n, w_.d, w_.ku_t, kBlockLanes);
    multiply<false, false>(kd, {w_.ku_t, kBlockLanes}, w_.left_ku, kBlockLanes, n, n, w_.d);
    with_columns(w_.dv, [&](auto vectors, std::int64_t column) {
      constexpr int kV = decltype(vectors)::value;
      for (std::int64_t i = 0; i < n; ++i) {
        float* const u = w_.u + (begin + i) * w_.dv + column;
        vec sum[kV];
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) sum[v] = load(w_.du + i * w_.dv + column + v * kLanes);
        for (std::int64_t j = 0; j < i; ++j)
          add_row<kV>(w_.left_ku[i * kBlockLanes + j], w_.u + (begin + j) * w_.dv + column, sum);
        float* const missed = w_.missed + (first + begin + i) * w_.dv + column;
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) {
          const vec rest = load(u + v * kLanes) - sum[v];
          store(missed + v * kLanes, rest), store(u + v * kLanes, rest * vec(w_.beta[begin + i]));
        }
      }
    });
  }
  template <int kV>
  [[gnu::always_inline]] static void add_row(float factor, const float* row, vec (&sum)[kV]) {
#pragma GCC unroll 16
    for (int v = 0; v < kV; ++v) sum[v] = fma(vec(factor), load(row + v * kLanes), sum[v]);
  }

  // Gradients of u, left and ku of a window's tokens, and Y before them. `z_t`: Z^T at its beginning.
  void add_window(std::int64_t first, std::int64_t begin, std::int64_t n, const float* z_t) {
    const std::int64_t per_token = w_.per_token, first_row = begin * per_token;
    const Rows ku{w_.ku + begin * w_.d, w_.d}, u{w_.u + begin * w_.dv, w_.dv}, ku_t{w_.ku_t, kBlockLanes},
        u_t{w_.u_t, kBlockLanes}, left{w_.left + first_row * w_.d, w_.d}, right{w_.right + first_row * w_.dv, w_.dv};
    transpose_rows(ku, n, w_.d, w_.ku_t, kBlockLanes);
    transpose_rows(u, n, w_.dv, w_.u_t, kBlockLanes);
    const auto rows_from = [&](const Rows& rows, std::int64_t token) -> Rows {
      return {rows.data + token * per_token * rows.stride, rows.stride};
    };
    // For tiles of the triangles' rows.
    const auto for_each_tile = [&](auto f) {
      for (std::int64_t t = 0; t < n; t += kTokensOfTile) f(t, min(t + kTokensOfTile, n));
    };
    for_each_tile([&](std::int64_t t, std::int64_t end) {
      multiply<false, false>(rows_from(left, t), ku_t, w_.left_ku + t * per_token * kBlockLanes, kBlockLanes,
                             (end - t) * per_token, end, w_.d);
    });
    multiply<false, false>(ku, {w_.y, w_.dv}, w_.du + begin * w_.dv, w_.dv, n, w_.dv, w_.d);
    solve(first, begin, n);

    float* const dleft = w_.dleft + first_row * w_.d;
    multiply<false, false>(right, {z_t, w_.d}, dleft, w_.d, n * per_token, w_.d, w_.dv);
    for_each_tile([&](std::int64_t t, std::int64_t end) {
      float* const right_u = w_.right_u + t * per_token * kBlockLanes;
      multiply<false, false>(rows_from(right, t), u_t, right_u, kBlockLanes, (end - t) * per_token, end, w_.dv);
      // A query reads what its own token writes, a prediction does not.
      for (std::int64_t i = t; i < end; ++i)
        for (std::int64_t r = 0; r < per_token; ++r)
          for (std::int64_t j = r < p_.reads ? i + 1 : i; j < end; ++j)
            right_u[((i - t) * per_token + r) * kBlockLanes + j] = 0;
      multiply<false, true>({right_u, kBlockLanes}, ku, dleft + t * per_token * w_.d, w_.d, (end - t) * per_token, w_.d,
                            end);
    });
    float* const dku = w_.dku + begin * w_.d;
    multiply<false, false>(u, {w_.y_t, w_.d}, dku, w_.d, n, w_.d, w_.dv);
    for_each_tile([&](std::int64_t t, std::int64_t end) {
      multiply<true, true>({w_.right_u + t * per_token * kBlockLanes + t, kBlockLanes}, rows_from(left, t),
                           dku + t * w_.d, w_.d, end - t, w_.d, (n - t) * per_token);
    });
    multiply<true, true>(left, right, w_.y, w_.dv, w_.d, w_.dv, n * per_token);
    transpose_rows({w_.y, w_.dv}, w_.d, w_.dv, w_.y_t, w_.d);
    // rowsum(Y Z), for finish() of the window's first token.
    for (std::int64_t c = 0; c < w_.d; c += kLanes) {
      vec sum(0.f);
      for (std::int64_t i = 0; i < w_.dv; ++i) sum = fma(load(w_.y_t + i * w_.d + c), load(z_t + i * w_.d + c), sum);
      store(w_.anchor + c, sum);
    }
  }
  // du from the last token on, as it joins `right` as dw; and dbeta.
  void solve(std::int64_t first, std::int64_t begin, std::int64_t n) {
    const std::int64_t per_token = w_.per_token;
    for (std::int64_t i = 0; i < n; ++i) w_.dbeta[begin + i] = vec(0.f);
    with_columns(w_.dv, [&](auto vectors, std::int64_t column) {
      constexpr int kV = decltype(vectors)::value;
      float* const right = w_.right + begin * per_token * w_.dv + column;
      for (std::int64_t i = n - 1; i >= 0; --i) {
        float* const du = w_.du + (begin + i) * w_.dv + column;
        vec sum[kV];
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) sum[v] = load(du + v * kLanes);
        const auto add_rows = [&](std::int64_t from, std::int64_t to) __attribute__((always_inline)) {
          for (std::int64_t r = from; r < to; ++r) add_row<kV>(w_.left_ku[r * kBlockLanes + i], right + r * w_.dv, sum);
        };
        add_rows(i * per_token, i * per_token + p_.reads);
        add_rows((i + 1) * per_token, n * per_token);
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) store(du + v * kLanes, sum[v]);
        if (!p_.has_delta) continue;
        float* const dw = right + (i * per_token + p_.reads) * w_.dv;
        const float* const missed = w_.missed + (first + begin + i) * w_.dv + column;
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) {
          store(dw + v * kLanes, sum[v] * vec(w_.beta[begin + i]));
          w_.dbeta[begin + i] = fma(sum[v], load(missed + v * kLanes), w_.dbeta[begin + i]);
        }
      }
    });
  }

  // The gradients of a token; `opens`: the first of its window.
  void finish(std::int64_t first, std::int64_t t, bool opens) {
    const std::int64_t token = first + t;
    const float *const e = w_.e_of + t * w_.d, *const ku = w_.ku + t * w_.d, *const dku = w_.dku + t * w_.d;
    const float *const left = w_.left + t * w_.per_token * w_.d, *const dleft = w_.dleft + t * w_.per_token * w_.d;
    for (std::int64_t c = 0; c < w_.d; c += kLanes) {
      vec dlog = vec(0.f) - load(ku + c) * load(dku + c), dk = load(dku + c) / load(e + c);
      for (std::int64_t r = 0; r < w_.per_token; ++r)
        dlog = fma(load(left + r * w_.d + c), load(dleft + r * w_.d + c), dlog);
      if (p_.has_delta) dk = dk - load(dleft + p_.reads * w_.d + c) * load(e + c);
      store(w_.gradient + c, dk);
      store(w_.carry + c, opens ? load(w_.anchor + c) : load(w_.carry + c) + dlog);
    }
    tokens_.row_gradient(tokens_.k(token, w_.row), w_.k_factor[t], w_.gradient);
    give(p_.grad_k, item_.k_sums, p_.k_group, token, item_.h / p_.k_group, p_.d);
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      for (std::int64_t c = 0; c < w_.d; c += kLanes)
        store(w_.gradient + c, load(dleft + r * w_.d + c) * (load(e + c) * vec(p_.scale)));
      tokens_.row_gradient(tokens_.q(token, r, w_.row), w_.q_factor[t * p_.reads + r], w_.gradient);
      give(p_.grad_q, item_.q_sums, p_.q_group, token, item_.h / p_.q_group * p_.reads + r, p_.d);
    }
    copy(p_.has_delta ? w_.right + (t * w_.per_token + p_.reads) * w_.dv : w_.du + t * w_.dv, w_.dv, w_.gradient);
    give(p_.grad_v, item_.v_sums, p_.v_group, token, item_.h / p_.v_group, p_.dv);
    if (p_.grad_beta) {
      w_.gradient[0] = tokens_.beta_gradient(token, sum_of(w_.dbeta[t]));
      tokens_.write(p_.grad_beta, token, item_.h, 0, 1, w_.gradient);
    }
    if (p_.decay == Decay::none) return;
    const std::int64_t n = p_.decay == Decay::channel ? p_.d : 1;
    tokens_.decay_gradient(token, w_.carry, w_.gradient, item_.head_sums[0]);
    if (p_.grad_g) tokens_.write(p_.grad_g, token, item_.h, 0, n, w_.gradient);
    item_.head_sums[1] += static_cast<double>(w_.gradient[0]);
    for (std::int64_t c = 0; c < n; c += kLanes) store(w_.bias + c, load(w_.bias + c) + load(w_.gradient + c));
  }
  // The gradient of a row of q, k or v; the last of the state heads that share it has the sum.
  void give(const TokenRows& to, float* sums, std::int64_t group, std::int64_t token, std::int64_t head,
            std::int64_t n) {
    if (!to) return;
    if (group > 1) {
      const std::int64_t before = item_.h % group;
      float* const sum = sums + tokens_.index(token, head, p_.h / group) * sums_of_row(n);
      for (std::int64_t c = 0; c < n; c += kLanes) {
        const vec x = before > 0 ? load(sum + c) + load(w_.gradient + c) : load(w_.gradient + c);
        store(before < group - 1 ? sum + c : w_.gradient + c, x);
      }
      if (before < group - 1) return;
    }
    tokens_.write(to, token, head, 0, n, w_.gradient);
  }

  const DeltaRuleBackwardParams& p_;
  const DeltaRuleBackwardItem& item_;
  Carver carver_;
  const DeltaTokens tokens_;
  const Scratch w_;
};

void begin(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  Item(p, item, scratch).begin();
}
void add_block(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::int64_t block,
               std::byte* scratch) noexcept {
  const FlushDenormals flush;
  Item(p, item, scratch).add_block(block);
}
void end(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  Item(p, item, scratch).end();
}

std::size_t scratch_bytes(const DeltaRuleBackwardShape& shape) noexcept {
  Carver carver(nullptr);
  Scratch(carver, shape, true);
  return carver.used();
}

}  // namespace

const DeltaRuleBackwardKernel kDeltaRuleBackward = {.facts = {.operation = Operation::delta_rule_backward,
                                                              .phase = Phase::all,
                                                              .arithmetic = "f32",
                                                              .dtypes = kFloatTypes,
                                                              .max_head_size = 256,
                                                              .max_value_head_size = 256},
                                                    .scratch_bytes = scratch_bytes,
                                                    .begin = begin,
                                                    .add_block = add_block,
                                                    .end = end};

}  // namespace rapt::cpu::RAPT_ISA
