// The kernels that the objects of one ISA export, as rows of data that the framework reads. Nothing else of these
// objects is visible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/append_kv/params.hpp"
#include "operations/attention_backward/params.hpp"
#include "operations/attention/params.hpp"
#include "operations/delta_rule_backward/params.hpp"
#include "operations/index_scores/params.hpp"
#include "operations/merge_states/params.hpp"
#include "operations/select_topk/params.hpp"

namespace rapt::cpu {

// A work item of attention: query rows of one kv head of one sequence (semantics/sequence.hpp), and a range of keys.
struct WorkItem {
  std::int64_t b, hk, row_begin, row_end;
  std::int64_t key_begin, key_end;  // key_end may lie past the sequence's length
  // Null: the work item has all keys of its rows, and stores final results. Else it stores partial results for
  // attention_combine here, [row][partial_floats].
  float* partial;
  bool same_keys = false;          // the previous work item with this scratch had the same call, sequence and kv head
  const WorkItem* next = nullptr;  // the worker's probable next work item, for prefetching
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
  int full_rows = 0;              // ... but from full_rows on only over long keys: see decode_is_faster(). 0: over all
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

// attention_backward.

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
  std::int64_t b, hk, key_begin, key_end;
  std::int64_t clear_end;  // keys of the tensors from the sequence's end up to here get gradients of 0
  // Sums of dQ, [rows, rounded up to chunks][sums_of_row], if the head's keys are divided among several work items:
  // those of earlier ones. Null: the work item has all keys.
  float* dq_sums;
  bool split;  // the sums belong to this work item alone and start at 0; a work item without keys finishes the rows
  // Each row's share of the gradients of sinks and slopes: [b, hq, sq], ragged [hq, total_q]. Null: not wanted.
  float *sink_sums, *slope_sums;
  std::int32_t* head_facts;        // of the head, 0 at first: what begin() determines once for all of its work items
  const PoolSums* pool = nullptr;  // gathered keys: end() adds dK and dV to it. Null: end() stores them
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
  bool softcap;
  std::int64_t keys;  // of an item
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

// append_kv: new rows [begin, end), counted over all sequences, of every head.
struct AppendKvKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t size) noexcept;  // for rows of up to `size` elements, a multiple of 64
  void (*run)(const AppendKvParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// merge_states: rows [begin, end).
struct MergeStatesKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t count, std::int64_t dv) noexcept;  // a multiple of 64
  void (*run)(const MergeStatesParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// delta_rule: columns [begin, end) of the state of head h of sequence b.
struct DeltaRuleItem {
  std::int64_t b, h, begin, end;
};
struct DeltaRuleShape {
  std::int64_t d, columns, reads;  // reads: query heads of a state head
};
struct DeltaRuleKernel {
  KernelFacts facts;
  std::int64_t columns;                                          // columns of a work item are a multiple of this
  std::int64_t max_tokens = INT64_MAX;                           // the most tokens of a sequence
  bool keeps_steps = true;                                       // can store a state for each token
  std::size_t (*scratch_bytes)(const DeltaRuleShape&) noexcept;  // a multiple of 64
  void (*run)(const DeltaRuleParams&, const DeltaRuleItem&, std::byte* scratch) noexcept;
};

// delta_rule_backward.

inline constexpr std::int64_t kDeltaBackwardTokens = 24;  // tokens of a block
// The floats of a row of n sums, in whole cache lines.
[[gnu::always_inline]] constexpr std::int64_t padded_sums(std::int64_t n) {
  return (n + 15) / 16 * 16;
}

// A work item: a state head of a sequence.
struct DeltaRuleBackwardItem {
  std::int64_t b, h;
  // [tokens of all sequences][heads][padded_sums(d or dv)]: gradients of heads of q, k and v that several state heads
  // share, summed over the state heads before this one. Null: no head is shared.
  float *q_sums, *k_sums, *v_sums;
  double* head_sums;  // [2 + d]: the work item's share of the gradients of a_log, of g as [h], and of dt_bias
};
struct DeltaRuleBackwardShape {
  std::int64_t d, dv, reads, tokens;  // of the longest sequence
};
// A worker calls begin(), then add_block() for every block of tokens, the last block first, then end(), all with one
// scratch. Work items may run at the same time; those that share a head of q, k or v process a block in the order of
// their heads.
struct DeltaRuleBackwardKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(const DeltaRuleBackwardShape&) noexcept;  // a multiple of 64
  void (*begin)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::byte* scratch) noexcept;
  void (*add_block)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::int64_t block,
                    std::byte* scratch) noexcept;
  void (*end)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::byte* scratch) noexcept;
};

// index_scores.

// The largest scores that a work item found for one of its queries, if other work items have other keys of it.
struct TopkList {
  std::int64_t count;
  // Followed by [n] of order and [n] of position, as Topk has them, and padding for reading whole vectors.
  [[gnu::always_inline]] std::int32_t* order() { return reinterpret_cast<std::int32_t*>(this + 1); }
  [[gnu::always_inline]] std::int32_t* position(std::int64_t n) { return order() + n; }
  [[gnu::always_inline]] static constexpr std::size_t bytes(std::int64_t n) {
    return (sizeof(TopkList) + 8 * static_cast<std::size_t>(n) + 64 + 63) / 64 * 64;
  }
};
// A work item: keys [key_begin, key_end), which may be past the sequence's end, for queries [token_begin, token_end)
// of sequence b.
struct IndexItem {
  std::int64_t b, token_begin, token_end, key_begin, key_end;
  // TopkLists, [queries of the work item][splits], from its first query on. Null: the work item has all keys, and
  // stores the indices.
  std::byte* lists;
  std::int64_t list_stride;  // bytes from query to query
};
struct IndexShape {
  std::int64_t h, d, topk, keys;  // keys: of a sequence
};
struct IndexScoresKernel {
  KernelFacts facts;
  std::int64_t tokens;                                       // the most queries of a work item
  std::int64_t keys;                                         // key_begin is a multiple of this
  std::size_t (*scratch_bytes)(const IndexShape&) noexcept;  // a multiple of 64
  void (*run)(const IndexScoresParams&, const IndexItem&, std::byte* scratch) noexcept;
  // Merges the lists of all splits and stores the indices of the work item's queries.
  void (*merge)(const IndexScoresParams&, const IndexItem&, std::int64_t splits, std::byte* scratch) noexcept;
};

// select_topk: rows [begin, end).
struct SelectTopkKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t n, std::int64_t sk) noexcept;  // a multiple of 64
  void (*run)(const SelectTopkParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// Operands of int8_chains(): unsigned bytes 1, 2, 3, 255 and signed bytes 1, -2, 3, -4, and the sum of their products.
inline constexpr std::uint32_t kInt8Left = 0xff030201, kInt8Right = 0xfc03fe01;
inline constexpr std::int32_t kInt8Products = 1 - 4 + 9 - 4 * 255;

struct IsaKernels {
  const AttentionKernel* const* attention;  // in the order that dispatch tries them, null behind the last
  // Null: none.
  const AttentionBackwardKernel *attention_backward = nullptr, *attention_backward_f16 = nullptr,
                                *attention_backward_naive = nullptr;
  const AppendKvKernel* append_kv = nullptr;
  const MergeStatesKernel* merge_states = nullptr;
  const DeltaRuleKernel *delta_rule = nullptr, *delta_rule_decode = nullptr, *delta_rule_naive = nullptr;
  const DeltaRuleBackwardKernel* delta_rule_backward = nullptr;
  const IndexScoresKernel* index_scores = nullptr;
  const SelectTopkKernel* select_topk = nullptr;
  // attention_backward of gathered keys: stores the gradients of a pool's rows from their sums, and resets the sums.
  void (*store_pool)(const AttentionBackwardParams&, const PoolItem&, const PoolSums&) noexcept;
  // Merges partial results of attention, [splits][rows of the work item][partial_floats] at item.partial; the work
  // item's key range has every key. `split_rows` is the number of rows from one split's partial results to the next's;
  // the work item may have fewer.
  void (*combine)(const AttentionParams&, const WorkItem&, std::int64_t splits, std::int64_t split_rows) noexcept;
  // For the roofline and for tests.
  double (*fma_chains)(std::int64_t iterations) noexcept;  // returns the FLOPs done
  // Null: the ISA has none. Returns the integer operations done. `sum` is the sum of all products, modulo 2^32, of
  // which every four sum to kInt8Products.
  double (*int8_chains)(std::int64_t iterations, std::uint32_t& sum) noexcept = nullptr;
  float (*read_stream)(const float* data, std::int64_t n) noexcept;  // returns a value that depends on all
  void (*exp2)(const float* x, float* y, std::int64_t n) noexcept;   // y = 2^x for x <= 127
  // y = x, loaded, held as fp32 and stored as the kernels do, with denormal results of arithmetic flushed.
  void (*convert)(DType x_type, const void* x, DType y_type, void* y, std::int64_t n) noexcept;
};

namespace generic {
extern const IsaKernels kKernels;
}
namespace avx2 {
extern const IsaKernels kKernels;
}
namespace avx512 {
extern const IsaKernels kKernels;
}
namespace avx512bf16 {
extern const IsaKernels kKernels;
}
namespace amx {
extern const IsaKernels kKernels;
}
namespace neon {
extern const IsaKernels kKernels;
}
namespace neonbf16 {
extern const IsaKernels kKernels;
}

}  // namespace rapt::cpu
