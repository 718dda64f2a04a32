// attention_backward's tiles with a mask or dropout, whose scores nothing changes.
#include "cuda/kernels/backward_launch.cuh"

namespace rapt::cuda {

cudaError_t launch_backward_bits(const AttentionBackwardParams& p, const BackwardRows& rows, const DsSlots& kept,
                                 int sharers, std::byte* ds, cudaStream_t stream) {
  return launch_tiles_of_type<TileModifiers::bits>(p, rows, kept, sharers, ds, stream);
}

}  // namespace rapt::cuda
