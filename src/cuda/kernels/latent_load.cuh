// attention_latent's loads of Q, keys and values: by TMA where tensor maps can describe their rows; else keys and
// values by the threads of the first warpgroup, and Q by those of the others.
#pragma once

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/latent_config.cuh"

namespace rapt::cuda {

// Where the block's keys are, in boxes of `box` keys.
__device__ inline KeyBoxes boxes_of(const LatentParams& params, const SplitBlock& block, const LatentShare& share,
                                    int box) {
  const AttentionParams& p = params.p;
  const std::int64_t first = p.ring ? block.first_key % p.page_size : block.head.k_first + block.first_key;
  const int entry = p.total_k >= 0 ? 0 : static_cast<int>(block.head.b);
  return {box, entry, block.begin, share.end, static_cast<unsigned>(first)};
}

// Loads keys and values by TMA, by one warp whose lanes have one box of a block's keys each; and Q, if a map describes
// it.
__device__ inline void load_by_tma(const LatentParams& params, const SplitBlock& block, const LatentShare& share,
                                   const LatentRing& ring, std::uint32_t q) {
  const AttentionParams& p = params.p;
  const int lane = threadIdx.x % 32, b = static_cast<int>(block.head.b), hk = static_cast<int>(block.head.hk);
  const KeyBoxes boxes = boxes_of(params, block, share, params.box);
  if (params.q_by_tma && lane == 0) {
    const unsigned row = block.row_begin, token = block.grid.group.quotient(row);
    barrier_arrive_expecting(ring.q_full(), kBlockBytes);
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel)
      tma_load(q + panel * kPanelBytes, &params.q, panel * 64, static_cast<int>(row - token * block.grid.group.by),
               static_cast<int>(token), hk, b, ring.q_full());
  }
  KeyBoxes::Box next = boxes.box_at(p, params.page_size, share.key_of(0));
#pragma unroll 1
  for (int i = 0; i < share.blocks; ++i) {
    const KeyBoxes::Box current = next;
    if (i + 1 < share.blocks)
      next =
          boxes.box_at(p, params.page_size, share.key_of(i + 1));  // a block ahead: the page table is in device memory
#pragma unroll 1
    for (int values = 0; values < (params.separate_values ? 2 : 1); ++values) {
      const int n = params.separate_values ? 2 * i + values : i;
      const CUtensorMap* const map = values ? &params.v : &params.k;
#pragma unroll 1
      for (int part = 0; part < LatentRing::kParts; ++part) {
        const int panel = LatentRing::begin(part), end = LatentRing::end(part);
        if (part % 2 == 0) ring.wait_empty(n, part / 2);
        if (lane == 0) barrier_arrive_expecting(ring.full(n, part), kPanelBytes * (end - panel));
        __syncwarp();
        if (lane * params.box < kKeys)
#pragma unroll 1
          for (int at = panel; at < end; ++at)
            tma_load(ring.slot(n) + at * kPanelBytes + lane * params.box * 128, map, at * 64, current.row, hk,
                     current.entry, ring.full(n, part), params.keep_in_l2);
        __syncwarp();
      }
    }
  }
}

// Loads panels [begin, end) of `rows` rows as load_rows() does, by one warp.
__device__ __forceinline__ void load_panels(int rows, std::uint32_t to, const void* x, std::int64_t at,
                                            std::int64_t stride, int size, bool vector, int begin, int end) {
#pragma unroll 1
  for (int panel = begin; panel < end; ++panel)
    load_rows<64, 1>(rows, to + panel * kPanelBytes, 0, static_cast<const std::uint16_t*>(x) + panel * 64 * stride, at,
                     stride, size - panel * 64, vector, 0);
}

// A warp's 16 rows of a block of keys or values, of which each lane copies 16 bytes of every fourth row at a time.
class LatentRows {
 public:
  // `at`: of lane r the offset of row r; negative: the row is 0.
  __device__ LatentRows(const void* data, std::int64_t at, int size) : size_(size) {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const std::int64_t start = __shfl_sync(~0u, at, row(i));
      from_[i] = static_cast<const std::uint16_t*>(data) + max(start, std::int64_t{0});
      exist_ |= start < 0 ? 0 : 1u << i;
    }
  }
  // Copies panels [begin, end) to the block's rows from address `to` on.
  __device__ void copy(std::uint32_t to, int begin, int end) const {
    const int chunk = static_cast<int>(threadIdx.x) % 8;
#pragma unroll 1
    for (int panel = begin; panel < end; ++panel) {
      const int column = panel * 64 + 8 * chunk, columns = min(size_ - column, 8);
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        const bool exists = (exist_ >> i & 1) && columns > 0;
        copy16(to + panel * kPanelBytes + row(i) * 128 + chunk_place<128>(row(i), chunk) * 16,
               from_[i] + (exists ? column : 0), exists ? 2 * columns : 0);
      }
    }
  }

 private:
  static constexpr int kRowsOfLane = kKeys / 4 / 4;
  __device__ static int row(int i) {
    return static_cast<int>(threadIdx.x) % 32 / 8 + 4 * i;
  }

  const std::uint16_t* from_[kRowsOfLane];
  unsigned exist_ = 0;  // bit i: from_[i] is a row; else the row is 0
  int size_;            // columns
};

// Loads keys and values by a warpgroup, in any layout. Reads only keys that some row sees.
__device__ inline void load_by_threads(const LatentParams& params, const SplitBlock& block, const LatentShare& share,
                                       const LatentRing& ring) {
  constexpr int kWarpRows = kKeys / 4;
  const AttentionParams& p = params.p;
  const int first = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
  std::uint32_t filling = 0;  // first full barrier of the half whose copies are in flight
  const auto filled = [&] {
    fence_async_proxy();
    barrier_arrive(filling), barrier_arrive(filling + 8);
    filling = 0;
  };
  const KeyBoxes keys = boxes_of(params, block, share, 1);
  const auto locate = [&](int i) { return keys.box_at(p, params.page_size, share.key_of(i) + first); };
  KeyBoxes::Box next = locate(0);
#pragma unroll 1
  for (int i = 0; i < share.blocks; ++i) {
    const int key = share.key_of(i) + first + lane;
    const bool exists = key >= block.begin && key < share.end && lane < kWarpRows;
    const KeyBoxes::Box place = next;
    if (i + 1 < share.blocks) next = locate(i + 1);  // a block ahead: the page table is in device memory
#pragma unroll 1
    for (int values = 0; values < (params.separate_values ? 2 : 1); ++values) {
      const int n = params.separate_values ? 2 * i + values : i, size = static_cast<int>(values ? p.dv : p.d);
      const Strides& stride = values ? p.v_stride : p.k_stride;
      const void* const data = values ? p.v : p.k;
      const std::int64_t at = exists ? place.entry * stride.b + block.head.hk * stride.h + place.row * stride.s : -1;
      const LatentRows rows(data, at, size);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (!ring.is_empty(n, half)) {
          if (filling) {  // or its readers, who wait for it, would never free this place
            copy_wait<0>();
            filled();
          }
          ring.wait_empty(n, half);
        }
        const std::uint32_t to = ring.slot(n) + first * 128;
        const int begin = half ? kLeftPanels : 0, end = half ? kPanels : kLeftPanels;
        if (params.kv_vector) rows.copy(to, begin, end);
        else load_panels(kWarpRows, to, data, at, stride.d, size, false, begin, end);
        copy_commit();
        if (filling) {
          copy_wait<1>();
          filled();
        }
        filling = ring.full(n, 2 * half);
      }
    }
  }
  copy_wait<0>();
  if (filling) filled();
}

// Loads the tile's rows of Q, by the math warps.
__device__ inline void load_q(const LatentParams& params, const SplitBlock& block, const LatentShared& shared,
                              std::uint32_t q) {
  constexpr int kWarpRows = kRows / kMathWarps;
  const AttentionParams& p = params.p;
  const int first = (threadIdx.x / 32 - 4) * kWarpRows, lane = threadIdx.x % 32;
  const bool exists = lane < kWarpRows && block.row_begin + first + lane < block.row_count;
  const std::int64_t at = exists ? shared.rows.row_at(block.head, first + lane, p.q_stride) : -1;
  load_panels(kWarpRows, q + first * 128, p.q, at, p.q_stride.d, static_cast<int>(p.d), params.q_vector, 0, kPanels);
  copy_commit();
  copy_wait<0>();
  fence_async_proxy();
}

}  // namespace rapt::cuda
