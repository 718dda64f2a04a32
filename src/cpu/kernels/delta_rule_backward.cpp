// delta_rule_backward: the recurrence of delta_rule.cpp, Z = S / e, differentiated block by block, so that all but a
// few triangles are products of matrices. With Y = G e, where G is the gradient of S, both ends of a window are linear
// in what its tokens write, and e is part of kd, ku and qd alone. For the tokens i of a block in one window, from Z at
// its beginning and Y at its end,
//
//   du_i  =  Y^T ku_i + sum_j>=i (qd_j . ku_i) dout_j - sum_j>i (kd_j . ku_i) dw_j,     dw_i = beta_i du_i
//   dqd_i =  Z dout_i + sum_j<=i (dout_i . u_j) ku_j
//  -dkd_i =  Z dw_i   + sum_j<i (dw_i . u_j) ku_j
//   dku_i =  Y u_i    + sum_j>=i (dout_j . u_i) qd_j   - sum_j>i (dw_j . u_i) kd_j
//   Y    +=  sum_i qd_i dout_i^T - kd_i dw_i^T
//
// The rows [qd; -kd] and [dout; dw] are always used together: `left` and `right` here, in the order of their tokens.
//
// The gradient of a token's log decay is a sum over reads, at the token or later, of what was written before it. Reads
// after the part are in `across`: rowsum(Y Z), plus ku_j * (Y u_j) for the tokens j before it. Those in the part are a
// running sum from its end, `reads`: a token adds what it reads, and subtracts what later ones read of its own write.
// What the decay does not reach is in neither, or its rounding errors would exceed the little that strong decays leave.
// A decay to 0 gets 0.
//
// begin() runs the forward, keeps Z^T at the beginning of each block, and each token's prediction error.
#include "cpu/kernels/delta_rule_backward_part.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

class DeltaRuleBackwardRunner : DeltaRuleBackwardPart {
 public:
  DeltaRuleBackwardRunner(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch)
      : DeltaRuleBackwardPart(p, item, scratch),
        item_(item),
        q_head_(item.h / p.q_group * p.reads),
        k_head_(item.h / p.k_group),
        v_head_(item.h / p.v_group),
        grad_q_(tokens_.rows_of(p.grad_q, q_head_)),
        grad_k_(tokens_.rows_of(p.grad_k, k_head_)),
        grad_v_(tokens_.rows_of(p.grad_v, v_head_)),
        grad_g_(tokens_.rows_of(p.grad_g, item.h)),
        grad_beta_(tokens_.rows_of(p.grad_beta, item.h)) {}

  void begin() {
    for_each_column([&](std::int64_t i, std::int64_t c, std::int64_t n) {
      const StateRows& s = p_.initial;
      store(w_.z[i] + c, s ? load_state(s, s.at(item_.b, item_.h), i, c, n) : vec(0.f));
    });
    for (std::int64_t i = p_.d; i < w_.d; ++i) fill(w_.z[i], w_.dv, 0);
    fill(w_.e, w_.d, 1);
    for (std::int64_t t = 0; t < tokens_.count(); t += kBlock) run_forward(t);
    for (std::int64_t i = 0; i < w_.d; ++i) fill(w_.y[i], w_.dv, 0);
    if (const StateRows& s = p_.final)
      for_each_column([&](std::int64_t i, std::int64_t c, std::int64_t n) {
        store(w_.y[i] + c, load_state(s, s.at(item_.b, item_.h), i, c, n) * vec(w_.e[i]));
      });
    transpose(w_.y, w_.d, w_.dv, w_.y_t);
    for (std::int64_t i = 0; i < 2 + p_.d; ++i) item_.head_sums[i] = 0;
  }

  void add_block(std::int64_t block) {
    const std::int64_t first = block * kBlock, end = min(first + kBlock, tokens_.count());
    const auto z_of = [&](std::int64_t part) {
      return part > 0 ? w_.part_z.from((part - 1) * w_.dv) : w_.starts.from(block * w_.dv);
    };
    // Finds the parts, and computes Z again where there are several, in the forward's order of operations: other
    // rounding errors would grow.
    std::int64_t last = -1;
    copy(w_.e_before[block], w_.d, w_.e);
    for (std::int64_t t = first, n = 0; t < end; t += n) {
      w_.parts[++last] = t;
      copy(w_.e, w_.d, w_.part_e[last]);
      n = prepare(t, end - t);
      if (last > 0 && opens_window_) open_rows(w_.z, 0, 1);
      if (last > 0) transpose(w_.z, w_.d, w_.dv, z_of(last));
      if (t + n == end) continue;
      if (last == 0) transpose(z_of(0), w_.dv, w_.d, w_.z);
      prepare_rest(t, n);
      multiply_by_ku(w_.left, 0);
      write(n);
    }
    w_.parts[last + 1] = end;
    fill(w_.bias, w_.d, 0);
    for (std::int64_t part = last; part >= 0; --part) {
      const std::int64_t begin = w_.parts[part], n = w_.parts[part + 1] - begin;
      if (part < last) copy(w_.part_e[part], w_.d, w_.e), prepare(begin, n);
      add_part(begin, n, z_of(part));
    }
    if (p_.grad_dt_bias)
      for (std::int64_t c = 0; c < p_.d; ++c) item_.head_sums[2 + c] += static_cast<double>(w_.bias[c]);
  }

  void end() const {
    const StateRows& s = p_.grad_initial;
    if (!s) return;
    for_each_column([&](std::int64_t i, std::int64_t c, std::int64_t n) {
      store_state(s, s.at(item_.b, item_.h), i, c, n, load(w_.y[i] + c));
    });
  }

 private:
  // Goes back over the tokens of a part. `z_t` is Z^T at its beginning.
  void add_part(std::int64_t first, std::int64_t n, const Matrix& z_t) {
    prepare_rest(first, n);
    multiply_by_ku(w_.left, w_.per_token);
    multiply<false, false>(w_.last_ku, w_.y, w_.du, n, w_.dv, w_.d);
    solve(first, n);
    differentiate_left(n, z_t);
    multiply<false, false>(w_.u, w_.y_t, w_.dku, n, w_.d, w_.dv);
    find_factors(1, pieces_);
    sum_across(n, z_t);
    fill(w_.reads, w_.d, 0);
    for (std::int64_t i = pieces_ - 1; i >= 0; --i) {
      const std::int64_t begin = w_.pieces[i], end = w_.pieces[i + 1], per_token = w_.per_token;
      for_each_tile(begin, end, [&](std::int64_t t, std::int64_t tile_end) {
        const std::int64_t r = t * per_token;
        multiply<true, false>({w_.right_u[r] + t, w_.right_u.stride}, w_.left.from(r), w_.own_dku.from(t), tile_end - t,
                              w_.d, n * per_token - r);
      });
      if (i == 0) take_y_before(n);
      for (std::int64_t t = end - 1; t >= begin; --t) finish(first, t);
      if (i == 0) break;
      open_columns(begin, w_.left.from(begin * per_token), (n - begin) * per_token);
      open_columns(begin, w_.dku, begin);
    }
    if (opens_window_) open_rows(w_.y, 0, 1), open_columns(0, w_.y_t, w_.dv);
  }
  // Calls f(row of the state, column, columns that exist) for whole vectors of columns.
  template <class F>
  void for_each_column(F f) const {
    for (std::int64_t i = 0; i < p_.d; ++i)
      for (std::int64_t c = 0; c < w_.dv; c += kLanes) f(i, c, min(kLanes, p_.dv - c));
  }
  // Computes the gradient of `left`, without what a token reads of its own write.
  void differentiate_left(std::int64_t n, const Matrix& z_t) const {
    const std::int64_t per_token = w_.per_token;
    transpose(w_.u, n, w_.dv, w_.u_t);
    multiply<false, false>(w_.right, z_t, w_.dleft, n * per_token, w_.d, w_.dv);
    for (std::int64_t i = 0; i < pieces_; ++i)
      for_each_tile(w_.pieces[i], w_.pieces[i + 1], [&](std::int64_t t, std::int64_t tile_end) {
        const std::int64_t r = t * per_token, rows = (tile_end - t) * per_token;
        const Matrix right_u = w_.right_u.from(r);
        multiply<false, false>(w_.right.from(r), w_.u_t, right_u, rows, tile_end, w_.dv);
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t token = t + row / per_token, read = row % per_token;
          if (read < p_.reads) w_.own_read[token * p_.reads + read] = right_u[row][token];
          for (std::int64_t j = token; j < tile_end; ++j) right_u[row][j] = 0;
        }
      });
    for (std::int64_t i = 0; i < pieces_; ++i) {
      const std::int64_t begin = w_.pieces[i], end = w_.pieces[i + 1];
      const auto add = [&](std::int64_t t, std::int64_t to, std::int64_t tokens) {
        const std::int64_t r = t * per_token;
        multiply<false, true>({w_.right_u[r] + begin, w_.right_u.stride}, w_.ku.from(begin), w_.dleft.from(r),
                              (to - t) * per_token, w_.d, tokens);
      };
      if (i > 0) open_columns(begin, w_.dleft.from(begin * per_token), (n - begin) * per_token);
      for_each_tile(begin, end, [&](std::int64_t t, std::int64_t tile_end) { add(t, tile_end, tile_end - begin); });
      add(end, n, end - begin);
    }
  }
  // Computes the part of each token's dg that Y after the part accounts for, across the token's decay: from Z before
  // the part, and from what earlier tokens write.
  void sum_across(std::int64_t n, const Matrix& z_t) const {
    with_columns(w_.d, [&](auto vectors, std::int64_t column) {
      constexpr int kV = decltype(vectors)::value;
      vec sum[kV];
#pragma GCC unroll 16
      for (int v = 0; v < kV; ++v) sum[v] = vec(0.f);
      for (std::int64_t i = 0; i < w_.dv; ++i)
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) {
          const std::int64_t c = column + v * kLanes;
          sum[v] = fma(load(w_.y_t[i] + c) * load(w_.factor + c), load(z_t[i] + c), sum[v]);
        }
#pragma GCC unroll 16
      for (int v = 0; v < kV; ++v) {
        const std::int64_t c = column + v * kLanes;
        vec across = sum[v] * load(w_.rest_of_factor + c);
        for (std::int64_t t = 0; t < n; ++t) {
          store(w_.across[t] + c, across);
          across = fma(load(w_.last_ku[t] + c), load(w_.dku[t] + c), across);
        }
      }
    });
  }
  void take_y_before(std::int64_t n) const {
    if (pieces_ > 1) multiply_rows(w_.y);
    multiply<true, true>(w_.left, w_.right, w_.y, w_.d, w_.dv, n * w_.per_token);
    transpose(w_.y, w_.d, w_.dv, w_.y_t);
  }
  // Prefetches where the gradients of a token of this block go, and the inputs of one of the block before.
  [[gnu::always_inline]] void prefetch_for(std::int64_t token) const {
    if (token >= kBlock) tokens_.prefetch_inputs(token - kBlock, !p_.has_delta, true);
    tokens_.prefetch<1>(grad_k_, token, 0, p_.d), tokens_.prefetch<1>(grad_v_, token, 0, p_.dv);
    if (p_.decay == Decay::channel) tokens_.prefetch<1>(grad_g_, token, 0, p_.d);
    for (std::int64_t r = 0; r < p_.reads; ++r) tokens_.prefetch<1>(grad_q_, token, r, p_.d);
  }
  // Solves for du from the last token to the first, stores dw in `right`, and sums dbeta.
  void solve(std::int64_t first, std::int64_t n) const {
    const std::int64_t per_token = w_.per_token;
    const Matrix du = w_.du, right = w_.right;
    vec* const dbeta = w_.dbeta;
    for (std::int64_t i = 0; i < n; ++i) dbeta[i] = vec(0.f);
    with_columns(w_.dv, [&](auto vectors, std::int64_t column) {
      constexpr int kV = decltype(vectors)::value;
      for (std::int64_t i = n - 1; i >= 0; --i) {
        if (column == 0) prefetch_for(first + i);
        vec sum[kV];
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) sum[v] = load(du[i] + column + v * kLanes);
        const auto add_rows = [&](std::int64_t from, std::int64_t to) __attribute__((always_inline)) {
          for (std::int64_t r = from; r < to; ++r) add_row<kV>(w_.left_ku[r][i], right[r] + column, sum);
        };
        add_rows(i * per_token, i * per_token + p_.reads);
        add_rows((i + 1) * per_token, n * per_token);
#pragma GCC unroll 16
        for (int v = 0; v < kV; ++v) {
          const std::int64_t at = column + v * kLanes;
          store(du[i] + at, sum[v]);
          if (!p_.has_delta) continue;
          store(right[i * per_token + p_.reads] + at, sum[v] * vec(w_.beta[i]));
          dbeta[i] = fma(sum[v], load(w_.missed[first + i] + at), dbeta[i]);
        }
      }
    });
  }

  // Stores the gradients of a token.
  void finish(std::int64_t first, std::int64_t t) {
    const std::int64_t token = first + t;
    const float *const e = w_.e_of[t], *const ku = w_.ku[t], *const own_dku = w_.own_dku[t],
                       *const own_read = w_.own_read + t * p_.reads;
    const Matrix left = w_.left.from(t * w_.per_token), dleft = w_.dleft.from(t * w_.per_token);
    const bool decays_zeros = token == 0 && !p_.initial;
    for (std::int64_t c = 0; c < w_.d; c += kLanes) {
      vec dku = load(w_.dku[t] + c) + load(own_dku + c), reads = load(w_.reads + c) - load(ku + c) * load(own_dku + c);
      for (std::int64_t r = 0; r < w_.per_token; ++r) reads = fma(load(left[r] + c), load(dleft[r] + c), reads);
      for (std::int64_t r = 0; r < p_.reads; ++r) dku = fma(vec(own_read[r]), load(left[r] + c), dku);
      vec dk = dku / load(e + c);
      if (p_.has_delta) dk = dk - load(dleft[p_.reads] + c) * load(e + c);
      store(w_.gradient + c, dk);
      const auto is_zero = (decays_zeros ? vec(0.f) : load(w_.decay[t] + c)) == vec(0.f);
      store(w_.reads + c, xsimd::select(is_zero, vec(0.f), reads));
      store(w_.across[t] + c, xsimd::select(is_zero, vec(0.f), load(w_.across[t] + c) + reads));
    }
    if (p_.l2norm) tokens_.row_gradient(tokens_.k(token, w_.row), w_.k_factor[t], w_.gradient);
    give(grad_k_, item_.k_sums, p_.k_group, token, k_head_, 0, p_.d);
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      for (std::int64_t c = 0; c < w_.d; c += kLanes)
        store(w_.gradient + c, fma(vec(own_read[r]), load(ku + c), load(dleft[r] + c)) * (load(e + c) * vec(p_.scale)));
      if (p_.l2norm) tokens_.row_gradient(tokens_.q(token, r, w_.row), w_.q_factor[t * p_.reads + r], w_.gradient);
      give(grad_q_, item_.q_sums, p_.q_group, token, q_head_, r, p_.d);
    }
    copy(p_.has_delta ? w_.right[t * w_.per_token + p_.reads] : w_.du[t], w_.dv, w_.gradient);
    give(grad_v_, item_.v_sums, p_.v_group, token, v_head_, 0, p_.dv);
    if (p_.grad_beta) {
      w_.gradient[0] = tokens_.beta_gradient(token, sum_of(w_.dbeta[t]));
      tokens_.write(grad_beta_, token, 0, 0, 1, w_.gradient);
    }
    if (p_.decay == Decay::none) return;
    const std::int64_t n = p_.decay == Decay::channel ? p_.d : 1;
    tokens_.decay_gradient(token, w_.across[t], w_.gradient, item_.head_sums[0]);
    if (p_.grad_g) tokens_.write(grad_g_, token, 0, 0, n, w_.gradient);
    item_.head_sums[1] += static_cast<double>(w_.gradient[0]);
    for (std::int64_t c = 0; c < n; c += kLanes) store(w_.bias + c, load(w_.bias + c) + load(w_.gradient + c));
  }
  // Stores the gradient of a row of q, k or v, of head `first_head` + r. State heads that share the row add to a sum,
  // and the last of them stores it.
  void give(const HeadRows& to, float* sums, std::int64_t group, std::int64_t token, std::int64_t first_head,
            std::int64_t r, std::int64_t n) {
    if (!to) return;
    if (group > 1) {
      const std::int64_t before = item_.h % group;
      float* const sum = sums + tokens_.index(token, first_head + r, p_.h / group) * padded_sums(n);
      for (std::int64_t c = 0; c < n; c += kLanes) {
        const vec x = before > 0 ? load(sum + c) + load(w_.gradient + c) : load(w_.gradient + c);
        store(before < group - 1 ? sum + c : w_.gradient + c, x);
      }
      if (before < group - 1) return;
    }
    tokens_.write(to, token, r, 0, n, w_.gradient);
  }

  const DeltaRuleBackwardItem& item_;
  const std::int64_t q_head_, k_head_, v_head_;  // the first heads that this state head reads
  const HeadRows grad_q_, grad_k_, grad_v_, grad_g_, grad_beta_;
};

void begin(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  DeltaRuleBackwardRunner(p, item, scratch).begin();
}
void add_block(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::int64_t block,
               std::byte* scratch) noexcept {
  const FlushDenormals flush;
  DeltaRuleBackwardRunner(p, item, scratch).add_block(block);
}
void end(const DeltaRuleBackwardParams& p, const DeltaRuleBackwardItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  DeltaRuleBackwardRunner(p, item, scratch).end();
}

std::size_t scratch_bytes(const DeltaRuleBackwardShape& shape) noexcept {
  return bytes_of<DeltaRuleBackwardScratch>(shape, true);
}

}  // namespace

const DeltaRuleBackwardKernel kDeltaRuleBackward = {.facts = {.operation = Operation::delta_rule_backward,
                                                              .phase = Phase::all,
                                                              .arithmetic = "f32",
                                                              .dtypes = kFloatTypes,
                                                              .max_head_dim = 256,
                                                              .max_value_head_dim = 256},
                                                    .scratch_bytes = scratch_bytes,
                                                    .begin = begin,
                                                    .add_block = add_block,
                                                    .end = end};

}  // namespace rapt::cpu::RAPT_ISA
