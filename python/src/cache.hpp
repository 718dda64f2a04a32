// KV caches as Python gives them: read by attention and appended to.
#pragma once

#include "array.hpp"
#include "rapt/kv_cache.hpp"

namespace rapt::python {

/// Python's arguments that make up a cache.
struct CacheArguments {
  nb::handle k, v, block_table, ring, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype;
};

/// `writable`: it will be appended to.
KvCache cache_of(Arrays& arrays, const CacheArguments& arguments, bool writable);

}  // namespace rapt::python
