// attention_backward: gradients of attention on Hopper's tensor cores, of q, k, v and dout in one 16-bit type.
//
// The entries attention_backward.bf16 and attention_backward.f16 call it. dk and dv take four products of 2 rows keys d
// flops. dq takes one more, of the dS that these leave in memory; or three, where ds_slots() keeps none or TMA
// cannot load the rows.
#include "cuda/kernels/backward_launch.cuh"

namespace rapt::cuda {

cudaError_t launch_backward_plain(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept,
                                  int sharers, std::byte* ds, cudaStream_t stream) {
  return launch_tiles_of_type<TileModifiers::none>(p, rows, kept, sharers, ds, stream);
}

cudaError_t launch_attention_backward(const AttentionBackwardParams& p, const DsSlots& kept, int sharers,
                                      std::byte* workspace, cudaStream_t stream) {
  const BackwardRows rows = backward_rows(p, workspace + kept.bytes());
  const ScoreParams& s = p.score;
  const auto launch_tiles = changes_scores(s)           ? launch_backward_scores
                            : s.mask || s.dropout.given ? launch_backward_bits
                                                        : launch_backward_plain;
  cudaError_t status = launch_backward_rows(p, rows, stream);
  if (status == cudaSuccess) status = launch_tiles(p, rows, kept, sharers, workspace, stream);
  if (status == cudaSuccess) status = launch_backward_marked(p, rows, stream);
  return status == cudaSuccess ? launch_backward_heads(p, rows, stream) : status;
}

}  // namespace rapt::cuda
