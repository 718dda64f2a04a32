// What kernels of every backend know of scores: the POD part of the borders to them.
#pragma once

#include <cstdint>

namespace rapt {

inline constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

// What an element of q, k, v or out is; the last four in k and v only. i4 come in pairs, two to a byte.
enum class Element : std::uint8_t { f32, bf16, f16, i8, e4m3, e5m2, i4 };

// Strides in elements of the dimensions b, h, s (rows) and d (inner). Ragged tensors have b = 0.
struct Strides {
  std::int64_t b, h, s, d;
};

#ifdef __CUDACC__
#define RAPT_HOST_DEVICE __host__ __device__
#else
#define RAPT_HOST_DEVICE [[gnu::always_inline]]
#endif

// A list of i32 or i64, `stride` elements apart: lengths, first rows, pages. Null = not given. Of calls on a GPU it is
// in device memory, where only kernels can look.
struct Integers {
  const void* data;
  std::int64_t stride;
  bool is_int64;

  RAPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  RAPT_HOST_DEVICE std::int64_t operator[](std::int64_t i) const { return element(i * stride); }
  // The one at that many elements from the first.
  RAPT_HOST_DEVICE std::int64_t element(std::int64_t offset) const {
    return is_int64 ? static_cast<const std::int64_t*>(data)[offset] : static_cast<const std::int32_t*>(data)[offset];
  }
};

// Everything between q.k and the softmax, in the log2 domain where it says so.
struct ScoreParams {
  float scale_log2;    // scale * log2(e)
  float softcap_log2;  // c * log2(e); 0 = none
  // Row i sees keys i + offset - left <= j <= i + offset + right; sides are open at kOpen. Causal is right = 0.
  std::int64_t left, right, offset;
  bool bottom_right;         // offset += len_k - len_q of the sequence
  const void* bias;          // [b, hq, sq, sk] with broadcast strides of 0; null = none
  const std::uint8_t* mask;  // [b, hq, sq, sk] likewise, nonzero = attend; null = none
  Strides bias_stride, mask_stride;
  const void* alibi;  // [b, hq] slopes; null = none
  std::int64_t alibi_stride_b, alibi_stride_h;
  const void* sinks;  // [hq]; null = none
  std::int64_t sinks_stride;
  Element bias_type, alibi_type, sinks_type;  // f32, bf16 or f16
};
inline constexpr std::int64_t kOpen = std::int64_t{1} << 53;

}  // namespace rapt
