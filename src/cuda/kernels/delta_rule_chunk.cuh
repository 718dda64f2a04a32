// Records of delta_rule_prefill in shared memory: a chunk of 16 tokens, as the state's products need them.
//
// With b the running sums of a chunk's log decays, S the state before it, and rows k, q, v, u of its tokens:
//   r_t = v_t - (e^b_t k_t) S         u = T r, T = (1 + A)^-1 diag(beta), A_tj = beta_t <k_t, e^(b_t - b_j) k_j>, j < t
//   out_t = (e^b_t q_t) S + sum_j P_tj u_j, P_tj = <q_t, e^(b_t - b_j) k_j>, j <= t
//   S' = e^b_15 S + sum_j (e^(b_15 - b_j) k_j) u_j
// Norms of q and k are not in rows, but in factors of what is computed from them.
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/tile/delta_rule.cuh"

namespace rapt::cuda {

constexpr int kChunk = 16;  // tokens

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

// Volatile: the compiler must not move these to where some lanes of the warp do not come.
//
// mma of a warp: d += a b^T, [16 x 16] times [8 x 16].
__device__ __forceinline__ void warp_mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Loads four matrices of 8 x 8 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&x)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
// Transposes a matrix of 8 x 8 16-bit elements, of which each lane has two of row lane / 4.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
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

// The log2 of decays, from g of two channels a token; NaN stays. Below kLeastDecay 2^x is 0, even beside the growth
// that products take.
constexpr float kLeastDecay = -144;
template <int kTokens>
__device__ __forceinline__ void log2_decays(const DeltaHead& head, const float (&bias)[2], float2 (&g)[kTokens]) {
  const auto each = [&](const auto& of) {
#pragma unroll
    for (float2& pair : g)
      pair = make_float2(max_or_nan(of(pair.x, bias[0]), kLeastDecay), max_or_nan(of(pair.y, bias[1]), kLeastDecay));
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

}  // namespace rapt::cuda
