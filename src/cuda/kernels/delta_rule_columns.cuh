// Columns of a state of delta_rule that lanes share, each having some of the rows: sums over rows, in a tree that does
// not depend on how columns are cut, and what a token does to a state.
#pragma once

#include "cuda/tile/element.cuh"

namespace rapt::cuda {

// Adds up the lanes' x of columns that they share, and leaves in x[0] the sum of one column: my_column(). kLanes lanes,
// which are kStep apart, share columns. The highest bits of a lane's place among them choose which half of the columns
// it keeps.
template <int kLanes, int kStep, int kColumns>
__device__ float sum_of_columns(float (&x)[kColumns]) {
  int bit = kLanes / 2 * kStep;
#pragma unroll
  for (int half = kColumns / 2; half > 0; half /= 2, bit /= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? x[i + half] : x[i], give = upper ? x[i] : x[i + half];
      x[i] = keep + __shfl_xor_sync(~0u, give, bit);
    }
  }
#pragma unroll
  for (; bit >= kStep; bit /= 2) x[0] += __shfl_xor_sync(~0u, x[0], bit);
  return x[0];
}
// The other way: from the lane's own column to all that it shares.
template <int kLanes, int kStep, int kColumns>
__device__ void spread_columns(float own, float (&x)[kColumns]) {
  x[0] = own;
  int bit = kLanes / kColumns * kStep;
#pragma unroll
  for (int half = 1; half < kColumns; half *= 2, bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], bit);
      x[i + half] = upper ? x[i] : other;
      x[i] = upper ? other : x[i];
    }
  }
}
template <int kLanes, int kStep, int kColumns>
__device__ int my_column() {
  return threadIdx.x / kStep % kLanes / (kLanes / kColumns);
}

// Four neighbouring rows of kColumns columns.
template <int kColumns>
struct StateRun {
  float s[4][kColumns];

  // S = a S; adds to x what the rows have of S^T k.
  __device__ void decay_and_predict(const float4& decay, const float4& key, float (&x)[kColumns]) {
    const float a[] = {decay.x, decay.y, decay.z, decay.w}, k[] = {key.x, key.y, key.z, key.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        s[i][c] *= a[i];
        x[c] = fmaf(s[i][c], k[i], x[c]);
      }
  }
  // S = S + k u^T
  __device__ void write(const float4& key, const float (&u)[kColumns]) {
    const float k[] = {key.x, key.y, key.z, key.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) s[i][c] = fmaf(k[i], u[c], s[i][c]);
  }
  // Adds to y what the rows have of S^T q.
  __device__ void read(const float4& query, float (&y)[kColumns]) const {
    const float q[] = {query.x, query.y, query.z, query.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) y[c] = fmaf(s[i][c], q[i], y[c]);
  }

  // From memory or to it, where each row's elements are neighbours and aligned together; `stride` from row to row.
  template <bool kStores, class Element>
  __device__ void move_rows(Element* data, std::int64_t stride, int rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < rows) move<kStores, kColumns>(data + i * stride, [&](int c) -> float& { return s[i][c]; });
  }
  // The same where each column's four are; `stride` from column to column.
  template <bool kStores, class Element>
  __device__ void move_columns(Element* data, std::int64_t stride) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) move<kStores, 4>(data + c * stride, [&](int i) -> float& { return s[i][c]; });
  }
  // One by one.
  template <bool kStores, class Element>
  __device__ void move_singly(Element* data, std::int64_t row_stride, std::int64_t column_stride, int rows,
                              int columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (i < rows && c < columns)
          move<kStores, 1>(data + i * row_stride + c * column_stride, [&](int) -> float& { return s[i][c]; });
  }

 private:
  template <bool kStores, int kCount, class Element, class Number>
  static __device__ void move(Element* data, const Number& number) {
    struct alignas(sizeof(Element) * kCount) Elements {
      Element x[kCount];
    };
    Elements all;
    if constexpr (!kStores) all = *reinterpret_cast<const Elements*>(data);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kStores) all.x[i] = static_cast<Element>(number(i));  // to nearest even
      else number(i) = static_cast<float>(all.x[i]);
    }
    if constexpr (kStores) *reinterpret_cast<Elements*>(data) = all;
  }
};

}  // namespace rapt::cuda
