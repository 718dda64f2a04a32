// What Python says of how keys lie: which arguments, and the kind that follows from them.
#pragma once

#include <array>

#include "array.hpp"
#include "error.hpp"
#include "rapt/kv_cache.hpp"
#include "scalar.hpp"

namespace rapt::python {

/// Of a cache, in the order in which Python hands them on, and their names.
struct CacheLayout {
  nb::handle block_table, ring;
  static constexpr std::array kNames{"block_table", "ring"};

  void give(Arrays& arrays, KvCache& cache) const {
    cache.block_table = arrays.read("block_table", block_table, {.elements = Elements::integers});
    const bool is_ring = truth("ring", ring);
    if (is_ring && cache.block_table) refuse_value("ring", "True with a block_table", "one of them");
    cache.kind = is_ring ? KvSource::Kind::ring : cache.block_table ? KvSource::Kind::paged : KvSource::Kind::strided;
  }
};

/// Of keys that are read, before those of their cache.
struct KeyLayout {
  nb::handle cu_seqlens_k, cache_seqlens, indices, counts;

  /// Keys in this cache. Refuses two kinds of keys.
  KvSource source(Arrays& arrays, const KvCache& cache) const {
    const auto integers = [&](const char* name, nb::handle array) {
      return arrays.read(name, array, {.elements = Elements::integers});
    };
    const TensorView cu_seqlens = integers("cu_seqlens_k", cu_seqlens_k),
                     seqlens = integers("cache_seqlens", cache_seqlens);
    if (cu_seqlens && (seqlens || cache.kind != KvSource::Kind::strided))
      refuse_value("cu_seqlens_k", "ragged keys with cache_seqlens, block_table or ring", "one kind of keys");
    KvSource kv = cache.source(seqlens);
    if (cu_seqlens) kv.kind = KvSource::Kind::ragged, kv.cu_seqlens = cu_seqlens;
    kv.indices = integers("indices", indices), kv.counts = integers("counts", counts);
    if (kv.indices) {
      if (kv.kind != KvSource::Kind::strided || seqlens)
        refuse_value("indices", "gathered keys with cu_seqlens_k, cache_seqlens, block_table or ring",
                     "one kind of keys");
      kv.kind = KvSource::Kind::gathered;
    }
    return kv;
  }
};

}  // namespace rapt::python
