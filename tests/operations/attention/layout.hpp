// What tests do with a KV layout: of each, in one struct, problems, lengths and arguments at random, and where a key
// lies.
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
namespace inputs {

inline std::int64_t offset_of(const Layout& layout, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  int dim = 0;
  for (std::int64_t i : index) offset += i * layout.strides[static_cast<std::size_t>(dim++)];
  return offset;
}

inline std::int64_t read_index(const TensorView& t, std::initializer_list<std::int64_t> index) {
  const std::int64_t at = offset_of(t, index);
  return t.dtype == DType::i64 ? static_cast<const std::int64_t*>(t.data)[at]
                               : static_cast<const std::int32_t*>(t.data)[at];
}

inline std::int64_t read_index(const TensorView& t, std::int64_t i) {
  return read_index(t, {i});
}

/// Where a row of keys or values lies: an index of the tensor's first dimension, and one of its rows if it has such.
struct Slot {
  std::int64_t entry, row;
};

}  // namespace inputs

/// The tensors that say where keys lie; a layout uses some of them.
struct KeyIndices {
  TensorView cu_seqlens, block_table, seqlens, indices, counts;
};

/// Keys of b sequences of sq rows that a fuzzer makes; a layout may have another sk than it is given.
struct FuzzedKeys {
  std::int64_t b, hk, sq, sk, d, dv;
  DType dtype;
};

/// Keys or values of b entries and s rows: strided, paged or in a ring.
template <class Given, class Choices>
TensorView cache(Given& g, Choices& c, std::int64_t b, std::int64_t hk, std::int64_t s, std::int64_t d, DType dtype) {
  return floats(g, c, {b, hk, s, dtype == DType::i4x2 ? d / 2 : d}, dtype);
}
/// Lengths of b sequences, 0 to sk.
template <class Choices>
std::vector<std::int64_t> fuzzed_lengths(Choices& c, std::int64_t b, std::int64_t sk) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(b));
  for (auto& length : lengths) length = c.below(static_cast<int>(sk) + 1);
  return lengths;
}
inline TensorView as_rank(TensorView t, std::vector<std::int64_t> shape) {
  static_cast<Layout&>(t) = Layout(shape);
  return t;
}

/// What a layout says; a layout has a struct of its own, which inherits the defaults.
///
///     is(problem)               whether keys lie so
///     undo(problem)             lets its keys lie in order, unless that is said by a CacheProblem
///     is_sampled, sample(random, problem)  lets a problem's keys lie so; its kv_lengths is set
///     row(sk, j)                the row of key j in its sequence's entry of k, of sk rows
///     max_keys(sk, fresh)       that a sequence may have before so many new ones
///     first_kept(sk, fresh)     of keys that are written at once, the first that stays
///     length(problem, choice, between)  of a sequence; choices 0 to 3 ask for different ones
///     make_cache(k, v, table)   of those that are appended to
///     make(k, v, indices)       a KvSource
///     choose(given, choices, keys, kv)  the same by a fuzzer's choices
///     slot(kv, n, j)            where key j of sequence n lies
///     first_key(kv, count)      the first of so many keys that is there
template <KvSource::Kind kKind>
struct KeyLayout;

struct KeyLayoutDefaults {
  static void undo(AttentionProblem&) {}
  static constexpr bool is_sampled = false;
  static std::int64_t row(std::int64_t, std::int64_t j) { return j; }
  static std::int64_t max_keys(std::int64_t sk, std::int64_t fresh) { return sk - fresh; }
  static std::int64_t first_kept(std::int64_t, std::int64_t) { return 0; }
  template <class Between>
  static std::int64_t length(const AttentionProblem& p, std::uint64_t choice, const Between& between) {
    return choice == 3 ? 0 : choice == 0 ? p.sk : between(0, p.sk);
  }
  static std::int64_t first_key(const KvSource&, std::int64_t) { return 0; }
};

}  // namespace rapt::testing
