// attention_naive: the three-step pipeline, S = q k^T, P = softmax(S), out = P v, as three passes over an S x S matrix
// in memory. The baseline of every table and the trusted fallback: it shares nothing with attention_forward but exp2
// and the geometry of rows.
//
// One item is one kv head of one sequence: 4 sq sk bytes of scores, written and read once a pass. Vector lanes run
// along d (dot products) and dv (sums of rows); strided inner dimensions go element by element. 16-bit elements are
// widened as they are loaded.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/panel.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kSumBlock = 128;  // keys summed before they join the row: rounding grows with the block

float sum_of(vec x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  float sum = 0;
  for (float y : lane) sum += y;
  return sum;
}

// Rows of fp32 in scratch have room for whole vectors; load_row fills them up with zeros.
template <class T>
void load_row(const T* x, std::int64_t stride, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(y + i, load_strided(x + i * stride, stride, least(kLanes, n - i)));
}
template <class T>
void store_row(const float* x, T* y, std::int64_t stride, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store_strided(y + i * stride, stride, least(kLanes, n - i), load(x + i));
}

// The order of the sum is the same for any stride.
template <class T>
float dot(const float* a, const T* b, std::int64_t stride, std::int64_t n) {
  vec acc(0.f);
  for (std::int64_t i = 0; i < n; i += kLanes)
    acc = fma(load(a + i), load_strided(b + i * stride, stride, least(kLanes, n - i)), acc);
  return sum_of(acc);
}

// y += w * x
template <class T>
void add_row(float w, const T* x, std::int64_t stride, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; i += kLanes)
    store(y + i, fma(vec(w), load_strided(x + i * stride, stride, least(kLanes, n - i)), load(y + i)));
}

// The final score of one pair in the log2 domain; -inf where masked.
float final_score(const Head& head, const Row& row, std::int64_t j, float dot) {
  const ScoreParams& s = head.p.score;
  if (s.mask && !term_row(s.mask, s.mask_stride, head, row)[j * s.mask_stride.d]) return -__builtin_inff();
  float x = dot * s.scale_log2;
  if (s.softcap_log2 != 0) x = s.softcap_log2 * __builtin_tanhf(x / s.softcap_log2);
  if (s.bias) {
    const float bias = term_row(static_cast<const float*>(s.bias), s.bias_stride, head, row)[j * s.bias_stride.d];
    if (bias == -__builtin_inff()) return bias;
    const float scaled = bias * kLog2e;  // the largest finite values stay finite: only -inf masks
    x += __builtin_isinf(scaled) && !__builtin_isinf(bias) ? __builtin_copysignf(__FLT_MAX__, bias) : scaled;
  }
  if (s.alibi) {
    const float slope = s.alibi[head.b * s.alibi_stride_b + row.q_head * s.alibi_stride_h];
    x -= slope * kLog2e * __builtin_fabsf(static_cast<float>(row.token + head.offset - j));
  }
  return x;
}

struct Scratch {
  float *s, *q, *out, *block;

  Scratch(Carver& carver, const ForwardShape& shape) {
    s = carver.take<float>(shape.rows * shape.sk);
    q = carver.take<float>(round_up(shape.d, kLanes));
    out = carver.take<float>(round_up(shape.dv, kLanes));
    block = carver.take<float>(round_up(shape.dv, kLanes));
  }
};

void run(const ForwardParams& p, const WorkItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  const Head head(p, item);
  Carver carver(scratch);
  const Scratch w(carver, {p.sk, p.d, p.dv, item.row_end - item.row_begin});
  const std::int64_t row_end = least(item.row_end, head.len_q * p.group), sk = head.len_k;
  const auto scores = [&](std::int64_t r) { return w.s + (r - item.row_begin) * sk; };

  for (std::int64_t r = item.row_begin; r < row_end; ++r) {  // S = q k^T, keys [first, last) only
    Row row;
    find_rows(head, r, 1, &row);
    with_element(p.q_type, [&](auto element) {
      load_row(static_cast<const decltype(element)*>(p.q) + row_at(p.q_stride, head, row), p.q_stride.d, p.d, w.q);
    });
    with_element(p.kv_type, [&](auto element) {
      const auto* k = static_cast<const decltype(element)*>(p.k) + head.key_at(p.k_stride, 0);
      for (std::int64_t j = row.first; j < row.last; ++j)
        scores(r)[j] = final_score(head, row, j, dot(w.q, k + j * p.k_stride.s, p.k_stride.d, p.d));
    });
  }
  for (std::int64_t r = item.row_begin; r < row_end; ++r) {  // P = 2^(S - max) / sum
    Row row;
    find_rows(head, r, 1, &row);
    float* s = scores(r);
    const float sink = p.score.sinks ? p.score.sinks[row.q_head * p.score.sinks_stride] * kLog2e : -__builtin_inff();
    float top = sink;
    for (std::int64_t j = row.first; j < row.last; ++j) top = s[j] > top ? s[j] : top;  // a NaN stays in s
    const float m = top == -__builtin_inff() ? 0.f : top;
    double sum = sink == -__builtin_inff() ? 0. : static_cast<double>(__builtin_exp2f(sink - m));
    for (std::int64_t j = row.first; j < row.last; j += kLanes) {
      const std::int64_t n = least(kLanes, row.last - j);
      alignas(64) float weight[kLanes];
      store(weight, exp2(load_strided(s + j, 1, n) - vec(m)));
      for (std::int64_t i = 0; i < n; ++i) {
        if (s[j + i] == -__builtin_inff()) continue;  // stays, so that the last pass can tell it from a vanished weight
        s[j + i] = weight[i];
        sum += static_cast<double>(weight[i]);
      }
    }
    const float inverse = sum == 0 ? 1.f : static_cast<float>(1 / sum);
    for (std::int64_t j = row.first; j < row.last; ++j) s[j] *= inverse;
    if (p.lse)
      p.lse[row_at(p.lse_stride, head, row)] =
          static_cast<float>((__builtin_log2(sum) + static_cast<double>(m)) * kLn2);
  }
  for (std::int64_t r = item.row_begin; r < row_end; ++r) {  // out = P v
    Row row;
    find_rows(head, r, 1, &row);
    const float* s = scores(r);
    for (std::int64_t c = 0; c < round_up(p.dv, kLanes); ++c) w.out[c] = w.block[c] = 0;
    with_element(p.kv_type, [&](auto element) {
      const auto* v = static_cast<const decltype(element)*>(p.v) + head.key_at(p.v_stride, 0);
      for (std::int64_t j = row.first; j < row.last; ++j) {
        if (s[j] != -__builtin_inff()) add_row(s[j], v + j * p.v_stride.s, p.v_stride.d, p.dv, w.block);
        if (j % kSumBlock != kSumBlock - 1 && j + 1 != row.last) continue;
        for (std::int64_t c = 0; c < p.dv; ++c) w.out[c] += w.block[c], w.block[c] = 0;
      }
    });
    with_element(p.out_type, [&](auto element) {
      store_row(w.out, static_cast<decltype(element)*>(p.out) + row_at(p.out_stride, head, row), p.out_stride.d, p.dv);
    });
  }
}

std::size_t scratch_bytes(const ForwardShape& shape) noexcept {
  Carver carver(nullptr);
  Scratch(carver, shape);
  return carver.used();
}

}  // namespace

const ForwardKernel kAttentionNaive = {"attention_naive", "f32", kAnyElement, nullptr, 0, 0, 0, 1, scratch_bytes, run};

}  // namespace rapt::cpu::RAPT_ISA
