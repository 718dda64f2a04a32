#pragma once

#include <array>

#include "operations/attention/operation.hpp"
#include "operations/operation.hpp"
#include "rapt/attention_backward.hpp"

namespace rapt {

template <>
struct OperationOf<AttentionBackwardArgs> {
  using Args = AttentionBackwardArgs;
  using C = rapt_attention_backward_args;

  using Forward = rapt_attention_args;
  static constexpr Shapes queries = AttentionShapes::queries, keys = AttentionShapes::keys,
                          pairs = AttentionShapes::pairs;
  static constexpr std::array results = {
      read<&Forward::out, &Args::out>("out", kFloatTypes, queries + "dv"),
      read<&Forward::lse, &Args::lse>("lse", kF32, queries).minus_infinity_allowed(),
  };
  static constexpr std::array gradients = {
      read<&C::dout, &Args::dout>("dout", kFloatTypes, queries + "dv").gradient_of("out"),
      read<&C::dlse, &Args::dlse>("dlse", kF32, queries).optional().gradient_of("lse"),
      written<&C::dq, &Args::dq>("dq", kFloatTypes, queries + "d").optional().gradient_of("q"),
      written<&C::dk, &Args::dk>("dk", kFloatTypes, keys + "dk").optional().gradient_of("k"),
      written<&C::dv, &Args::dv>("dv", kFloatTypes, keys + "dv").optional().gradient_of("v"),
      written<&C::dbias, &Args::dbias>("dbias", kFloatTypes, pairs).optional().gradient_of("score.bias"),
      written<&C::dsinks, &Args::dsinks>("dsinks", kFloatTypes, "hq").optional().gradient_of("score.sinks"),
      written<&C::dalibi, &Args::dalibi>("dalibi", kFloatTypes, "b~ hq").optional().gradient_of("score.alibi"),
  };
  // In C, what attention had is in a structure of its own.
  static constexpr ArgumentTable arguments{
      join(of_forward(AttentionInputs<Args, kFloatTypes, kFloatTypes>::with(results)), gradients)};
  static constexpr auto& modes = AttentionModes::names;
  static unsigned mode(const Args& args) { return AttentionModes::of(args.kv, args.cu_seqlens_q); }
  // c.forward is what this version knows of the caller's.
  static void set_scalars(const C& c, Args& args);
  static Call bind(const Args& args, Bound& bound);
};

}  // namespace rapt
