// What the CPU kernels of attention_backward are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/attention_backward/params.hpp"

namespace rapt::cpu {

// Work items begin at multiples of this many keys.
inline constexpr std::int64_t kBackwardKeys = 128;

// The sums of dK and dV for the rows of a pool of gathered keys, of one kv head, over all tokens that list a row. A
// row of sums has dK, [whole vectors of 32], then dV at `dv_at`; each only if it is wanted. Tokens are added one after
// another. Work items share the sums: each may add to them only when its end() is called.
struct PoolSums {
  float* rows;           // [rows of the pool][stride]; garbage where counts is 0
  std::int64_t* counts;  // [rows of the pool] how many tokens have been added
  std::int64_t stride, dv_at;
  // The accumulated sums of a row are this far behind its sums: every kPoolInterval tokens the sums are added to them,
  // so that no sum is long. 0: there are none.
  std::int64_t accum_at;

  [[gnu::always_inline]] float* row(std::int64_t i) const { return rows + i * stride; }
};
inline constexpr std::int64_t kPoolInterval = 32;

// A work item of attention_backward: keys [key_begin, key_end) of one kv head of one sequence, which process its rows
// in chunks. key_end may be past the sequence's length; both are that length where other work items have the keys.
struct BackwardItem {
  std::int64_t b, hk, key_begin = 0, key_end = 0;
  std::int64_t clear_end = 0;  // keys of the tensors from the sequence's end up to here get gradients of 0
  // Sums of dQ, [rows, rounded up to chunks][sums_of_row], if the head's keys are divided among several work items:
  // those of earlier ones. Null: the work item has all keys.
  float* dq_sums = nullptr;
  // The sums belong to this work item alone and start at 0; a work item without keys finishes the rows.
  bool split = false;
  // Each row's share of the gradients of sinks and slopes: [b, hq, sq], ragged [hq, total_q]. Null: not wanted.
  float *sink_sums = nullptr, *slope_sums = nullptr;
  std::int32_t* head_facts = nullptr;  // of the head, 0 at first: what begin() finds once for all of its work items
  const PoolSums* pool = nullptr;      // gathered keys: end() adds dK and dV to it. Null: end() stores them
};
// Rows [begin, end) of a head of a pool, whose sums are complete.
struct PoolItem {
  std::int64_t pool, hk, begin, end;
};
// A piece of the gradient of the bias: `bias_rows` rows from row_begin on, and kBackwardKeys keys. Dimensions that the
// bias broadcasts over have index 0.
struct BiasItem {
  std::int64_t b, h, row_begin, key_begin;
};
struct BackwardShape {
  std::int64_t d, dv;
  bool has_derivatives;  // scratch for a derivative of each score (changes_derivative())
  std::int64_t keys;     // of an item
};

// A worker calls begin(), then add_rows() for every chunk of `facts.block_q` rows (0: one row) that sees one of the
// work item's keys, the last chunk first, then end(), all with one scratch. The first work item of a head also gets
// the chunks that see no key. Work items of one head may run at the same time, but not on the same chunk: they process
// a chunk in the order of their keys.
struct AttentionBackwardKernel {
  KernelFacts facts;
  std::int64_t (*sums_of_row)(std::int64_t d) noexcept;         // floats of dq_sums per row
  std::size_t (*scratch_bytes)(const BackwardShape&) noexcept;  // a multiple of 64
  void (*begin)(const AttentionBackwardParams&, const BackwardItem&, std::byte* scratch) noexcept;
  void (*add_rows)(const AttentionBackwardParams&, const BackwardItem&, std::int64_t row_begin,
                   std::byte* scratch) noexcept;
  void (*end)(const AttentionBackwardParams&, const BackwardItem&, std::byte* scratch) noexcept;
  // The gradient of the bias is computed by these alone.
  std::size_t (*bias_scratch_bytes)(const BackwardShape&) noexcept;
  std::int64_t bias_rows;  // rows of a piece
  void (*add_bias)(const AttentionBackwardParams&, const BiasItem&, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct AttentionBackwardKernels {
  const AttentionBackwardKernel *best = nullptr, *f16 = nullptr, *naive = nullptr;
  // Of gathered keys: stores the gradients of a pool's rows from their sums, and resets the sums.
  void (*store_pool)(const AttentionBackwardParams&, const PoolItem&, const PoolSums&) noexcept;
};

}  // namespace rapt::cpu
