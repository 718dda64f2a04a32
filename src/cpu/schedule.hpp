// How a problem is cut into work items and spread over strands: pure functions.
#pragma once

#include <atomic>
#include <span>

#include "backend.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu {

// The sequences of a call that lie one after another and are alike: all of a dense call, else single ones. The items of
// one: hk heads, of each `row_items` ranges of rows, of each `parts` ranges of keys.
struct SequenceGroup {
  const ForwardKernel* kernel;
  std::int64_t b, count, rows, rows_per_item, row_items;
  std::int64_t first_key, part_keys, parts;             // with one part, it has all keys
  std::int64_t first_item, first_state, first_counter;  // in items, floats, counters of all sequences before
  double cost;                                          // of the most costly item: rows x keys
  bool heads_in_turn;                                   // the last rows of every head, then the ones before

  std::int64_t items_of_head() const { return row_items * parts; }
};

// Items that one strand begins with, and others go on with when they are done with theirs.
struct alignas(64) Lot {
  std::atomic<std::int64_t> next;
  std::int64_t end;
};

// A call's workspace: a lot for each strand, the list of sequences, the strands' scratch, the states of parts, and a
// counter of parts for each range of rows.
struct ForwardSchedule final : Schedule {
  const ForwardKernel* kernel = nullptr;
  // Among the sequences of a call, take those of few rows and those that `kernel` is not worthwhile for; null: it does.
  const ForwardKernel *decode = nullptr, *plain = nullptr;
  std::int64_t rows_per_item = 0;        // of (token, head of the group) pairs, for `kernel`
  std::int64_t plain_rows_per_item = 0;  // for `plain`
  bool keeps_keys = false;               // `kernel` prepares keys once for items of one head in a row
  std::int64_t max_groups = 0;           // entries in the list
  std::int64_t max_parts = 1;            // of a head's keys
  std::size_t scratch_bytes = 0;         // of one strand
  std::size_t state_bytes = 0;           // of all states
  std::size_t counter_bytes = 0;         // of all counters of parts

  std::string note() const override;
  std::size_t lot_bytes() const { return static_cast<std::size_t>(threads) * sizeof(Lot); }
  std::size_t list_bytes() const {
    return (static_cast<std::size_t>(max_groups) * sizeof(SequenceGroup) + 63) / 64 * 64;
  }
};

// Whether sequences of so many rows of a head and keys repay what the kernel prepares.
inline bool is_worthwhile(const ForwardKernel& kernel, std::int64_t rows, std::int64_t keys, std::int64_t d,
                          std::int64_t dv) {
  return rows >= kernel.min_rows && keys * (d + dv) >= kernel.min_key_elements;
}

// Rows of a sequence and kv head up to which attention_decode is the faster kernel: where keys come from memory.
inline constexpr std::int64_t kDecodeRows = 16;

// The kernels of a call: `decode` and `plain` as in ForwardSchedule.
struct Kernels {
  const ForwardKernel& kernel;
  const ForwardKernel *decode = nullptr, *plain = nullptr;
};

// `concurrency`: the most strands the executor offers.
ForwardSchedule schedule_forward(const Problem& problem, const Kernels& kernels, int concurrency, std::size_t l2_bytes);

// At least the workspace of every problem for the same kernels that is no larger in b, sq, sk and ragged rows.
std::size_t max_workspace_bytes(const Problem& largest, const Kernels& kernels, int concurrency, std::size_t l2_bytes);

// The sequences of a call that have rows, those with the most costly items first, in `list`, which has room for the
// schedule's max_groups. How keys are cut into parts depends on the keys that the sequence's own rows see and the
// number of kv heads alone: neither threads nor the rest of the batch change bits.
std::span<const SequenceGroup> list_sequences(const ForwardSchedule& schedule, const ForwardParams& params,
                                              std::int64_t b, SequenceGroup* list);

// Rows [row_begin, row_end) of a kv head, the range of rows of that number in its sequence, and a part of their keys.
struct ItemPlace {
  std::int64_t b, hk, row_begin, row_end, range, part;
};

// Of the group's item of that number, with `heads` kv heads.
ItemPlace place_of(const SequenceGroup& group, std::int64_t heads, std::int64_t item);

// A call's items in lots of about the same cost: one of whole heads for each of `lots` (some are empty), or all in the
// first where heads are in turn. Returns those that are used. A strand begins with its own lot, where it finds K and V
// in its cache, and goes on to the next ones.
std::span<Lot> cut_into_lots(std::span<const SequenceGroup> all, std::int64_t hk, std::span<Lot> lots);

}  // namespace rapt::cpu
