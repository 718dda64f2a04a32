// How attention calls with one problem are carried out: which kernels, how many rows a work item has, how many workers,
// and how much workspace. Pure functions of the problem.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/registry.hpp"
#include "dispatch/entry.hpp"

namespace rapt::cpu {

// The kernels of a call. Among sequences that need not be alike, each goes to the kernel that it would get alone.
struct AttentionKernels {
  const AttentionKernel* kernel = nullptr;
  const AttentionKernel* decode = nullptr;   // for sequences of few rows; null: `kernel` takes them
  const AttentionKernel* smaller = nullptr;  // for those that `kernel` is not worthwhile for; null: it takes them
};

// A call's workspace holds, one after another: a queue for each worker, the list of sequences, the workers' scratch,
// the partial results of splits, and for each range of rows a counter of the splits that are done.
struct AttentionPlan final : EntryPlan {
  AttentionKernels kernels;
  std::int64_t rows_per_item = 0;          // of (token, head of the group) pairs, for kernels.kernel
  std::int64_t smaller_rows_per_item = 0;  // for kernels.smaller
  bool keeps_keys = false;                 // the kernel prepares keys once for items of one head in a row
  std::int64_t max_sequences = 0;          // in the list
  std::int64_t max_splits = 1;             // of a head's keys
  std::size_t queue_bytes = 0, list_bytes = 0;
  std::size_t scratch_bytes = 0;  // of one worker
  std::size_t partial_bytes = 0;  // of all partial results
  std::size_t counter_bytes = 0;  // of all counters

  std::string note() const override;
};

// The most rows of a sequence and kv head that attention_decode takes: all that it is faster for beside some kernel.
inline constexpr std::int64_t kDecodeRows = AttentionKernel{}.decode_rows;
// Sequences of at most kFewRows rows are split along their keys until they occupy a large machine. Up to kSplitRows
// (16 tokens of 128 heads that share their keys) they are where their heads and ranges of rows are few: into so many
// that partial results take no more than those of kFewRows rows.
inline constexpr std::int64_t kFewRows = 64, kSplitRows = 2048;
// Splits have a multiple of so many keys, and begin at a multiple of kSplitAlign: a whole number of any kernel's
// blocks.
inline constexpr std::int64_t kSplitKeys = 512, kSplitAlign = 128;
// The most splits of a head's keys, and the fewest keys of a split. `rows`: of the head. Of gathered keys, which are a
// few thousand for each token, those of all tokens for the first, and 1 for the second.
std::int64_t max_splits(std::int64_t hk, std::int64_t rows);
std::int64_t min_split_keys(std::int64_t rows);

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Query rows of a kv head of a sequence: tokens x group, with gathered keys those of one token.
std::int64_t rows_of_head(const AttentionProblem& problem);
// Whether sequences of so many rows of a head and keys repay what the kernel prepares.
bool is_worthwhile(const AttentionKernel& kernel, std::int64_t rows, std::int64_t keys, std::int64_t d,
                   std::int64_t dv);
// Whether attention_decode is faster for them than the kernel, and any that takes what the kernel is not worthwhile
// for.
bool decode_is_faster(const AttentionKernel& kernel, std::int64_t rows, std::int64_t keys, std::int64_t d,
                      std::int64_t dv);

// What plans go by for `kernel` and those beside it.
TuningValues default_tuning(const AttentionKernel& kernel);
// `concurrency`: the most workers the executor offers.
AttentionPlan plan_attention(const AttentionProblem& problem, const AttentionKernels& kernels,
                             const TuningValues& tuning, int concurrency, std::size_t l2_bytes);
// At least the workspace of every problem for the same kernels that is no larger in b, sq, sk and ragged rows.
std::size_t max_workspace_bytes(const AttentionProblem& largest, const AttentionKernels& kernels,
                                const TuningValues& tuning, int concurrency, std::size_t l2_bytes);

}  // namespace rapt::cpu
