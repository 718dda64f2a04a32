// Loads rows of Q, K and V, of any type and strides, from global memory to matrices of fp32 in shared memory.
#pragma once

#include "cuda/tile/head.cuh"

namespace rapt::cuda {

// A matrix in shared memory, stored by rows with 16 bytes between them, so that neighbouring rows lie in different
// banks; read 4 elements at a time.
template <int kWidth>
struct Matrix {
  static constexpr int kPitch = kWidth + 4;
  float* data;

  __device__ float4& four(int row, int column) const {
    return *reinterpret_cast<float4*>(data + row * kPitch + column);
  }
};

__device__ __forceinline__ float element(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Four neighbours as in memory, widened to fp32.
__device__ inline float4 widen(const float4& x, DType) {
  return x;
}
__device__ inline float4 widen(const uint2& x, DType type) {
  const std::uint32_t bits[2] = {x.x, x.y};
  float2 pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] = type == DType::f16 ? __half22float2(reinterpret_cast<const __half2&>(bits[i]))
                                 : make_float2(__uint_as_float(bits[i] << 16), __uint_as_float(bits[i] & 0xffff0000u));
  }
  return make_float4(pair[0].x, pair[0].y, pair[1].x, pair[1].y);
}
__device__ inline float4 widen(std::uint32_t x, DType type) {
  return four_codes(x, type);
}

// Rows of q, k or v in global memory.
struct Source {
  const void* data;
  DType type;
  std::int64_t stride, size;  // stride: between columns; size: columns

  // Whether rows can be read as aligned vectors of four.
  __device__ bool is_vector(const Strides& s) const {
    const int bytes = type == DType::f32 ? 16 : type == DType::f8e4m3 ? 4 : 8;  // of four elements
    return s.d == 1 && (size | s.b | s.h | s.s) % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  }
};

// Fetches columns [column, column + kWidth) of kRows rows, by kThreads threads. Row i begins at offset row_at[i]; if
// that is negative the row is 0. put(row, column, four elements) stores them.
template <int kWidth, int kThreads, int kRows>
struct Fetch {
  static constexpr int kFours = kWidth / 4, kStep = kThreads / kFours, kTimes = kRows / kStep;
  const Source& x;
  const std::int64_t* row_at;
  std::int64_t column;
  int row, thread_column;  // the thread's first column

  __device__ Fetch(const Source& x, const std::int64_t* row_at, std::int64_t column)
      : x(x), row_at(row_at), column(column) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // or the compiler computes addresses early, and keeps them in registers
    row = thread / kFours, thread_column = thread % kFours * 4;
  }

  template <class Put>
  __device__ void operator()(bool vector, Put put) const {
    if (!vector) one_by_one(put);
    else if (x.type == DType::f32) at_once<float4>(put);
    else if (x.type == DType::f8e4m3) at_once<std::uint32_t>(put);
    else at_once<uint2>(put);
  }
  template <class Four, class Put>
  __device__ void at_once(Put put) const {
    const auto* const from = static_cast<const char*>(x.data) + (column + thread_column) * (sizeof(Four) / 4);
    const bool exists = column + thread_column < x.size;
    Four e[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const std::int64_t at = row_at[row + i * kStep];
      e[i] = exists && at >= 0 ? *reinterpret_cast<const Four*>(from + at * (sizeof(Four) / 4)) : Four{};
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) put(row + i * kStep, thread_column, widen(e[i], x.type));
  }
  template <class Put>
  __device__ void one_by_one(Put put) const {
#pragma unroll 1
    for (int i = row; i < kRows; i += kStep) {
      const std::int64_t n = row_at[i] < 0 ? 0 : x.size - column - thread_column;
      put(i, thread_column, load4(x.data, x.type, row_at[i] + (column + thread_column) * x.stride, x.stride, n));
    }
  }
};

// Whether codes can be read four at a time, of one group each.
__device__ inline bool allows_vectors(const KvSide& x) {
  const std::int64_t bytes = x.type == DType::i4x2 ? 2 : 4;
  return x.stride.d == 1 && (x.stride.b | x.stride.h | x.stride.s) % bytes == 0 && (x.codes | x.quant.group) % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(x.data) % bytes == 0;
}

// The same for quantized keys or values. Row i is 0 if place[i].at is negative.
template <int kWidth, int kThreads, int kRows>
struct FetchCodes {
  static constexpr int kFours = kWidth / 4, kStep = kThreads / kFours, kTimes = kRows / kStep;
  const KvSide& x;
  const KvPlace* place;
  std::int64_t column;  // the thread's first
  int row, thread_column;

  __device__ FetchCodes(const KvSide& x, const KvPlace* place, std::int64_t first) : x(x), place(place) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    row = thread / kFours, thread_column = thread % kFours * 4, column = first + thread_column;
  }

  template <class Put>
  __device__ void operator()(bool vector, Put put) const {
    if (vector && column < x.codes) at_once(put);
    else one_by_one(put);
  }
  __device__ std::uint32_t four_bits(std::int64_t at) const {
    const auto* const codes = static_cast<const std::uint8_t*>(x.data) + at;
    if (x.type == DType::i4x2) return *reinterpret_cast<const std::uint16_t*>(codes + column / 2);
    return *reinterpret_cast<const std::uint32_t*>(codes + column);
  }
  template <class Put>
  __device__ void at_once(Put put) const {
    const std::int64_t group = column / x.quant.group;
    std::uint32_t bits[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const KvPlace& at = place[row + i * kStep];
      bits[i] = at.at < 0 ? 0 : four_bits(at.at);
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const KvPlace& at = place[row + i * kStep];
      float4 e = make_float4(0, 0, 0, 0);
      if (at.at >= 0) {
        e = four_codes(bits[i], x.type);
        for (float* const one : {&e.x, &e.y, &e.z, &e.w}) *one = x.number(at, group, *one);
      }
      put(row + i * kStep, thread_column, e);
    }
  }
  template <class Put>
  __device__ void one_by_one(Put put) const {
#pragma unroll 1
    for (int i = row; i < kRows; i += kStep) {
      const KvPlace& at = place[i];
      const auto element = [&](int n) { return at.at >= 0 && column + n < x.size ? x.element(at, column + n) : 0.f; };
      put(i, thread_column, make_float4(element(0), element(1), element(2), element(3)));
    }
  }
};

}  // namespace rapt::cuda
