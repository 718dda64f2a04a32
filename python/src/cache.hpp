// KV caches as Python gives them: read by attention, appended to, and parts of attention merged.
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

/// The arguments of rapt.append_kv, in its order.
struct AppendArguments {
  nb::handle k_new, v_new, k, v, cache_seqlens, block_table, ring, cu_seqlens, k_scale, v_scale, k_zero, v_zero, k_tail,
      kv_dtype;
};

/// rapt.append_kv. Without the GIL where it works.
void append_kv(const AppendArguments& arguments);

/// rapt.merge_states: `outs` and `lses` are sequences of arrays; `lse` may be None.
void merge_states(const nb::sequence& outs, const nb::sequence& lses, nb::handle out, nb::handle lse);

}  // namespace rapt::python
