// Part of delta_rule_backward.cpp: the tokens of a part of a block, and the forward.
//
// A piece is the intersection of a block of tokens and a window. Its kd, ku and qd, and their gradients, are relative
// to its window; those of another window differ by the factors of the windows that begin between. So blocks of several
// pieces read and update Z and Y once: rows take the factors, where they meet rows of another piece or a state.
//
// Decays above 1 magnify the rounding errors of what tokens erase, until Z and Y are updated. So a block is computed in
// parts, each of which updates them, and in which no channel rises by more than kMaxGrowth: one part unless states
// grow.
#pragma once

#include "cpu/kernels/delta_rule_backward_scratch.hpp"
#include "cpu/tile/delta_rule.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kTokensOfTile = 8;  // of a triangle; products past its last token are skipped
constexpr float kMaxGrowth = kWindowMax / kWindowStart;

// Calls f(integral_constant<int, vectors>, first column) for column blocks of up to 8 or 16 vectors: enough
// independent sums.
template <int kMaxVecs = kRegisters == 32 ? 16 : 8, class F>
void with_columns(std::int64_t columns, F f, std::int64_t c = 0) {
  for (; columns - c >= kMaxVecs * kLanes; c += kMaxVecs * kLanes) f(std::integral_constant<int, kMaxVecs>(), c);
  if constexpr (kMaxVecs > 1) with_columns<kMaxVecs / 2>(columns, f, c);
}

void copy(const float* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, load_any(from + i));
}

class DeltaRuleBackwardPart {
 protected:
  DeltaRuleBackwardPart(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch)
      : p_(p),
        allocator_(scratch),
        tokens_(p, item.b, item.h),
        w_(allocator_, {p.d, p.dv, p.reads, tokens_.count()}, p.has_delta) {}

  // Finds the pieces of a part, and computes kd, ku and beta. Returns how many of the next n tokens are in the part.
  std::int64_t prepare(std::int64_t first, std::int64_t n) {
    pieces_ = 0;
    for (std::int64_t t = 0; t < n; ++t) {
      float* const decay = w_.decay[t];
      tokens_.decay(first + t, decay);
      if (grows(decay, t == 0)) {
        n = t;
        break;
      }
      const bool opens_window = next_e(w_.e, decay, w_.d, first + t == 0, w_.e_of[t], w_.z_factor[t]);
      if (t == 0) opens_window_ = opens_window;
      if (t == 0 || opens_window) w_.pieces[pieces_++] = t;
      const float* const k = tokens_.k(first + t, w_.row);
      const vec factor(w_.k_factor[t] = tokens_.factor(k));
      for (std::int64_t c = 0; c < w_.d; c += kLanes) {
        const vec e = load(w_.e_of[t] + c), x = load_any(k + c) * factor;
        store(w_.e + c, e);
        store(w_.kd[t] + c, x * e), store(w_.ku[t] + c, x * inverse_of(e));
      }
      w_.beta[t] = tokens_.beta(first + t);
    }
    w_.pieces[pieces_] = n;
    return n;
  }
  // Updates how far each channel has risen since it was lowest in the part. Returns whether that is too much for one.
  bool grows(const float* decay, bool begins_part) {
    if (begins_part) {
      fill(w_.rise, w_.d, 1);
      has_risen_ = false;
      return false;
    }
    vec largest(1.f);
    for (std::int64_t c = 0; c < w_.d; c += kLanes) largest = xsimd::max(largest, load(decay + c));
    has_risen_ = has_risen_ || xsimd::any(largest > vec(1.f));
    if (!has_risen_) return false;
    for (std::int64_t c = 0; c < w_.d; c += kLanes) {
      const vec rise = xsimd::max(load(w_.rise + c) * load(decay + c), vec(1.f));
      store(w_.rise + c, rise);
      largest = xsimd::max(largest, rise);
    }
    return xsimd::any(largest > vec(kMaxGrowth));
  }
  // Computes u and the rows of `left` and `right`, except dw.
  void prepare_rest(std::int64_t first, std::int64_t n) {
    for (std::int64_t t = 0; t < n; ++t) {
      const Matrix left = w_.left.from(t * w_.per_token), right = w_.right.from(t * w_.per_token);
      for (std::int64_t r = 0; r < p_.reads; ++r) {
        const float* const q = tokens_.q(first + t, r, w_.row);
        const vec scale(p_.scale * (w_.q_factor[t * p_.reads + r] = tokens_.factor(q)));
        for (std::int64_t c = 0; c < w_.d; c += kLanes)
          store(left[r] + c, load_any(q + c) * (load(w_.e_of[t] + c) * scale));
        if (p_.out) copy(tokens_.out(first + t, r, w_.row), w_.dv, right[r]);
        else fill(right[r], w_.dv, 0);
      }
      if (!p_.has_delta) {
        take_v(first, t);
        continue;
      }
      for (std::int64_t c = 0; c < w_.d; c += kLanes) store(left[p_.reads] + c, vec(0.f) - load(w_.kd[t] + c));
      for (std::int64_t c = 0; c < w_.dv; c += kLanes)
        store(w_.u[t] + c, load(w_.missed[first + t] + c) * vec(w_.beta[t]));
    }
  }
  void take_v(std::int64_t first, std::int64_t t) const {
    copy(tokens_.v(first + t, 0, p_.dv, w_.row), w_.dv, w_.u[t]);
  }

  void run_forward(std::int64_t first) {
    const std::int64_t end = min(first + kBlock, tokens_.count()), block = first / kBlock;
    copy(w_.e, w_.d, w_.e_before[block]);
    for (std::int64_t t = first + kBlock; t < min(first + 2 * kBlock, tokens_.count()); ++t)
      tokens_.prefetch_inputs(t, true, false);
    for (std::int64_t part = first, n = 0; part < end; part += n) {
      n = prepare(part, end - part);
      if (opens_window_) open_rows(w_.z, 0, 1);
      if (part == first) transpose(w_.z, w_.d, w_.dv, w_.starts.from(block * w_.dv));
      for (std::int64_t t = 0; t < n; ++t) take_v(part, t);
      multiply_by_ku(w_.kd, p_.has_delta ? 1 : 0);
      if (p_.has_delta) predict(part, n);
      write(n);
    }
  }
  // Moves Z from the beginning of a part to its end.
  void write(std::int64_t n) const {
    open_rows(w_.z, 1, pieces_);
    multiply<true, true>(w_.last_ku, w_.u, w_.z, w_.d, w_.dv, n);
  }
  // Computes the products left_ku of rows of a part with ku of the same and earlier tokens, and last_ku.
  void multiply_by_ku(const Matrix& rows, std::int64_t per_token) const {
    for (std::int64_t i = 0; i < pieces_; ++i) {
      const std::int64_t begin = w_.pieces[i], end = w_.pieces[i + 1];
      if (i > 0) open_columns(begin, w_.last_ku, begin);
      for (std::int64_t t = begin; t < end; ++t) copy(w_.ku[t], w_.d, w_.last_ku[t]);
      if (per_token == 0) continue;
      transpose(w_.last_ku, end, w_.d, w_.ku_t);
      for_each_tile(begin, end, [&](std::int64_t t, std::int64_t tile_end) {
        const std::int64_t r = t * per_token;
        multiply<false, false>(rows.from(r), w_.ku_t, w_.left_ku.from(r), (tile_end - t) * per_token, tile_end, w_.d);
      });
    }
  }
  // Computes u of a part's tokens, from v: beta times the prediction error.
  void predict(std::int64_t first, std::int64_t n) const {
    const Matrix u = w_.u, missed = w_.missed.from(first);
    for (std::int64_t i = pieces_ - 1; i > 0; --i)
      open_columns(w_.pieces[i], w_.kd.from(w_.pieces[i]), n - w_.pieces[i]);
    multiply<false, false>(w_.kd, w_.z, missed, n, w_.dv, w_.d);
    with_columns(w_.dv, [&](auto vectors, std::int64_t column) {
      constexpr int kV = decltype(vectors)::value;
      for (std::int64_t i = 0; i < n; ++i) {
        vec sum[kV];
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) sum[v] = load(missed[i] + column + v * kLanes);
        for (std::int64_t j = 0; j < i; ++j) add_row<kV>(w_.left_ku[i][j], u[j] + column, sum);
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) {
          const std::int64_t at = column + v * kLanes;
          const vec rest = load(u[i] + at) - sum[v];
          store(missed[i] + at, rest), store(u[i] + at, rest * vec(w_.beta[i]));
        }
      }
    });
  }
  template <int kV>
  [[gnu::always_inline]] static void add_row(float factor, const float* row, vec (&sum)[kV]) {
#pragma GCC unroll 16
    for (int v = 0; v < kV; ++v) sum[v] = fma(vec(factor), load(row + v * kLanes), sum[v]);
  }

  // From one window to a later one, what has a row or a column for each channel is multiplied by factors of Z, each by
  // two floats, since one may be out of fp32's range. open_rows() does so for all windows that pieces [begin, end)
  // begin, open_columns() for the one that a token begins.
  void open_rows(const Matrix& state, std::int64_t begin, std::int64_t end) const {
    if (begin == end) return;
    find_factors(begin, end);
    multiply_rows(state);
  }
  void find_factors(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t c = 0; c < w_.d; ++c) w_.exact_factor[c] = 1;
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const float *const z_factor = w_.z_factor[w_.pieces[piece]], *const decay = w_.decay[w_.pieces[piece]];
      for (std::int64_t c = 0; c < w_.d; ++c)
        w_.exact_factor[c] *= static_cast<double>(z_factor[c]) * static_cast<double>(decay[c]);
    }
    for (std::int64_t c = 0; c < w_.d; ++c) {
      constexpr double kSmall = 0x1p-126, kLarge = 0x1p127;
      const double factor = w_.exact_factor[c], part = factor < kSmall ? kSmall : factor > kLarge ? kLarge : factor;
      w_.factor[c] = static_cast<float>(part), w_.rest_of_factor[c] = static_cast<float>(factor / part);
    }
  }
  void multiply_rows(const Matrix& state) const {
    for (std::int64_t i = 0; i < w_.d; ++i) {
      const vec factor(w_.factor[i]), rest(w_.rest_of_factor[i]);
      for (std::int64_t c = 0; c < w_.dv; c += kLanes) store(state[i] + c, load(state[i] + c) * factor * rest);
    }
  }
  void open_columns(std::int64_t token, const Matrix& rows, std::int64_t count) const {
    const float *const z_factor = w_.z_factor[token], *const decay = w_.decay[token];
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t c = 0; c < w_.d; c += kLanes)
        store(rows[i] + c, load(rows[i] + c) * load(z_factor + c) * load(decay + c));
  }
  // Calls f(token, end) for tiles of a triangle's rows: tokens [token, end).
  template <class F>
  static void for_each_tile(std::int64_t begin, std::int64_t end, F f) {
    for (std::int64_t t = begin; t < end; t += kTokensOfTile) f(t, min(t + kTokensOfTile, end));
  }

  const DeltaRuleBackwardParams& p_;
  BumpAllocator allocator_;
  const DeltaTokens tokens_;
  const DeltaRuleBackwardScratch w_;
  std::int64_t pieces_ = 0;    // of the part
  bool opens_window_ = false;  // whether the part's first token begins a window

 private:
  bool has_risen_ = false;  // whether some decay of the part is above 1
};

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
