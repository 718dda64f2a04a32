#pragma once

#include "operations/operation.hpp"
#include "rapt/merge_states.hpp"

namespace rapt {

template <>
struct OperationOf<MergeStatesArgs> {
  using Args = MergeStatesArgs;
  using C = rapt_merge_states_args;

  static constexpr ArgumentTable arguments{
      read<&C::outs, &Args::outs>("outs", kFloatTypes, "... dv"),
      read<&C::lses, &Args::lses>("lses", kF32, "...").minus_infinity_allowed(),
      written<&C::out, &Args::out>("out", kFloatTypes, "... dv"),
      written<&C::lse, &Args::lse>("lse", kF32, "...").optional().minus_infinity_allowed(),
  };
  static Device device(const Args& args) { return args.outs.empty() ? Device{} : args.outs.front().device; }
  static Call bind(const Args& args, Bound& bound);
};

}  // namespace rapt
