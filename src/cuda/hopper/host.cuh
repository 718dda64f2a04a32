// What both kernels do on the host's side.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/hopper/schedule.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

// Whether rows are contiguous and aligned to 16 bytes, of elements of `size` bytes.
inline bool is_vector(const void* data, const Strides& s, std::int64_t size) {
  const std::int64_t count = 16 / size;
  return s.d == 1 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && s.b % count == 0 && s.h % count == 0 &&
         s.s % count == 0;
}

// Calls `then` with the head size that kernels are compiled for and a call needs, as a type.
template <class Then>
auto with_head_size(const AttentionParams& p, Then then) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return then(std::integral_constant<int, 64>());
  if (size <= 128) return then(std::integral_constant<int, 128>());
  if (size <= 192) return then(std::integral_constant<int, 192>());
  return then(std::integral_constant<int, 256>());
}

// A bit for each row of the tiles of attention_simt, which computes the fallback rows.
static_assert(kGroupRows == kSimtRows, "a warpgroup's rows are a tile of attention_simt");
inline std::size_t fallback_bytes(const AttentionParams& p) {
  return static_cast<std::size_t>(simt_tiles(p)) * sizeof(std::uint64_t);
}
// To divide by sizes, which may be 0: a call without rows is planned, too.
inline std::int64_t at_least_1(std::int64_t size) {
  return std::max<std::int64_t>(size, 1);
}

// start() launches what sets grid.fallback_rows.
template <class Start>
cudaError_t launch_with_fallback(const Grid& grid, cudaStream_t stream, Start start) {
  const AttentionParams& p = grid.p;
  cudaError_t status = cudaSuccess;
  // Tiles of ragged sequences may be empty, and then no warp sets their bits.
  if (p.total_q >= 0) status = cudaMemsetAsync(grid.fallback_rows, 0, fallback_bytes(p), stream);
  if (status == cudaSuccess) status = start();
  if (status != cudaSuccess) return status;
  return attention_simt(p, stream, reinterpret_cast<const std::uint64_t*>(grid.fallback_rows));
}

}  // namespace rapt::cuda
