// What the objects of one ISA export: kernels, as rows of data. The framework reads the rows; nothing else is visible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/append_kv_params.hpp"
#include "operations/attention_backward_params.hpp"
#include "operations/attention_params.hpp"
#include "operations/delta_rule_backward_params.hpp"
#include "operations/index_scores_params.hpp"
#include "operations/merge_states_params.hpp"
#include "operations/select_topk_params.hpp"

namespace rapt::cpu {

// Query rows of one kv head of one sequence (semantics/sequence.hpp), and the keys they look at.
struct WorkItem {
  std::int64_t b, hk, row_begin, row_end;
  std::int64_t key_begin, key_end;  // key_end may lie past the sequence's length
  // Null: the item has all keys of its rows, and finishes them. Else it leaves partial results for attention_combine,
  // [row][partial_floats].
  float* partial;
  bool same_keys = false;          // the item before it in this scratch was of the same call, sequence and kv head
  const WorkItem* next = nullptr;  // the item that the worker will probably do next: may be fetched
};

inline constexpr std::int64_t kMaxSplits = 64;  // of a row's keys, each with a partial result of its own

// The partial result of a row over some of its keys: dv weighted sums of values, not yet divided; neg_m, what their
// weights are relative to; and the sum of the weights (0: no key seen), padded to whole cache lines. Partial results
// lie as [kv head][range of rows][split][row]: a kernel writes rows, attention_combine reads splits and rows.
[[gnu::always_inline]] constexpr std::int64_t partial_floats(std::int64_t dv) {
  return (dv + 2 + 15) / 16 * 16;
}

// What a kernel needs to know to size its scratch.
struct AttentionShape {
  std::int64_t sk, d, dv;     // sk of the longest sequence
  std::int64_t rows;          // most rows of a work item
  std::int64_t k_groups = 0;  // of a key that have a scale each, its tail one more; 0: there are none
};

// The most rows of a sequence and kv head that attention_decode takes. It is faster for all of these than the kernels
// that do not have a smaller number of their own.
inline constexpr int kDecodeRows = 16;

struct AttentionKernel {
  KernelFacts facts;
  int max_rows = 0;          // of a work item; 0: an item takes all rows of its kv head
  int items_per_worker = 1;  // at least so many, that the last even out ...
  int min_item_rows = 0;     // ... but 2 rather than items of fewer rows, which do not repay what each prepares
  // What it prepares is not repaid by fewer rows of a head, or by keys of fewer elements (keys x (d + dv)): dispatch
  // gives such sequences to a kernel without these limits.
  int min_rows = 0;
  int min_key_elements = 0;
  int decode_rows = kDecodeRows;  // attention_decode is faster for up to so many rows of a head ...
  int full_rows = 0;              // ... but of so many or more only over long keys: see decode_is_faster(). 0: over all
  // Of quantised keys and values each group is the whole row, or has a multiple of so many elements, as the keys' tail
  // has, and none has a zero; 0: they may be any.
  int group_multiple = 0;
  // Up to so many keys stay prepared in the scratch for the next item, if it is of the same head; null: none.
  std::int64_t (*kept_keys)(std::int64_t d, std::int64_t dv) noexcept = nullptr;
  // Scratch of one work item, a multiple of 64.
  std::size_t (*scratch_bytes)(const AttentionShape&) noexcept;
  // No allocation, threads, logging or environment. `scratch` is 64-byte aligned.
  void (*run)(const AttentionParams&, const WorkItem&, std::byte* scratch) noexcept;
};

// attention_backward.

// Items begin at a multiple of so many keys.
inline constexpr std::int64_t kBackwardKeys = 128;

// Sums of dK and dV over all tokens that list a row of a pool of gathered keys, of one kv head. A row of so many floats
// has dK, [whole vectors of 32], then dV at `dv_at`; each only if it is wanted. Token by token is added, and an item is
// not alone with them: its end() is called when the sums are its to add to.
struct PoolSums {
  float* rows;           // [rows of the pool][stride]; garbage where ...
  std::int64_t* counts;  // [rows of the pool] ... nothing has been added yet: how often something was
  std::int64_t stride, dv_at;
  // So far behind a row kPoolRun of its sums at a time are added up, so that no sum is long; 0: they are not.
  std::int64_t accum_at;

  [[gnu::always_inline]] float* row(std::int64_t i) const { return rows + i * stride; }
};
inline constexpr std::int64_t kPoolInterval = 32;

// Keys [key_begin, key_end) of one kv head of one sequence, whose rows come to it in chunks. key_end may lie past the
// sequence's length; both are that length where others have the keys.
struct BackwardItem {
  std::int64_t b, hk, key_begin, key_end;
  std::int64_t clear_end;  // keys of the tensors past the sequence's, up to here, get gradients of 0
  // [rows, rounded up to chunks][sums_of_row] for the head's rows, where its keys are cut into several items: what the
  // items before this one gave. Null: the item has all keys.
  float* dq_sums;
  bool split;  // the sums are this item's alone, and all 0: an item without keys finishes the rows
  // What each row adds to the gradients of sinks and slopes: [b, hq, sq], ragged [hq, total_q]. Null: not wanted.
  float *sink_sums, *slope_sums;
  std::int32_t* head_facts;        // of the head, 0 at first: what begin() wants to find out once for all of its items
  const PoolSums* pool = nullptr;  // gathered keys: where end() adds dK and dV. Null: it stores them
};
// Rows [begin, end) of a head of a pool whose sums are complete.
struct PoolItem {
  std::int64_t pool, hk, begin, end;
};
// A piece of the gradient of the bias: the kernel's rows from row_begin on, and kBackwardKeys keys. Of dimensions that
// the bias broadcasts over, index 0.
struct BiasItem {
  std::int64_t b, h, row_begin, key_begin;
};
struct BackwardShape {
  std::int64_t d, dv;
  bool softcap;
  std::int64_t keys;  // of an item
};

// A worker calls begin(), add_rows() for every chunk of `facts.block_q` rows (0: one row) that sees one of the item's
// keys, the last first, and end(), all with one scratch. The first item of a head also gets the chunks that see no key
// at all. Items of one head may go on at the same time, but not with the same chunk: that goes to them in the order of
// their keys.
struct AttentionBackwardKernel {
  KernelFacts facts;
  std::int64_t (*sums_of_row)(std::int64_t d) noexcept;         // floats of dq_sums
  std::size_t (*scratch_bytes)(const BackwardShape&) noexcept;  // a multiple of 64
  void (*begin)(const AttentionBackwardParams&, const BackwardItem&, std::byte* scratch) noexcept;
  void (*add_rows)(const AttentionBackwardParams&, const BackwardItem&, std::int64_t row_begin,
                   std::byte* scratch) noexcept;
  void (*end)(const AttentionBackwardParams&, const BackwardItem&, std::byte* scratch) noexcept;
  // The gradient of the bias, by itself.
  std::size_t (*bias_scratch_bytes)(const BackwardShape&) noexcept;
  std::int64_t bias_rows;  // of a piece
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
  std::int64_t columns;                                          // that items are multiples of
  std::int64_t max_tokens = INT64_MAX;                           // of a sequence
  bool keeps_steps = true;                                       // a state for each token, where that is asked for
  std::size_t (*scratch_bytes)(const DeltaRuleShape&) noexcept;  // a multiple of 64
  void (*run)(const DeltaRuleParams&, const DeltaRuleItem&, std::byte* scratch) noexcept;
};

// delta_rule_backward.

inline constexpr std::int64_t kDeltaBackwardTokens = 24;  // of a block
// A row of n sums of several state heads, in whole cache lines.
[[gnu::always_inline]] constexpr std::int64_t padded_sums(std::int64_t n) {
  return (n + 15) / 16 * 16;
}

// A state head of a sequence.
struct DeltaRuleBackwardItem {
  std::int64_t b, h;
  // [tokens of all sequences][heads][padded_sums(d or dv)]: gradients of heads of q, k and v that serve several state
  // heads, from those before this one. Null: where each serves one.
  float *q_sums, *k_sums, *v_sums;
  double* head_sums;  // [2 + d]: what the item adds to the gradients of a_log, of g as [h], and of dt_bias
};
struct DeltaRuleBackwardShape {
  std::int64_t d, dv, reads, tokens;  // of the longest sequence
};
// A worker calls begin(), add_block() for every block of tokens, the last first, and end(), all with one scratch. Items
// may go on at the same time; those of heads that share one of q, k or v come to a block in the order of the heads.
struct DeltaRuleBackwardKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(const DeltaRuleBackwardShape&) noexcept;  // a multiple of 64
  void (*begin)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::byte* scratch) noexcept;
  void (*add_block)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::int64_t block,
                    std::byte* scratch) noexcept;
  void (*end)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::byte* scratch) noexcept;
};

// index_scores.

// The best keys that an item found for one of its queries, of which there are others' too.
struct TopkList {
  std::int64_t count;
  // Behind it [n] of order and [n] of position, as Topk has them, and room for reading whole vectors.
  [[gnu::always_inline]] std::int32_t* order() { return reinterpret_cast<std::int32_t*>(this + 1); }
  [[gnu::always_inline]] std::int32_t* position(std::int64_t n) { return order() + n; }
  [[gnu::always_inline]] static constexpr std::size_t bytes(std::int64_t n) {
    return (sizeof(TopkList) + 8 * static_cast<std::size_t>(n) + 64 + 63) / 64 * 64;
  }
};
// Keys [key_begin, key_end), which may lie past the sequence's, for queries [token_begin, token_end) of sequence b.
struct IndexItem {
  std::int64_t b, token_begin, token_end, key_begin, key_end;
  // [queries of the item][splits], of its first query; TopkLists. Null: the item has all keys, and stores the indices.
  std::byte* lists;
  std::int64_t list_stride;  // bytes from query to query
};
struct IndexShape {
  std::int64_t h, d, topk, keys;  // keys of a sequence
};
struct IndexScoresKernel {
  KernelFacts facts;
  std::int64_t tokens;                                       // of an item, at most
  std::int64_t keys;                                         // that begins of items are multiples of
  std::size_t (*scratch_bytes)(const IndexShape&) noexcept;  // a multiple of 64
  void (*run)(const IndexScoresParams&, const IndexItem&, std::byte* scratch) noexcept;
  // Stores the indices of the item's queries from the lists of all splits of the keys.
  void (*merge)(const IndexScoresParams&, const IndexItem&, std::int64_t splits, std::byte* scratch) noexcept;
};

// select_topk: rows [begin, end).
struct SelectTopkKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t n, std::int64_t sk) noexcept;  // a multiple of 64
  void (*run)(const SelectTopkParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// What bytes 1, 2, 3, 255 and 1, -2, 3, -4 make, the former without a sign.
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
  // attention_backward of gathered keys: gradients of rows of a pool from their sums, which then are as if never used.
  void (*store_pool)(const AttentionBackwardParams&, const PoolItem&, const PoolSums&) noexcept;
  // Finishes rows of attention from their partial results: [splits][rows of the item][partial_floats] at item.partial,
  // with every key in its range.
  // `split_rows`: of each split's partial results, from one to the next; the item's rows may be fewer.
  void (*combine)(const AttentionParams&, const WorkItem&, std::int64_t splits, std::int64_t split_rows) noexcept;
  // For the roofline and for tests.
  double (*fma_chains)(std::int64_t iterations) noexcept;  // returns the FLOPs done
  // Null: none. Returns the integer operations done; `sum` is that of all products, modulo 2^32, four of which are
  // kInt8Products.
  double (*int8_chains)(std::int64_t iterations, std::uint32_t& sum) noexcept = nullptr;
  float (*read_stream)(const float* data, std::int64_t n) noexcept;  // returns a value that depends on all
  void (*exp2)(const float* x, float* y, std::int64_t n) noexcept;   // y = 2^x for x <= 127
  // y = x as the kernels load, hold as fp32 and store it, while denormal results of arithmetic are flushed.
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
