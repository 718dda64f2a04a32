// The arguments that attention and its backward share: queries, keys, values and scores.
#pragma once

#include <array>

#include "operations/attention/keys.hpp"
#include "operations/attention/modifiers.hpp"
#include "rapt/attention.hpp"

namespace rapt {

// Of an operation whose arguments A have attention's members. In C they are attention's arguments. Tables have them in
// this order, in which they are checked; the results of attention stand behind the first.
template <class A, DTypeSet kQueryTypes, DTypeSet kKeyTypes>
struct AttentionInputs {
  using C = rapt_attention_args;
  using K = KvSource;
  using Features = AttentionFeatures;
  static constexpr Shapes queries = AttentionShapes::queries, keys = AttentionShapes::keys;

  static constexpr std::array queries_and_keys = {
      read<&C::q, &A::q>("q", kQueryTypes, queries + "d"),
      read<&C::cu_seqlens_q, &A::cu_seqlens_q>("cu_seqlens_q", kIntegers, "b+1").in(Features::positions),
      read<&C::k, &A::kv, &K::k>("k", kKeyTypes, keys + "dk").packed(),
      read<&C::k_tail, &A::kv, &K::k_tail>("kv.k_tail", kFloatTypes, keys + "tail").optional(),
      step([](const void* args, Bound& bound) { check_key_shapes(static_cast<const A*>(args)->kv, bound); }),
      read<&C::v, &A::kv, &K::v>("v", kKeyTypes, keys + "dv").packed().type_of("k"),
  };

  static constexpr Shapes scales = keys.broadcast_but("hk");
  static constexpr auto scales_and_lengths = join(
      std::array{
          read<&C::k_scale, &A::kv, &K::k_scale>("kv.k_scale", kF32, scales + "k_groups").optional(),
          read<&C::v_scale, &A::kv, &K::v_scale>("kv.v_scale", kF32, scales + "v_groups").optional(),
          step([](const void* args, Bound& bound) { check_scale_shapes(static_cast<const A*>(args)->kv, bound); }),
          read<&C::k_zero, &A::kv, &K::k_zero>("kv.k_zero", kF32, scales + "k_groups").optional(),
          read<&C::v_zero, &A::kv, &K::v_zero>("kv.v_zero", kF32, scales + "v_groups").optional(),
      },
      KeyKinds::arguments<A>,
      std::array{
          read<&C::kv_seqlens, &A::kv, &K::seqlens>("kv.seqlens", kIntegers, "b")
              .in(Features::positions & ~Features::ragged)
              .needed(Features::needs_lengths),
          step([](const void* args, Bound& bound) {
            const A& a = *static_cast<const A*>(args);
            check_lengths(a.cu_seqlens_q, a.kv, bound);
          }),
      });

  static constexpr auto modifiers = Modifiers::arguments<A>;
};

// What C gives of these and is no tensor.
void set_attention_scalars(const rapt_attention_args& c, KvSource& kv, ScoreSpec& score);

}  // namespace rapt
