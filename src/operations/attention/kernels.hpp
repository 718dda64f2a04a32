// What the CPU kernels of attention are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/attention/params.hpp"

namespace rapt::cpu {

// A work item of attention: query rows of one kv head of one sequence (semantics/sequence.hpp), and a range of keys.
struct WorkItem {
  std::int64_t b, hk, row_begin, row_end;
  std::int64_t key_begin, key_end;  // key_end may lie past the sequence's length
  // Null: the work item has all keys of its rows, and stores final results. Else it stores partial results for
  // attention_combine here, [row][partial_floats].
  float* partial;
  bool same_keys = false;          // the previous work item with this scratch had the same call, sequence and kv head
  const WorkItem* next = nullptr;  // the worker's probable next work item, of any sequence, for prefetching
};

inline constexpr std::int64_t kMaxSplits = 64;  // the most splits of a row's keys

// The partial result of a row over some of its keys: dv weighted sums of values, not yet divided by l; neg_m; and l
// (0: no key seen), padded to whole cache lines. The layout of all partial results is [kv head][range of
// rows][split][row].
[[gnu::always_inline]] constexpr std::int64_t partial_floats(std::int64_t dv) {
  return (dv + 2 + 15) / 16 * 16;
}

// The sizes that a kernel's scratch depends on.
struct AttentionShape {
  std::int64_t sk, d, dv;     // sk: of the longest sequence
  std::int64_t rows;          // the most rows of a work item
  std::int64_t k_groups = 0;  // groups of a key that have a scale each, plus one for its tail; 0: no scales
};

// The most rows per sequence and kv head that attention_decode takes. Up to here it is faster than the other kernels,
// except those that declare a smaller number.
inline constexpr int kDecodeRows = 16;

struct AttentionKernel {
  KernelFacts facts;
  int max_rows = 0;          // most rows of a work item; 0: a work item takes all rows of its kv head
  int items_per_worker = 1;  // the fewest per worker, so that workers finish together ...
  int min_item_rows = 0;     // ... but 2 if they had fewer rows than this, which would not repay their setup
  // The kernel's setup is not repaid by fewer rows of a head, or by keys of fewer elements (keys x (d + dv)). Dispatch
  // gives such sequences to a kernel without these limits.
  int min_rows = 0;
  int min_key_elements = 0;
  int decode_rows = kDecodeRows;  // attention_decode is faster up to this many rows of a head ...
  int full_rows = 0;              // ... but from full_rows on only over long keys (cpu_choice.cpp). 0: over all
  // For quantised keys and values: each group must be the whole row or a multiple of this many elements, as must the
  // keys' tail, and there must be no zeros. 0: no restriction.
  int group_multiple = 0;
  // The number of keys that stay packed in the scratch for the next work item of the same head; null: none.
  std::int64_t (*kept_keys)(std::int64_t d, std::int64_t dv) noexcept = nullptr;
  // Scratch of one work item, a multiple of 64.
  std::size_t (*scratch_bytes)(const AttentionShape&) noexcept;
  // No allocation, threads, logging or environment. `scratch` is 64-byte aligned.
  void (*run)(const AttentionParams&, const WorkItem&, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct AttentionKernels {
  const AttentionKernel* const* in_order = nullptr;  // in the order that dispatch tries them, null behind the last
  // Merges partial results of attention, [splits][rows of the work item][partial_floats] at item.partial; the work
  // item's key range has every key. `split_rows` is the number of rows from one split's partial results to the next's;
  // the work item may have fewer.
  void (*combine)(const AttentionParams&, const WorkItem&, std::int64_t splits, std::int64_t split_rows) noexcept;
};

}  // namespace rapt::cpu
