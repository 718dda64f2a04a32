// attention_naive: three steps, S = q k^T, P = softmax(S), out = P v, as three passes over an S x S matrix in memory.
// `rapt bench` times it as the baseline, which is why it is compiled for every ISA. It is also a cross-check: it
// shares nothing with attention_prefill but exp2, the geometry of rows and the places of biases, slopes and sinks.
//
// A work item is one kv head of one sequence, with 4 sq sk bytes of scores, which each pass writes or reads once.
// Vector lanes run along d (dot products) and dv (sums of rows); strided inner dimensions are read element by element.
// 16-bit elements are widened as they are loaded; quantised rows are dequantised one element at a time.
#include "cpu/kernels/attention_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/head.hpp"
#include "semantics/coding.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

float sum_of(vec x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  float sum = 0;
  for (float y : lane) sum += y;
  return sum;
}

// Rows of fp32 in scratch have room for whole vectors; load_row() pads them with zeros.
template <class T>
void load_row(const T* x, std::int64_t stride, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(y + i, load_strided(x + i * stride, stride, min(kLanes, n - i)));
}
template <class T>
void store_row(const float* x, T* y, std::int64_t stride, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store_strided(y + i * stride, stride, min(kLanes, n - i), load(x + i));
}

// The order of summation does not depend on the stride.
template <class T>
float dot(const float* a, const T* b, std::int64_t stride, std::int64_t n) {
  vec acc(0.f);
  for (std::int64_t i = 0; i < n; i += kLanes)
    acc = fma(load(a + i), load_strided(b + i * stride, stride, min(kLanes, n - i)), acc);
  return sum_of(acc);
}

// y += w * x
template <class T>
void add_row(float w, const T* x, std::int64_t stride, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; i += kLanes)
    store(y + i, fma(vec(w), load_strided(x + i * stride, stride, min(kLanes, n - i)), load(y + i)));
}

constexpr float from_bits(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// An 8-bit float with `digits` fraction bits.
constexpr float from_float8(unsigned code, unsigned digits) {
  const unsigned magnitude = code & 0x7fu, exponent = magnitude >> digits, fraction = magnitude & ((1u << digits) - 1);
  const unsigned bias = (1u << (6 - digits)) - 1;
  const std::uint32_t sign = (code & 0x80u) << 24;
  const bool e5m2 = digits == 2;
  if (e5m2 ? exponent == 31 : magnitude == 0x7f)  // e4m3 has no infinity: its other numbers there are finite
    return from_bits(sign | (e5m2 && fraction == 0 ? 0x7f800000u : 0x7fc00000u));
  if (exponent == 0) {
    const float x = static_cast<float>(fraction) * from_bits((128 - bias - digits) << 23);
    return sign ? -x : x;
  }
  return from_bits(sign | (exponent + 127 - bias) << 23 | fraction << (23 - digits));
}

// The number of each 8-bit code, and of each code of 4 bits.
template <DType kType>
struct Codes {
  float number[256] = {};
  constexpr Codes() {
    for (int code = 0; code < 256; ++code) {
      if constexpr (kType == DType::i8) number[code] = static_cast<float>(code < 128 ? code : code - 256);
      else if constexpr (kType == DType::i4x2)
        number[code] = static_cast<float>(code % 16 < 8 ? code % 16 : code % 16 - 16);
      else number[code] = from_float8(static_cast<unsigned>(code), Fp8<kType>::kFraction);
    }
  }
};
template <DType kType>
constexpr Codes<kType> kCodes;

// Element i of the row of k or v at `row`, before its scale.
template <DType kType>
float code_at(const std::uint8_t* row, std::int64_t stride, std::int64_t i) {
  if constexpr (kType == DType::i4x2) return kCodes<kType>.number[row[i / 2 * stride] >> (i % 2 * 4) & 15];
  else return kCodes<kType>.number[row[i * stride]];
}

// Dequantises a row of n elements to fp32, padded with zeros like load_row()'s. at(strides) is the index of the row in
// an array of these strides.
template <DType kType, class At>
void dequantize_row(const void* x, const Strides& stride, const Quantization& quant, std::int64_t n, float* y, At at) {
  const auto* row = static_cast<const std::uint8_t*>(x) + at(stride);
  const float* scale = quant.scale ? quant.scale + at(quant.scale_stride) : nullptr;
  const float* zero = quant.zero ? quant.zero + at(quant.zero_stride) : nullptr;
  for (std::int64_t begin = 0, group = 0; begin < n; begin += quant.group, ++group) {
    const float s = scale ? scale[group * quant.scale_stride.d] : 1, z = zero ? zero[group * quant.zero_stride.d] : 0;
    for (std::int64_t i = begin; i < begin + quant.group; ++i) y[i] = (code_at<kType>(row, stride.d, i) - z) * s;
  }
  for (std::int64_t i = n; i < round_up(n, kLanes); ++i) y[i] = 0;
}

// Calls f(j, row, stride) for keys [first, last): the row of k or v in place, or dequantised into `scratch` with its
// tail.
template <class F>
void for_each_key(const Head& head, const Row& row, const void* x, const Strides& stride, const Quantization& quant,
                  const KeyTail& tail, std::int64_t n, float* scratch, F f) {
  const auto dequantized = [&]<DType kType>(DTypeConstant<kType>) {
    for (std::int64_t j = row.first; j < row.last; ++j) {
      dequantize_row<kType>(x, stride, quant, n - tail.size, scratch,
                            [&](const Strides& s) { return head.key_at(s, j); });
      for (std::int64_t i = 0; i < tail.size; ++i)
        scratch[n - tail.size + i] = number_at(tail.data, tail.type, head.key_at(tail.stride, j) + i * tail.stride.d);
      f(j, static_cast<const float*>(scratch), std::int64_t{1});
    }
  };
  if (with_dtype<kCacheTypes & ~kFloatTypes>(head.p.kv_type, dequantized)) return;
  with_float_type(head.p.kv_type, [&](auto element) {
    const auto* base = static_cast<const decltype(element)*>(x);
    for (std::int64_t j = row.first; j < row.last; ++j) f(j, base + head.key_at(stride, j), stride.d);
  });
}

void load_query(const Head& head, const Row& row, float* y) {
  const AttentionParams& p = head.p;
  const auto at = [&](const Strides& s) { return row_at(s, head, row); };
  if (p.q_type == DType::f8e4m3) {
    const Quantization quant{p.q_scale, nullptr, p.q_scale_stride, {}, p.d};
    return dequantize_row<DType::f8e4m3>(p.q, p.q_stride, quant, p.d, y, at);
  }
  with_float_type(p.q_type, [&](auto element) {
    load_row(static_cast<const decltype(element)*>(p.q) + at(p.q_stride), p.q_stride.d, p.d, y);
  });
}

struct AttentionNaiveScratch {
  float *s, *q, *block, *key;
  double *out, *inverse;

  AttentionNaiveScratch(BumpAllocator& allocator, const AttentionShape& shape) {
    s = allocator.take<float>(shape.rows * shape.sk);
    q = allocator.take<float>(round_up(shape.d, kLanes));
    out = allocator.take<double>(round_up(shape.dv, kLanes));
    inverse = allocator.take<double>(shape.rows);
    block = allocator.take<float>(round_up(shape.dv, kLanes));
    key = allocator.take<float>(round_up(max(shape.d, shape.dv), kLanes));
  }
};

void run(const AttentionParams& p, const WorkItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  const Head head(p, item);
  BumpAllocator allocator(scratch);
  const AttentionNaiveScratch w(allocator, {p.sk, p.d, p.dv, item.row_end - item.row_begin});
  const std::int64_t row_end = min(item.row_end, head.len_q * p.group);
  const std::int64_t low = head.low;  // a ring holds the last keys only, so key j's score is s[j - low]
  const auto scores = [&](std::int64_t r) { return w.s + (r - item.row_begin) * (head.high - low); };

  for (std::int64_t r = item.row_begin; r < row_end; ++r) {  // S = q k^T, keys [first, last) only
    Row row;
    find_rows(head, r, 1, &row);
    load_query(head, row, w.q);
    float* s = scores(r);
    for_each_key(head, row, p.k, p.k_stride, p.k_quant, p.k_tail, p.d, w.key,
                 [&](std::int64_t j, const auto* key, std::int64_t stride) {
                   s[j - low] = finish_score(p.score, place_of(head, row, j), row.nearest,
                                             dot(w.q, key, stride, p.d) * p.score.scale_log2, kNumberAt);
                 });
  }
  for (std::int64_t r = item.row_begin; r < row_end; ++r) {  // P = 2^(S - max)
    Row row;
    find_rows(head, r, 1, &row);
    float* s = scores(r);
    float top = -__builtin_inff();
    for (std::int64_t j = row.first; j < row.last; ++j) top = s[j - low] > top ? s[j - low] : top;  // a NaN stays in s
    const float m = top == -__builtin_inff() ? 0.f : top;
    double sum = 0;
    for (std::int64_t j = row.first; j < row.last; j += kLanes) {
      const std::int64_t n = min(kLanes, row.last - j);
      alignas(64) float weight[kLanes];
      float* at = s + (j - low);
      store(weight, exp2(load_strided(at, 1, n) - vec(m)));
      for (std::int64_t i = 0; i < n; ++i) {
        if (at[i] == -__builtin_inff())
          continue;  // keeps -inf, so that the last pass can tell a masked key from a weight that underflowed
        at[i] = weight[i];
        sum += static_cast<double>(weight[i]);
      }
    }
    // The sink is added in float64 and is not part of the maximum: a sink far above the scores would cost their
    // weights' digits.
    const double shift = static_cast<double>(alibi_shift_log2(head, row)), row_max = static_cast<double>(m);
    const double sink =
        p.score.sinks
            ? static_cast<double>(number_at(p.score.sinks, p.score.sinks_type, row.q_head * p.score.sinks_stride)) *
                      rapt::kLog2e +
                  shift
            : -__builtin_inf();
    const bool alone = sum == 0 && p.score.sinks;
    const double larger = sink > row_max || alone ? sink : row_max, factor = __builtin_exp2(row_max - larger);
    const double all = (sum == 0 ? 0 : factor * sum) + (sink == -__builtin_inf() ? 0 : __builtin_exp2(sink - larger));
    w.inverse[r - item.row_begin] = sum == 0 ? 0 * all : factor / all;  // NaN for a sink of NaN or inf
    if (p.lse)
      p.lse[row_at(p.lse_stride, head, row)] = static_cast<float>((__builtin_log2(all) + larger - shift) * kLn2);
  }
  for (std::int64_t r = item.row_begin; r < row_end; ++r) {  // out = P v / sum
    Row row;
    find_rows(head, r, 1, &row);
    const float* s = scores(r);
    const float kept = p.score.dropout.given ? p.score.dropout.scale : 1.f;
    for (std::int64_t c = 0; c < round_up(p.dv, kLanes); ++c) w.out[c] = 0, w.block[c] = 0;
    for_each_key(head, row, p.v, p.v_stride, p.v_quant, KeyTail{}, p.dv, w.key,
                 [&](std::int64_t j, const auto* value, std::int64_t stride) {
                   const float weight = s[j - low];
                   const bool dropped = is_dropped(p.score, place_of(head, row, j));
                   if (weight != -__builtin_inff() && !dropped) add_row(weight * kept, value, stride, p.dv, w.block);
                   if (j % kSumKeys != kSumKeys - 1 && j + 1 != row.last) return;
                   for (std::int64_t c = 0; c < p.dv; ++c) w.out[c] += static_cast<double>(w.block[c]), w.block[c] = 0;
                 });
    const double inverse = w.inverse[r - item.row_begin];
    for (std::int64_t c = 0; c < p.dv; ++c) w.block[c] = static_cast<float>(w.out[c] * inverse);
    with_float_type(p.out_type, [&](auto element) {
      store_row(w.block, static_cast<decltype(element)*>(p.out) + row_at(p.out_stride, head, row), p.out_stride.d,
                p.dv);
    });
  }
}

}  // namespace

const AttentionKernel kAttentionNaive = {.facts = {.operation = Operation::attention,
                                                   .phase = Phase::naive,
                                                   .arithmetic = "f32",
                                                   .dtypes = kCacheTypes,
                                                   .dropout = true,
                                                   .key_tail = true},
                                         .scratch_bytes = bytes_of<AttentionNaiveScratch>,
                                         .run = run};

}  // namespace rapt::cpu::RAPT_ISA
