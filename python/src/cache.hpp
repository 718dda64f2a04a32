// Keys and values as Python gives them: read by attention, and appended to where they are a cache.
#pragma once

#include <array>

#include "array.hpp"
#include "layouts.hpp"
#include "rapt/kv_cache.hpp"

namespace rapt::python {

/// What makes a cache of k and v, as Python hands it on. kNames: of what follows the layout.
struct CacheArguments {
  CacheLayout layout;
  nb::handle k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype;
  static constexpr std::array kNames{"k_scale", "v_scale", "k_zero", "v_zero", "k_tail", "kv_dtype"};
};
static_assert(sizeof(CacheArguments) ==
                  (CacheLayout::kNames.size() + CacheArguments::kNames.size()) * sizeof(nb::handle),
              "Python finds an argument's place by its name");
/// What makes keys and values of k and v, in that order.
struct KeyArguments {
  KeyLayout layout;
  CacheArguments cache;
};

/// A cache that is appended to.
KvCache cache_of(Arrays& arrays, nb::handle k, nb::handle v, const CacheArguments& arguments);
/// What attention reads. Refuses keys of two kinds.
KvSource keys_of(Arrays& arrays, nb::handle k, nb::handle v, const KeyArguments& arguments);
/// Refuses pages without a block_table: lengths that fit the sequences of `rows` [b, ..], and a k that does not.
void check_pages(KvSource::Kind kind, const Layout& k, const Layout& seqlens, const Layout& rows);

}  // namespace rapt::python
