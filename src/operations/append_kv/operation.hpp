#pragma once

#include "operations/attention/keys.hpp"
#include "operations/attention/modes.hpp"
#include "operations/operation.hpp"
#include "rapt/kv_cache.hpp"

namespace rapt {

template <>
struct OperationOf<AppendKvArgs> {
  using Args = AppendKvArgs;
  using C = rapt_append_kv_args;
  // The kind of the cache, and whether new rows are ragged.
  static constexpr unsigned kRagged = KvModes::any + 1;
  // Scales have an element for every row: they and zeros are computed and written, else given and read.
  static constexpr unsigned kComputesK = kRagged << 1, kComputesV = kRagged << 2;
  static constexpr auto modes = join(KvModes::names, std::array{"ragged rows"});

  static constexpr Shapes kRows = AttentionShapes::cache;
  static constexpr Shapes kScales = kRows.broadcast_but("hk");
  static constexpr Shapes kNewRows = Shapes("b hk n").when(kRagged, "total hk");

  static void derive_room(const void* args, Bound& bound);
  static void derive_head_size(const void* args, Bound& bound);
  static constexpr ArgumentTable arguments{
      written<&C::k, &Args::cache, &KvCache::k>("cache.k", kCacheTypes, kRows + "dk").packed(),
      written<&C::v, &Args::cache, &KvCache::v>("cache.v", kCacheTypes, kRows + "dv").packed().type_of("cache.k"),
      KeyKinds::cache_arguments<Args>,
      step(derive_room),
      read<&C::seqlens, &Args::seqlens>("seqlens", kIntegers, "b"),
      read<&C::cu_seqlens, &Args::cu_seqlens>("cu_seqlens", kIntegers, "b+1").in(kRagged, true),
      written<&C::k_tail, &Args::cache, &KvCache::k_tail>("cache.k_tail", kFloatTypes, kRows + "tail").optional(),
      step(derive_head_size),
      read<&C::k_new, &Args::k_new>("k_new", kFloatTypes, kNewRows + "d"),
      read<&C::v_new, &Args::v_new>("v_new", kFloatTypes, kNewRows + "dv"),
      written<&C::k_scale, &Args::cache, &KvCache::k_scale>("cache.k_scale", kF32, kScales + "k_groups")
          .optional()
          .written_only_in(kComputesK),
      written<&C::k_zero, &Args::cache, &KvCache::k_zero>("cache.k_zero", kF32, kScales + "k_groups")
          .optional()
          .written_only_in(kComputesK),
      written<&C::v_scale, &Args::cache, &KvCache::v_scale>("cache.v_scale", kF32, kScales + "v_groups")
          .optional()
          .written_only_in(kComputesV),
      written<&C::v_zero, &Args::cache, &KvCache::v_zero>("cache.v_zero", kF32, kScales + "v_groups")
          .optional()
          .written_only_in(kComputesV),
  };
  static unsigned mode(const Args& args);
  static Device device(const Args& args) { return args.cache.k.device; }
  static Call bind(const Args& args, Bound& bound);
  static void check_values(const Args& args, const Call& call);
  static void set_scalars(const C& c, Args& args);
};

}  // namespace rapt
