// Split-KV, of dense queries: the keys that a sequence's rows see in splits, which thread blocks share, and what each
// leaves of a row. Splits depend on the number of keys, rows and kv heads of the sequence alone, so that a row's bits
// do not depend on the batch.
#pragma once

#include <algorithm>

#include "cuda/tile/head.cuh"

namespace rapt::cuda {

// Splits of all kv heads of a sequence together: a few for each multiprocessor.
constexpr int kSplitsOfSequence = 512, kMaxSplits = 256;
constexpr int kSplitUnit = 128;  // keys; kernels' blocks of keys are divisors
constexpr int kMinSplits = 8;    // of a sequence by itself, which has to occupy the GPU alone
constexpr int kMinSplitKeys = 256, kEnoughSplitKeys = 512;  // no more than these are never split
constexpr int kFewRows = 16;  // for more, splits are longer: partial results count beside their keys

struct Splits {
  int keys, count;  // keys of each but the last; at least one split, without keys if there are none
};
// The most that a sequence has.
inline int max_splits(std::int64_t hk) {
  return static_cast<int>(clamp_to(kSplitsOfSequence / (hk > 0 ? hk : 1), 1, kMaxSplits));
}
// How a call's sequences are split: into at most so many, and, unless it is 0, into as few as keep to so many keys.
struct SplitRule {
  int max_splits, max_keys;
};
// Of so many keys from `SplitKeys::first` on, and `rows` of the sequence and a kv head.
__host__ __device__ inline Splits splits_of(std::int64_t all_keys, int rows, const SplitRule& rule) {
  const auto keys = static_cast<unsigned>(all_keys), units = (keys + kSplitUnit - 1) / kSplitUnit;
  const auto max_splits = static_cast<unsigned>(rule.max_splits), max_keys = static_cast<unsigned>(rule.max_keys);
  const auto in_splits = [&](unsigned count) { return (units + count - 1) / count * kSplitUnit; };
  if (max_keys > 0) {
    if (keys <= max_keys) return {rule.max_keys, 1};
    const unsigned count = (keys + max_keys - 1) / max_keys;
    const unsigned even = in_splits(count < max_splits ? count : max_splits);
    return {static_cast<int>(even), static_cast<int>((keys + even - 1) / even)};
  }
  const auto shortest = static_cast<unsigned>(clamp_to(in_splits(kMinSplits), kMinSplitKeys, kEnoughSplitKeys));
  const unsigned even = in_splits(max_splits), least = rows <= kFewRows ? shortest : 2 * shortest;
  const unsigned size = keys <= kEnoughSplitKeys ? kEnoughSplitKeys : even > least ? even : least;
  return {static_cast<int>(size), keys > size ? static_cast<int>((keys + size - 1) / size) : 1};
}

// Those of a sequence and kv head: from a multiple of kSplitUnit on, so that blocks of keys lie in one split.
struct SplitKeys : Splits {
  std::int64_t first, last;  // of the first split, and the end of the last

  __device__ SplitKeys(const Head& head, const SplitRule& rule) {
    const KeyRange visible = visible_keys(head.p.score, head);
    first = visible.first / kSplitUnit * kSplitUnit, last = visible.last;
    const std::int64_t keys = max(last - first, std::int64_t{0});  // a mask may end before a window begins
    static_cast<Splits&>(*this) = splits_of(keys, static_cast<int>(head.p.sq * head.p.group), rule);
  }
};

// What splits leave for attention_combine.
struct Partials {
  int splits;  // the most that a sequence of this call has
  SplitRule rule;
  float* data;          // [row][splits][floats]
  std::int64_t floats;  // [dv] of O, then from a multiple of 4 on m and l

  __device__ float* at(const Head& head, std::int64_t row, std::int64_t split) const {
    const AttentionParams& p = head.p;
    return data + (((head.b * p.hk + head.hk) * p.sq * p.group + row) * splits + split) * floats;
  }
  __host__ __device__ static std::int64_t m_at(const AttentionParams& p) { return ceil_div(p.dv, 4) * 4; }
};

// Sequences of fewer keys may have more splits.
inline Partials partials_of(const AttentionParams& p, std::byte* workspace) {
  // In a ring, the first split may begin with keys that are no longer there.
  const std::int64_t keys = std::max(p.sk, p.total_k) + (p.ring ? kSplitUnit - 1 : 0), most = max_splits(p.hk);
  const std::int64_t short_ones = ceil_div(keys, kMinSplitKeys), long_ones = ceil_div(keys, kEnoughSplitKeys);
  const std::int64_t splits =
      keys <= kEnoughSplitKeys ? 1 : std::min(short_ones, std::max<std::int64_t>(long_ones, kMinSplits));
  return {static_cast<int>(clamp_to(splits, 1, most)),
          {static_cast<int>(most), 0},
          reinterpret_cast<float*>(workspace),
          Partials::m_at(p) + 4};
}
// In splits of up to `max_keys`, a multiple of kSplitUnit.
inline Partials partials_of(const AttentionParams& p, std::byte* workspace, int max_keys) {
  const std::int64_t keys = std::max(p.sk, p.total_k) + (p.ring ? kSplitUnit - 1 : 0), most = max_splits(p.hk);
  return {static_cast<int>(clamp_to(ceil_div(keys, max_keys), 1, most)),
          {static_cast<int>(most), max_keys},
          reinterpret_cast<float*>(workspace),
          Partials::m_at(p) + 4};
}
inline std::size_t bytes_of(const AttentionParams& p, const Partials& partials) {
  return static_cast<std::size_t>(p.b * p.hk * p.group * p.sq * partials.splits * partials.floats) * sizeof(float);
}

// Queues the kernel that finishes all rows of a call, to begin while the one before ends.
cudaError_t attention_combine(const AttentionParams& p, const Partials& partials, cudaStream_t stream);

}  // namespace rapt::cuda
