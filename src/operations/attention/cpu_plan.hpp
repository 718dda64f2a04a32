// How attention calls with one problem are run: how many rows a work item has, how many workers, and how much
// workspace. Pure functions of the problem and the kernels.
#pragma once

#include <cstdint>
#include <string>

#include "dispatch/entry.hpp"
#include "operations/attention/cpu_choice.hpp"

namespace rapt::cpu {

// A call's workspace holds, one after another: a queue for each worker, the list of sequences, the workers' scratch,
// the partial results of splits, and for each range of rows a counter of the splits that are done.
struct AttentionPlan final : EntryPlan {
  AttentionChoice choice;
  std::int64_t rows_per_item = 0;        // for choice.chosen; a row is a (token, head of the group) pair
  std::int64_t short_rows_per_item = 0;  // for choice.short_keys
  bool keeps_keys = false;               // the kernel packs keys once for consecutive work items of a head
  bool looks_ahead = false;              // each work item prefetches the start of the next one
  std::int64_t max_sequences = 0;        // in the list
  std::int64_t max_splits = 1;           // of a head's keys
  std::size_t queue_bytes = 0, list_bytes = 0;
  std::size_t scratch_bytes = 0;  // of one worker
  std::size_t partial_bytes = 0;  // of all partial results
  std::size_t counter_bytes = 0;  // of all counters

  std::string note() const override;
};

// If each kv head of a sequence has at most kFewRows rows, its keys are split until the sequence can occupy a large
// machine. With more rows, up to kSplitRows (16 tokens of 128 heads that share their keys), keys are split only where
// heads and ranges of rows are few, and only so far that the partial results take no more memory than those of
// kFewRows rows may.
inline constexpr std::int64_t kFewRows = 64, kSplitRows = 2048;
// The first split begins at a multiple of kSplitAlign, and all have a multiple of split_align() keys; the last may have
// fewer. These are multiples of the kernels' blocks, so that no split begins inside a block. The exception is
// attention_prefill_tiles, whose blocks have 256 keys where d + dv >= 512: if no row sees the first keys, because of a
// window or a ring, every split may begin in the middle of a block, which it then shares with the split before it.
inline constexpr std::int32_t kSplitAlign = 128;
constexpr std::int32_t split_align(std::int64_t d, std::int64_t dv) {
  return d + dv >= 512 ? 2 * kSplitAlign : kSplitAlign;
}
// The number of splits of a head's keys, which rises with them. `rows` are those of the head. Keys without positions
// are a few thousand for each token: for these, `rows` are those of all tokens together.
std::int64_t split_count(std::int64_t keys, std::int64_t hk, std::int64_t rows, bool positions);

// `concurrency`: the most workers the executor offers.
AttentionPlan plan_attention(const AttentionProblem& problem, const AttentionChoice& choice, int concurrency,
                             std::size_t l2_bytes);
// An upper bound on the workspace of all problems that have the same choice of kernels, and are no larger than
// `largest` in b, sq, sk and ragged rows.
std::size_t max_workspace_bytes(const AttentionProblem& largest, const AttentionChoice& choice, int concurrency,
                                std::size_t l2_bytes);

}  // namespace rapt::cpu
