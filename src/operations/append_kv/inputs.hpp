// What append_kv shares with operations that do something to new rows first: the rows of argument tables, the fields of
// problems, and the checks.
#pragma once

#include <array>

#include "operations/append_kv/params.hpp"
#include "operations/attention/features.hpp"
#include "operations/attention/keys.hpp"
#include "operations/operation.hpp"
#include "rapt/append_kv.hpp"
#include "rapt/cost.hpp"

namespace rapt {

// The kind of the cache, and what else shapes depend on.
struct AppendFeatures : KvFeatures {
  static constexpr unsigned ragged = any + 1;  // new rows
  // Scales have an element for every row: they and zeros are computed and written, else given and read.
  static constexpr unsigned computes_k = ragged << 1, computes_v = ragged << 2, last = computes_v;
  static constexpr auto names =
      join(KvFeatures::names, std::array{"ragged rows", "computed scales of k", "computed scales of v"});
  static unsigned of(const AppendKvArgs& args);

  static constexpr Shapes new_rows = Shapes("b hk n").when(ragged, "total hk");
};

// Sizes of a table that has the rows below.
struct AppendDimensions {
  int b, hk, n, total, sk, d, dk, dv, m, k_groups, v_groups;
};
template <class Args>
inline constexpr AppendDimensions kAppendDimensions = {
    dimension_of<Args>("b"),        dimension_of<Args>("hk"),      dimension_of<Args>("n"),
    dimension_of<Args>("total"),    dimension_of<Args>("sk"),      dimension_of<Args>("d"),
    dimension_of<Args>("dk"),       dimension_of<Args>("dv"),      dimension_of<Args>("m"),
    dimension_of<Args>("k_groups"), dimension_of<Args>("v_groups")};

// What steps of the table do: what is said of the cache alone, with the room that a sequence has there; the columns of
// keys.
void derive_room(const AppendKvArgs& args, const AppendDimensions& dims, Bound& bound);
void derive_head_dim(const AppendKvArgs& args, const AppendDimensions& dims, Bound& bound);
using Step = void (*)(const void* args, Bound& bound);

// `room`, `head_dim`: the steps, of Args; kCached: the features of calls with a cache; kPath: the member of Args that
// is an AppendKvArgs; none if Args is.
template <class C, unsigned kCached, class Args, auto... kPath>
constexpr auto append_inputs(Step room, Step head_dim) {
  using F = AppendKvArgs;
  using Features = AppendFeatures;
  constexpr Shapes rows = AttentionShapes::cache, scales = rows.broadcast_but("hk");
  const std::array cache = {
      written<&C::k, kPath..., &F::cache, &KvCache::k>("cache.k", kCacheTypes, rows + "dk").packed().in(kCached, true),
      written<&C::v, kPath..., &F::cache, &KvCache::v>("cache.v", kCacheTypes, rows + "dv")
          .packed()
          .type_of("cache.k")
          .in(kCached, true)};
  const std::array rest = {
      step(room),
      read<&C::seqlens, kPath..., &F::seqlens>("seqlens", kIntegers, "b").needed(kCached),
      read<&C::cu_seqlens, kPath..., &F::cu_seqlens>("cu_seqlens", kIntegers, "b+1").in(Features::ragged, true),
      written<&C::k_tail, kPath..., &F::cache, &KvCache::k_tail>("cache.k_tail", kFloatTypes, rows + "tail")
          .in(kCached),
      step(head_dim),
      read<&C::k_new, kPath..., &F::k_new>("k_new", kFloatTypes, Features::new_rows + "d"),
      read<&C::v_new, kPath..., &F::v_new>("v_new", kFloatTypes, Features::new_rows + "dv").in(kCached, true),
      written<&C::k_scale, kPath..., &F::cache, &KvCache::k_scale>("cache.k_scale", kF32, scales + "k_groups")
          .in(kCached)
          .written_only_in(Features::computes_k),
      written<&C::k_zero, kPath..., &F::cache, &KvCache::k_zero>("cache.k_zero", kF32, scales + "k_groups")
          .in(kCached)
          .written_only_in(Features::computes_k),
      written<&C::v_scale, kPath..., &F::cache, &KvCache::v_scale>("cache.v_scale", kF32, scales + "v_groups")
          .in(kCached)
          .written_only_in(Features::computes_v),
      written<&C::v_zero, kPath..., &F::cache, &KvCache::v_zero>("cache.v_zero", kF32, scales + "v_groups")
          .in(kCached)
          .written_only_in(Features::computes_v)};
  return join(cache, KeyKinds::cache_arguments<C, kPath..., &F::cache>, rest);
}

// Fills what append_kv's problem and kernels get of a call; without a cache, no sides.
void bind_append(const AppendKvArgs& args, const AppendDimensions& dims, Bound& bound, AppendKvProblem& p,
                 AppendKvParams& f);
// Places and given scales, whose values are known on the CPU alone.
void check_append_values(const AppendKvArgs& args, const AppendKvProblem& p, const AppendKvParams& f);

// The bytes that are moved.
Cost append_cost(const AppendKvArgs& args, const AppendKvProblem& p, const AppendKvParams& f);

// Element `index` of the tensor's memory.
inline const void* element_at(const TensorView& t, std::int64_t index) {
  return static_cast<const char*>(t.data) + index * static_cast<std::int64_t>(size_of(t.dtype));
}

// The words of problems, in the order of the text.
template <class P>
constexpr std::array append_first_fields = {
    common_dtype_field<P, &P::new_dtype, &P::kv_dtype>("dtype"),
    own_dtype_field<P, &P::new_dtype, &P::new_dtype, &P::kv_dtype>("new"),
    own_dtype_field<P, &P::kv_dtype, &P::new_dtype, &P::kv_dtype>("kv"),
    device_field<P>(),
    size_field<P, &P::b>("b"),
    size_field<P, &P::hk>("hk"),
    size_field<P, &P::n>("n"),
    size_field<P, &P::sk>("sk"),
    size_field<P, &P::d>("d"),
    size_field_like<P, &P::dv, &P::d>("dv"),
    integer_field<P, &P::ragged, -1>("ragged"),
};
template <class P>
constexpr std::array append_last_fields = {
    groups_field<P>(),
    own_groups_field<P, &P::k_groups>("k_groups"),
    own_groups_field<P, &P::v_groups>("v_groups"),
    flag_field<P, &P::zeros>("zeros"),
    integer_field<P, &P::k_tail, 0>("tail"),
    dtype_field<P, &P::k_tail_dtype>("tail_dtype"),
    flag_field<P, &P::given_scales>("given_scales"),
    flag_field<P, &P::values_are_keys>("values_are_keys"),
};
template <class P>
constexpr auto append_fields = join(append_first_fields<P>, KeyKinds::fields<P>, append_last_fields<P>);

}  // namespace rapt
