// What tests do with each KV layout: problems, lengths and arguments at random, and where a key lies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "rapt/attention.hpp"
#include "rapt/kv_cache.hpp"
#include "support/fill.hpp"
#include "support/random.hpp"
#include "support/tensor.hpp"

namespace rapt::testing {

/// Gathers the keys, which goes with nothing that has positions.
inline void keep_no_positions(AttentionProblem& p) {
  const AttentionProblem none;
  p.gathered = true, p.kv_lengths = false, p.ragged_q = p.ragged_k = -1;
  p.causal = p.alibi = false, p.window_left = p.window_right = -1;
  p.align = none.align, p.align_offset = 0, p.bias = p.mask = none.kNone, p.bias_dtype = none.bias_dtype, p.dropout = 0;
}

/// Lets the keys of a problem lie in blocks, now and then.
inline void sample_blocks(Random& random, AttentionProblem& p) {
  if (p.ragged_k >= 0 || p.gathered) return;
  const bool positions = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.alibi;
  switch (between(random, 0, 2)) {
    case 0:
      p.page_size = pick(random, {1, 2, 5, 16, 17, 64, 128});
      p.sk = (p.sk + p.page_size - 1) / p.page_size * p.page_size;
      if (positions && p.align == AttentionProblem::Align::none) p.sq = p.sk;
      p.kv_lengths = true;
      break;
    case 1:
      p.ring = p.kv_lengths = true;
      p.bias = p.mask = AttentionProblem::kNone;
      // Windows that leave room for a chunk: without one, causal rows of a ring that has gone round are refused.
      if (p.causal && p.align == AttentionProblem::Align::bottom_right && p.sq <= p.sk && one_in(random, 2))
        p.window_left = between(random, 0, p.sk - p.sq);
      break;
    default:
      break;
  }
}

inline bool lies_in_order(const AttentionProblem& p) {
  return p.page_size == 0 && !p.ring && !p.gathered;
}
inline void lay_in_order(AttentionProblem& p) {
  p.page_size = 0, p.ring = p.gathered = false;
}
/// Whether keys are those of a sequence, and not of a list for each token.
inline bool has_positions(const AttentionProblem& p) {
  return !p.gathered;
}
inline bool has_positions(const KvSource& kv) {
  return kv.kind != KvSource::Kind::gathered;
}

/// Whether a ring still has every key that p.sq rows of a sequence of `length` see, by asking each of them.
inline bool ring_has_all(const AttentionProblem& p, std::int64_t length) {
  const std::int64_t offset = p.align == AttentionProblem::Align::bottom_right ? length - p.sq
                              : p.align == AttentionProblem::Align::offset     ? p.align_offset
                                                                               : 0;
  constexpr std::int64_t kFar = std::int64_t{1} << 60;  // further than any key
  const std::int64_t left = std::min(p.window_left, kFar), right = p.causal ? 0 : std::min(p.window_right, kFar);
  for (std::int64_t at = offset; at < offset + p.sq; ++at) {
    const std::int64_t end = right < 0 ? length : std::min(length, at + right + 1);
    const std::int64_t begin = std::max<std::int64_t>(0, left < 0 ? end - p.sk : at - left);
    if (begin < end && begin < length - p.sk) return false;
  }
  return true;
}

/// Key lengths of the sequences of a case that has them.
inline Dims key_lengths(const AttentionProblem& p, std::uint64_t seed, std::mt19937_64 random) {
  Dims lengths(static_cast<std::size_t>(p.b), p.sk);
  // Without an alignment, scores that look at positions need equal lengths.
  const bool positions = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.alibi;
  if (positions && p.align == AttentionProblem::Align::none) return lengths;
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const std::uint64_t choice = (n + seed) % 4;
    if (choice == 3) lengths[n] = p.ring ? p.sk * 7 + between(0, p.sk) : 0;
    else if (choice == 2 && p.ring) lengths[n] = p.sk + between(1, p.sk);
    else if (choice != 0) lengths[n] = between(0, p.sk);
    if (p.ring && !ring_has_all(p, lengths[n])) lengths[n] = p.sk;
  }
  return lengths;
}

/// The row of key j in its sequence's entry of k, of sk rows, of keys that are neither paged nor gathered.
inline std::int64_t row_in_entry(const CacheProblem& p, std::int64_t sk, std::int64_t j) {
  return p.ring ? j % sk : j;
}

/// Keys that a sequence may have, `fresh` of them new, with room for sk; far more where there is room for any number.
inline std::int64_t most_keys_before(const CacheProblem& p, std::int64_t sk, std::int64_t fresh) {
  return p.ring ? 7 * sk : sk - fresh;
}
/// Of `fresh` keys that are written at once, the first that stays.
inline std::int64_t first_kept(const CacheProblem& p, std::int64_t sk, std::int64_t fresh) {
  return p.ring ? std::max<std::int64_t>(0, fresh - sk) : 0;
}
inline KvCache cache_of(const CacheProblem& p, const MutableTensorView& k, const MutableTensorView& v,
                        const TensorView& block_table) {
  return p.page_size > 0 ? KvCache::paged(k, v, block_table) : p.ring ? KvCache::ring(k, v) : KvCache::strided(k, v);
}

/// The tensors that say where keys lie; a layout uses some of them.
struct KeyIndices {
  TensorView cu_seqlens, block_table, seqlens, indices, counts;
};
inline KvSource source_of(const AttentionProblem& p, const TensorView& k, const TensorView& v, const KeyIndices& i) {
  return p.ragged_k >= 0   ? KvSource::ragged(k, v, i.cu_seqlens)
         : p.page_size > 0 ? KvSource::paged(k, v, i.block_table, i.seqlens)
         : p.gathered      ? KvSource::gathered(k, v, i.indices, i.counts)
         : p.ring          ? KvSource::ring(k, v, i.seqlens)
                           : KvSource::strided(k, v, i.seqlens);
}

/// Keys or values of b entries and s rows: strided, paged or in a ring.
template <class Given, class Choices>
TensorView cache(Given& g, Choices& c, std::int64_t b, std::int64_t hk, std::int64_t s, std::int64_t d, DType dtype) {
  return floats(g, c, {b, hk, s, dtype == DType::i4x2 ? d / 2 : d}, dtype);
}

/// Keys of b sequences of sq rows by a fuzzer's choices (tests/fuzz/call.hpp); returns the sk that terms of scores must
/// have.
template <class Given, class Choices>
std::int64_t choose_layout(Given& g, Choices& c, KvSource& kv, std::int64_t b, std::int64_t hk, std::int64_t sq,
                           std::int64_t sk, std::int64_t d, std::int64_t dv, DType dtype) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(b));
  switch (c.below(6)) {
    case 0: {
      const auto rows = borders(c, b);
      const std::int64_t half = dtype == DType::i4x2 ? 2 : 1;
      kv = KvSource::ragged(floats(g, c, {rows.back(), hk, d / half}, dtype),
                            floats(g, c, {rows.back(), hk, dv / half}, dtype), integers(g, c, rows));
      sk = 5;
      break;
    }
    case 1: {
      const std::int64_t page_size = 1 + c.below(4), columns = c.below(4), pages = 1 + c.below(5);
      sk = page_size * columns;
      std::vector<std::int64_t> table(static_cast<std::size_t>(b * columns));
      for (auto& page : table) page = c.one_in(32) ? c.below(16) - 8 : c.below(static_cast<int>(pages));
      for (auto& length : lengths) length = c.below(static_cast<int>(sk) + 1);
      kv = KvSource::paged(cache(g, c, pages, hk, page_size, d, dtype), cache(g, c, pages, hk, page_size, dv, dtype),
                           integers(g, c, table), integers(g, c, lengths));
      kv.block_table.ndim = 2;
      kv.block_table.shape = {b, columns, 0, 0};
      kv.block_table.strides = {columns, 1, 0, 0};
      break;
    }
    case 2: {
      for (auto& length : lengths) length = c.one_in(8) ? c.template raw<std::int32_t>() : c.below(40);
      kv = KvSource::ring(cache(g, c, b, hk, sk, d, dtype), cache(g, c, b, hk, sk, dv, dtype), integers(g, c, lengths));
      break;
    }
    case 3: {
      const std::int64_t n = c.below(6), entries = c.one_in(3) ? 1 : b;
      std::vector<std::int64_t> lists(static_cast<std::size_t>(b * sq * n)), counts(static_cast<std::size_t>(b * sq));
      for (auto& row : lists)
        row = c.one_in(64) ? c.template raw<std::int32_t>() : c.below(static_cast<int>(sk) + 1) - 1;
      for (auto& count : counts) count = c.below(static_cast<int>(n) + 1);
      kv = KvSource::gathered(cache(g, c, entries, hk, sk, d, dtype), cache(g, c, entries, hk, sk, dv, dtype),
                              integers(g, c, lists), c.one_in(3) ? integers(g, c, counts) : TensorView());
      kv.indices.ndim = 3;
      kv.indices.shape = {b, sq, n, 0};
      kv.indices.strides = {sq * n, n, 1, 0};
      if (kv.counts) {
        kv.counts.ndim = 2;
        kv.counts.shape = {b, sq, 0, 0};
        kv.counts.strides = {sq, 1, 0, 0};
      }
      sk = n;
      break;
    }
    default:
      for (auto& length : lengths) length = c.below(static_cast<int>(sk) + 1);
      kv = KvSource::strided(cache(g, c, b, hk, sk, d, dtype), cache(g, c, b, hk, sk, dv, dtype),
                             c.one_in(3) ? integers(g, c, lengths) : TensorView());
  }
  return sk;
}

namespace inputs {

inline std::int64_t offset_of(const Layout& layout, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  int dim = 0;
  for (std::int64_t i : index) offset += i * layout.strides[static_cast<std::size_t>(dim++)];
  return offset;
}

inline std::int64_t read_index(const TensorView& t, std::int64_t i) {
  const std::int64_t at = offset_of(t, {i});
  return t.dtype == DType::i64 ? static_cast<const std::int64_t*>(t.data)[at]
                               : static_cast<const std::int32_t*>(t.data)[at];
}

/// Where a row of keys or values lies: an index of the tensor's first dimension, and one of its rows if it has such.
struct Slot {
  std::int64_t entry, row;
};

inline Slot slot_of(const KvSource& kv, std::int64_t n, std::int64_t j) {
  switch (kv.kind) {
    case KvSource::Kind::strided:
      return {n, j};
    case KvSource::Kind::ragged:
      return {read_index(kv.cu_seqlens, n) + j, 0};
    case KvSource::Kind::ring:
      return {n, j % kv.k.shape[2]};
    case KvSource::Kind::paged:
    case KvSource::Kind::gathered:  // has a list for each token, which listed_slots() reads
      break;
  }
  const std::int64_t page_size = kv.k.shape[2];
  const std::int64_t at = n * kv.block_table.strides[0] + j / page_size * kv.block_table.strides[1];
  return {kv.block_table.dtype == DType::i64 ? static_cast<const std::int64_t*>(kv.block_table.data)[at]
                                             : static_cast<const std::int32_t*>(kv.block_table.data)[at],
          j % page_size};
}

/// Of gathered keys, the rows that token i of sequence n attends to, in the order of its list.
inline std::vector<Slot> listed_slots(const KvSource& kv, std::int64_t n, std::int64_t i) {
  const auto read = [](const TensorView& t, std::int64_t at) {
    return t.dtype == DType::i64 ? static_cast<const std::int64_t*>(t.data)[at]
                                 : static_cast<const std::int32_t*>(t.data)[at];
  };
  const std::int64_t count = kv.counts ? read(kv.counts, offset_of(kv.counts, {n, i})) : kv.indices.shape[2];
  std::vector<Slot> slots;
  for (std::int64_t j = 0; j < count; ++j)
    if (const std::int64_t row = read(kv.indices, offset_of(kv.indices, {n, i, j})); row >= 0)
      slots.push_back({n, row});
  return slots;
}

/// The first of a sequence's keys that is there.
inline std::int64_t first_key(const KvSource& kv, std::int64_t len_k) {
  return kv.kind == KvSource::Kind::ring ? std::max<std::int64_t>(0, len_k - kv.k.shape[2]) : 0;
}

}  // namespace inputs
}  // namespace rapt::testing
