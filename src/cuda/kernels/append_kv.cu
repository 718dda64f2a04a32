// append_kv: copies new rows of k and v to the cache, rounded or quantized to the same bits as on CPUs. The entry
// append_kv.f64 calls it. Aligned rows of the cache's type go in pieces of 16 bytes (rotary_append_kv_rows.cuh). Of
// others, a warp does one head of a row of k, of v, or of the tail of keys. The call reads and writes each row once.
// Rows without a place in the cache are skipped.
#include <algorithm>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/append_row.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/rotary_append_kv_rows.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) append_kv(const __grid_constant__ AppendKvParams p) {
  const std::int64_t items = p.total * p.hk * p.sides, step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; item < items; item += step) {
    const std::int64_t row = item / p.sides;
    const AppendKvSide& s = p.side[item % p.sides];
    RowPlace at;
    if (find_row(p, s, row / p.hk, row % p.hk, at)) write_row(s, at);
  }
}

}  // namespace

cudaError_t launch_append_kv(const AppendKvParams& p, cudaStream_t stream) {
  constexpr std::int64_t kMaxBlocks = 1 << 20;
  RotaryAppendKvParams rows{p};
  rows.d = p.side[0].size;
  rows.k = {
      .from = p.side[0].from, .from_type = p.side[0].from_type, .from_stride = p.side[0].from_stride, .heads = p.hk};
  if (has_vector_rows(rows))
    return with_row_type(row_type(rows), [&](auto element) {
      return launch_vector_rows<decltype(element), Turn::none, false>(rows, stream);
    });
  const std::int64_t blocks = ceil_div(p.total * p.hk * p.sides, kWarps);
  return launch_kernel(false, append_kv, static_cast<unsigned>(std::min(blocks, kMaxBlocks)), kThreads, 0, stream, p);
}

}  // namespace rapt::cuda
