// The first warpgroup of attention_prefill where K and V are codes of a quantised cache, in any layout: its threads
// read them, 16 bytes at a time, widen them and put them into shared memory, where the products want elements of 16
// bits.
//
// A block's products take 2048 cycles at least, in which each of these threads has 256 codes. They take four
// instructions for two codes. As soon as a thread's codes of K have come, those of V are asked for, and so on, so that
// the memory has as long to answer as it takes to widen either.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/kernels/prefill_load.cuh"

namespace rapt::cuda {

// The entry or page that a key lies in, and its row there.
struct CachedKey {
  std::int64_t block;
  std::uint32_t row;
  bool exists;
};
// The same as it was read of a table, to be looked at when it has come.
struct PageTableEntry {
  std::uint32_t low, high, row;
  bool exists;
};

// Where the keys of a tile lie, by a warp that has C::kKeys / 4 of a block's, a key to a lane.
template <class C>
struct CodeKeys {
  static constexpr int kWarpKeys = C::kKeys / 4;

  const PrefillParams& params;
  const TileExtent& tile;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;  // the warp's first of a block
  std::uint32_t origin;  // where the tile's first key lies, before pages and rings

  __device__ CodeKeys(const PrefillParams& params, const TileExtent& tile) : params(params), tile(tile) {
    const AttentionParams& p = params.p;
    if (p.ring) origin = static_cast<std::uint32_t>(tile.key % p.page_size);
    else origin = static_cast<std::uint32_t>(tile.key + (p.page_size > 0 ? 0 : Head(p, tile.b, tile.hk).k_first));
  }

  // key_place() of semantics/sequence.hpp in 32 bits, of the lane's key of a block. Where there is none, of one that
  // some row sees: its codes are finite, unless that row's result is not, and so add nothing to rows that do not see
  // them.
  __device__ PageTableEntry request(int block) const {
    const AttentionParams& p = params.p;
    const int own = block * C::kKeys + first + lane % kWarpKeys;
    const int begin = static_cast<int>(tile.begin - tile.key), end = static_cast<int>(tile.end - tile.key);
    const int key = max(min(own, end - 1), begin);
    const bool exists = key == own && begin < end;
    const std::uint32_t row = origin + key, b = static_cast<std::uint32_t>(tile.b);
    if (p.page_size == 0) return {b, 0, row, exists};
    const std::uint32_t page = params.page_size.quotient(row), in_page = row - page * params.page_size.by;
    if (p.ring || begin >= end) return {b, 0, in_page, exists};  // there may be no table
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
  // The scale of the lane's key.
  __device__ float scale_of(const Quantization& quant, const CachedKey& at) const {
    return quant.scale && at.exists ? quant.scale[index(quant.scale_stride, at)] : 1.f;
  }
  // Those of K and V, to a block's place. What is not finite becomes NaN: no key hides behind a score of -inf.
  __device__ void store_scales(std::uint32_t to, float of_key, float of_value) const {
    if (lane >= kWarpKeys) return;
    store4(to + 4 * (first + lane), __float_as_uint(fmaf(of_key, 0, of_key)));
    store4(to + 4 * (C::kKeys + first + lane), __float_as_uint(fmaf(of_value, 0, of_value)));
  }
};

// Eight lanes read 64 columns of a few keys, which become a panel's rows of shared memory: 16 bytes of different banks
// at a time. Of rows in whole times 16 bytes.
template <class C, DType kType>
struct CodeLoader : CodeKeys<C> {
  using Keys = CodeKeys<C>;
  using Keys::kWarpKeys, Keys::params, Keys::tile, Keys::lane, Keys::first, Keys::request, Keys::resolve,
      Keys::scale_of;
  using Coding = Codes<kType>;
  static constexpr int kPanels = C::kSize / 64;
  static constexpr int kPlaces = Coding::kChunk / 8, kInPanel = 8 / kPlaces;  // of 16 bytes: what 16 become; a row's
  static constexpr int kKeyStep = 4 * kPlaces;  // keys that a warp reads at once, which lie alike in their panels
  static constexpr int kTimes = kPanels * kWarpKeys / kKeyStep;
  static constexpr int kBatches = C::kSize == 256 ? kTimes / kPanels : 1,
                       kBatch = kTimes / kBatches;  // that registers hold
  static_assert(C::kSize % 64 == 0 && kWarpKeys % kKeyStep == 0 && kKeyStep % 8 == 0 && kBatch % kPanels == 0);

  const Coding coding;
  const int key = lane / 8 * kPlaces + lane / kInPanel % kPlaces, chunk = lane % kInPanel;  // the lane's first 16 bytes
  const std::uint32_t own = (first + key) * 128 + (chunk * kPlaces ^ key % 8) * 16;         // where these go to
  // Of all panels of a key, then of the key kKeyStep further on: those that are here, and those that are on their way.
  uint4 codes[kBatch], incoming[kBatch];

  __device__ CodeLoader(const PrefillParams& params, const TileExtent& tile)
      : Keys(params, tile), coding{params.code_offset} {}

  // K's or V's rows of a block, in 16 bytes.
  struct Rows {
    const std::uint8_t* data;
    int bytes;         // of a row
    std::uint32_t at;  // where the lane's key's begin
  };
  __device__ Rows rows(bool values, const CachedKey& at) const {
    const AttentionParams& p = params.p;
    const int size = static_cast<int>(values ? p.dv : p.d), bytes = kType == DType::i4x2 ? size / 2 : size;
    const Strides& stride = values ? p.v_stride : p.k_stride;
    const auto units = [](std::int64_t stride) { return static_cast<std::uint32_t>(stride >> 4); };
    const std::uint32_t row =
        static_cast<std::uint32_t>(at.block) * units(stride.b) + tile.hk * units(stride.h) + at.row * units(stride.s);
    return {static_cast<const std::uint8_t*>(values ? p.v : p.k), bytes, row};
  }
  // Asks for a batch of them. Past the end of a row there is its beginning once more: there K meets Q's zeros, and V is
  // columns of O that are not there.
  __device__ __forceinline__ void issue_loads(const Rows& rows, int batch) {
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
  // Waits for all that were asked for. Later ones would be waited for, too: the processor counts loads, of which it
  // tells a few kinds apart.
  __device__ __forceinline__ void wait_loads() {
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      codes[n] = incoming[n];
      pin(codes[n].x), pin(codes[n].y), pin(codes[n].z), pin(codes[n].w);
    }
  }
  // Widens what has come to a block's place; `to`: the lane's there.
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

  // All blocks of the tile; `n` came before.
  __device__ __forceinline__ void load(const Blocks<C>& k, const Blocks<C>& v, std::uint32_t scales, unsigned& n) {
    CachedKey at = resolve(request(tile.blocks - 1));
    PageTableEntry next{};
    float k_scale = scale_of(params.p.k_quant, at), v_scale = scale_of(params.p.v_quant, at);
    Rows from = rows(false, at);
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
            if (values) at = resolve(next);  // K of the next block comes next
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
          const std::uint32_t to = ring.slot(n) + own + batch * (kBatch / kPanels * kKeyStep * 128);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) store(i, to);
        }
        fence_async_proxy();
        barrier_arrive(ring.full(n));
      }
    }
  }
};

// The same of any rows, two codes at a time. Out of line: what is hot needs the registers.
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
      const std::int64_t size = values ? p.dv : p.d, own = at.exists ? keys.index(stride, at) : -1;
#pragma unroll 1
      for (int key = 0; key < kWarpKeys; ++key) {
        const std::int64_t row = __shfl_sync(~0u, own, key);
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

// Tiles in their order.
template <class C>
__device__ void load_codes(const PrefillParams& params, TileProducer<C> producer, const TileQueue& queue,
                           Tile<C>* tiles, const QueryRing<C>& q, const Blocks<C>& k, const Blocks<C>& v,
                           std::uint32_t scales) {
  bool has_tile = producer.push(0);
  for (unsigned i = 0, n = 0; has_tile; ++i) {
    load_q<C>(params, queue, tiles, q, i);
    has_tile = producer.push(i + 1);  // a tile early, so that its readers do not wait for it
    const TileExtent& tile = tiles[i % kQueueTiles];
    const auto load = [&](auto type) { CodeLoader<C, decltype(type)::value>(params, tile).load(k, v, scales, n); };
    if (!params.kv_vector || tile.begin >= tile.end) {
      load_codes_by_twos<C>(params, tile, k, v, scales, n);
      n += tile.blocks;
      continue;
    }
    // fp16 has none with scales, and integers have one.
    if constexpr (!std::is_same_v<typename C::Element, __half>) {
      if (params.p.kv_type == DType::i8) load(std::integral_constant<DType, DType::i8>());
      if (params.p.kv_type == DType::i4x2) load(std::integral_constant<DType, DType::i4x2>());
    }
    if (params.p.kv_type == DType::f8e4m3) load(std::integral_constant<DType, DType::f8e4m3>());
    if (params.p.kv_type == DType::f8e5m2) load(std::integral_constant<DType, DType::f8e5m2>());
  }
}

}  // namespace rapt::cuda
