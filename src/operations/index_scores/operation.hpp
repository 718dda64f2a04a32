#pragma once

#include "operations/operation.hpp"
#include "rapt/index_scores.hpp"

namespace rapt {

template <>
struct OperationOf<IndexScoresArgs> {
  using Args = IndexScoresArgs;
  using C = rapt_index_scores_args;
  static constexpr unsigned kStrided = 1, kPaged = 2;
  static constexpr const char* feature_names[] = {"keys of each sequence", "pages"};

  static constexpr DTypeSet kKeyTypes = kCacheTypes & ~set_of(DType::i4x2);

  static void derive_keys(const void* args, Bound& bound);
  static constexpr ArgumentTable arguments{
      read<&C::q, &Args::q>("q", kFloatTypes, "b sq h d"),
      read<&C::k, &Args::k>("k", kKeyTypes, Shapes("b sk d").when(kPaged, "pages page_size d")),
      read<&C::weights, &Args::weights>("weights", kF32, "b sq h"),
      read<&C::k_scale, &Args::k_scale>("k_scale", kF32, Shapes("b sk").when(kPaged, "pages page_size")).optional(),
      read<&C::block_table, &Args::block_table>("block_table", kIntegers, "b m").in(kPaged, true),
      step(derive_keys),
      read<&C::seqlens, &Args::seqlens>("seqlens", kIntegers, "b").needed(kPaged),
      read<&C::key_begin, &Args::key_begin>("key_begin", kIntegers, "b sq").optional(),
      read<&C::key_end, &Args::key_end>("key_end", kIntegers, "b sq").optional(),
      written<&C::scores, &Args::scores>("scores", kF32, "b sq sk").optional().minus_infinity_allowed(),
      written<&C::indices, &Args::indices>("indices", kI32, "b sq n").optional(),
  };
  static unsigned features(const Args& args) { return args.block_table ? kPaged : kStrided; }
  static Device device(const Args& args) { return args.q.device; }
  static Call bind(const Args& args, Bound& bound);
  static void set_scalars(const C& c, Args& args);
};

}  // namespace rapt
