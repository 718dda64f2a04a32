// The pipeline between the producer warpgroup and the math warpgroups: a ring of slots in shared memory with full and
// empty barriers; and rows of 16-bit elements there as wgmma reads them.
#pragma once

#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

// A ring of kSlots slots. The n-th use is of slot n % kSlots: the producer waits until it is empty and fills it, and
// readers wait until it is full and release it.
template <int kSlots>
struct Ring {
  std::uint32_t barriers, data = 0;
  unsigned bytes = 0;  // of a slot

  __device__ std::uint32_t slot(unsigned n) const { return data + n % kSlots * bytes; }
  __device__ std::uint32_t full(unsigned n) const { return barriers + n % kSlots * 16; }
  __device__ std::uint32_t empty(unsigned n) const { return full(n) + 8; }
  __device__ void wait_full(unsigned n) const { barrier_wait(full(n), n / kSlots % 2); }
  __device__ void wait_empty(unsigned n) const { barrier_wait(empty(n), n / kSlots % 2 ^ 1); }
  // Called by whole warps that have read the slot; one lane arrives.
  __device__ void release(unsigned n) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(n));
  }
  __device__ void init(int writers, int readers) const {
    for (int n = 0; n < kSlots; ++n) barrier_init(full(n), writers), barrier_init(empty(n), readers);
  }
};

// Copies a multiple of 8 rows of `size` elements into panels of kPanel columns, with zeros past the last column, by one
// warp. Lane i gives the offset of row i; negative: the row is 0. Rows that are not aligned to 16 bytes are copied
// element by element, with their sign bits flipped by `sign`.
template <int kSize, int kUnroll, int kPanel = 64>
__device__ void load_rows(int rows, std::uint32_t to, int panel_bytes, const void* x, std::int64_t at,
                          std::int64_t stride, int size, bool vector, std::uint16_t sign) {
  constexpr int kChunks = kSize / 8, kPanelChunks = kPanel / 8;  // of 16 bytes
#pragma unroll kUnroll
  for (int i = threadIdx.x % 32; i < rows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const std::int64_t start = __shfl_sync(~0u, at, row);
    const int n = start < 0 ? 0 : min(max(size - 8 * chunk, 0), 8);
    const std::uint32_t at_chunk = to + chunk / kPanelChunks * panel_bytes + row * (2 * kPanel) +
                                   chunk_place<2 * kPanel>(row, chunk % kPanelChunks) * 16;
    const auto* from = static_cast<const std::uint16_t*>(x);
    if (n > 0) from += start + 8 * chunk * stride;
    if (vector) {
      copy16(at_chunk, from, 2 * n);
      continue;
    }
#pragma unroll 1
    for (int k = 0; k < 8; k += 2, from += 2 * stride) {
      const std::uint32_t low = k < n ? from[0] ^ sign : 0, high = k + 1 < n ? from[stride] ^ sign : 0;
      store4(at_chunk + 2 * k, low | high << 16);
    }
  }
}

// Zeroes rows [from, kKeys) of such a matrix, by a warpgroup: keys that do not exist, whose memory may hold anything.
// Several warpgroups may do so at the same time.
template <int kSize, int kKeys, int kPanel = 64>
__device__ void zero_rows(std::uint32_t block, int from) {
  constexpr int kChunks = kSize / 8, kPanelChunks = kPanel / 8;
  for (int i = threadIdx.x % 128; i < (kKeys - from) * kChunks; i += 128) {
    const int row = from + i / kChunks, chunk = i % kChunks;
    store16(block + (chunk / kPanelChunks * kKeys + row) * (2 * kPanel) + chunk % kPanelChunks * 16,
            make_uint4(0, 0, 0, 0));
  }
  fence_async_proxy();
}

}  // namespace rapt::cuda
