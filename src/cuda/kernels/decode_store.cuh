// Stores what a thread block's warps have of a split: partial results, or results where the split is the sequence's
// only one.
#pragma once

#include "cuda/hopper/combine_row.cuh"
#include "cuda/kernels/decode_softmax.cuh"

namespace rapt::cuda {

// Each warp's results in shared memory: row_max and row_sum of every row.
template <class C>
struct DecodeResults {
  // O is staged in free slots of the rings, 8 rows and kPassColumns columns at a time.
  static constexpr int kPassColumns = std::min(C::kSize, C::kTileBytes / (8 * 4)), kPasses = C::kSize / kPassColumns;
  static_assert(kPassColumns % 32 == 0);

  alignas(16) float row_max[C::kRows][kDecodeWarps];
  alignas(16) float row_sum[C::kRows][kDecodeWarps];
  std::uint32_t slot[kDecodeWarps];  // where each warp stages its O

  // Stores partial results or, if the call's sequences have one split each, results; then `fallback` gets a bit for
  // each of the warp's rows that is a fallback row.
  template <class Block>
  __device__ __forceinline__ void store(const DecodeSoftmax<C>& softmax, const Block& block, int split,
                                        std::uint32_t free_slot, unsigned& fallback) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float sum = softmax.reduce_over_keys(softmax.row_sum[tile][b], Sum());
        if (lane < 4)
          row_max[softmax.row(tile, b)][warp] = softmax.row_max(tile, b, sum),
                                    row_sum[softmax.row(tile, b)][warp] = sum;
      }
    if (lane == 0) slot[warp] = free_slot;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        constexpr int kProducts = kPassColumns / 16;
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int product = pass * kProducts + i;
            store4(
                address_in_slot(free_slot, softmax.row(0, n % 2), softmax.column(product, n / 2) - pass * kPassColumns),
                __float_as_uint(softmax.o[product][tile][n]));
          }
        __syncthreads();
#pragma unroll 1
        for (int r = warp; r < 8; r += kDecodeWarps)
          if (block.row_begin + 8 * tile + r < block.row_count)
            store_row(block, split, 8 * tile + r, pass * kPassColumns, fallback);
        __syncthreads();
      }
  }

 private:
  // Swizzled: a lane's two rows and its neighbours' lie in different banks.
  __device__ static std::uint32_t address_in_slot(std::uint32_t slot, int row, int column) {
    return slot + 4 * (row * kPassColumns + (column ^ row / 2 * 8));
  }
  // Combines the warps' results of columns [first_column, first_column + kPassColumns) of the block's row r, and stores
  // them, by a warp.
  template <class Block>
  __device__ __forceinline__ void store_row(const Block& block, int split, int r, int first_column,
                                            unsigned& fallback) const {
    const DecodeParams& params = block.params;
    const AttentionParams& p = params.p;
    const int lane = threadIdx.x % 32, row = block.row_begin + r, dv = static_cast<int>(p.dv);
    RowSums sums = {-kInfinity, 0};
    float rescale[kDecodeWarps];  // factors of the warps' sums
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) sums.row_max = fmaxf(sums.row_max, row_max[r][w]);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      rescale[w] = rescale_factor(row_max[r][w], sums.row_max);
      sums.row_sum = fmaf(row_sum[r][w], rescale[w], sums.row_sum);
    }
    const auto sum_columns = [&](int column) {
      sums.o = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) {
        const float4 x = load16(address_in_slot(slot[w], r % 8, column - first_column));
        const auto add = [&](float& sum, float x) { sum = __fadd_rn(sum, __fmul_rn(x, rescale[w])); };
        add(sums.o.x, x.x), add(sums.o.y, x.y), add(sums.o.z, x.z), add(sums.o.w, x.w);
      }
    };
    const int end = min(first_column + kPassColumns, dv);
    if (params.writes_output) {
      const RowFinalizer finalizer = block.row_end(row);
      bool trusted = true;
#pragma unroll 1
      for (int column = first_column + 4 * lane; column < end; column += 128) {
        sum_columns(column);
        trusted &= finalizer.store(p, sums, column, true);
      }
      if (!__all_sync(~0u, trusted)) fallback |= 1u << r / kDecodeWarps;
      return;
    }
    float* const partial = block.partial(row, split);
#pragma unroll 1
    for (int column = first_column + 4 * lane; column < end; column += 128) {
      sum_columns(column);
      keep16(partial + column, sums.o);
    }
    if (first_column == 0 && lane < 2)  // the whole sector of 32 bytes, so that L2 need not read the rest
      keep16(partial + PartialResults::stats_offset(p) + 4 * lane,
             lane == 0 ? make_float4(sums.row_max, sums.row_sum, 0, 0) : make_float4(0, 0, 0, 0));
  }
};

// Recomputes the warp's fallback rows: bit i is row first + i * kDecodeWarps.
__device__ __forceinline__ void attend_fallback_rows(const AttentionParams& p, int b, int hk, int first,
                                                     unsigned fallback) {
  __syncwarp();  // the rows have been stored before they are stored again
#pragma unroll 1
  for (int r = first; fallback != 0; r += kDecodeWarps, fallback >>= 1)
    if (fallback & 1) recompute_rows<void, kDecodeMaxHeadDim, true>(p, b, hk, r, 1);
}

}  // namespace rapt::cuda
