// How a problem is cut into work items and spread over strands: pure functions.
#pragma once

#include <vector>

#include "backend.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu {

struct ForwardSchedule final : Schedule {
  const ForwardKernel* kernel = nullptr;
  const ForwardKernel* decode = nullptr;  // takes the sequences of few rows among longer ones; null: `kernel` does
  std::int64_t rows_per_item = 0;         // of (token, head of the group) pairs, for `kernel`
  bool keeps_keys = false;                // `kernel` prepares keys once for items of one head in a row
  std::size_t scratch_bytes = 0;          // of one strand
  std::size_t state_bytes = 0;            // of all states
  std::size_t counter_bytes = 0;          // of all counters of parts
};

// Rows of a sequence and kv head up to which attention_decode is the faster kernel: where keys come from memory.
inline constexpr std::int64_t kDecodeRows = 16;

// `concurrency`: the most strands the executor offers.
ForwardSchedule schedule_forward(const Problem& problem, const ForwardKernel& kernel, const ForwardKernel* decode,
                                 int concurrency, std::size_t l2_bytes);

// The items of one sequence: hk heads, of each `row_items` ranges of rows, of each `parts` ranges of keys.
struct Sequence {
  const ForwardKernel* kernel;
  std::int64_t b, rows, rows_per_item, row_items;
  std::int64_t first_key, part_keys, parts;             // with one part, it has all keys
  std::int64_t first_item, first_state, first_counter;  // in items, floats, counters of all sequences before
  double cost;                                          // of the most costly item: rows x keys
  bool heads_in_turn;                                   // the last rows of every head, then the ones before

  std::int64_t items_of_head() const { return row_items * parts; }
};

// The sequences of a call that have rows, those with the most costly items first. How keys are cut into parts depends
// on the keys that the sequence's own rows see and the number of kv heads alone: neither threads nor the rest of the
// batch change bits.
std::vector<Sequence> sequences(const ForwardSchedule& schedule, const ForwardParams& params, std::int64_t b);

// Rows [row_begin, row_end) of a kv head, the range of rows of that number in its sequence, and a part of their keys.
struct ItemPlace {
  std::int64_t hk, row_begin, row_end, range, part;
};

// Of the sequence's item of that number, with `heads` kv heads.
ItemPlace place_of(const Sequence& sequence, std::int64_t heads, std::int64_t item);

// A call's items in lots, one of whole heads for every strand and all of about the same cost (some are empty), or a
// single one where heads are in turn: the first item of each, and how many there are in all. A strand begins with its
// own lot, where it finds K and V in its cache, and goes on to the next ones.
std::vector<std::int64_t> cut_into_lots(const std::vector<Sequence>& all, std::int64_t hk, int strands);

}  // namespace rapt::cpu
