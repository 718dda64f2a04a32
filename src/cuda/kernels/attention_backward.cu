// attention_backward: gradients of attention on Hopper's tensor cores, of q, k, v and dout in one 16-bit type.
//
// The entries attention_backward.bf16 and attention_backward.f16 call it. dk and dv take four products of 2 rows keys d
// flops. dq takes one more, of the dS that these leave in memory; or three, where ds_portions() keeps none or TMA
// cannot load the rows.
#include <cuda_runtime.h>

#include "cuda/kernels/backward_queries.cuh"
#include "cuda/kernels/backward_tiles.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {
namespace {

// Describes a call's rows to TMA. False: TMA cannot load them.
bool make_maps(BackwardParams& params) {
  const AttentionBackwardParams& p = params.p;
  constexpr int kRows = kBackwardTile;
  return make_rows_map(params.q, p, p.q_type, p.q, p.q_stride, p.d, kRows) &&
         make_rows_map(params.dout, p, p.dout_type, p.dout, p.dout_stride, p.dv, kRows) &&
         make_keys_map(params.k, p, p.k, p.k_stride, p.d, kRows) &&
         make_keys_map(params.v, p, p.v, p.v_stride, p.dv, kRows);
}

BackwardParams params_of(const AttentionBackwardParams& p, const BackwardRows& rows) {
  BackwardParams params{};
  params.p = p, params.rows = rows, params.group = Divisor(p.group);
  params.q_vector = is_vector(p.q, p.q_stride, 2), params.dout_vector = is_vector(p.dout, p.dout_stride, 2);
  params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  params.tma = make_maps(params);
  return params;
}

// Launches a kernel for `heads` heads from first_head on.
template <class C>
cudaError_t launch(BackwardParams params, void (*kernel)(BackwardParams), std::int64_t first_head, std::int64_t heads,
                   cudaStream_t stream) {
  const AttentionBackwardParams& p = params.p;
  params.first_head = static_cast<int>(first_head), params.heads = static_cast<int>(heads);
  params.tiles = static_cast<int>(C::kOfKeys ? Blocking<C::kOwn>::blocks(p) : Tiling<C::kOwn>::tiles(p));
  // As many heads as keep their other side within half of L2.
  constexpr std::int64_t kBytes = 24 << 20;
  const std::int64_t others = C::kOfKeys ? std::max(p.sq, p.total_q) * p.group : std::max(p.sk, p.total_k);
  params.section =
      static_cast<int>(std::clamp<std::int64_t>(kBytes / at_least_1(others * 4 * C::kSize), 1, at_least_1(heads)));
  const std::int64_t blocks = heads * params.tiles;
  if (blocks == 0) return cudaSuccess;
  return launch_kernel(true, kernel, static_cast<unsigned>(blocks), C::kThreads, C::kSharedBytes, stream, params);
}

template <class T, int kSize>
cudaError_t launch_all(const AttentionBackwardParams& p, const BackwardRows& rows, const DsPortions& portions,
                       std::byte* ds, cudaStream_t stream) {
  BackwardParams params = params_of(p, rows);
  const std::int64_t row_heads = BackwardTiling::heads(p), key_heads = BackwardBlocking::heads(p);
  cudaError_t status = cudaSuccess;
  if (portions.heads > 0 && params.tma) {
    using Keys = BackwardConfig<T, kSize, true, true>;
    using Queries = BackwardQueriesConfig<T, kSize>;
    params.ds = ds, params.ds_keys = static_cast<int>(portions.key_tiles);
    params.ds_rows = static_cast<int>(portions.row_tiles);
    for (std::int64_t first = 0; first < row_heads && status == cudaSuccess; first += portions.heads) {
      const std::int64_t heads = std::min(portions.heads, row_heads - first);
      status = launch<Keys>(params, attention_backward<Keys>, first, heads, stream);
      if (status == cudaSuccess)
        status = launch<Queries>(params, attention_backward_queries<Queries>, first, heads, stream);
    }
    return status;
  }
  using Queries = BackwardConfig<T, kSize, false>;
  using Keys = BackwardConfig<T, kSize, true>;
  if (p.grad_q) status = launch<Queries>(params, attention_backward<Queries>, 0, row_heads, stream);
  if (status == cudaSuccess && (p.grad_k || p.grad_v))
    status = launch<Keys>(params, attention_backward<Keys>, 0, key_heads, stream);
  return status;
}
template <class T>
cudaError_t launch_tiles(const AttentionBackwardParams& p, const BackwardRows& rows, const DsPortions& portions,
                         std::byte* ds, cudaStream_t stream) {
  return std::max(p.d, p.dv) <= 64 ? launch_all<T, 64>(p, rows, portions, ds, stream)
                                   : launch_all<T, 128>(p, rows, portions, ds, stream);
}

}  // namespace

cudaError_t launch_attention_backward(const AttentionBackwardParams& p, const DsPortions& portions,
                                      std::byte* workspace, cudaStream_t stream) {
  const BackwardRows rows = backward_rows(p, workspace + portions.bytes());
  cudaError_t status = launch_backward_rows(p, rows, stream);
  if (status == cudaSuccess)
    status = p.q_type == DType::f16 ? launch_tiles<__half>(p, rows, portions, workspace, stream)
                                    : launch_tiles<__nv_bfloat16>(p, rows, portions, workspace, stream);
  if (status == cudaSuccess) status = launch_backward_marked(p, rows, stream);
  return status == cudaSuccess ? launch_backward_heads(p, rows, stream) : status;
}

}  // namespace rapt::cuda
