// Tensor maps for TMA loads and stores of boxes of rows. Threads do the same, more slowly, where no map can describe
// the rows.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <numeric>

#include "cuda/hopper/tiles.cuh"

namespace rapt::cuda {

// A dimension of a tensor map and of its box. Strides are in elements.
struct MapDimension {
  std::int64_t size, stride;
  int box;
};

// Makes a map of 16-bit elements or 8-bit codes, with dimensions from the innermost on: its elements are contiguous and
// its box is a panel. False: no map can describe the tensor.
template <int kRank>
bool make_map(CUtensorMap& map, DType type, const void* data, const MapDimension (&dimensions)[kRank]) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) cudaGetLastError();
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) found = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (!encode) return false;
  constexpr std::int64_t kStrideLimit = std::int64_t{1} << 39;
  const int element = type == DType::bf16 || type == DType::f16 ? 2 : 1;  // bytes
  cuuint64_t sizes[kRank], bytes[kRank] = {};
  cuuint32_t boxes[kRank], ones[kRank];
  for (int n = 0; n < kRank; ++n) {
    const MapDimension& dimension = dimensions[n];
    sizes[n] = static_cast<cuuint64_t>(dimension.size), boxes[n] = static_cast<cuuint32_t>(dimension.box), ones[n] = 1;
    if (n == 0) continue;
    // The stride of a dimension of 1 does not matter, but a map takes no stride of 0.
    if (dimension.size > 1) {
      if (dimension.stride <= 0 || dimension.stride >= kStrideLimit) return false;
      bytes[n - 1] = static_cast<cuuint64_t>(dimension.stride) * element;
    } else {
      bytes[n - 1] = n == 1 ? (sizes[0] * element + 15) / 16 * 16 : bytes[n - 2] * sizes[n - 1];
    }
  }
  const CUtensorMapDataType kind = element == 1          ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(&map, kind, kRank, const_cast<void*>(data), sizes, bytes, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                boxes[0] * element == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Keys of a box for blocks of `keys` keys: all of them, or as many as always lie in one page.
inline int box_keys(const AttentionParams& p, int keys) {
  return p.page_size == 0 ? keys : static_cast<int>(std::gcd(p.page_size, std::int64_t{keys}));
}
// Makes a map of K or V with rows of `size` columns, in boxes of `keys` rows by `panel` columns; `keys` is a multiple
// of the swizzle's 8 rows.
inline bool make_keys_map(CUtensorMap& map, const AttentionParams& p, const void* data, const Strides& s,
                          std::int64_t size, int keys, int panel = 64) {
  const bool ragged = p.total_k >= 0;
  const std::int64_t rows = p.page_size > 0 ? p.page_size : ragged ? p.total_k : p.sk;
  const std::int64_t entries = p.page_size > 0 && !p.ring ? p.page_count : ragged ? 1 : p.b;
  return keys % 8 == 0 && rows > 0 && entries > 0 && is_vector(data, s, 2) &&
         make_map(map, p.kv_type, data, {{size, 1, panel}, {rows, s.s, keys}, {p.hk, s.h, 1}, {entries, s.b, 1}});
}

// The boxes of a tile's key blocks, one for each lane of a warp. A box that no row sees is put past the last row of a
// page: TMA writes zeros for it, and its page need not exist.
struct KeyBoxes {
  int box;         // keys
  int b;           // batch entry, without pages
  int begin, end;  // the keys that any row sees
  unsigned first;  // row of key 0, from which keys are counted: in the tensor, the ring or the pages of the sequence

  struct Box {
    int row, entry;
  };

  // The lane's box of the block that begins with `key`.
  __device__ Box box_at(const AttentionParams& p, const Divisor& page_size, int key) const {
    key += static_cast<int>(threadIdx.x) % 32 * box;
    const unsigned at = first + key;
    if (p.page_size == 0) return {static_cast<int>(at), b};
    if (key >= end || key + box <= begin) return {static_cast<int>(page_size.by), 0};
    const unsigned page = page_size.quotient(at);
    const int row = static_cast<int>(at - page * page_size.by);
    if (p.ring) return {row, b};
    const std::int64_t entry = p.pages.element(b * p.pages_stride_b + std::int64_t{page} * p.pages.stride);
    return {row, static_cast<int>(clamp_to(entry, 0, p.page_count - 1))};
  }
};

// Makes a map of Q or the output with rows of `size` columns, in boxes of `rows` rows of a tile: the heads of a group,
// token by token. Rows are multiples of 16 bytes: TMA stores the last 16 bytes as a whole.
inline bool make_rows_map(CUtensorMap& map, const AttentionParams& p, DType type, const void* data, const Strides& s,
                          std::int64_t size, int rows, int panel = 64) {
  const bool ragged = p.total_q >= 0;
  const auto group = static_cast<int>(std::min<std::int64_t>(p.group, kGroupRows + 1));
  return rows % group == 0 && size % 8 == 0 && is_vector(data, s, 2) &&
         make_map(map, type, data,
                  {{size, 1, panel},
                   {group, s.h, group},
                   {ragged ? p.total_q : p.sq, s.s, rows / group},
                   {p.hk, s.h * group, 1},
                   {ragged ? 1 : p.b, s.b, 1}});
}

}  // namespace rapt::cuda
