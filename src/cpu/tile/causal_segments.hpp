// The segments of a block of keys: which keys each vector of a query block reads, and which of them need a mask.
#pragma once

#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

// Keys [begin, end) of a block, read by vectors [vec, vecs) of the query block. Not masked: every row of these vectors
// sees every key of the segment.
struct Segment {
  std::int64_t begin, end, vec;
  bool masked;
};
struct BlockSegments {
  Segment segment[kVecs + 2];
  int count = 0;
  std::int64_t begin = 0, end[kVecs] = {};  // vector v reads keys [begin, end[v]); end[v] rises with v
};

// Divides keys [k0, k0 + n) into segments. A vector reads no keys past the last one that its rows see, so a causal
// diagonal wastes kLanes and not `width` rows of scores. The first keys of a sliding window are masked instead.
inline BlockSegments find_segments(const QueryBlock& q_block, std::int64_t k0, std::int64_t n, bool all_masked) {
  BlockSegments c;
  const std::int64_t tile = rows_of_tile(kVecs), w = q_block.width - 1;
  if (!all_masked && q_block.first(w) <= k0 && q_block.last(0) >= k0 + n) {  // the common case: one unmasked segment
    c.segment[c.count++] = {0, n, 0, false};
    for (std::int64_t v = 0; v < q_block.vecs; ++v) c.end[v] = n;
    return c;
  }
  const auto local = [&](std::int64_t key) { return clamp(key - k0, 0, n); };
  const std::int64_t begin = c.begin = local(q_block.first(0)), end = local(q_block.last(w));
  if (begin >= end) return c;
  const std::int64_t full_begin = all_masked ? end : clamp(local(q_block.first(w)), begin, end);
  std::int64_t full_end = all_masked ? end : clamp(local(q_block.last(0)), full_begin, end);
  if (full_end < end)
    full_end = full_begin + (full_end - full_begin) / tile * tile;  // the remainder goes to the masked segment
  const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t first_vec, bool masked) {
    if (from < to) c.segment[c.count++] = {from, to, first_vec, masked};
  };
  add(begin, full_begin, 0, true);
  add(full_begin, full_end, 0, false);
  std::int64_t at = full_end;
  for (std::int64_t v = 0; v < q_block.vecs; ++v) {
    const std::int64_t last = local(q_block.last((v + 1) * kLanes - 1));
    const std::int64_t to = min(at + round_up(max(last - at, 0), tile), end);
    add(at, to, v, true);
    c.end[v] = at = to;
  }
  return c;
}

// Calls f(integral_constant<int, vecs>) for 1 <= vecs <= kMax.
template <int kMax = kVecs, class F>
[[gnu::always_inline]] inline void with_vecs(std::int64_t vecs, F f) {
  if constexpr (kMax > 1) {
    if (vecs < kMax) return with_vecs<kMax - 1>(vecs, f);
  }
  f(std::integral_constant<int, kMax>());
}

}  // namespace rapt::cpu::RAPT_ISA
