#pragma once

#include "operations/append_kv/inputs.hpp"
#include "rapt/rotary_append_kv.hpp"

namespace rapt {

template <>
struct OperationOf<RotaryAppendKvArgs> {
  using Args = RotaryAppendKvArgs;
  using C = rapt_rotary_append_kv_args;
  struct Features : AppendFeatures {
    static constexpr unsigned cached = last << 1, returned = last << 2, with_q = last << 3, tables = last << 4;
    static constexpr auto names =
        join(AppendFeatures::names, std::array{"a cache", "a call without a cache", "q", "tables cos [positions, r]"});
  };
  static constexpr auto& feature_names = Features::names;

  static constexpr Shapes angles =
      Shapes("b|1 n").when(Features::tables, "positions").when(Features::ragged, "1 total");
  static void room(const void* args, Bound& bound);
  static void head_dim(const void* args, Bound& bound);
  static constexpr ArgumentTable arguments{
      append_inputs<C, Features::cached, Args, &Args::append>(room, head_dim),
      written<&C::k_out, &Args::k_out>("k_out", kFloatTypes, Features::new_rows + "d").needed(Features::returned),
      read<&C::q, &Args::q>("q", kFloatTypes, Shapes("b hq n d").when(Features::ragged, "total hq d")).optional(),
      written<&C::q_out, &Args::q_out>("q_out", kFloatTypes, Shapes("b hq n d").when(Features::ragged, "total hq d"))
          .in(Features::with_q, true),
      read<&C::cos, &Args::cos>("cos", kFloatTypes, angles + "r"),
      read<&C::sin, &Args::sin>("sin", kFloatTypes, angles + "r").type_of("cos"),
      read<&C::positions, &Args::positions>("positions", kIntegers, Shapes("b|1 n").when(Features::ragged, "1 total"))
          .in(Features::tables),
      read<&C::q_norm, &Args::q_norm>("q_norm", kFloatTypes, "d").in(Features::with_q),
      read<&C::k_norm, &Args::k_norm>("k_norm", kFloatTypes, "d").optional(),
  };
  static unsigned features(const Args& args);
  static Device device(const Args& args) { return args.append.k_new.device; }
  static Call bind(const Args& args, Bound& bound);
  static void check_values(const Args& args, const Call& call);
  static void set_scalars(const C& c, Args& args);
};

}  // namespace rapt
