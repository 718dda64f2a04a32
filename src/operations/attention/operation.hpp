#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "operations/attention/arguments.hpp"
#include "operations/operation.hpp"
#include "rapt/attention.hpp"

namespace rapt {

template <>
struct OperationOf<AttentionArgs> {
  using Args = AttentionArgs;
  using C = rapt_attention_args;

  using Inputs = AttentionInputs<Args, kQueryTypes, kCacheTypes>;
  static constexpr Shapes queries = AttentionShapes::queries;

  static constexpr ArgumentTable arguments{
      Inputs::queries_and_keys,
      written<&C::out, &Args::out>("out", kFloatTypes, queries + "dv"),
      written<&C::lse, &Args::lse>("lse", kF32, queries).optional().minus_infinity_allowed(),
      read<&C::q_scale, &Args::q_scale>("q_scale", kF32, queries.broadcast_but("hq") + "1").optional(),
      Inputs::scales_and_lengths,
      Inputs::modifiers,
  };
  static constexpr auto& feature_names = AttentionFeatures::names;
  static unsigned features(const Args& args) { return AttentionFeatures::of(args.kv, args.cu_seqlens_q); }
  static Device device(const Args& args) { return args.q.device; }
  static void set_scalars(const C& c, Args& args) { set_attention_scalars(c, args.kv, args.score); }
  static Call bind(const Args& args, Bound& bound);
  static std::vector<Problem> corners(const AttentionProblem& largest);
};

// The number of a dimension, for Bound: the same in all operations that have attention's arguments.
consteval int attention_dimension(std::string_view name) {
  return dimension_of<AttentionArgs>(name);
}

// Of a forward, whose tensors have been checked: its problem, and its parameters into `params`. `lists` becomes what
// `params` has of gathered keys beyond the tensors. Throws Error.
AttentionProblem bind_forward(const AttentionArgs& args, const Bound& bound, AttentionParams& params,
                              std::shared_ptr<const void>& lists);

}  // namespace rapt
