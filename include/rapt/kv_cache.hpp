// KV caches that are written: one object to append to and to attend from.
#pragma once

#include <cstdint>

#include "rapt/kv_source.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// The memory of a KvSource before it has lengths. Who owns the tensors keeps the lengths too.
struct KvCache {
  KvSource::Kind kind = KvSource::Kind::strided;  ///< strided, paged or ring
  MutableTensorView k, v;                         ///< as in KvSource
  TensorView block_table;                         ///< paged: as in KvSource
  MutableTensorView k_scale, v_scale;             ///< quantised: as in KvSource
  MutableTensorView k_zero, v_zero;               ///< optional, likewise
  MutableTensorView k_tail;                       ///< optional, beside a quantised k: as in KvSource

  static KvCache strided(const MutableTensorView& k, const MutableTensorView& v) {
    return {KvSource::Kind::strided, k, v, {}, {}, {}, {}, {}, {}};
  }
  static KvCache paged(const MutableTensorView& k, const MutableTensorView& v, const TensorView& block_table) {
    return {KvSource::Kind::paged, k, v, block_table, {}, {}, {}, {}, {}};
  }
  static KvCache ring(const MutableTensorView& k, const MutableTensorView& v) {
    return {KvSource::Kind::ring, k, v, {}, {}, {}, {}, {}, {}};
  }
  /// The same cache, quantised.
  KvCache quantized(const MutableTensorView& scale_of_k, const MutableTensorView& scale_of_v,
                    const MutableTensorView& zero_of_k = {}, const MutableTensorView& zero_of_v = {}) const {
    return {kind, k, v, block_table, scale_of_k, scale_of_v, zero_of_k, zero_of_v, k_tail};
  }
  /// The same cache, with these columns behind those of k.
  KvCache with_tail(const MutableTensorView& tail_of_k) const {
    KvCache cache = *this;
    cache.k_tail = tail_of_k;
    return cache;
  }
  /// What attention() reads: the first `seqlens` (i32 or i64 [b]) keys of each sequence.
  KvSource source(const TensorView& seqlens) const {
    KvSource kv = KvSource::strided(k, v, seqlens).quantized(k_scale, v_scale, k_zero, v_zero).with_tail(k_tail);
    kv.kind = kind;
    kv.block_table = block_table;
    return kv;
  }
};

/// What problems say of the kind of a cache; strided by default.
struct CacheProblem {
  std::int64_t page_size = 0;  ///< text: page=; 0: keys are not paged
  bool ring = false;           ///< text: ring; sk rows, key j in row j % sk

  friend bool operator==(const CacheProblem&, const CacheProblem&) = default;
};

}  // namespace rapt
