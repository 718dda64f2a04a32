// Split-KV: how a sequence's keys are split among thread blocks, and where their partial results lie. Splits depend
// only on the number of keys, rows and kv heads of the sequence, so that a row's bits do not depend on the batch.
#pragma once

#include <algorithm>

#include "cuda/hopper/decode_limits.hpp"
#include "cuda/tile/head.cuh"

namespace rapt::cuda {

// The most splits of all kv heads of a sequence together, a few for each multiprocessor; and of one kv head.
constexpr int kSplitsOfSequence = 512, kMaxSplits = 256;
constexpr int kSplitUnit = 128;                             // keys; a multiple of every kernel's key block
constexpr int kMinSplits = 8;                               // that a sequence wants, as it may have the GPU to itself
constexpr int kMinSplitKeys = 256, kEnoughSplitKeys = 512;  // sequences of up to kEnoughSplitKeys keys are not split

struct Splits {
  int keys, count;  // keys of each split but the last; splits: at least one, which may be empty
};
// Gathered keys for so many tokens that these occupy a GPU without splits.
inline bool has_many_lists(const AttentionParams& p) {
  return p.list_tokens >= kManyListTokens;
}
// The most splits of a kv head.
inline int max_splits(const AttentionParams& p) {
  return has_many_lists(p) ? 1 : static_cast<int>(clamp_to(kSplitsOfSequence / (p.hk > 0 ? p.hk : 1), 1, kMaxSplits));
}
// The rule of a call: at most max_splits splits and, if max_keys is not 0, the fewest that have at most max_keys keys
// each.
struct SplitRule {
  int max_splits, max_keys;
};
// The splits of `all_keys` keys from SplitKeys::first on, for `rows` rows of the sequence and kv head.
__host__ __device__ inline Splits splits_of(std::int64_t all_keys, int rows, const SplitRule& rule) {
  const auto keys = static_cast<unsigned>(all_keys), units = (keys + kSplitUnit - 1) / kSplitUnit;
  const auto max_splits = static_cast<unsigned>(rule.max_splits), max_keys = static_cast<unsigned>(rule.max_keys);
  // Keys of each of `count` equal splits, in whole units.
  const auto keys_of_split = [&](unsigned count) { return (units + count - 1) / count * kSplitUnit; };
  if (max_keys > 0) {
    if (keys <= max_keys) return {rule.max_keys, 1};
    const unsigned count = (keys + max_keys - 1) / max_keys;
    const unsigned even = keys_of_split(count < max_splits ? count : max_splits);
    return {static_cast<int>(even), static_cast<int>((keys + even - 1) / even)};
  }
  const auto few_rows_min = static_cast<unsigned>(clamp_to(keys_of_split(kMinSplits), kMinSplitKeys, kEnoughSplitKeys));
  const unsigned even = keys_of_split(max_splits), min_keys = rows <= kFewRows ? few_rows_min : 2 * few_rows_min;
  const unsigned size = keys <= kEnoughSplitKeys ? kEnoughSplitKeys : even > min_keys ? even : min_keys;
  return {static_cast<int>(size), keys > size ? static_cast<int>((keys + size - 1) / size) : 1};
}

// The splits of a sequence and kv head. They begin at a multiple of kSplitUnit, so that no key block spans two.
struct SplitKeys : Splits {
  std::int64_t first, last;  // the first key of the first split; the end of the last

  __host__ __device__ SplitKeys(const AttentionParams& p, const Sequence& s, const SplitRule& rule) {
    const KeyRange visible = visible_keys(p.score, s);
    first = visible.first / kSplitUnit * kSplitUnit, last = visible.last;
    const std::int64_t keys = last > first ? last - first : 0;  // a mask may end before a window begins
    static_cast<Splits&>(*this) = splits_of(keys, static_cast<int>(s.len_q * p.group), rule);
  }
  __device__ SplitKeys(const Head& head, const SplitRule& rule) : SplitKeys(head.p, head, rule) {}
};

// Whether a ragged call's sequence has so few rows that the decode kernels do it; the launch of prefill tiles leaves it
// out.
__device__ inline bool is_decode_sequence(const AttentionParams& p, std::int64_t rows) {
  return p.total_q >= 0 && rows <= kDecodeMaxRows;
}
__device__ inline bool is_decode_sequence(const Head& head) {
  return is_decode_sequence(head.p, head.len_q * head.p.group);
}
// The rows of a sequence and kv head that decode kernels do; 0: none.
__device__ inline int decode_rows(const Head& head) {
  return head.p.total_q < 0 || is_decode_sequence(head) ? static_cast<int>(head.len_q * head.p.group) : 0;
}

// Whether a dense call has so few rows that attention_decode does 16-bit types.
inline bool has_few_rows(const AttentionParams& p) {
  return p.total_q < 0 && p.sq * p.group <= kFewRows;
}

// The most rows that a sequence and kv head may have.
inline std::int64_t max_rows(const AttentionParams& p) {
  return p.total_q < 0 ? p.sq * p.group : std::min<std::int64_t>(p.total_q * p.group, kDecodeMaxRows);
}

// Partial results of a call's sequences, or of a part of them, for attention_combine: O, row_max and row_sum of each
// row and split.
struct PartialResults {
  int splits;  // the most splits of a kv head of this call
  SplitRule rule;
  float* data;                 // [kv head][row][splits][floats]
  std::int64_t floats;         // of a row and split: O [dv], then row_max and row_sum, aligned to sectors of 32 bytes
  std::int64_t rows;           // rows of each kv head that there is room for
  std::int64_t sequence_rows;  // rows of each sequence; 0: rows follow each other as in q
  std::int64_t first = 0, sequences;  // sequences [first, first + sequences)

  // There are fewer than 2^32 rows: memory holds no more of their results.
  __device__ float* at(const Head& head, std::int64_t row, std::int64_t split) const {
    const std::int64_t before = sequence_rows > 0 ? (head.b - first) * sequence_rows : head.q_first * head.p.group;
    const auto number = static_cast<std::uint32_t>(head.hk * rows + before + row);
    return data + std::uint64_t{number} * row_floats() + static_cast<std::uint32_t>(split * floats);
  }
  // Floats from one row's results to the next's.
  __device__ std::uint32_t row_floats() const { return splits * static_cast<std::uint32_t>(floats); }
  __host__ __device__ static std::int64_t stats_offset(const AttentionParams& p) {
    return (static_cast<std::uint32_t>(p.dv) + 7) / 8 * 8;
  }
};
constexpr std::int64_t kMaxPartialBytes = std::int64_t{1} << 30;  // of ragged calls, unless one sequence takes more

inline std::int64_t bytes_of(const AttentionParams& p, const PartialResults& partials, std::int64_t rows) {
  return p.hk * rows * partials.splits * partials.floats * std::int64_t{sizeof(float)};
}
// At least the bytes of every call that is no larger.
inline std::size_t bytes_of(const AttentionParams& p, const PartialResults& partials) {
  const std::int64_t rows = p.total_q < 0 ? partials.rows : std::min(p.total_q * p.group, p.b * kDecodeMaxRows);
  const std::int64_t bytes = bytes_of(p, partials, rows);
  const std::int64_t max_bytes = std::max(kMaxPartialBytes, bytes_of(p, partials, kDecodeMaxRows));
  return static_cast<std::size_t>(p.total_q < 0 ? bytes : std::min(bytes, max_bytes));
}

// The partial results of a call whose kv heads have up to `splits` splits.
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
  if (all.rows <= p.b * kDecodeMaxRows && bytes_of(p, all, all.rows) <= kMaxPartialBytes) return all;
  // The host does not know which sequences have few rows: there is room for kDecodeMaxRows rows of each sequence, for a
  // part of the sequences at a time.
  const std::int64_t of_sequence = std::max<std::int64_t>(bytes_of(p, all, kDecodeMaxRows), 1);
  const std::int64_t parts = ceil_div(p.b, std::max<std::int64_t>(kMaxPartialBytes / of_sequence, 1));
  all.sequences = ceil_div(p.b, std::max<std::int64_t>(parts, 1));
  all.rows = all.sequences * kDecodeMaxRows, all.sequence_rows = kDecodeMaxRows;
  return all;
}
// Calls `launch` for each part of a call's sequences, until one fails.
template <class Launch>
cudaError_t for_each_part(const AttentionParams& p, PartialResults partials, Launch launch) {
  const std::int64_t max_sequences = partials.sequences;
  cudaError_t status = cudaSuccess;
  for (; partials.first < p.b && status == cudaSuccess; partials.first += max_sequences) {
    partials.sequences = std::min(max_sequences, p.b - partials.first);
    status = launch(partials);
  }
  return status;
}
// Shorter sequences may have more splits than longer ones.
inline PartialResults partials_of(const AttentionParams& p, std::byte* workspace) {
  // In a ring, the first split may begin with keys that have been overwritten.
  const std::int64_t keys = std::max(p.sk, p.total_k) + (p.ring ? kSplitUnit - 1 : 0);
  const std::int64_t short_ones = ceil_div(keys, kMinSplitKeys), long_ones = ceil_div(keys, kEnoughSplitKeys);
  const std::int64_t splits =
      keys <= kEnoughSplitKeys ? 1 : std::min(short_ones, std::max<std::int64_t>(long_ones, kMinSplits));
  return partials_in(p, workspace, splits, {max_splits(p), 0});
}
// The same with splits of up to `max_keys` keys, a multiple of kSplitUnit.
inline PartialResults partials_of(const AttentionParams& p, std::byte* workspace, int max_keys) {
  const std::int64_t keys = std::max(p.sk, p.total_k) + (p.ring ? kSplitUnit - 1 : 0);
  return partials_in(p, workspace, ceil_div(keys, max_keys), {max_splits(p), max_keys});
}

// Whether attention_decode_m64 writes results itself and needs no workspace: keys are not split and scores have no
// modifiers, with which it always leaves partial results. (A scale of 0 counts as a modifier.)
inline bool writes_output_directly(const AttentionParams& p, const PartialResults& partials) {
  return partials.splits == 1 && !has_modifiers(p.score) && p.score.scale_log2 != 0 && !p.score.sinks;
}

}  // namespace rapt::cuda
