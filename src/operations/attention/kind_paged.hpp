// Blocks of rows that lie anywhere, and a table of those that each sequence has.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "operations/attention/kind.hpp"

namespace rapt {

template <>
struct KeyKind<KvSource::Kind::paged> : KeyKindDefaults<KvSource::Kind::paged> {
  static constexpr const char* rows = "pages hk page_size";
  template <class P>
  static constexpr std::array fields = {
      Field<P>{"page", false,
               [](const P& p, std::string_view key, std::string& text) {
                 if (p.page_size != 0) print_word(text, key, std::to_string(p.page_size));
               },
               [](P& p, const Word& word) {
                 p.page_size = word.integer();
                 if (p.page_size == 0) word.refuse("pages of 1 row or more");
               }},
  };
  template <class A>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::block_table, &A::kv, &KvSource::block_table>("kv.block_table", kIntegers, "b n")
          .in(bit, true)};
  template <class C, auto... kCache>
  static constexpr std::array cache_arguments = {
      read<&C::block_table, kCache..., &KvCache::block_table>("cache.block_table", kIntegers, "b m").in(bit, true)};
  static constexpr bool is(const CacheProblem& p) { return p.page_size > 0; }
  static void check_blocks(const CacheProblem& p, std::int64_t sk, const char* k);
  static void check_shapes(const KvSource& kv, Bound& bound);
  using KeyKindDefaults::fill;
  static void fill(std::int64_t block, CacheProblem& p) { p.page_size = block; }
  static void fill(const CacheProblem& p, std::int64_t, KvLayout& f) { f.page_size = p.page_size; }
  template <class Cache>
  static void fill_tensors(const Cache& cache, KvLayout& f) {
    f.pages = integers_of(cache.block_table, 1);
    f.pages_stride_b = cache.block_table.strides[0], f.page_count = cache.k.shape[0];
  }
  static void check_visible(const AttentionProblem& p, const AttentionParams& params);
};

}  // namespace rapt
