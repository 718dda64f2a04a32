// KV caches as Python gives them: read by attention, appended to, and parts of attention merged.
#pragma once

#include "array.hpp"
#include "rapt/kv_cache.hpp"

namespace rapt::python {

/// The cache in arguments k, v, block_table, ring, k_scale, v_scale, k_zero, v_zero and kv_dtype. `writable`: it will
/// be appended to.
KvCache cache_of(Arrays& arguments, bool writable);

/// rapt.append_kv with its arguments by name. Without the GIL where it works. Returns the names of those written.
std::vector<std::string> append_kv(const nb::dict& arguments);

/// rapt.merge_states: `outs` and `lses` are sequences of arrays; `lse` may be None.
void merge_states(const nb::sequence& outs, const nb::sequence& lses, nb::handle out, nb::handle lse);

}  // namespace rapt::python
