#pragma once

#include "operations/attention/operation.hpp"
#include "operations/operation.hpp"
#include "rapt/attention_backward.hpp"

namespace rapt {

template <>
struct OperationOf<AttentionBackwardArgs> {
  using Args = AttentionBackwardArgs;
  using C = rapt_attention_backward_args;

  using ForwardC = rapt_attention_args;
  using Forward = AttentionArgs;
  static constexpr Operation kForward = Operation::attention;
  using Inputs = AttentionInputs<Args, kFloatTypes, kFloatTypes>;
  static constexpr Shapes queries = AttentionShapes::queries;

  // In C, what attention had is in a structure of its own.
  static constexpr ArgumentTable arguments{
      of_forward(Inputs::queries_and_keys),
      read<&ForwardC::out, &Args::out>("out", kFloatTypes, queries + "dv").of_forward(),
      read<&ForwardC::lse, &Args::lse>("lse", kF32, queries).minus_infinity_allowed().of_forward(),
      of_forward(Inputs::scales_and_lengths),
      of_forward(Inputs::modifiers),
      read<&C::dout, &Args::dout>("dout", kFloatTypes, "").gradient_of("out"),
      read<&C::dlse, &Args::dlse>("dlse", kF32, "").optional().gradient_of("lse"),
      gradient<&C::dq, &Args::dq>("dq", kFloatTypes, "q"),
      gradient<&C::dk, &Args::dk>("dk", kFloatTypes, "k"),
      gradient<&C::dv, &Args::dv>("dv", kFloatTypes, "v"),
      gradient<&C::dbias, &Args::dbias>("dbias", kFloatTypes, "score.bias"),
      gradient<&C::dsinks, &Args::dsinks>("dsinks", kFloatTypes, "score.sinks"),
      gradient<&C::dalibi, &Args::dalibi>("dalibi", kFloatTypes, "score.alibi"),
  };
  static constexpr auto& feature_names = AttentionFeatures::names;
  static unsigned features(const Args& args) { return AttentionFeatures::of(args.kv, args.cu_seqlens_q); }
  static Device device(const Args& args) { return args.q.device; }
  // c.forward is what this version knows of the caller's.
  static void set_scalars(const C& c, Args& args);
  static Call bind(const Args& args, Bound& bound);
};

}  // namespace rapt
