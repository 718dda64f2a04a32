// Fallback rows: what the arithmetic of tensor cores does not carry is computed once more, from the keys themselves.
#pragma once

#include <cstring>
#include <type_traits>

#include "cuda/tile/score.cuh"

namespace rapt::cuda {

// Elements of q, k and v in 16-bit type T for a warp that goes over keys, several columns of a row at a time.
template <class T>
class RowReader {
 public:
  static constexpr int kUnroll = 4;  // of loads, which take hundreds of cycles

  __device__ explicit RowReader(const Head& head)
      : head_(head),
        q_(head.p.q, head.p.q_stride, head.p.d),
        k_(head.p.k, head.p.k_stride, head.p.d),
        v_(head.p.v, head.p.v_stride, head.p.dv) {}
  // Each lane has a key, and will be asked for its columns and for all lanes' values.
  __device__ void take_key(std::int64_t key) {
    k_at_ = head_.key_at(head_.p.k_stride, key), v_at_ = head_.key_at(head_.p.v_stride, key);
  }
  __device__ void query(std::int64_t at, int column, float (&x)[8]) const { q_.read(at, column, x); }
  __device__ void key(int column, float (&x)[8]) const { k_.read(k_at_, column, x); }
  __device__ void value(int lane, int column, float (&x)[2]) const {
    v_.read(__shfl_sync(~0u, v_at_, lane), column, x);
  }

 private:
  struct Rows {
    const T* data;
    std::int64_t stride;
    int size;
    bool vector;

    __device__ Rows(const void* data, const Strides& s, std::int64_t size)
        : data(static_cast<const T*>(data)),
          stride(s.d),
          size(static_cast<int>(size)),
          vector(is_vector(data, s, sizeof(T)) && size % 8 == 0) {}
    template <int kCount>
    __device__ void read(std::int64_t at, int column, float (&x)[kCount]) const {
      using Chunk = std::conditional_t<kCount == 8, uint4, std::uint32_t>;
      static_assert(sizeof(Chunk) == sizeof(T) * kCount);
      const T* const from = data + at + column * stride;
      T elements[kCount];
      if (vector) {
        Chunk chunk{};
        if (column < size) chunk = *reinterpret_cast<const Chunk*>(from);
        std::memcpy(elements, &chunk, sizeof chunk);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) elements[i] = column + i < size ? from[i * stride] : T(0.f);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = static_cast<float>(elements[i]);
    }
  };

  const Head& head_;
  const Rows q_, k_, v_;
  std::int64_t k_at_ = 0, v_at_ = 0;
};

// The same of elements of any kind.
template <>
class RowReader<void> {
 public:
  static constexpr int kUnroll = 1;

  __device__ explicit RowReader(const Head& head) : head_(head) {}
  __device__ void take_key(std::int64_t key) { key_ = key; }
  __device__ void query(std::int64_t at, int column, float (&x)[8]) const {
    const AttentionParams& p = head_.p;
    for (int i = 0; i < 8; ++i) x[i] = column + i < p.d ? load(p.q, p.q_type, at + (column + i) * p.q_stride.d) : 0.f;
  }
  __device__ void key(int column, float (&x)[8]) const {
    const KvRow row = KvRow::of_key(head_, key_);
    for (int i = 0; i < 8; ++i) x[i] = column + i < head_.p.d ? row[column + i] : 0.f;
  }
  __device__ void value(int lane, int column, float (&x)[2]) const {
    const KvRow row = KvRow::of_value(head_, __shfl_sync(~0u, key_, lane));
    for (int i = 0; i < 2; ++i) x[i] = column + i < head_.p.dv ? row[column + i] : 0.f;
  }

 private:
  const Head& head_;
  std::int64_t key_ = 0;
};

// Over all lanes.
template <class X, class Combine>
__device__ X over_lanes(X x, Combine combine) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x = combine(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

// Out and lse of rows of a sequence and kv head, those from `first_row` on whose bits are set, by a warp. It takes a
// few rows at a time, which share the latency of loads, over blocks of 32 keys, a key to a lane. Hidden keys count for
// nothing, whatever their values, and a row's bits do not depend on the others. For values of up to kMaxSize columns.
// Out of line: kernels that call it need their registers.
template <class T, int kMaxSize, bool kModified>
__device__ __noinline__ void attend_rows(const AttentionParams& p, int b, int hk, int first_row, unsigned rows) {
  using Sum = std::conditional_t<std::is_void_v<T>, double, float>;  // of what is not in 16 bits
  constexpr int kRows = std::is_void_v<T> || kModified ? 1 : 4;      // at a time: for modifiers there are no registers
  constexpr int kPairs = kMaxSize / 64;                              // of a lane's columns, 64 apart
  constexpr int kUnroll = RowReader<T>::kUnroll, kValueUnroll = kUnroll == 1 ? 1 : kPairs > 4 ? 4 : 16 / kPairs;
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d), dv = static_cast<int>(p.dv);
  const Head head(p, b, hk);
  RowReader<T> reader(head);
#pragma unroll 1
  while (rows != 0) {
    // Those left may be fewer: the last is there several times, with the same result.
    int number[kRows], begin[kRows], end[kRows];  // the keys that it sees, counted from `base`
    std::int64_t q_at[kRows], low = INT64_MAX, high = INT64_MIN;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      number[i] = rows == 0 ? number[max(i - 1, 0)] : first_row + __ffs(static_cast<int>(rows)) - 1;
      rows &= rows - 1;
      const Row row = row_of(head, number[i]);
      q_at[i] = row_at(p.q_stride, head, row);
      if (row.first < row.last) low = min(low, row.first), high = max(high, row.last);
    }
    const std::int64_t base = low < high ? low / 32 * 32 : 0;
    const int from = low < high ? static_cast<int>(low - base) : 0, to = low < high ? static_cast<int>(high - base) : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Row row = row_of(head, number[i]);
      begin[i] = static_cast<int>(clamp_to(row.first - base, 0, to));
      end[i] = static_cast<int>(clamp_to(row.last - base, 0, to));
    }

    Sum o[kRows][kPairs][2] = {}, l[kRows] = {};
    float m[kRows];
#pragma unroll
    for (float& x : m) x = -kInfinity;
#pragma unroll 1
    for (int block = 0; block < to; block += 32) {
      const int own = block + lane;
      reader.take_key(base + min(max(own, from), to - 1));
      float dot[kRows][2] = {};
#pragma unroll kUnroll
      for (int column = 0; column < d; column += 8) {
        float k[8];
        reader.key(column, k);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float q[8];
          reader.query(q_at[i], column, q);
#pragma unroll
          for (int n = 0; n < 8; ++n) dot[i][n % 2] = fmaf(q[n], k[n], dot[i][n % 2]);
        }
      }
      float weight[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float score = -kInfinity;
        if (own >= begin[i] && own < end[i]) {
          score = (dot[i][0] + dot[i][1]) * p.score.scale_log2;
          if (kModified) score = finish_score(head, row_of(head, number[i]), base + own, score);
        }
        const float before = m[i];
        m[i] = fmaxf(m[i], over_lanes(score, Max()));
        const Sum rescale = exp2_approx(before - shift_of(m[i]));
        weight[i] = weight_of(score, shift_of(m[i]));
        if (rescale == 1) continue;
        l[i] *= rescale;
#pragma unroll
        for (auto& pair : o[i])
#pragma unroll
          for (Sum& x : pair) x = isfinite(x) ? x * rescale : x;  // inf times 0 is no NaN
      }
      const int last = min(to - block, 32);
#pragma unroll kValueUnroll
      for (int n = max(from - block, 0); n < last; ++n) {
        float of_key[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) of_key[i] = __shfl_sync(~0u, weight[i], n);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          float x[2];
          reader.value(n, 64 * pair + 2 * lane, x);
#pragma unroll
          for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (!is_hidden(of_key[i])) o[i][pair][e] = fma(Sum(of_key[i]), Sum(x[e]), o[i][pair][e]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) l[i] += weight[i];
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Row row = row_of(head, number[i]);
      const auto all = static_cast<float>(over_lanes(l[i], [](Sum x, Sum y) { return x + y; }));
      const Finish f = finish_row(m[i], all, sink_of(head, row), alibi_shift_log2(head, row));
      const float inverse = 1 / f.sum;
      const std::int64_t out = row_at(p.out_stride, head, row);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (const int column = 64 * pair + 2 * lane + e; column < dv)
            store(p.out, p.out_type, out + column * p.out_stride.d,
                  f.sum == 0 ? 0.f : static_cast<float>(o[i][pair][e]) * f.half * f.half * inverse);
      if (p.lse && lane == 0) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
    }
  }
}

}  // namespace rapt::cuda
