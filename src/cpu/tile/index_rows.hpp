// The end of a query in the kernels of index_scores: masks keys, stores scores and keeps the largest.
#pragma once

#include "cpu/tile/topk.hpp"
#include "operations/index_scores/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

// One query of an item.
struct IndexRow {
  std::int64_t token;
  KeyRange keys;        // keys of the work item that the query sees
  float* scores;        // address of key 0's score; null: scores are not stored
  std::int64_t stride;  // from key to key
};

// Finds the keys of the work item that the query sees, and stores -inf as the scores of the others.
inline IndexRow index_row(const IndexScoresParams& p, const IndexItem& item, const Sequence& sequence,
                          std::int64_t token) {
  IndexRow row{token, visible_keys(p, item.b, sequence, token), nullptr, p.scores_stride.d};
  row.keys.first = clamp(row.keys.first, item.key_begin, item.key_end);
  row.keys.last = clamp(row.keys.last, row.keys.first, item.key_end);
  if (!p.scores) return row;
  row.scores = p.scores + item.b * p.scores_stride.b + token * p.scores_stride.s;
  for (std::int64_t j = item.key_begin; j < row.keys.first; ++j) row.scores[j * row.stride] = -kInfinity;
  for (std::int64_t j = row.keys.last; j < item.key_end; ++j) row.scores[j * row.stride] = -kInfinity;
  return row;
}

// Stores the scores of keys [j, j + kLanes) and adds them to `topk`, except those that the query does not see.
[[gnu::always_inline]] inline void take_scores(const IndexRow& row, std::int64_t j, vec score, Topk* topk) {
  const std::int64_t begin = max(row.keys.first - j, 0), end = min(row.keys.last - j, kLanes);
  if (begin >= end) return;
  if (row.scores) {
    if (begin == 0 && end == kLanes && row.stride == 1) {
      store_any(row.scores + j, score);
    } else {
      alignas(64) float lane[kLanes];
      store(lane, score);
      for (std::int64_t i = begin; i < end; ++i) row.scores[(j + i) * row.stride] = lane[i];
    }
  }
  if (topk) topk->add(score, j, begin, end);
}

// The scales of keys [j, j + kLanes) of a quantised k.
inline vec scales_of(const IndexScoresParams& p, std::int64_t b, std::int64_t j, std::int64_t len_k) {
  alignas(64) float lane[kLanes] = {};
  for (std::int64_t i = 0; i < min(kLanes, len_k - j); ++i)
    lane[i] = p.k_scale[key_index(p, p.k_scale_stride, b, 0, 0, j + i)];
  return load(lane);
}

// Ends a query: stores its indices, or if the work item has only a split of the keys, the list of its largest scores.
inline void finish_row(const IndexScoresParams& p, const IndexItem& item, std::int64_t token, Topk& topk) {
  if (!item.lists)
    return topk.store_indices(p.indices + item.b * p.indices_stride.b + token * p.indices_stride.s, p.indices_stride.d);
  topk.keep_largest();
  auto* const list = reinterpret_cast<TopkList*>(item.lists + (token - item.token_begin) * item.list_stride);
  list->count = topk.count();
  const auto bytes = static_cast<std::size_t>(topk.count()) * sizeof(std::int32_t);
  __builtin_memcpy(list->order(), topk.order(), bytes);
  __builtin_memcpy(list->position(min(p.topk, p.sk)), topk.position(), bytes);
}

// Topk needs keys in rising order, which the order of the splits gives.
inline void merge_lists(const IndexScoresParams& p, const IndexItem& item, std::int64_t splits,
                        std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  Topk topk(allocator, p.topk, p.sk);
  const std::int64_t n = min(p.topk, p.sk);
  for (std::int64_t token = item.token_begin; token < item.token_end; ++token) {
    topk.start();
    for (std::int64_t split = 0; split < splits; ++split) {
      auto* const list = reinterpret_cast<TopkList*>(item.lists + (token - item.token_begin) * item.list_stride +
                                                     split * static_cast<std::int64_t>(TopkList::bytes(n)));
      topk.add(list->order(), list->position(n), list->count);
    }
    IndexItem whole = item;
    whole.lists = nullptr;
    finish_row(p, whole, token, topk);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
