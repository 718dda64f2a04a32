#pragma once

#include "operations/operation.hpp"
#include "rapt/select_topk.hpp"

namespace rapt {

template <>
struct OperationOf<SelectTopkArgs> {
  using Args = SelectTopkArgs;
  using C = rapt_select_topk_args;

  static constexpr ArgumentTable arguments{
      read<&C::scores, &Args::scores>("scores", kF32, "... sk").minus_infinity_allowed(),
      written<&C::indices, &Args::indices>("indices", kI32, "... n"),
  };
  static Device device(const Args& args) { return args.scores.device; }
  static Call bind(const Args& args, Bound& bound);
};

}  // namespace rapt
