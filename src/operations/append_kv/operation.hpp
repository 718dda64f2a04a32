#pragma once

#include "operations/append_kv/inputs.hpp"

namespace rapt {

template <>
struct OperationOf<AppendKvArgs> {
  using Args = AppendKvArgs;
  using C = rapt_append_kv_args;
  static constexpr auto& feature_names = AppendFeatures::names;

  static void room(const void* args, Bound& bound);
  static void head_dim(const void* args, Bound& bound);
  static constexpr ArgumentTable arguments{append_inputs<C, kAlways, Args>(room, head_dim)};
  static unsigned features(const Args& args) { return AppendFeatures::of(args); }
  static Device device(const Args& args) { return args.cache.k.device; }
  static Call bind(const Args& args, Bound& bound);
  static void check_values(const Args& args, const Call& call);
  static void set_scalars(const C& c, Args& args);
};

}  // namespace rapt
