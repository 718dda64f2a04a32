// attention_backward's launches.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/backward_queries.cuh"
#include "cuda/kernels/backward_tiles.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

// Describes a call's rows to TMA. False: TMA cannot load them.
inline bool make_maps(BackwardParams& params) {
  const AttentionBackwardParams& p = params.p;
  constexpr int kRows = kBackwardTile;
  const auto make_rows_map = [&](CUtensorMap& map, const void* data, const Strides& s, std::int64_t size) {
    const bool ragged = p.total_q >= 0;
    return is_vector(data, s, 2) &&
           make_map(
               map, p.q_type, data,
               {{size, 1, 64}, {ragged ? p.total_q : p.sq, s.s, kRows}, {p.hq, s.h, 1}, {ragged ? 1 : p.b, s.b, 1}});
  };
  return make_rows_map(params.q, p.q, p.q_stride, p.d) && make_rows_map(params.dout, p.dout, p.dout_stride, p.dv) &&
         make_keys_map(params.k, p, p.k, p.k_stride, p.d, kRows) &&
         make_keys_map(params.v, p, p.v, p.v_stride, p.dv, kRows);
}

inline BackwardParams params_of(const AttentionBackwardParams& p, const BackwardRows& rows) {
  BackwardParams params{};
  params.p = p, params.rows = rows, params.sharers = 1;
  params.q_vector = is_vector(p.q, p.q_stride, 2), params.dout_vector = is_vector(p.dout, p.dout_stride, 2);
  params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  const ScoreParams& s = p.score;
  params.mask_vector = is_vector(s.mask, s.mask_stride, 2);  // so that eight bytes are aligned
  params.bias_vector = is_vector(s.bias, s.bias_stride, s.bias_type == DType::f32 ? 4 : 2);
  params.tma = make_maps(params);
  return params;
}

// Launches a kernel that computes all scores it needs. `sharers`: thread blocks of a cluster, for the same keys.
template <class C>
cudaError_t launch(BackwardParams params, std::int64_t heads, int sharers, cudaStream_t stream) {
  const AttentionBackwardParams& p = params.p;
  params.sharers = sharers, params.heads = static_cast<int>(heads);
  params.tiles = static_cast<int>(C::kOfKeys ? Blocking<C::kOwn>::blocks(p) : QueryHeadTiling<C::kOwn>::tiles(p));
  // As many heads as keep their other side within half of L2.
  constexpr std::int64_t kBytes = 24 << 20;
  const std::int64_t others = C::kOfKeys ? std::max(p.sq, p.total_q) * p.group : std::max(p.sk, p.total_k);
  params.section =
      static_cast<int>(std::clamp<std::int64_t>(kBytes / at_least_1(others * 4 * C::kSize), 1, at_least_1(heads)));
  const std::int64_t blocks = heads * params.tiles * sharers;
  if (blocks == 0) return cudaSuccess;
  return launch_clusters(sharers, true, attention_backward<C>, static_cast<unsigned>(blocks), C::kThreads,
                         C::kSharedBytes, stream, params);
}

template <class C>
cudaError_t launch_kept(BackwardParams params, const DsSlots& kept, int sharers, std::byte* ds, cudaStream_t stream) {
  using Queries = BackwardQueriesConfig<typename C::Element, C::kSize>;
  const AttentionBackwardParams& p = params.p;
  params.sharers = sharers;
  params.tiles = static_cast<int>(Blocking<C::kOwn>::blocks(p));
  params.row_tiles = static_cast<int>(QueryHeadTiling<Queries::kOwn>::tiles(p));
  const auto heads = static_cast<int>(BackwardBlocking::heads(p)), group = static_cast<int>(p.group);
  const int row_blocks = group * params.row_tiles, of_rows = (row_blocks + sharers - 1) / sharers * sharers;
  params.order = {heads, static_cast<int>(kept.lag), params.tiles * sharers, of_rows, row_blocks};
  params.ds = ds, params.ds_slots = static_cast<int>(kept.slots);
  params.ds_keys = static_cast<int>(kept.key_tiles), params.ds_rows = static_cast<int>(kept.row_tiles);
  return launch_clusters(sharers, true, attention_backward_kept<C>, static_cast<unsigned>(params.order.size()),
                         C::kThreads, std::max(C::kSharedBytes, Queries::kSharedBytes), stream, params);
}

template <class T, int kSize, bool kGrouped, TileModifiers kModifiers>
cudaError_t launch_all(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept, int sharers,
                       std::byte* ds, cudaStream_t stream) {
  const BackwardParams params = params_of(p, rows);
  if (kept.slots > 0 && params.tma)
    return launch_kept<BackwardConfig<T, kSize, true, true, kGrouped, kModifiers>>(params, kept, sharers, ds, stream);
  cudaError_t status = cudaSuccess;
  if (p.grad_q)
    status =
        launch<BackwardConfig<T, kSize, false, false, false, kModifiers>>(params, BackwardTiling::heads(p), 1, stream);
  if (status == cudaSuccess && (p.grad_k || p.grad_v))
    status = launch<BackwardConfig<T, kSize, true, false, kGrouped, kModifiers>>(params, BackwardBlocking::heads(p),
                                                                                 sharers, stream);
  return status;
}

template <class T, TileModifiers kModifiers>
cudaError_t launch_tiles(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept, int sharers,
                         std::byte* ds, cudaStream_t stream) {
  const auto launch_size = [&](auto grouped) {
    constexpr bool kGrouped = decltype(grouped)::value;
    return std::max(p.d, p.dv) <= 64 ? launch_all<T, 64, kGrouped, kModifiers>(p, rows, kept, sharers, ds, stream)
                                     : launch_all<T, 128, kGrouped, kModifiers>(p, rows, kept, sharers, ds, stream);
  };
  if constexpr (kModifiers == TileModifiers::none)
    if (p.group == 1) return launch_size(std::false_type());
  return launch_size(std::true_type());
}

// Calls launch<type of q, modifiers>().
template <TileModifiers kModifiers>
cudaError_t launch_tiles_of_type(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept,
                                 int sharers, std::byte* ds, cudaStream_t stream) {
  return p.q_type == DType::f16 ? launch_tiles<__half, kModifiers>(p, rows, kept, sharers, ds, stream)
                                : launch_tiles<__nv_bfloat16, kModifiers>(p, rows, kept, sharers, ds, stream);
}

// Of these modifiers; each in a source of its own.
using LaunchTiles = cudaError_t(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept,
                                int sharers, std::byte* ds, cudaStream_t stream);
LaunchTiles launch_backward_plain, launch_backward_bits, launch_backward_scores;

}  // namespace rapt::cuda
