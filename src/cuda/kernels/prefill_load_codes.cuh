// attention_prefill's loads from a quantized cache, in any layout: the first warpgroup reads codes of K and V, 16 bytes
// at a time, and widens them to 16-bit elements in shared memory, where wgmma reads them.
//
// A block's products take at least 2048 cycles, in which each thread widens 256 codes, at four instructions for two. As
// soon as a thread's codes of K have arrived it requests those of V, and so on: memory latency is hidden behind
// widening.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/kernels/prefill_load.cuh"

namespace rapt::cuda {

// The batch entry or page that holds a key, and the row there.
struct CachedKey {
  std::int64_t block;
  std::uint32_t row;
  bool exists;
};
// The same before the entry of the page table has arrived.
struct PageTableEntry {
  std::uint32_t low, high, row;
  bool exists;
};

// Locates a tile's keys. A warp has kKeys / 4 keys of each block, a lane one of these.
template <class C>
struct CodeKeys {
  static constexpr int kWarpKeys = C::kKeys / 4;

  const PrefillParams& params;
  const TileExtent& tile;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;  // first: the warp's first key of a block
  std::uint32_t origin;  // row of the tile's first key, before pages and rings

  __device__ CodeKeys(const PrefillParams& params, const TileExtent& tile) : params(params), tile(tile) {
    const AttentionParams& p = params.p;
    if (p.ring) origin = static_cast<std::uint32_t>(tile.key % p.page_size);
    else origin = static_cast<std::uint32_t>(tile.key + (p.page_size > 0 ? 0 : Head(p, tile.b, tile.hk).k_first));
  }

  // key_index() of semantics/sequence.hpp in 32 bits, for the lane's key of a block. A key that does not exist is
  // replaced by one that some row sees: its codes are finite, or that row falls back anyway, so weights of 0 hide it.
  __device__ PageTableEntry request(int block) const {
    const AttentionParams& p = params.p;
    const int lane_key = block * C::kKeys + first + lane % kWarpKeys;
    const int begin = static_cast<int>(tile.begin - tile.key), end = static_cast<int>(tile.end - tile.key);
    const int key = max(min(lane_key, end - 1), begin);
    const bool exists = key == lane_key && begin < end;
    const std::uint32_t row = origin + key, b = static_cast<std::uint32_t>(tile.b);
    if (p.page_size == 0) return {b, 0, row, exists};
    const std::uint32_t page = params.page_size.quotient(row), in_page = row - page * params.page_size.by;
    if (p.ring || begin >= end) return {b, 0, in_page, exists};  // the table may be empty
    const std::int64_t entry = b * p.pages_stride_b + page * p.pages.stride;
    const int words = p.pages.is_int64 ? 2 : 1;
    const auto* const from = static_cast<const std::uint32_t*>(p.pages.data) + entry * words;
    return {from[0], from[words - 1], in_page, exists};
  }
  __device__ CachedKey resolve(const PageTableEntry& at) const {
    const AttentionParams& p = params.p;
    if (p.page_size == 0 || p.ring) return {at.low, at.row, at.exists};
    const std::uint64_t whole = std::uint64_t{at.high} << 32 | at.low;
    const auto page = p.pages.is_int64 ? static_cast<std::int64_t>(whole) : static_cast<std::int32_t>(at.low);
    return {clamp_to(page, 0, p.page_count - 1), at.row, at.exists};
  }
  __device__ std::int64_t index(const Strides& s, const CachedKey& at) const {
    return at.block * s.b + tile.hk * s.h + at.row * s.s;
  }
  // The scale of the lane's key or value.
  __device__ float scale_of(const Quantization& quant, const CachedKey& at) const {
    return quant.scale && at.exists ? quant.scale[index(quant.scale_stride, at)] : 1.f;
  }
  // Stores the scales of the lane's key and value. What is not finite becomes NaN, so that no key hides behind a score
  // of -inf.
  __device__ void store_scales(std::uint32_t to, float of_key, float of_value) const {
    if (lane >= kWarpKeys) return;
    store4(to + 4 * (first + lane), __float_as_uint(fmaf(of_key, 0, of_key)));
    store4(to + 4 * (C::kKeys + first + lane), __float_as_uint(fmaf(of_value, 0, of_value)));
  }
};

// For rows of multiples of 16 bytes. Eight lanes read 64 columns of a few keys and store them as rows of a panel, 16
// bytes in different banks each.
template <class C, DType kType>
struct CodeLoader : CodeKeys<C> {
  using Keys = CodeKeys<C>;
  using Keys::kWarpKeys, Keys::params, Keys::tile, Keys::lane, Keys::first, Keys::request, Keys::resolve,
      Keys::scale_of;
  using Coding = Codes<kType>;
  static constexpr int kPanels = C::kSize / 64;
  static constexpr int kPlaces = Coding::kChunk / 8,
                       kInPanel =
                           8 / kPlaces;  // 16 codes widen to kPlaces chunks of 16 bytes; 16-byte reads in a panel row
  static constexpr int kKeyStep = 4 * kPlaces;  // keys that a warp reads at once, with the same swizzle
  static constexpr int kTimes = kPanels * kWarpKeys / kKeyStep;
  static constexpr int kBatches = C::kSize == 256 ? kTimes / kPanels : 1,
                       kBatch = kTimes / kBatches;  // reads that registers hold
  static_assert(C::kSize % 64 == 0 && kWarpKeys % kKeyStep == 0 && kKeyStep % 8 == 0 && kBatch % kPanels == 0);

  const Coding coding;
  const int key = lane / 8 * kPlaces + lane / kInPanel % kPlaces,
            chunk = lane % kInPanel;  // the lane's first 16 bytes of codes
  const std::uint32_t lane_offset = (first + key) * 128 + (chunk * kPlaces ^ key % 8) * 16;  // of the lane in a block
  // For all panels of a key, then for the key kKeyStep further on: codes that have arrived, and those in flight.
  uint4 codes[kBatch], incoming[kBatch];

  __device__ CodeLoader(const PrefillParams& params, const TileExtent& tile)
      : Keys(params, tile), coding{params.code_offset} {}

  // The lane's row of K or V, in units of 16 bytes.
  struct CodeRows {
    const std::uint8_t* data;
    int bytes;         // of a row
    std::uint32_t at;  // where the row of the lane's key begins
  };
  __device__ CodeRows rows(bool values, const CachedKey& at) const {
    const AttentionParams& p = params.p;
    const int size = static_cast<int>(values ? p.dv : p.d), bytes = kType == DType::i4x2 ? size / 2 : size;
    const Strides& stride = values ? p.v_stride : p.k_stride;
    const auto units = [](std::int64_t stride) { return static_cast<std::uint32_t>(stride >> 4); };
    const std::uint32_t row =
        static_cast<std::uint32_t>(at.block) * units(stride.b) + tile.hk * units(stride.h) + at.row * units(stride.s);
    return {static_cast<const std::uint8_t*>(values ? p.v : p.k), bytes, row};
  }
  // Requests a batch. Past the end of a row it reads the row's beginning again: in K that meets zeros of Q, and in V it
  // becomes columns of O that do not exist.
  __device__ __forceinline__ void issue_loads(const CodeRows& rows, int batch) {
    const std::uint8_t* from[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; n += kPanels) {
      const std::uint32_t row = __shfl_sync(~0u, rows.at, key + (batch * kBatch + n) / kPanels * kKeyStep);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int column = (panel * kInPanel + chunk) * 16;
        from[n + panel] = rows.data + std::uint64_t{row} * 16 + (column < rows.bytes ? column : 0);
      }
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) incoming[n] = load16_ahead(from[n]);
  }
  // Waits for the batch, before the next is requested: a warp tracks loads by a few counters, and would wait for later
  // ones, too.
  __device__ __forceinline__ void wait_loads() {
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      codes[n] = incoming[n];
      pin(codes[n].x), pin(codes[n].y), pin(codes[n].z), pin(codes[n].w);
    }
  }
  // Widens what has arrived into a block; `to`: the lane's address there.
  __device__ __forceinline__ void store(int n, std::uint32_t to) const {
    const std::uint32_t words[4] = {codes[n].x, codes[n].y, codes[n].z, codes[n].w};
#pragma unroll
    for (int place = 0; place < kPlaces; ++place) {
      constexpr int kWords = 4 / kPlaces;
      std::uint32_t pairs[kWords][Coding::kPairs];
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        coding.template widen_in_order<typename C::Element>(words[place * kWords + i], pairs[i]);
      const auto pair = [&](int i) { return pairs[i / Coding::kPairs][i % Coding::kPairs]; };
      store16((to ^ place * 16) + n % kPanels * (C::kKeys * 128) + n / kPanels * (kKeyStep * 128),
              make_uint4(pair(0), pair(1), pair(2), pair(3)));
    }
  }

  // Loads all blocks of the tile; n blocks were loaded before.
  __device__ __forceinline__ void load(const Blocks<C>& k, const Blocks<C>& v, std::uint32_t scales, unsigned& n) {
    CachedKey at = resolve(request(tile.blocks - 1));
    PageTableEntry next{};
    float k_scale = scale_of(params.p.k_quant, at), v_scale = scale_of(params.p.v_quant, at);
    CodeRows from = rows(false, at);
    issue_loads(from, 0);
#pragma unroll 1
    for (int block = tile.blocks - 1; block >= 0; --block, ++n) {
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        const Blocks<C> ring = values ? v : k;
#pragma unroll 1
        for (int batch = 0; batch < kBatches; ++batch) {
          wait_loads();
          const bool last = batch == kBatches - 1;
          if (last) {
            if (values) at = resolve(next);  // the next loads are K of the next block
            from = rows(values == 0, at);
          }
          issue_loads(from, last ? 0 : batch + 1);
          if (batch == 0) {
            ring.wait_empty(n);
            if (!values) {
              this->store_scales(scales + n % C::kScaleBlocks * C::kScaleBytes, k_scale, v_scale);
              next = request(max(block - 1, 0));
            }
          }
          if (last && values) k_scale = scale_of(params.p.k_quant, at), v_scale = scale_of(params.p.v_quant, at);
          const std::uint32_t to = ring.slot(n) + lane_offset + batch * (kBatch / kPanels * kKeyStep * 128);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) store(i, to);
        }
        fence_async_proxy();
        barrier_arrive(ring.full(n));
      }
    }
  }
};

// The same for any strides and sizes, two codes at a time. Out of line, to leave registers to the loop above.
template <class C>
__device__ __noinline__ void load_codes_by_twos(const PrefillParams& params, const TileExtent& tile, const Blocks<C>& k,
                                                const Blocks<C>& v, std::uint32_t scales, unsigned n) {
  constexpr int kWarpKeys = C::kKeys / 4;
  const CodeKeys<C> keys(params, tile);
  const AttentionParams& p = params.p;
#pragma unroll 1
  for (int block = tile.blocks - 1; block >= 0; --block, ++n) {
    const CachedKey at = keys.resolve(keys.request(block));
#pragma unroll 1
    for (int values = 0; values < 2; ++values) {
      const Blocks<C> ring = values ? v : k;
      ring.wait_empty(n);
      if (!values)
        keys.store_scales(scales + n % C::kScaleBlocks * C::kScaleBytes, keys.scale_of(p.k_quant, at),
                          keys.scale_of(p.v_quant, at));
      const Strides& stride = values ? p.v_stride : p.k_stride;
      const std::int64_t size = values ? p.dv : p.d, lane_row = at.exists ? keys.index(stride, at) : -1;
#pragma unroll 1
      for (int key = 0; key < kWarpKeys; ++key) {
        const std::int64_t row = __shfl_sync(~0u, lane_row, key);
        const std::uint32_t to = ring.slot(n) + (keys.first + key) * 128;
#pragma unroll 1
        for (int column = 2 * keys.lane; column < C::kSize; column += 64) {
          const auto code = [&](int i) {
            return row >= 0 && i < size ? load_code(values ? p.v : p.k, p.kv_type, row, stride.d, i) : 0.f;
          };
          store4(to + column / 64 * (C::kKeys * 128) + (column % 64 / 8 ^ key % 8) * 16 + column % 8 * 2,
                 pack<typename C::Element>(code(column), code(column + 1)));
        }
      }
      fence_async_proxy();
      barrier_arrive(ring.full(n));
    }
  }
}

// Loads the tiles of the thread block in their order.
template <class C>
__device__ void load_codes(const PrefillParams& params, TileProducer<C> producer, const TileQueue& queue,
                           Tile<C>* tiles, const QueryRing<C>& q, const Blocks<C>& k, const Blocks<C>& v,
                           std::uint32_t scales) {
  bool has_tile = producer.push(0);
  for (unsigned i = 0, n = 0; has_tile; ++i) {
    load_q<C>(params, queue, tiles, q, i);
    has_tile = producer.push(i + 1);  // a tile ahead, so that its readers do not wait for it
    const TileExtent& tile = tiles[i % kQueueTiles];
    const auto load = [&](auto type) { CodeLoader<C, decltype(type)::value>(params, tile).load(k, v, scales, n); };
    if (!params.kv_vector || tile.begin >= tile.end) {
      load_codes_by_twos<C>(params, tile, k, v, scales, n);
      n += tile.blocks;
      continue;
    }
    // Integer codes have scales, which fp16 may lack the range for.
    constexpr bool kFp16 = std::is_same_v<typename C::Element, __half>;
    with_dtype<kFp16 ? kFp8Types : kFp8Types | kIntegerCodes>(params.p.kv_type, load);
  }
}

}  // namespace rapt::cuda
