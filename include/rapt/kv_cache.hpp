// A KV cache that append_kv() writes and attention() reads.
#pragma once

#include <cstdint>

#include "rapt/kv_source.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// The tensors of a KV cache, without lengths. The caller owns the tensors and keeps the lengths.
struct KvCache {
  KvSource::Kind kind = KvSource::Kind::strided;  ///< strided, paged or ring
  MutableTensorView k, v;                         ///< as in KvSource
  TensorView block_table;                         ///< paged: as in KvSource
  MutableTensorView k_scale, v_scale;             ///< quantised: as in KvSource
  MutableTensorView k_zero, v_zero;               ///< quantised, optional: as in KvSource
  MutableTensorView k_tail;                       ///< quantised, optional: as in KvSource

  /// k [b, hk, sk, d], v [b, hk, sk, dv].
  static KvCache strided(const MutableTensorView& k, const MutableTensorView& v) {
    return {KvSource::Kind::strided, k, v, {}, {}, {}, {}, {}, {}};
  }
  /// k [pages, hk, page_size, d], v [pages, hk, page_size, dv], block_table i32 or i64 [b, n].
  static KvCache paged(const MutableTensorView& k, const MutableTensorView& v, const TensorView& block_table) {
    return {KvSource::Kind::paged, k, v, block_table, {}, {}, {}, {}, {}};
  }
  /// k [b, hk, sk, d], v [b, hk, sk, dv]: key j of a sequence is in row j % sk.
  static KvCache ring(const MutableTensorView& k, const MutableTensorView& v) {
    return {KvSource::Kind::ring, k, v, {}, {}, {}, {}, {}, {}};
  }
  /// The same cache, quantised with these scales and optional zeros.
  KvCache quantized(const MutableTensorView& scale_of_k, const MutableTensorView& scale_of_v,
                    const MutableTensorView& zero_of_k = {}, const MutableTensorView& zero_of_v = {}) const {
    return {kind, k, v, block_table, scale_of_k, scale_of_v, zero_of_k, zero_of_v, k_tail};
  }
  /// The same cache, with these columns after those of k.
  KvCache with_tail(const MutableTensorView& tail_of_k) const {
    KvCache cache = *this;
    cache.k_tail = tail_of_k;
    return cache;
  }
  /// The KvSource that attention() reads: the first `seqlens` (i32 or i64 [b]) keys of each sequence.
  KvSource source(const TensorView& seqlens) const {
    KvSource kv = KvSource::strided(k, v, seqlens).quantized(k_scale, v_scale, k_zero, v_zero).with_tail(k_tail);
    kv.kind = kind;
    kv.block_table = block_table;
    return kv;
  }
};

/// The fields of a problem for the layout of a cache; strided by default.
struct CacheProblem {
  std::int64_t page_size = 0;  ///< text: page=; 0: keys are not paged
  bool ring = false;           ///< text: ring; sk rows, with key j in row j % sk

  friend bool operator==(const CacheProblem&, const CacheProblem&) = default;
};

}  // namespace rapt
