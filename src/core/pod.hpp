// What parameter blocks are made of. Kernels of every backend include it, so all of it is plain data or always inlined.
#pragma once

#include <cstdint>

#include "rapt/enums.hpp"

#ifdef __CUDACC__
#define RAPT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define RAPT_HOST_DEVICE [[gnu::always_inline]] inline
#endif

namespace rapt {

inline constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

// Of a dimension, and of the keys that a sequence in a ring may have had: products of a few fit int64.
inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 48;

// A set of element types.
using DTypeSet = std::uint32_t;
RAPT_HOST_DEVICE constexpr DTypeSet set_of(DType dtype) {
  return DTypeSet{1} << static_cast<unsigned>(dtype);
}
// The types of one kind; dtypes.def says what kinds there are.
enum class DTypeKind : std::uint8_t { floating, integer_code, fp8, other };
constexpr DTypeSet types_of(DTypeKind wanted) {
  DTypeSet set = 0;
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) \
  if (DTypeKind::kind == wanted) set |= set_of(DType::name);
#include "rapt/dtypes.def"
  return set;
}
inline constexpr DTypeSet kFloatTypes = types_of(DTypeKind::floating), kFp8Types = types_of(DTypeKind::fp8),
                          kIntegerCodes = types_of(DTypeKind::integer_code),
                          kCacheTypes = kFloatTypes | kFp8Types | kIntegerCodes;

template <DType kType>
struct DTypeConstant {
  static constexpr DType value = kType;
};
// Calls f with the type as a DTypeConstant if it is one of kTypes; false if it is not.
template <DTypeSet kTypes, class F>
RAPT_HOST_DEVICE bool with_dtype(DType dtype, F f) {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) \
  if constexpr ((kTypes & set_of(DType::name)) != 0)    \
    if (dtype == DType::name) return f(DTypeConstant<DType::name>()), true;
#include "rapt/dtypes.def"
  return false;
}

// Strides in elements of the dimensions b, h, s (rows) and d (elements of a row). Ragged tensors have b = 0.
struct Strides {
  std::int64_t b, h, s, d;
};

// A list of i32 or i64, `stride` elements apart: lengths, first rows, pages. Null: not given. Of calls on a GPU it is
// in device memory, which only kernels can read.
struct Integers {
  const void* data;
  std::int64_t stride;
  bool is_int64;

  RAPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  RAPT_HOST_DEVICE std::int64_t operator[](std::int64_t i) const { return element(i * stride); }
  // The one that lies this many elements from the first.
  RAPT_HOST_DEVICE std::int64_t element(std::int64_t offset) const {
    return is_int64 ? static_cast<const std::int64_t*>(data)[offset] : static_cast<const std::int32_t*>(data)[offset];
  }
};

RAPT_HOST_DEVICE std::int64_t clamp_to(std::int64_t x, std::int64_t low, std::int64_t high) {
  const std::int64_t raised = x > low ? x : low;
  return raised < high ? raised : high;
}

RAPT_HOST_DEVICE std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
// The smallest multiple of `step` that is not less than `a`.
RAPT_HOST_DEVICE std::int64_t round_up(std::int64_t a, std::int64_t step) {
  return ceil_div(a, step) * step;
}

// The few functions of <cmath> that are needed on both sides.
inline constexpr float kInfinity = __builtin_inff();
#ifdef __CUDACC__
RAPT_HOST_DEVICE float abs_of(float x) {
  return fabsf(x);
}
RAPT_HOST_DEVICE float tanh_of(float x) {
  return tanhf(x);
}
RAPT_HOST_DEVICE float with_sign_of(float x, float sign) {
  return copysignf(x, sign);
}
RAPT_HOST_DEVICE double abs_of(double x) {
  return fabs(x);
}
RAPT_HOST_DEVICE double tanh_of(double x) {
  return tanh(x);
}
#else
RAPT_HOST_DEVICE float abs_of(float x) {
  return __builtin_fabsf(x);
}
RAPT_HOST_DEVICE float tanh_of(float x) {
  return __builtin_tanhf(x);
}
RAPT_HOST_DEVICE float with_sign_of(float x, float sign) {
  return __builtin_copysignf(x, sign);
}
RAPT_HOST_DEVICE double abs_of(double x) {
  return __builtin_fabs(x);
}
RAPT_HOST_DEVICE double tanh_of(double x) {
  return __builtin_tanh(x);
}
#endif
inline constexpr float kMaxFloat = 3.402823466e38f;
RAPT_HOST_DEVICE bool is_inf(float x) {
  return abs_of(x) == kInfinity;
}

// How k or v is quantised: element i of a row counts as (x - zero[i / group]) * scale[i / group]. The rows of scale and
// zero are found like those of k or v; their stride d leads from group to group.
struct Quantization {
  const float* scale;  // null: 1
  const float* zero;   // null: 0
  Strides scale_stride, zero_stride;
  std::int64_t group;  // elements
};

// What every kernel says of itself: dispatch reads it, and EntryInfo shows it.
struct KernelFacts {
  Operation operation;
  Phase phase;
  const char* arithmetic;        // what it multiplies in: "f32"; "f16x3" is fp16 by three products of bf16 components
  DTypeSet dtypes;               // element types it takes; those of outputs are not restricted
  bool dropout = false;          // takes dropout
  bool key_tail = false;         // takes keys whose last columns lie in a tensor of their own
  const char* opt_in = nullptr;  // why it runs only where it is forced; null: dispatch may choose it
  int block_q = 0, block_k = 0;  // query rows and keys of its innermost block; 0: it has none
  std::int64_t min_head_dim = 1, max_head_dim = 1 << 13, max_value_head_dim = 1 << 13;  // of d and dv; of dv alone
};

}  // namespace rapt
