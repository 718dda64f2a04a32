// Split-KV: the keys that a sequence's rows see in splits, which thread blocks share, and what each leaves of a row.
// Splits depend on the number of keys, rows and kv heads of the sequence alone, so that a row's bits do not depend on
// the batch.
#pragma once

#include <algorithm>

#include "cuda/kernels/decode_config.hpp"
#include "cuda/tile/head.cuh"

namespace rapt::cuda {

// Splits of all kv heads of a sequence together: a few for each multiprocessor.
constexpr int kSplitsOfSequence = 512, kMaxSplits = 256;
constexpr int kSplitUnit = 128;  // keys; kernels' blocks of keys are divisors
constexpr int kMinSplits = 8;    // of a sequence by itself, which has to occupy the GPU alone
constexpr int kMinSplitKeys = 256, kEnoughSplitKeys = 512;  // no more than these are never split
constexpr int kMaxSplitRows = 64;  // of a ragged sequence and kv head: with more it is not split

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

  __host__ __device__ SplitKeys(const AttentionParams& p, const Sequence& s, const SplitRule& rule) {
    const KeyRange visible = visible_keys(p.score, s);
    first = visible.first / kSplitUnit * kSplitUnit, last = visible.last;
    const std::int64_t keys = last > first ? last - first : 0;  // a mask may end before a window begins
    static_cast<Splits&>(*this) = splits_of(keys, static_cast<int>(s.len_q * p.group), rule);
  }
  __device__ SplitKeys(const Head& head, const SplitRule& rule) : SplitKeys(head.p, head, rule) {}
};

// Whether a sequence is one of a ragged call's that have few rows: a launch of their own splits their keys, and the one
// for tiles of rows leaves them out.
__device__ inline bool is_decode_sequence(const AttentionParams& p, std::int64_t rows) {
  return p.total_q >= 0 && rows <= kMaxSplitRows;
}
__device__ inline bool is_decode_sequence(const Head& head) {
  return is_decode_sequence(head.p, head.len_q * head.p.group);
}
// Rows of a sequence and kv head that launches which split keys do.
__device__ inline int decode_rows(const Head& head) {
  return head.p.total_q < 0 || is_decode_sequence(head) ? static_cast<int>(head.len_q * head.p.group) : 0;
}

// Whether rows are so few that 16-bit types are multiplied by warps, each with keys of its own.
inline bool has_few_rows(const AttentionParams& p) {
  return p.total_q < 0 && p.sq * p.group <= kFewRows;
}

// The most that any may have.
inline std::int64_t max_rows(const AttentionParams& p) {
  return p.total_q < 0 ? p.sq * p.group : std::min<std::int64_t>(p.total_q * p.group, kMaxSplitRows);
}

// What splits of some of a call's sequences leave for attention_combine.
struct PartialResults {
  int splits;  // the most that a sequence of this call has
  SplitRule rule;
  float* data;                        // [kv head][row][splits][floats]
  std::int64_t floats;                // [dv] of O, then from a multiple of 8 on m and l: sectors of 32 bytes
  std::int64_t rows;                  // of each kv head, that there is room for
  std::int64_t sequence_rows;         // and of each sequence; 0: rows lie end to end, as in q
  std::int64_t first = 0, sequences;  // which ones

  // Rows are fewer than 2^32: there is no memory for more of their results.
  __device__ float* at(const Head& head, std::int64_t row, std::int64_t split) const {
    const std::int64_t before = sequence_rows > 0 ? (head.b - first) * sequence_rows : head.q_first * head.p.group;
    const auto number = static_cast<std::uint32_t>(head.hk * rows + before + row);
    return data + std::uint64_t{number} * row_floats() + static_cast<std::uint32_t>(split * floats);
  }
  // From one row's results to the next's.
  __device__ std::uint32_t row_floats() const { return splits * static_cast<std::uint32_t>(floats); }
  __host__ __device__ static std::int64_t stats_offset(const AttentionParams& p) {
    return (static_cast<std::uint32_t>(p.dv) + 7) / 8 * 8;
  }
};
constexpr std::int64_t kMaxPartialBytes = std::int64_t{1} << 30;  // bytes, of ragged sequences, unless one takes more

inline std::int64_t bytes_of(const AttentionParams& p, const PartialResults& partials, std::int64_t rows) {
  return p.hk * rows * partials.splits * partials.floats * std::int64_t{sizeof(float)};
}
// At least those of all calls that are no larger.
inline std::size_t bytes_of(const AttentionParams& p, const PartialResults& partials) {
  const std::int64_t rows = p.total_q < 0 ? partials.rows : std::min(p.total_q * p.group, p.b * kMaxSplitRows);
  const std::int64_t bytes = bytes_of(p, partials, rows);
  const std::int64_t most = std::max(kMaxPartialBytes, bytes_of(p, partials, kMaxSplitRows));
  return static_cast<std::size_t>(p.total_q < 0 ? bytes : std::min(bytes, most));
}

// Of a call whose sequences have up to so many splits.
inline PartialResults partials_in(const AttentionParams& p, std::byte* workspace, std::int64_t splits, SplitRule rule) {
  const std::int64_t dense = p.sq * p.group;
  PartialResults all{.splits = static_cast<int>(clamp_to(splits, 1, rule.max_splits)),
                     .rule = rule,
                     .data = reinterpret_cast<float*>(workspace),
                     .floats = PartialResults::stats_offset(p) + 8,
                     .rows = p.b * dense,
                     .sequence_rows = dense,
                     .sequences = p.b};
  if (p.total_q < 0) return all;
  all.rows = p.total_q * p.group, all.sequence_rows = 0;
  if (all.rows <= p.b * kMaxSplitRows && bytes_of(p, all, all.rows) <= kMaxPartialBytes) return all;
  // The host does not know which sequences have few rows: there is room for kMaxSplitRows of each of a part of them.
  const std::int64_t of_sequence = std::max<std::int64_t>(bytes_of(p, all, kMaxSplitRows), 1);
  const std::int64_t parts = ceil_div(p.b, std::max<std::int64_t>(kMaxPartialBytes / of_sequence, 1));
  all.sequences = ceil_div(p.b, std::max<std::int64_t>(parts, 1));
  all.rows = all.sequences * kMaxSplitRows, all.sequence_rows = kMaxSplitRows;
  return all;
}
// Calls `launch` with the partial results of each part of a call's sequences in turn, until one fails.
template <class Launch>
cudaError_t for_each_part(const AttentionParams& p, PartialResults partials, Launch launch) {
  const std::int64_t most = partials.sequences;
  cudaError_t status = cudaSuccess;
  for (; partials.first < p.b && status == cudaSuccess; partials.first += most) {
    partials.sequences = std::min(most, p.b - partials.first);
    status = launch(partials);
  }
  return status;
}
// Sequences of fewer keys may have more splits.
inline PartialResults partials_of(const AttentionParams& p, std::byte* workspace) {
  // In a ring, the first split may begin with keys that are no longer there.
  const std::int64_t keys = std::max(p.sk, p.total_k) + (p.ring ? kSplitUnit - 1 : 0);
  const std::int64_t short_ones = ceil_div(keys, kMinSplitKeys), long_ones = ceil_div(keys, kEnoughSplitKeys);
  const std::int64_t splits =
      keys <= kEnoughSplitKeys ? 1 : std::min(short_ones, std::max<std::int64_t>(long_ones, kMinSplits));
  return partials_in(p, workspace, splits, {max_splits(p.hk), 0});
}
// In splits of up to `max_keys`, a multiple of kSplitUnit.
inline PartialResults partials_of(const AttentionParams& p, std::byte* workspace, int max_keys) {
  const std::int64_t keys = std::max(p.sk, p.total_k) + (p.ring ? kSplitUnit - 1 : 0);
  return partials_in(p, workspace, ceil_div(keys, max_keys), {max_splits(p.hk), max_keys});
}

// Whether attention_prefill finishes rows where it computes them, without workspace: where keys are not split, and
// scores have no modifiers: kernels with these leave partial results always. (Without a scale, it takes one of these.)
inline bool writes_output_directly(const AttentionParams& p, const PartialResults& partials) {
  return partials.splits == 1 && !has_modifiers(p.score) && p.score.scale_log2 != 0 && !p.score.sinks;
}

// Queues split_kv's kernels for these sequences: over quantised keys, or over 16-bit ones for up to kFewRows rows;
// then, unless it `finishes` or combines rows itself, the kernel below.
cudaError_t launch_decode_part(const AttentionParams& p, const DecodeConfig& config, const PartialResults& partials,
                               bool writes_output, bool overlap_previous, cudaStream_t stream);

// Queues the kernel that finishes the rows of these sequences, to begin while the one before ends.
cudaError_t launch_attention_combine(const AttentionParams& p, const PartialResults& partials, cudaStream_t stream);

}  // namespace rapt::cuda
