// Tensor maps, by which TMA loads blocks of K and V.
#pragma once

#include <cuda.h>

#include "cuda/hopper/host.cuh"

namespace rapt::cuda {

// Whether K and V can be loaded by TMA: not paged, rows contiguous, and all aligned to 16 bytes. It is only faster.
inline bool can_tma(const AttentionParams& p) {
  const bool ragged = p.total_k >= 0;
  // A tensor map has no stride of 0.
  const auto fits = [&](const void* data, const Strides& s) {
    const auto good = [](std::int64_t size, std::int64_t stride) {
      return size == 1 || (stride > 0 && stride < std::int64_t{1} << 39);
    };
    return is_vector(data, s, 2) && good(ragged ? p.total_k : p.sk, s.s) && good(p.hk, s.h) &&
           (ragged || good(p.b, s.b));
  };
  return p.page_size == 0 && (ragged ? p.total_k : p.sk) > 0 && fits(p.k, p.k_stride) && fits(p.v, p.v_stride);
}

// K or V for TMA in boxes of `keys` rows of 64 columns. False: the driver does not take it.
inline bool make_map(CUtensorMap& map, const AttentionParams& p, const void* data, const Strides& s, std::int64_t size,
                     int keys) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) cudaGetLastError();  // without it K and V are loaded another way
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) found = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (!encode) return false;
  const bool ragged = p.total_k >= 0;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(size), static_cast<cuuint64_t>(ragged ? p.total_k : p.sk),
                               static_cast<cuuint64_t>(p.hk), static_cast<cuuint64_t>(ragged ? 1 : p.b)};
  const std::int64_t steps[3] = {s.s, s.h, s.b};
  cuuint64_t bytes[3], dense = (sizes[0] * 2 + 15) / 16 * 16;  // what a dimension of 1 says counts for nothing
  for (int i = 0; i < 3; dense = bytes[i] * sizes[i + 1], ++i)
    bytes[i] = sizes[i + 1] == 1 ? dense : static_cast<cuuint64_t>(steps[i]) * 2;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(keys), 1, 1}, ones[4] = {1, 1, 1, 1};
  return encode(&map, p.kv_type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                const_cast<void*>(data), sizes, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace rapt::cuda
