// Fallback rows: what the arithmetic of tensor cores does not carry is computed once more, from the keys themselves.
#pragma once

#include "cuda/tile/score.cuh"

namespace rapt::cuda {

// 32 keys or fewer, from `first` on, in 16-bit elements T, which the query has, too.
template <class T>
class KeysOfWarp {
 public:
  static constexpr int kUnroll = 8;  // of loads, which take hundreds of cycles

  __device__ KeysOfWarp(const Head& head, std::int64_t first, int count) : p_(head.p) {
    const std::int64_t own = first + min(static_cast<int>(threadIdx.x % 32), count - 1);
    k_at_ = head.key_at(p_.k_stride, own), v_at_ = head.key_at(p_.v_stride, own);
  }
  __device__ float query(std::int64_t at) const { return static_cast<float>(static_cast<const T*>(p_.q)[at]); }
  // Rows of the n-th key. All lanes ask, each for one.
  __device__ auto key(int n) const { return RowOf{static_cast<const T*>(p_.k), at(k_at_, n), p_.k_stride.d}; }
  __device__ auto value(int n) const { return RowOf{static_cast<const T*>(p_.v), at(v_at_, n), p_.v_stride.d}; }

 private:
  struct RowOf {
    const T* data;
    std::int64_t at, stride;
    __device__ float operator[](int column) const { return static_cast<float>(data[at + column * stride]); }
  };
  __device__ static std::int64_t at(std::int64_t of_lane, int n) { return __shfl_sync(~0u, of_lane, n); }

  const AttentionParams& p_;
  std::int64_t k_at_, v_at_;  // where the lane's key's rows begin
};

// The same of elements of any kind.
template <>
class KeysOfWarp<void> {
 public:
  static constexpr int kUnroll = 1;

  __device__ KeysOfWarp(const Head& head, std::int64_t first, int count) : head_(head), first_(first), count_(count) {}
  __device__ float query(std::int64_t at) const { return load(head_.p.q, head_.p.q_type, at); }
  __device__ KvRow key(int n) const { return KvRow::of_key(head_, first_ + min(n, count_ - 1)); }
  __device__ KvRow value(int n) const { return KvRow::of_value(head_, first_ + min(n, count_ - 1)); }

 private:
  const Head& head_;
  std::int64_t first_;
  int count_;
};

// Over `kLanes` neighbouring lanes.
template <int kLanes, class X, class Combine>
__device__ X over_lanes(X x, Combine combine) {
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) x = combine(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

// Out and lse of row `r` of a sequence and kv head, by a warp that goes over 32 keys at a time. Hidden keys count for
// nothing, whatever their values. For values of up to kMaxSize columns. Out of line: kernels that call it need their
// registers.
template <class T, int kMaxSize, bool kModified>
__device__ __noinline__ void attend_row(const AttentionParams& p, int b, int hk, int r) {
  using Keys = KeysOfWarp<T>;
  constexpr int kColumns = kMaxSize / 32;             // of a lane, 32 apart
  constexpr int kSharers = 8, kKeys = 32 / kSharers;  // lanes that multiply a key, and keys at a time
  constexpr int kValueUnroll = Keys::kUnroll == 1 ? 1 : 16 / kColumns;
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d), dv = static_cast<int>(p.dv);
  const Head head(p, b, hk);
  const Row row = row_of(head, r);
  const std::int64_t q_at = row_at(p.q_stride, head, row);
  double o[kColumns] = {}, l = 0;
  float m = -kInfinity;
#pragma unroll 1
  for (std::int64_t first = row.first; first < row.last; first += 32) {
    const int count = static_cast<int>(min(row.last - first, std::int64_t{32}));
    const Keys keys(head, first, count);
    float score = -kInfinity;  // of key `lane`
#pragma unroll 1
    for (int n = 0; n < count; n += kKeys) {
      const auto k = keys.key(n + lane / kSharers);
      float dot = 0;
#pragma unroll Keys::kUnroll
      for (int column = lane % kSharers; column < d; column += kSharers)
        dot = fmaf(keys.query(q_at + column * p.q_stride.d), k[column], dot);
      dot = __shfl_sync(~0u, over_lanes<kSharers>(dot, Sum()), lane * kSharers % 32);
      if (n == lane / kKeys * kKeys && lane < count) score = dot * p.score.scale_log2;
    }
    if (kModified && lane < count) score = finish_score(head, row, first + lane, score);
    const float before = m;
    m = fmaxf(m, over_lanes<32>(score, Max()));
    const double rescale = exp2_approx(before - shift_of(m));
    const float weight = weight_of(score, shift_of(m));
    l = fma(l, rescale, static_cast<double>(weight));
    float sum[kColumns] = {};
#pragma unroll kValueUnroll
    for (int n = 0; n < count; ++n) {
      const float of_key = __shfl_sync(~0u, weight, n);
      const auto v = keys.value(n);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float x = lane + 32 * i < dv ? v[lane + 32 * i] : 0.f;  // of hidden ones, too: loads wait for no branch
        sum[i] = is_hidden(of_key) ? sum[i] : fmaf(of_key, x, sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const double add = sum[i];
      o[i] = isfinite(o[i]) ? fma(o[i], rescale, add) : o[i] + add;  // inf times 0 is no NaN
    }
  }

  const auto sum = static_cast<float>(over_lanes<32>(l, [](double x, double y) { return x + y; }));
  const Finish f = finish_row(m, sum, sink_of(head, row), alibi_shift_log2(head, row));
  const float inverse = 1 / f.sum;
  const std::int64_t out = row_at(p.out_stride, head, row);
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (const int column = lane + 32 * i; column < dv)
      store(p.out, p.out_type, out + column * p.out_stride.d,
            f.sum == 0 ? 0.f : static_cast<float>(o[i]) * f.half * f.half * inverse);
  if (p.lse && lane == 0) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
}

}  // namespace rapt::cuda
