// Shared memory of delta_rule_prefill, and what its warpgroups have in common. A record has a chunk of 16 tokens, as
// the state's products need them.
//
// With b the running sums of a chunk's log decays, S the state before it, and rows k, q, v, u of its tokens:
//   r_t = v_t - (e^b_t k_t) S         u = T r, T = (1 + A)^-1 diag(beta), A_tj = beta_t <k_t, e^(b_t - b_j) k_j>, j < t
//   out_t = (e^b_t q_t) S + sum_j P_tj u_j, P_tj = <q_t, e^(b_t - b_j) k_j>, j <= t
//   S' = e^b_15 S + sum_j (e^(b_15 - b_j) k_j) u_j
// Norms of q and k are not in rows, but in factors of what is computed from them.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/hopper/ptx.cuh"
#include "cuda/tile/delta_rule.cuh"

namespace rapt::cuda {

constexpr int kChunk = 16, kHalf = kChunk / 2;  // tokens

// Addresses in shared memory of a chunk's record. Matrices that wgmma reads are panels of 64 columns, in bf16.
template <int kD>
struct ChunkRecord {
  static constexpr int kPanels = kD / 64, kRowBytes = 128, kPanelBytes = 2 * kChunk * kRowBytes,
                       kWritePanelBytes = kChunk * kRowBytes, kMatrixBytes = kChunk * kChunk * 2;
  std::uint32_t at;

  // Rows e^b k of the tokens, then e^b q.
  __device__ std::uint32_t rows() const { return at; }
  // Rows e^(b_15 - b) k.
  __device__ std::uint32_t writes() const { return at + kPanels * kPanelBytes; }
  // T and P, [16][16] in bf16.
  __device__ std::uint32_t inverse() const { return writes() + kPanels * kWritePanelBytes; }
  __device__ std::uint32_t weights() const { return inverse() + kMatrixBytes; }
  // e^b_15, [kD].
  __device__ std::uint32_t decay() const { return weights() + kMatrixBytes; }
  // Factors of each token's prediction, read-out and write, [16] each.
  __device__ std::uint32_t prediction_factors() const { return decay() + kD * 4; }
  __device__ std::uint32_t output_factors() const { return prediction_factors() + kChunk * 4; }
  __device__ std::uint32_t write_factors() const { return output_factors() + kChunk * 4; }
  // How many tokens the products take. Those from there on are for the recurrence.
  __device__ std::uint32_t count() const { return write_factors() + kChunk * 4; }

  static constexpr int kBytes =
      (kPanels * (kPanelBytes + kWritePanelBytes) + 2 * kMatrixBytes + kD * 4 + 3 * kChunk * 4 + 4 + 1023) / 1024 *
      1024;

  // Of 16 bytes, chunk c of row `row` of a panel.
  __device__ static std::uint32_t place(int row, int c) {
    return static_cast<std::uint32_t>(row * kRowBytes + chunk_place<kRowBytes>(row, c) * 16);
  }
};

__device__ __forceinline__ float low_of(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_of(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000);
}

__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// The log2 of decays, from g of two channels a token; NaN stays. Below kMinDecay 2^x is 0, even beside the growth
// that products take.
constexpr float kMinDecay = -144;
template <int kTokens>
__device__ __forceinline__ void log2_decays(const DeltaHead& head, const float (&bias)[2], float2 (&g)[kTokens]) {
  const auto each = [&](const auto& of) {
#pragma unroll
    for (float2& pair : g)
      pair = make_float2(max_or_nan(of(pair.x, bias[0]), kMinDecay), max_or_nan(of(pair.y, bias[1]), kMinDecay));
  };
  const DeltaRuleParams& p = head.p;
  if (!p.gate) {
    each([](float x, float) { return kLog2e * x; });
  } else if (p.is_gate_bounded) {
    constexpr float kMax = 0x1.fffffep127f;
    const float rate = kLog2e * head.rate > kMax ? kMax : kLog2e * head.rate, bound = kLog2e * p.gate_lower_bound;
    each([&](float x, float addend) {
      float share;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1 + exp2_approx(-rate * (x + addend))));
      return bound * share;
    });
  } else {
    each([&](float x, float addend) {
      x += addend;
      const float y = exp2_approx(-kLog2e * abs_of(x));
      float log1p;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log1p) : "f"(1 + y));
      if (y < 0x1p-6f) log1p = kLog2e * y * (1 - y * (0.5f - y * (1 / 3.f)));
      return -head.rate * fmaf(kLog2e, x > 0 ? x : 0, log1p);
    });
  }
}
__device__ inline float log2_decay(const DeltaHead& head, float g, float bias) {
  float2 one[] = {make_float2(g, g)};
  const float biases[] = {bias, bias};
  log2_decays(head, biases, one);
  return one[0].x;
}

// Whether either of two bf16 numbers is NaN or Inf.
__device__ inline bool has_nonfinite(std::uint32_t pair) {
  constexpr std::uint32_t kExponent = 0x7f80;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// Two neighbouring bf16 elements; those past the end are 0.
__device__ inline std::uint32_t load_pair(const HeadRows& rows, std::int64_t token, int c, int end) {
  const auto* const at = static_cast<const std::uint16_t*>(rows.first) + token * rows.token_stride + c * rows.stride;
  if (c + 1 < end && rows.stride == 1 && reinterpret_cast<std::uintptr_t>(at) % 4 == 0)
    return __ldg(reinterpret_cast<const std::uint32_t*>(at));
  std::uint32_t pair = 0;
  if (c < end) pair = __ldg(at);
  if (c + 1 < end) pair |= static_cast<std::uint32_t>(__ldg(at + rows.stride)) << 16;
  return pair;
}

// Shared memory of a warpgroup that prepares records, beside these.
template <int kD>
struct FactorMemory {
  static constexpr int kWarps = kD / 32;  // that have channels, 32 each
  static constexpr int kRowBytes = kD * 2, kTensorBytes = kChunk * kRowBytes;

  std::uint32_t at;

  // q, k and log decays of the chunk as they are in memory: [16][kD].
  __device__ std::uint32_t q() const { return at; }
  __device__ std::uint32_t k() const { return at + kKeys; }
  __device__ std::uint32_t g() const { return at + 2 * kTensorBytes; }  // up to four bytes each
  // Rows e^-m k; of the first half e^(m_7 - m) k, of the second e^m k; of the second half e^m q.
  static constexpr int kKeys = kTensorBytes, kLeft = 4 * kTensorBytes, kAcross = 5 * kTensorBytes,
                       kQueries = 6 * kTensorBytes;
  // What each warp has of 12 sums of each lane, of squares of rows of k and q, and of strong rows.
  __device__ std::uint32_t sums() const { return at + 7 * kTensorBytes; }
  __device__ std::uint32_t squares() const { return sums() + 12 * 4 * 32 * 4; }
  __device__ std::uint32_t strong() const { return squares() + 2 * kChunk * 4 * 4; }  // [4][2][16][8]
  // [16][16], and rows as bits, which warps have found.
  __device__ std::uint32_t interactions() const { return strong() + 4 * 2 * kChunk * kHalf * 4; }
  __device__ std::uint32_t found() const { return interactions() + kChunk * kChunk * 4; }
  // Of each warp, four addresses.
  __device__ std::uint32_t starts() const { return found() + 64; }

  static constexpr int kBytes = 7 * kTensorBytes + 12 * 4 * 32 * 4 + 2 * kChunk * 4 * 4 + 4 * 2 * kChunk * kHalf * 4 +
                                kChunk * kChunk * 4 + 64 + 4 * 4 * 8;

  // Of 16 bytes, chunk c of row `row`. Rows of both halves, which lanes of a warp access together, lie apart.
  __device__ static std::uint32_t place(int row, int c) {
    return static_cast<std::uint32_t>(row * kRowBytes + (c ^ row % 8 ^ row / 8 * 4) * 16);
  }
};

__device__ inline std::uint32_t load4_bits(std::uint32_t from) {
  return __float_as_uint(load4(from));
}
__device__ inline float2 pair_at(std::uint32_t from) {
  const std::uint32_t pair = load4_bits(from);
  return make_float2(low_of(pair), high_of(pair));
}
}  // namespace rapt::cuda
