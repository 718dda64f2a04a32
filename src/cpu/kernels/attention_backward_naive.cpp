// attention_backward_naive: the gradients as docs/contract.md writes them, one row and one key after another. It is
// the reference for attention_backward, compiled for one ISA. The two share the workers, the geometry of rows and
// keys, and semantics/score.hpp.
//
//   for each row that sees some of the item's keys         delta = dout . out - dlse
//     for each of these keys
//       P = e^(x - lse), dS = P (dout . v - delta), dX = dS f
//       dq += dX k, dk += dX q, dv += P dout
//
// Everything but the score is fp64. Only dq is rounded on the way, to the fp32 in which work items hand it on: after
// every kBackwardKeys keys, so that its bits do not depend on how keys are divided into work items.
#include "cpu/kernels/backward_pool.hpp"
#include "cpu/kernels/backward_rows.hpp"
#include "cpu/tile/bump_allocator.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

struct AttentionBackwardNaiveScratch {
  float *k, *v;     // [keys][d or dv]
  double *dk, *dv;  // likewise, before the scale
  float *q, *dout;  // of a row
  double* dq;       // [d] before the scale, and then the row's share of its slope's gradient
  double* dbias;    // [kBackwardKeys]
  float* rounded;   // [d or dv, whole vectors]

  AttentionBackwardNaiveScratch(BumpAllocator& allocator, const BackwardShape& shape) {
    k = allocator.take<float>(shape.keys * shape.d), v = allocator.take<float>(shape.keys * shape.dv);
    dk = allocator.take<double>(shape.keys * shape.d), dv = allocator.take<double>(shape.keys * shape.dv);
    q = allocator.take<float>(shape.d), dout = allocator.take<float>(shape.dv);
    dq = allocator.take<double>(shape.d + 1);
    dbias = allocator.take<double>(kBackwardKeys);
    rounded = allocator.take<float>(round_up(max(shape.d, shape.dv), kLanes));
  }
};
AttentionBackwardNaiveScratch scratch_of(const AttentionBackwardParams& p, std::int64_t keys, std::byte* scratch) {
  BumpAllocator allocator(scratch);
  return {allocator, {p.d, p.dv, changes_derivative(p.score), keys}};
}

Head head_of(const AttentionBackwardParams& p, std::int64_t b, std::int64_t hk) {
  return {p, {b, hk, 0, 0, 0, INT64_MAX, nullptr}};
}

void load_row(const void* x, DType type, std::int64_t at, std::int64_t stride, std::int64_t n, float* y) {
  for (std::int64_t c = 0; c < n; ++c) y[c] = number_at(x, type, at + c * stride);
}
// Stores x times the scale as a row of a gradient; null: 0.
void store_row(const double* x, double scale, std::int64_t n, const Gradient& to, std::int64_t at) {
  with_float_type(to.type, [&](auto element) {
    auto* const y = static_cast<decltype(element)*>(to.data) + at;
    for (std::int64_t c = 0; c < n; ++c)
      store_strided(y + c * to.stride.d, 1, 1, vec(x ? static_cast<float>(x[c] * scale) : 0.f));
  });
}
double dot(const float* a, const float* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t c = 0; c < n; ++c) sum += static_cast<double>(a[c]) * static_cast<double>(b[c]);
  return sum;
}
// y += w * x
void add_row(double w, const float* x, std::int64_t n, double* y) {
  for (std::int64_t c = 0; c < n; ++c) y[c] += w * static_cast<double>(x[c]);
}

void round_to_float(double* x, std::int64_t n) {
  for (std::int64_t c = 0; c < n; ++c) x[c] = static_cast<double>(static_cast<float>(x[c]));
}

// Loads keys [first, last) and clears the sums of their gradients.
void load_keys(const AttentionBackwardParams& p, const Head& head, std::int64_t first, std::int64_t last,
               const AttentionBackwardNaiveScratch& w) {
  for (std::int64_t j = first, i = 0; j < last; ++j, ++i) {
    load_row(p.k, p.kv_type, head.key_at(p.k_stride, j), p.k_stride.d, p.d, w.k + i * p.d);
    load_row(p.v, p.kv_type, head.key_at(p.v_stride, j), p.v_stride.d, p.dv, w.v + i * p.dv);
    for (std::int64_t c = 0; c < p.d; ++c) w.dk[i * p.d + c] = 0;
    for (std::int64_t c = 0; c < p.dv; ++c) w.dv[i * p.dv + c] = 0;
  }
}

struct GradRow : Row {
  double lse_log2;  // its lse in the log2 domain, without the shift of ALiBi
  double delta;
  bool has_dp;  // false: dP is equal to dout . out, and delta lacks it, too
};

GradRow load_query(const AttentionBackwardParams& p, const Head& head, const Row& row,
                   const AttentionBackwardNaiveScratch& w) {
  load_row(p.q, p.q_type, row_at(p.q_stride, head, row), p.q_stride.d, p.d, w.q);
  load_row(p.dout, p.dout_type, row_at(p.dout_stride, head, row), p.dout_stride.d, p.dv, w.dout);
  GradRow query{row, 0, 0, true};
  const float lse = p.lse[row_at(p.lse_stride, head, row)];
  // A row without keys has weights of 0; those of one that saw +inf are NaN, as the forward's.
  if (is_inf(lse)) query.lse_log2 = lse < 0 ? __builtin_inf() : __builtin_nan("");
  else query.lse_log2 = static_cast<double>(lse) * rapt::kLog2e + static_cast<double>(alibi_shift_log2(head, row));
  const double dlse = p.dlse ? static_cast<double>(p.dlse[row_at(p.dlse_stride, head, row)]) : 0;
  query.delta -= dlse;
  bool sees = false;  // a row that sees no key contributes only dlse to its sink, whatever dout holds
  for (std::int64_t j = row.first; j < row.last && !sees; ++j)
    sees = finish_score(p.score, place_of(head, row, j), row.nearest, 0.f, kNumberAt) != -kInfinity;
  for (std::int64_t c = 0; sees && c < p.dv; ++c) {
    const float out = number_at(p.out, p.out_type, row_at(p.out_stride, head, row) + c * p.out_stride.d);
    query.delta += static_cast<double>(w.dout[c]) * static_cast<double>(out);
  }
  if (query.delta - query.delta == 0 && attends_one_value(p, head, row)) query.has_dp = false, query.delta = 0 - dlse;
  return query;
}

// The gradients of a (row, key) pair.
struct Pair {
  bool hidden = true, dropped = true;
  double p = 0;  // the weight after dropout
  double ds = 0, dx = 0;
};

// Key j is the i-th in scratch.
Pair differentiate(const AttentionBackwardParams& p, const Head& head, const GradRow& row, std::int64_t j,
                   std::int64_t i, const AttentionBackwardNaiveScratch& w) {
  const ScorePlace place = place_of(head, row, j);
  const auto x = static_cast<float>(dot(w.q, w.k + i * p.d, p.d) * static_cast<double>(p.score.scale_log2));
  const float score = finish_score(p.score, place, row.nearest, x, kNumberAt);
  if (score == -kInfinity) return {};
  // Clamped, because no weight is above 1 whatever rounding errors the score and lse have.
  const double exponent = static_cast<double>(score) - row.lse_log2;
  const double weight = __builtin_exp2(exponent > 0 ? 0 : exponent);
  const bool dropped = is_dropped(p.score, place);
  const double kept = p.score.dropout.given ? static_cast<double>(p.score.dropout.scale) : 1;
  const double dp = dropped || !row.has_dp ? 0 : kept * dot(w.dout, w.v + i * p.dv, p.dv);
  const double ds = weight * (dp - row.delta);
  const double derivative = score_derivative(p.score, static_cast<double>(x));
  return {false, dropped, dropped ? 0 : kept * weight, ds, ds * derivative};
}

void begin(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head = head_of(p, item.b, item.hk);
  load_keys(p, head, item.key_begin, min(item.key_end, head.len_k),
            scratch_of(p, item.key_end - item.key_begin, scratch));
}

std::int64_t sums_of_row(std::int64_t d) noexcept {
  return d + 1;  // dq and the slope's share
}

// Stores the row's dq and its shares of the sink's and slope's gradients, once its last key is done.
void finish_row(const AttentionBackwardParams& p, const BackwardItem& item, const Head& head, const GradRow& row,
                const AttentionBackwardNaiveScratch& w) {
  if (p.grad_q) store_row(w.dq, static_cast<double>(p.scale), p.d, p.grad_q, row_at(p.grad_q.stride, head, row));
  const std::int64_t at = row_sum_at(p, item.b, head, row);
  if (item.slope_sums) item.slope_sums[at] = static_cast<float>(w.dq[p.d]);
  if (!item.sink_sums) return;
  const double weight = sink_weight(p, head, row);
  item.sink_sums[at] = weight == 0 ? 0.f : static_cast<float>(-weight * row.delta);
}

// A chunk is a row.
void add_rows(const AttentionBackwardParams& p, const BackwardItem& item, std::int64_t r, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head = head_of(p, item.b, item.hk);
  const AttentionBackwardNaiveScratch w = scratch_of(p, item.key_end - item.key_begin, scratch);
  const GradRow row = load_query(p, head, row_of(head, r / p.group, item.hk * p.group + r % p.group), w);
  const bool sees = row.first < row.last, is_first = !item.dq_sums || !sees || item.key_begin <= row.first,
             is_last = !item.split && (!sees || row.last <= item.key_end);
  float* const sums = is_first && is_last ? nullptr : item.dq_sums + r * sums_of_row(p.d);
  for (std::int64_t c = 0; c <= p.d; ++c) w.dq[c] = is_first ? 0 : static_cast<double>(sums[c]);
  const std::int64_t last = min(row.last, item.key_end);
  for (std::int64_t j = max(row.first, item.key_begin); j < last; ++j) {
    const std::int64_t i = j - item.key_begin, distance = row.token + head.offset - j;
    if (const Pair pair = differentiate(p, head, row, j, i, w); !pair.hidden) {
      add_row(pair.dx, w.k + i * p.d, p.d, w.dq);
      w.dq[p.d] -= pair.ds * static_cast<double>(max(distance, -distance));
      add_row(pair.dx, w.q, p.d, w.dk + i * p.d);
      if (!pair.dropped) add_row(pair.p, w.dout, p.dv, w.dv + i * p.dv);
    }
    if (j + 1 == last || (j + 1) % kBackwardKeys == 0) round_to_float(w.dq, p.d + 1);
  }
  if (is_last) return finish_row(p, item, head, row, w);
  for (std::int64_t c = 0; c <= p.d; ++c) sums[c] = static_cast<float>(w.dq[c]);
}

// Gathered keys: adds the gradients to the pool's sums, which are fp32 as dq is.
void add_to_pool(const AttentionBackwardParams& p, const BackwardItem& item, const Head& head,
                 const AttentionBackwardNaiveScratch& w) {
  for (std::int64_t j = item.key_begin, i = 0; j < min(item.key_end, head.len_k); ++j, ++i) {
    const std::int64_t row = listed_row(p, head.b, head.k_first, j);
    const bool first = begin_pool_sum(*item.pool, row);
    const auto add = [&](const double* sums, std::int64_t n, float* to) {
      for (std::int64_t c = 0; c < round_up(n, kLanes); ++c) w.rounded[c] = c < n ? static_cast<float>(sums[c]) : 0.f;
      add_floats(w.rounded, n, first, to);
    };
    if (p.grad_k) add(w.dk + i * p.d, p.d, item.pool->row(row));
    if (p.grad_v) add(w.dv + i * p.dv, p.dv, item.pool->row(row) + item.pool->dv_at);
  }
}

void end(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head = head_of(p, item.b, item.hk);
  const AttentionBackwardNaiveScratch w = scratch_of(p, item.key_end - item.key_begin, scratch);
  if (item.pool) return add_to_pool(p, item, head, w);
  const std::int64_t last = min(item.key_end, head.len_k);
  const auto store = [&](const Gradient& to, const double* sums, double scale, std::int64_t n) {
    for (std::int64_t j = item.key_begin, i = 0; to && j < max(last, item.clear_end); ++j, ++i)
      store_row(j < last ? sums + i * n : nullptr, scale, n, to, head.key_at(to.stride, j));
  };
  store(p.grad_k, w.dk, static_cast<double>(p.scale), p.d);
  store(p.grad_v, w.dv, 1, p.dv);
}

// The gradient of a piece of the bias, which is one row here: dS, summed over the dimensions that the bias broadcasts
// over.
void add_to_bias(const AttentionBackwardParams& p, const BiasItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const AttentionBackwardNaiveScratch w = scratch_of(p, kBackwardKeys, scratch);
  const auto summed = [](std::int64_t size, std::int64_t index, std::int64_t all) {
    return size == 1 ? KeyRange{0, all} : KeyRange{index, min(index + 1, all)};
  };
  const std::int64_t keys = min(kBackwardKeys, p.grad_bias_k - item.key_begin);  // of the gradient
  const bool one_key = p.grad_bias_k == 1;
  for (std::int64_t i = 0; i < keys; ++i) w.dbias[i] = 0;
  const KeyRange batch = summed(p.grad_bias_b, item.b, p.b), heads = summed(p.grad_bias_h, item.h, p.hq);
  for (std::int64_t b = batch.first; b < batch.last; ++b)
    for (std::int64_t h = heads.first; h < heads.last; ++h) {
      const Head head = head_of(p, b, h / p.group);
      const KeyRange tokens = summed(p.grad_bias_q, item.row_begin, head.len_q);
      const std::int64_t key_end = one_key ? head.len_k : min(item.key_begin + keys, head.len_k);
      for (std::int64_t k0 = item.key_begin; k0 < key_end; k0 += kBackwardKeys) {
        const std::int64_t k1 = min(k0 + kBackwardKeys, key_end);
        load_keys(p, head, k0, k1, w);
        for (std::int64_t token = tokens.first; token < tokens.last; ++token) {
          const GradRow row = load_query(p, head, row_of(head, token, h), w);
          for (std::int64_t j = max(row.first, k0); j < min(row.last, k1); ++j)
            w.dbias[one_key ? 0 : j - k0] += differentiate(p, head, row, j, j - k0, w).ds;
        }
      }
    }
  const Strides& to = p.grad_bias.stride;
  store_row(w.dbias, 1, keys, p.grad_bias,
            item.b * to.b + item.h * to.h + item.row_begin * to.s + item.key_begin * to.d);
}

std::size_t scratch_bytes(const BackwardShape& shape) noexcept {
  BumpAllocator allocator(nullptr);
  AttentionBackwardNaiveScratch(allocator, shape);
  return allocator.used();
}
std::size_t scratch_bytes_of_bias(const BackwardShape& shape) noexcept {
  return scratch_bytes({shape.d, shape.dv, shape.has_derivatives, kBackwardKeys});
}

}  // namespace

const AttentionBackwardKernel kAttentionBackwardNaive = {.facts = {.operation = Operation::attention_backward,
                                                                   .phase = Phase::naive,
                                                                   .arithmetic = "f32",
                                                                   .dtypes = kFloatTypes,
                                                                   .dropout = true},
                                                         .sums_of_row = sums_of_row,
                                                         .scratch_bytes = scratch_bytes,
                                                         .begin = begin,
                                                         .add_rows = add_rows,
                                                         .end = end,
                                                         .bias_scratch_bytes = scratch_bytes_of_bias,
                                                         .bias_rows = 1,
                                                         .add_bias = add_to_bias};

}  // namespace rapt::cpu::RAPT_ISA
