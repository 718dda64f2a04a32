// The work items of one call, and in which order workers take them: pure functions of the plan and the call's lengths.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "operations/attention/cpu_plan.hpp"

namespace rapt::cpu {

// Consecutive sequences of a call with the same lengths: all of a dense call, else one each. A sequence has work items
// for each of hk heads, `row_items` ranges of rows and `splits` ranges of keys.
struct SequenceWork {
  const AttentionKernel* kernel;
  std::int64_t b, count, rows, rows_per_item, row_items;
  std::int64_t first_key, key_blocks, splits;             // one split has all keys
  std::int64_t first_item, first_partial, first_counter;  // work items, floats and counters of all sequences before
  double cost;                                            // of the most costly item: rows x keys
  std::int32_t split_align;                               // keys of a key block; the blocks begin at first_key
  bool heads_in_turn;  // work items in turn over heads: the last rows of every head first

  std::int64_t items_of_head() const { return row_items * splits; }
  // The first key of a split. Splits have as many key blocks as each other, or one more.
  std::int64_t split_begin(std::int64_t split) const { return first_key + key_blocks * split / splits * split_align; }
};

// The queue of one worker. Other workers take from it when their own are empty.
struct alignas(64) WorkQueue {
  std::atomic<std::int64_t> next;
  std::int64_t end;
};

// The sequences of a call that have rows, those with the most costly items first, in `list`, which has room for the
// plan's max_sequences. How keys are split depends on the sequence's own rows, the keys that they see and the number of
// kv heads alone: neither threads nor the rest of the batch change bits.
std::span<const SequenceWork> work_list(const AttentionPlan& plan, const AttentionParams& params, SequenceWork* list);

// Rows [row_begin, row_end) of a kv head, and a split of their keys.
struct ItemPlace {
  std::int64_t b, hk, row_begin, row_end, split;
};
// The place of a work item, which is numbered from `work`'s first; `heads` is the number of kv heads.
ItemPlace place_of(const SequenceWork& work, std::int64_t heads, std::int64_t item);

// Distributes a call's work items over queues of about the same cost, whole heads each (some may be empty); or puts
// them all into the first queue if heads of some sequence are in turn. Returns the queues that are used. A worker
// begins with its own queue, whose K and V it finds in its cache, and goes on to the next ones.
std::span<WorkQueue> partition_into_queues(std::span<const SequenceWork> all, std::int64_t hk,
                                           std::span<WorkQueue> queues);

}  // namespace rapt::cpu
