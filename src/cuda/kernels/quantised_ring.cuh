// What the decoding of quantised caches is compiled for, what a launch gets, and how K and V come to shared memory.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/hopper/host.cuh"
#include "cuda/hopper/split_block.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/divisor.hpp"

namespace rapt::cuda {

constexpr int kQuantisedWarps = 4, kQuantisedThreads = 32 * kQuantisedWarps;
constexpr int kGroupUnit = 32;  // columns: groups are multiples, or whole rows

// For codes of one type, head sizes up to kSize, rows in kTiles tiles of 8, and numbers in kParts parts.
template <DType kType_, int kSize_, int kTiles_, int kParts_>
struct QuantisedConfig {
  static constexpr DType kType = kType_;
  using Coding = Codes<kType>;
  static constexpr int kSize = kSize_, kTiles = kTiles_, kParts = kParts_;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kRowBytes = kSize / Coding::kChunk * 16, kChunks = kRowBytes / 16;
  static constexpr int kStepKeys = kRowBytes > 128 ? 16 : 32, kSixteens = kStepKeys / 16;
  static constexpr int kTileBytes = kStepKeys * kRowBytes;
  static constexpr int kStages = kRowBytes < 128 ? 4 : 2;
  static constexpr int kQueryPitch = 2 * kSize + 16;  // so that neighbouring rows lie in other banks
  static constexpr int kQueryBytes = kParts * kRows * kQueryPitch;
  static constexpr int kBlocks = kSize * kTiles <= 128 ? 3 : 2;  // on a multiprocessor, that registers are for
  static_assert(kStages * 2 * kTileBytes >= kRows * kSize * 4, "a warp's O fits where its keys were");
  static_assert(kSplitUnit % kStepKeys == 0);
};

// Strides in whole 16 bytes, or of scales in numbers: products and sums may wrap, what they lead to does not.
struct ShortStrides {
  std::uint32_t b, h, s, d;
};

// What a launch knows of k or v: its rows, and where a step's scales and zeros lie in a slot of the ring.
struct QuantisedSide {
  const std::uint8_t* data;
  Strides stride;
  Quantization quant;
  ShortStrides of_rows, of_scales, of_zeros;
  int bytes;              // of a row
  int columns;            // of it, rounded up to whole units
  int group, groups;      // columns that share a scale; 0 groups: no scales
  int scale_at, zero_at;  // bytes from the step's K on; [groups][keys]
};
struct QuantisedParams {
  AttentionParams p;
  Partials partials;
  QuantisedSide k, v;
  Divisor page_size;
  int tiles;       // blocks for the rows of a sequence and kv head
  int slot_bytes;  // of the ring
  bool modified;   // scores need more than a scale
  bool vector;     // rows of k and v are whole times 16 bytes, and what leads to them and their scales fits 32 bits
};

// The entry or page that a key lies in, and its row there.
struct RowPlace {
  std::uint32_t block, row;
};

// A warp's ring of K and V tiles with their scales. Rows have no gaps: chunk c of row r lies in place c ^ turn(r), so
// that the same chunk of 8 rows lies in different banks.
template <class C>
struct CodeRing {
  static constexpr int kAtOnce = 32 / C::kChunks;  // rows that a warp copies with one instruction

  const QuantisedParams& params;
  const SplitBlock& block;
  const std::uint32_t data;
  const int lane = threadIdx.x % 32;
  std::uint32_t first_row;  // of dense keys and rings: where the split's first key lies

  __device__ CodeRing(const QuantisedParams& params, const SplitBlock& block, std::uint32_t data)
      : params(params), block(block), data(data) {
    const AttentionParams& p = params.p;
    first_row =
        static_cast<std::uint32_t>(p.ring ? block.first_key % p.page_size : block.head.k_first + block.first_key);
    // Zeros where heads of fewer columns leave rows as they are.
    if (params.k.bytes == C::kRowBytes && params.v.bytes == C::kRowBytes) return;
    for (int i = 16 * lane; i < C::kStages * params.slot_bytes; i += 512) store16(data + i, make_uint4(0, 0, 0, 0));
    __syncwarp();
  }

  __device__ std::uint32_t slot(int i) const { return data + i * params.slot_bytes; }
  __device__ static int turn(int row) { return C::kChunks < 8 ? row * C::kChunks / 8 % C::kChunks : row % 8; }

  // key_place() of semantics/sequence.hpp in 32 bits, of the lane's key of a step. Where there is none, of one that
  // some row sees: finite, unless that row's result is not.
  __device__ RowPlace place(int step) const {
    const AttentionParams& p = params.p;
    if (step >= block.end) return {};
    const auto key = static_cast<unsigned>(max(min(step + lane % C::kStepKeys, block.end - 1), block.begin));
    const auto b = static_cast<std::uint32_t>(block.head.b);
    if (p.page_size == 0) return {b, first_row + key};
    const std::uint32_t row = first_row + key, page = params.page_size.quotient(row);
    const std::uint32_t in_page = row - page * static_cast<std::uint32_t>(p.page_size);
    if (p.ring) return {b, in_page};
    const std::int64_t entry = p.pages.element(block.head.b * p.pages_stride_b + page * p.pages.stride);
    return {static_cast<std::uint32_t>(clamp_to(entry, 0, p.page_count - 1)), in_page};
  }

  // Fills a slot: lane i knows where key i lies.
  __device__ void load(int i, const RowPlace& at) const {
    if (!params.vector) return load_one_by_one(i, at);
    load(slot(i), params.k, at), load(slot(i) + C::kTileBytes, params.v, at);
    load_numbers(slot(i), params.k, at), load_numbers(slot(i), params.v, at);
  }

 private:
  __device__ std::uint32_t index(const ShortStrides& s, const RowPlace& at) const {
    return at.block * s.b + static_cast<std::uint32_t>(block.head.hk) * s.h + at.row * s.s;
  }
  __device__ __forceinline__ void load(std::uint32_t tile, const QuantisedSide& side, const RowPlace& at) const {
    const std::uint32_t start = index(side.of_rows, at);
    const int row = lane / C::kChunks, chunk = lane % C::kChunks;
    const std::uint8_t* const from = side.data + 16 * chunk;
    const std::uint32_t to = row * C::kRowBytes + (chunk ^ turn(row)) * 16;
    const bool wanted = 16 * chunk < side.bytes;
#pragma unroll
    for (int first = 0; first < C::kStepKeys; first += kAtOnce) {
      const std::uint32_t of_row = __shfl_sync(~0u, start, first + row);
      // Of so many rows further on the turn is another, but in bits that `row` has not.
      const int turned = C::kChunks < 8 ? 0 : first % 8 * 16;
      if (wanted) copy16(tile + (to ^ turned) + first * C::kRowBytes, from + std::uint64_t{of_row} * 16);
    }
  }
  __device__ __forceinline__ void load_numbers(std::uint32_t slot, const QuantisedSide& side,
                                               const RowPlace& at) const {
    if (lane >= C::kStepKeys) return;
    const auto load = [&](std::uint32_t to, const float* from, const ShortStrides& s) {
      std::uint32_t number = index(s, at);
#pragma unroll 1
      for (int g = 0; g < side.groups; ++g, number += s.d, to += 4 * C::kStepKeys) copy4(to + 4 * lane, from + number);
    };
    load(slot + side.scale_at, side.quant.scale, side.of_scales);
    if (side.quant.zero) load(slot + side.zero_at, side.quant.zero, side.of_zeros);
  }

  // Of rows of any strides and sizes, by the lanes that know where one lies.
  __device__ __noinline__ void load_one_by_one(int i, const RowPlace& at) const {
    if (lane >= C::kStepKeys) return;
    const auto index = [&](const Strides& s) { return at.block * s.b + block.head.hk * s.h + at.row * s.s; };
    for (const bool values : {false, true}) {
      const QuantisedSide& side = values ? params.v : params.k;
      const std::uint32_t to = slot(i) + (values ? C::kTileBytes : 0) + lane * C::kRowBytes;
      const std::uint8_t* const from = side.data + index(side.stride);
      for (int byte = 0; byte < side.bytes; ++byte)
        store1(to + (byte / 16 ^ turn(lane)) * 16 + byte % 16, from[byte * side.stride.d]);
      const Quantization& q = side.quant;
      for (int g = 0; g < side.groups; ++g) {
        const std::uint32_t number = slot(i) + (g * C::kStepKeys + lane) * 4;
        store4(number + side.scale_at, __float_as_uint(q.scale[index(q.scale_stride) + g * q.scale_stride.d]));
        if (q.zero) store4(number + side.zero_at, __float_as_uint(q.zero[index(q.zero_stride) + g * q.zero_stride.d]));
      }
    }
  }
};

}  // namespace rapt::cuda
