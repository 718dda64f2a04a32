// What the first warpgroup of attention_backward loads.
#pragma once

#include "cuda/hopper/progress.cuh"
#include "cuda/kernels/backward_modifiers.cuh"

namespace rapt::cuda {

// What the producer loads: 64 rows of q and dout, or keys and values, at a time.
template <class C>
struct BackwardLoads {
  const BackwardBlock<C>& block;
  const Ring<C::kStages>& ring;
  const std::uint32_t own, own_full;  // where own rows go, and their barrier

  // By the warpgroup's threads: any rows.
  __device__ void by_threads() const {
    for (int group = 0; group < C::kGroups; ++group)
      copy<C::kOfKeys>(own + group * kBackwardTile * 128, C::kOwnPanel, block.q_head,
                       block.own + kBackwardTile * group);
    copy_commit();
    const auto arrive = [](std::uint32_t barrier) {
      fence_async_proxy();
      barrier_arrive(barrier);
    };
    Modifiers modifiers(block, own + C::kStagedAt);
    const int count = for_each_tile([&](int n, int h, int first) {
      ring.wait_empty(n);
      copy<!C::kOfKeys>(ring.slot(n), C::kOtherPanel, h, first);
      if constexpr (C::kOfKeys) {
        const auto* const of_rows = reinterpret_cast<const std::byte*>(block.rows_of(h, first));
        if (threadIdx.x < kTileBytes / 16)
          copy16(ring.slot(n) + C::kRowsAt + 16 * threadIdx.x, of_rows + 16 * threadIdx.x);
      }
      copy_commit();
      prepare_modifiers(modifiers, n);
      copy_wait<1>();
      arrive(n == 0 ? own_full : ring.full(n - 1));
    });
    copy_wait<0>();
    if (count > 0) arrive(ring.full(count - 1));
  }

  // The same by TMA, by the first thread. Modifiers, if there are any, by all.
  __device__ void by_tma() const {
    const bool loads = threadIdx.x == 0;
    if (loads) {
      barrier_arrive_expecting(own_full, 2 * C::kOwnBytes);
      for (int group = 0; group < C::kGroups; ++group)
        box<C::kOfKeys>(own + group * kBackwardTile * 128, C::kOwnPanel, block.q_head,
                        block.own + kBackwardTile * group, own_full);
      if constexpr (C::kKeepsDs) {  // math warpgroups write dS once they have a tile
        const int before = block.kv_head() - block.params.ds_slots;
        if (before >= 0) wait_for_count(&block.params.rows.progress[before].read, block.params.order.row_blocks);
      }
    } else if (!C::kModified) {
      return;
    }
    Modifiers modifiers(block, own + C::kStagedAt);
    for_each_tile([&](int n, int h, int first) {
      ring.wait_empty(n);
      if (loads) {
        barrier_arrive_expecting(ring.full(n), 2 * C::kOtherBytes + (C::kOfKeys ? kTileBytes : 0));
        box<!C::kOfKeys>(ring.slot(n), C::kOtherPanel, h, first, ring.full(n));
        if constexpr (C::kOfKeys)
          bulk_load(ring.slot(n) + C::kRowsAt, block.rows_of(h, first), kTileBytes, ring.full(n), true);
      }
      prepare_modifiers(modifiers, n);
    });
  }

 private:
  static constexpr int kTileBytes = sizeof(RowsOfTile);
  struct NoModifierLoads {
    __device__ NoModifierLoads(const BackwardBlock<C>&, std::uint32_t) {}
  };
  using Modifiers = std::conditional_t<C::kModified, ModifierLoads<C>, NoModifierLoads>;

  __device__ static void prepare_modifiers(NoModifierLoads&, int) {}
  __device__ void prepare_modifiers(ModifierLoads<C>& modifiers, int n) const {
    modifiers.prepare(ring.slot(n));
    barrier_arrive(ring.full(n));
  }
  // Calls load(n, h, first) for the n-th tile of the other side: of query head h, from row or key `first` on. Returns
  // how many.
  template <class Load>
  __device__ int for_each_tile(Load load) const {
    int n = 0;
#pragma unroll 1
    for (int h = block.q_head; h < block.q_head + block.q_heads; ++h)
#pragma unroll 1
      for (int tile = 0; tile < block.tiles; ++tile, ++n) load(n, h, block.other + tile * kBackwardTile);
    return n;
  }
  // Each warp has 16 of the rows.
  template <bool kKeys>
  __device__ void copy(std::uint32_t to, int panel_bytes, int h, int first) const {
    const auto& p = block.p;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, number = first + warp_row + lane;
    const bool exists = lane < 16 && number < (kKeys ? block.keys() : block.tokens());
    const auto copy_tensor = [&](std::uint32_t place, const void* x, const Strides& s, std::int64_t size, bool vector) {
      const std::int64_t at = kKeys ? block.head.key_at(s, number) : row_at(s, block.head, h, number);
      load_rows<C::kSize, 4>(16, place + warp_row * 128, panel_bytes, x, exists ? at : -1, s.d, static_cast<int>(size),
                             vector, 0);
    };
    const std::uint32_t second = to + C::kPanels * panel_bytes;
    if constexpr (kKeys) {
      copy_tensor(to, p.k, p.k_stride, p.d, block.params.kv_vector);
      copy_tensor(second, p.v, p.v_stride, p.dv, block.params.kv_vector);
    } else {
      copy_tensor(to, p.q, p.q_stride, p.d, block.params.q_vector);
      copy_tensor(second, p.dout, p.dout_stride, p.dv, block.params.dout_vector);
    }
  }
  template <bool kKeys>
  __device__ void box(std::uint32_t to, int panel_bytes, int h, int first, std::uint32_t barrier) const {
    const auto& params = block.params;
    const auto& p = params.p;
    const int hk = static_cast<int>(block.head.hk);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel, to += panel_bytes) {
      if constexpr (kKeys) {
        const int b = p.total_k < 0 ? static_cast<int>(block.head.b) : 0,
                  row = static_cast<int>(block.head.k_first) + first;
        tma_load(to, &params.k, panel * 64, row, hk, b, barrier, true);
        tma_load(to + C::kPanels * panel_bytes, &params.v, panel * 64, row, hk, b, barrier, true);
      } else {
        const int b = p.total_q < 0 ? static_cast<int>(block.head.b) : 0,
                  row = static_cast<int>(block.head.q_first) + first;
        tma_load(to, &params.q, panel * 64, row, h, b, barrier, true);
        tma_load(to + C::kPanels * panel_bytes, &params.dout, panel * 64, row, h, b, barrier, true);
      }
    }
  }
};

}  // namespace rapt::cuda
