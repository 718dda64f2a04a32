// The rows, keys and pairs of them that a call of attention has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "operations/attention/params.hpp"

namespace rapt {

// What causal, window, align, lengths, rings and lists leave of a call, in all its heads.
struct Work {
  double pairs = 0, rows = 0, keys = 0;  // pairs of a row and a key that it sees; rows; keys that some row sees

  explicit Work(const AttentionParams& p) {
    if (p.tokens > 0) count_lists(p);
    else
      for (std::int64_t i = 0; i < p.b; ++i) count_sequence(p, sequence_of(p, p, i));
    const auto hk = static_cast<double>(p.hk), hq = static_cast<double>(p.hk * p.group);
    pairs *= hq, rows *= hq, keys *= hk;
  }

 private:
  void count_sequence(const AttentionParams& p, const Sequence& s) {
    const std::int64_t offset = row_offset(p.score, s);
    std::int64_t next = s.oldest;  // rows see ranges that move on: keys before this one are counted
    for (std::int64_t token = 0; token < s.len_q; ++token) {
      const KeyRange seen = visible_keys(p.score, token, offset + token, s.oldest, s.len_k);
      pairs += static_cast<double>(std::max<std::int64_t>(0, seen.last - seen.first));
      keys += static_cast<double>(std::max<std::int64_t>(0, seen.last - std::max(seen.first, next)));
      next = std::max(next, seen.last);
    }
    rows += static_cast<double>(s.len_q);
  }
  void count_lists(const AttentionParams& p) {
    std::vector<bool> listed(static_cast<std::size_t>(p.page_count));  // of the pool at hand
    for (std::int64_t i = 0; i < p.b; ++i) {
      Sequence s = sequence_of(p, p, i);
      const std::int64_t entry = entry_of(p, i, s);
      if (p.k_stride.b != 0 && s.q_first == 0) listed.assign(listed.size(), false);
      for (std::int64_t j = 0; j < s.len_k; ++j) {
        auto is_listed = listed[static_cast<std::size_t>(listed_row(p, entry, s.k_first, j))];
        if (!is_listed) ++keys;
        is_listed = true;
      }
      pairs += static_cast<double>(s.len_k);
    }
    rows = static_cast<double>(p.b);
  }
};

}  // namespace rapt
