// attention_latent's loads of Q, keys and values: by TMA where tensor maps can describe their rows; else keys and
// values by the threads of the first warpgroup, and Q by those of the others.
#pragma once

#include <type_traits>

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

// Loads the tile's rows of Q by TMA, by one thread.
__device__ inline void load_q_by_tma(const LatentParams& params, const SplitBlock& block, std::uint32_t q,
                                     std::uint32_t q_full) {
  const unsigned row = block.row_begin, token = block.grid.group.quotient(row);
  barrier_arrive_expecting(q_full, kBlockBytes);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel)
    tma_load(q + panel * kPanelBytes, &params.q, panel * 64, static_cast<int>(row - token * block.grid.group.by),
             static_cast<int>(token), static_cast<int>(block.head.hk), static_cast<int>(block.head.b), q_full);
}

// Loads keys and values by TMA, by one warp whose lanes have one box of a block's keys each.
__device__ inline void load_by_tma(const LatentParams& params, const SplitBlock& block, const LatentShare& share,
                                   const LatentRing<true>& ring) {
  const AttentionParams& p = params.p;
  const int lane = threadIdx.x % 32, hk = static_cast<int>(block.head.hk);
  const KeyBoxes boxes = boxes_of(params, block, share, params.box);
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
      for (int part = 0; part < kParts; ++part) {
        const int panel = part_begin(part), end = part_end(part);
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

// A warp's 16 rows of a block of keys or values, all of which exist and are aligned to 16 bytes. Each lane copies 16
// bytes of every fourth row at a time, by one instruction: a copy with a number of bytes takes ten, and the warp waits
// for each.
class LatentRows {
 public:
  // `at`: of lane r the offset of row r. `to`: the address of the warp's rows in the block.
  __device__ LatentRows(const void* data, std::int64_t at, std::uint32_t to) {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i)
      from_[i] = static_cast<const std::uint16_t*>(data) + __shfl_sync(~0u, at, row(i)) + 8 * chunk();
#pragma unroll
    for (int i = 0; i < 2; ++i) to_[i] = to + row(i) * 128 + chunk_place<128>(row(i), chunk()) * 16;
  }
  // Copies the panels of a part, the last one if it is wanted.
  template <int kPart>
  __device__ __forceinline__ void copy(bool last) const {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i)
#pragma unroll
      for (int panel = part_begin(kPart); panel < part_end(kPart); ++panel)
        if (panel < kPanels - 1 || last) copy16(to_[i % 2] + i / 2 * 1024 + panel * kPanelBytes, from_[i] + 64 * panel);
  }

 private:
  static constexpr int kRowsOfLane = kKeys / 4 / 4;
  __device__ static int chunk() {
    return static_cast<int>(threadIdx.x) % 8;
  }
  __device__ static int row(int i) {
    return static_cast<int>(threadIdx.x) % 32 / 8 + 4 * i;
  }

  const std::uint16_t* from_[kRowsOfLane];
  std::uint32_t to_[2];  // of rows 0 and 1; each second row lies 1024 bytes behind the one before
};

// Loads keys and values by a warpgroup, in any layout. Reads only keys that some row sees.
__device__ inline void load_by_threads(const LatentParams& params, const SplitBlock& block, const LatentShare& share,
                                       const LatentRing<false>& ring) {
  constexpr int kWarpRows = kKeys / 4;
  const AttentionParams& p = params.p;
  const int first = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
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
      const std::uint32_t to = ring.slot(n) + first * 128;
      const int panels = values ? kPanels - 1 : kPanels;  // the last panel of a place for values is not read
      const bool whole = params.kv_vector && size == 64 * panels && __all_sync(~0u, exists || lane >= kWarpRows);
      const LatentRows rows(data, at, to);
      const auto load_part = [&](auto number) {
        constexpr int kPart = decltype(number)::value;
        if (kPart % 2 == 0) ring.wait_empty(n, kPart / 2);
        if (whole) rows.copy<kPart>(!values);
        else
          load_panels(kWarpRows, to, data, at, stride.d, size, params.kv_vector, part_begin(kPart),
                      min(part_end(kPart), panels));
        if (params.kv_vector) barrier_arrive_after_copies(ring.full(n, kPart));
        else barrier_arrive(ring.full(n, kPart));
      };
      load_part(std::integral_constant<int, 0>());
      load_part(std::integral_constant<int, 1>());
      load_part(std::integral_constant<int, 2>());
      load_part(std::integral_constant<int, 3>());
    }
  }
  copy_commit();
  copy_wait<0>();
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
