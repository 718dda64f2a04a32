// The inputs of delta_rule kernels: rows of a token, loaded long before they are used; as fp32, normalised if asked
// for; decays and beta computed from a model's projections.
#pragma once

#include "cuda/tile/element.cuh"
#include "cuda/tile/score.cuh"
#include "operations/delta_rule/params.hpp"

namespace rapt::cuda {

// e^x; 0 below the normal numbers. From x = 88.02 on it stays at e^88.02, nearly 2^127: products with it overflow
// anyway.
__device__ inline float decay_of(float x) {
  const float y = expf(x > 88.02f ? 88.02f : x);
  return y < 0x1p-126f ? 0 : y;
}
// Flushes denormals to 0, since a gate's rate, which may be as large as fp32 allows, may multiply the result.
__device__ inline float sigmoid_of(float x) {
  const float share = 1 / (1 + decay_of(-x));
  return share < 0x1p-126f ? 0 : share;
}
__device__ inline float softplus_of(float x) {
  return (x > 0 ? x : 0) + log1pf(decay_of(-abs_of(x)));
}

// Four neighbouring elements as they are in memory, those of 16 bits in `low`, or one. A warp that converts them later
// does not wait for memory. Loads of each width have registers of their own: one into the same register would wait for
// the one before it.
struct FourElements {
  uint2 low, high;

  // The first n exist; the others are 0.
  __device__ static FourElements load(const void* base, DType type, std::int64_t at, std::int64_t stride, int n) {
    FourElements four{make_uint2(0, 0), make_uint2(0, 0)};
    const bool is_f32 = type == DType::f32;
    const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(base) + at * (is_f32 ? 4 : 2);
    if (n >= 4 && stride == 1 && from % 8 == 0) {
      four.low = __ldg(reinterpret_cast<const uint2*>(from));
      if (is_f32) four.high = __ldg(reinterpret_cast<const uint2*>(from) + 1);
    } else {
      load_singly(from, is_f32, stride, n, four);
    }
    return four;
  }
  // For one().
  __device__ static FourElements load_one(const void* base, DType type, std::int64_t at) {
    FourElements four{make_uint2(0, 0), make_uint2(0, 0)};
    if (type == DType::f32) four.low.x = __ldg(static_cast<const std::uint32_t*>(base) + at);
    else four.high.x = __ldg(static_cast<const std::uint16_t*>(base) + at);
    return four;
  }
  __device__ float one(DType type) const {
    if (type == DType::f32) return __uint_as_float(low.x);
    return type == DType::bf16 ? __uint_as_float(high.x << 16) : __half2float(__ushort_as_half(high.x));
  }
  __device__ float4 numbers(DType type) const {
    if (type == DType::f32)
      return make_float4(__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(high.x),
                         __uint_as_float(high.y));
    if (type == DType::bf16)
      return make_float4(__uint_as_float(low.x << 16), __uint_as_float(low.x & 0xffff0000),
                         __uint_as_float(low.y << 16), __uint_as_float(low.y & 0xffff0000));
    const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&low.x)),
                 second = __half22float2(*reinterpret_cast<const __half2*>(&low.y));
    return make_float4(first.x, first.y, second.x, second.y);
  }

 private:
  __device__ static void load_singly(std::uintptr_t from, bool is_f32, std::int64_t stride, int n, FourElements& four) {
    std::uint32_t x[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= n) break;
      if (is_f32) x[i] = __ldg(reinterpret_cast<const std::uint32_t*>(from) + i * stride);
      else x[i] = __ldg(reinterpret_cast<const std::uint16_t*>(from) + i * stride);
    }
    four.low = is_f32 ? make_uint2(x[0], x[1]) : make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
    four.high = make_uint2(x[2], x[3]);
  }
};

// A row, of which a lane has four elements in every 128.
template <int kPadded>
struct RowElements {
  static constexpr int kSteps = (kPadded + 127) / 128;
  FourElements four[kSteps];
};

// The rows that one head of a sequence has in a tensor, from its first token on.
struct HeadRows {
  const void* first;  // null: the tensor is not given
  std::int64_t token_stride, stride;
  DType type;

  HeadRows() = default;
  __device__ HeadRows(const TokenRows& rows, std::int64_t b, std::int64_t token, std::int64_t head)
      : first(rows.data), token_stride(rows.stride.s), stride(rows.stride.d), type(rows.type) {
    const std::int64_t at = token_at(rows.stride, b, token, head);
    if (first) first = static_cast<const std::byte*>(first) + at * (type == DType::f32 ? 4 : 2);
  }
  __device__ explicit operator bool() const { return first != nullptr; }

  // Elements [c, c + 4) of a row of n.
  __device__ FourElements four(std::int64_t token, int c, int n) const {
    return FourElements::load(first, type, token * token_stride + c * stride, stride, n - c);
  }
  // Of a tensor [b, t, h].
  __device__ FourElements one(std::int64_t token) const {
    return FourElements::load_one(first, type, token * token_stride);
  }
  template <int kPadded>
  __device__ RowElements<kPadded> row(std::int64_t token, int n) const {
    RowElements<kPadded> row;
#pragma unroll
    for (int i = 0; i < row.kSteps; ++i) row.four[i] = four(token, 4 * (threadIdx.x % 32) + 128 * i, n);
    return row;
  }
};

// What becomes of the inputs of one state head.
struct DeltaHead {
  const DeltaRuleParams& p;
  std::int64_t h = 0;
  float rate = 1;  // of the gate: exp(a_log), but finite, so that a gate of 0 stays 0

  __device__ explicit DeltaHead(const DeltaRuleParams& params) : p(params) {}
  __device__ DeltaHead(const DeltaRuleParams& params, std::int64_t head) : p(params) { start(head); }
  __device__ void start(std::int64_t head) {
    h = head;
    if (!p.a_log) return;
    constexpr float kMax = 0x1.fffffep127f;
    const float exp_a_log = expf(p.a_log[h * p.a_log_stride]);
    rate = exp_a_log > kMax ? kMax : exp_a_log;  // NaN stays
  }

  __device__ float bias(int c) const {
    return p.dt_bias ? p.dt_bias[h * p.dt_bias_stride_h + c * p.dt_bias_stride_d] : 0;
  }
  // From g and the channel's bias.
  __device__ float decay(float g, float bias) const {
    if (!p.gate) return decay_of(g);
    g += bias;
    return decay_of(p.is_gate_bounded ? p.gate_lower_bound * sigmoid_of(rate * g) : -rate * softplus_of(g));
  }
  __device__ float beta(float given) const {
    const float share = p.beta_sigmoid ? sigmoid_of(given) : given;
    return p.beta_double ? 2 * share : share;
  }
};

// A lane's elements of a row as numbers, times a factor.
template <int kPadded>
struct RowNumbers {
  static constexpr int kSteps = RowElements<kPadded>::kSteps;
  float4 x[kSteps];

  __device__ RowNumbers(const RowElements<kPadded>& row, DType type) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) x[i] = row.four[i].numbers(type);
  }
  // The lane's share of the sum of squares.
  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (const float4& y : x) sum = fmaf(y.x, y.x, fmaf(y.y, y.y, fmaf(y.z, y.z, fmaf(y.w, y.w, sum))));
    return sum;
  }
  // To `to`, [kPadded]; what a row lacks is 0.
  __device__ void write(float factor, float* to) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (const int c = 4 * (threadIdx.x % 32) + 128 * i; c < kPadded)
        *reinterpret_cast<float4*>(to + c) =
            make_float4(x[i].x * factor, x[i].y * factor, x[i].z * factor, x[i].w * factor);
  }
};
// What gives a row a norm of 1.
__device__ inline float norm_factor(float squares) {
  return rsqrtf(squares + 1e-6f);
}

}  // namespace rapt::cuda
