// attention_backward's tiles whose scores a bias, ALiBi or a softcap changes.
#include "cuda/kernels/backward_launch.cuh"

namespace rapt::cuda {

cudaError_t launch_backward_scores(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept,
                                   int sharers, std::byte* ds, cudaStream_t stream) {
  return launch_tiles_of_type<TileModifiers::scores>(p, rows, kept, sharers, ds, stream);
}

}  // namespace rapt::cuda
