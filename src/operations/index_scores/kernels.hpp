// What the CPU kernels of index_scores are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/index_scores/params.hpp"

namespace rapt::cpu {

// The largest scores that a work item found for one of its queries, if other work items have other keys of it.
struct TopkList {
  std::int64_t count;
  // Followed by [n] scores as Topk's integers of the same order, [n] positions, and padding for reading whole vectors.
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

// Those of one ISA; null: it has none.
struct IndexScoresKernels {
  const IndexScoresKernel* all = nullptr;
};

}  // namespace rapt::cpu
