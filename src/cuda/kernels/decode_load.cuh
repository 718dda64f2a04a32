// What the decoding of few rows on tensor cores is compiled for, what a launch gets, and how K and V come to shared
// memory.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/hopper/host.cuh"
#include "cuda/hopper/split_block.cuh"
#include "cuda/kernels/decode_config.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/divisor.hpp"

namespace rapt::cuda {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
constexpr int kGroupUnit = 32;  // columns: groups are multiples, or whole rows
constexpr int kMaxUnits = kDecodeMaxHeadSize / kGroupUnit;

// The sizes of a kernel's tiles and rings.
template <DecodeConfig kConfig>
struct Decode {
  static constexpr DType kType = kConfig.kv_type;
  static constexpr bool kSameKeys = kConfig.path != DecodePath::general, kDense = kConfig.path == DecodePath::dense;
  using Coding = Codes<kType>;
  using Element = std::conditional_t<kType == DType::f16, __half, __nv_bfloat16>;  // of products
  static constexpr bool kIs16Bit = Coding::kIs16Bit;
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = kType == DType::f16 ? 7 : 0;
  static constexpr int kSize = kConfig.head_size, kTiles = kConfig.row_tiles;
  static constexpr int kComponents = kConfig.query_components;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kRowBytes = kSize / Coding::kChunk * 16, kChunks = kRowBytes / 16;
  static constexpr int kStepKeys = kRowBytes > 128 ? 16 : 32, kKeyTiles = kStepKeys / 16;
  static constexpr int kTileBytes = kStepKeys * kRowBytes;
  static constexpr int kOut = kRows * kSize;  // numbers of a warp's O
  // Tiles in a warp's ring, of K and of V: as many of 4 KiB as let four blocks fit.
  static constexpr int kSlots = std::max(kTileBytes > 2048 ? 3 : 4, 4 * kOut / kTileBytes);
  static constexpr int kQueryPitch = 2 * kSize + 16;  // so that neighbouring rows lie in other banks
  static constexpr int kQueryBytes = kComponents * kRows * kQueryPitch;
  // On a multiprocessor, that registers are for.
  static constexpr int kFewBlocks = kOut > 2048 || kTiles > 2 ? 2 : 3, kManyBlocks = kTileBytes > 2048 ? 4 : 5;
  static constexpr int kBlocks = kOut > 1024 || kComponents > 1 ? kFewBlocks : kManyBlocks;
  static_assert(kSplitUnit % kStepKeys == 0);
};

// Strides in whole 16 bytes, or of scales in numbers: products and sums may wrap, what they lead to does not.
struct ShortStrides {
  std::uint32_t b, h, s, d;
};

// What a launch knows of k or v: its rows, and where a step's scales and zeros lie in a slot of the ring.
struct DecodeOperand {
  const std::uint8_t* data;
  ShortStrides of_rows;
  int bytes;  // of a row
  Strides stride;
  Quantization quant;
  ShortStrides of_scales, of_zeros;
  int groups;             // that have a scale each; 0: no scales
  bool grouped, zeros;    // grouped: scales multiply sums of units of columns: they are several, or there are zeros
  int scale_at, zero_at;  // bytes from the tile on; [groups][keys]
  int group_of_unit[kMaxUnits];
};
// What thread blocks want first comes first, side by side: each line of parameters comes from memory.
struct DecodeParams {
  SplitGrid grid;
  bool in_blocks;     // keys are in pages or a ring
  Divisor page_size;  // of these
  // Of attention_decode_same_keys: rows of a kv head, thread blocks for each tile of these, and the most splits that a
  // kv head has.
  int rows;
  Divisor blocks;
  int splits;
  float scale_log2;
  ShortStrides of_queries;  // where `vector_queries`
  DecodeOperand k, v;
  AttentionParams p;
  PartialResults partials;
  std::uint32_t code_offset;  // Codes::offset
  int slot_bytes;             // of the ring: a tile, its scales and zeros
  bool writes_output;         // no sequence's keys are split, and results are stored at once
  bool combines_in_cluster;   // the thread blocks of a sequence and kv head are a cluster (or one), and combine their
                              // results
  bool overlap_previous;      // to begin while the launch before, of this call, is at work
  bool modified;              // scores need more than a scale
  bool scaled_queries;        // by q_scale
  bool vector;  // rows of k and v are whole times 16 bytes, and what leads to them and their scales fits 32 bits
  bool vector_queries;  // rows of q likewise
};

// The entry or page that a key lies in, and its row there.
struct CacheRow {
  std::uint32_t page, row;
};
// A number for each sixteen keys of a step: attention_decode_same_keys's pages are multiples of these.
template <int kKeyTiles>
struct PerKeyTile {
  std::uint32_t of[kKeyTiles];
};

// A warp's ring of tiles of K or V, with their scales. Rows have no gaps: chunk c of row r lies in place c ^ turn(r),
// so that the same chunk of 8 rows lies in different banks.
template <class C>
struct KvRing {
  static constexpr int kAtOnce = 32 / C::kChunks;  // rows that a warp copies with one instruction
  static constexpr int kCopies = C::kStepKeys / kAtOnce;

  // What is found out about where a step's keys lie before they are asked for: their pages, or the lane's key's place.
  using Location = std::conditional_t<C::kSameKeys, PerKeyTile<C::kKeyTiles>, CacheRow>;

  const DecodeParams& params;
  std::uint32_t data, last;  // the ring's first slot and its last
  const int lane = threadIdx.x % 32;
  const std::uint32_t b, hk;
  const int begin, end;     // keys of the split that some row of the block sees
  std::uint32_t first_row;  // where the split's first key lies, in pages counted as if they lay in order
  // The lane's 16 bytes of the rows that the warp copies at once: their column, their place in a tile, and where the kv
  // head's first row of K and V has them.
  int lane_column;
  std::uint32_t lane_offset;
  std::uint64_t k_from, v_from;  // attention_decode_same_keys: that of the first key, but in pages
  // Which key of a step the lane knows the place of: of those that its kChunks lanes copy, the i-th for the i-th lane.
  int lane_key;

  template <class Block>
  __device__ KvRing(const DecodeParams& params, const Block& block, std::uint32_t rings)
      : params(params),
        data(rings + threadIdx.x / 32 * bytes()),
        last(data + bytes() - params.slot_bytes),
        b(static_cast<std::uint32_t>(block.head.b)),
        hk(static_cast<std::uint32_t>(block.head.hk)),
        begin(block.begin),
        end(block.end) {
    const AttentionParams& p = params.p;
    if constexpr (C::kSameKeys) first_row = block.first_row;
    else
      first_row =
          static_cast<std::uint32_t>(p.ring ? block.first_key % p.page_size : block.head.k_first + block.first_key);
    const int row = lane / C::kChunks, chunk = lane % C::kChunks;
    lane_column = 16 * chunk;
    lane_offset = row * C::kRowBytes + (chunk ^ swizzle(row)) * 16;
    lane_key = key_of(lane);
    const auto from = [&](const DecodeOperand& side) {
      std::uint32_t row = hk * side.of_rows.h;
      if (C::kSameKeys && !in_blocks()) row += b * side.of_rows.b + first_row * side.of_rows.s;
      return reinterpret_cast<std::uint64_t>(side.data) + std::uint64_t{row} * 16 + lane_column;
    };
    k_from = from(params.k), v_from = from(params.v);
    // Once, not before every copy; and what costs few instructions, where there are registers.
    asm volatile("" : "+r"(lane_offset), "+l"(k_from), "+l"(v_from));
    if (C::kTiles == 1) asm volatile("" : "+r"(lane_column), "+r"(lane_key), "+r"(data), "+r"(last));
    // Where heads of fewer columns leave rows as they are, zeros: what is in new memory might be no number. What K and
    // V leave there for each other meets Q's zeros, or is a column of O that is not there. (Codes that are no numbers
    // have the row computed once more.)
    if (params.k.bytes == C::kRowBytes && params.v.bytes == C::kRowBytes) return;
    for (std::uint32_t i = 16 * lane; i < bytes(); i += 512) store16(data + i, make_uint4(0, 0, 0, 0));
    __syncwarp();
  }

  __device__ static int swizzle(int row) { return C::kChunks < 8 ? row * C::kChunks / 8 % C::kChunks : row % 8; }
  // Of a step; lanes with none have another's.
  __device__ static int key_of(int lane) { return (lane % C::kChunks * kAtOnce + lane / C::kChunks) % C::kStepKeys; }
  __device__ bool has_key() const { return kCopies == C::kChunks || lane % C::kChunks < kCopies; }
  __device__ std::uint32_t bytes() const { return C::kSlots * params.slot_bytes; }
  // The slot after another.
  __device__ std::uint32_t after(std::uint32_t slot) const { return slot == last ? data : slot + params.slot_bytes; }

  __device__ bool in_blocks() const { return !C::kDense && params.in_blocks; }

  // A key, or where there is none, one that some row sees: finite, unless that row's result is not.
  __device__ std::uint32_t clamped_key(int key) const {
    return static_cast<std::uint32_t>(max(min(key, end - 1), begin));
  }
  // Of a step, asked for a step before it is wanted: it may be in a table.
  __device__ Location locate(int step) const {
    if constexpr (C::kSameKeys) {
      Location at{};
      if (!in_blocks() || step >= end) return at;
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
        at.of[i] = page_of(params.page_size.quotient(first_row + clamped_key(step + 16 * i)));
      return at;
    } else {
      // key_place() of semantics/sequence.hpp in 32 bits, of the lane's key.
      const std::uint32_t row = first_row + clamped_key(step + lane_key);
      if (!params.in_blocks) return {b, row};
      const std::uint32_t in_page = params.page_size.remainder(row);
      if (params.p.ring) return {b, in_page};
      if (step >= end) return {};  // there may be no table
      return {page_of(params.page_size.quotient(row)), in_page};
    }
  }

  // Fills a slot with the step's keys or values, if it has any: each lane says where its key lies.
  template <bool kValues>
  __device__ __forceinline__ void load(std::uint32_t slot, int step, const Location& at) const {
    const DecodeOperand& side = kValues ? params.v : params.k;
    if (step < end) {
      if (C::kSameKeys || params.vector) {
        load_rows(slot, side, kValues ? v_from : k_from, step, at);
        if (!C::kIs16Bit && has_key()) load_numbers(slot + 4 * lane_key, side, row_of_lane(step, at));
      } else if constexpr (!C::kSameKeys) {
        if (has_key()) load_one_by_one(slot, side, hk, at);
      }
    }
    copy_commit();
  }

 private:
  // The n-th page of the sequence.
  __device__ std::uint32_t page_of(std::uint32_t n) const {
    const AttentionParams& p = params.p;
    const std::int64_t entry = p.pages.element(b * p.pages_stride_b + n * p.pages.stride);
    return static_cast<std::uint32_t>(clamp_to(entry, 0, p.page_count - 1));
  }
  __device__ CacheRow row_of_lane(int step, const Location& at) const {
    if constexpr (C::kSameKeys) {
      const std::uint32_t row = first_row + clamped_key(step + lane_key);
      if (!in_blocks()) return {b, row};
      return {C::kKeyTiles > 1 && lane_key >= 16 ? at.of[C::kKeyTiles - 1] : at.of[0], params.page_size.remainder(row)};
    } else {
      return at;
    }
  }
  // What is added to a key times the stride, of each sixteen; or where the lane's key's row lies.
  __device__ auto starts(const DecodeOperand& side, int step, const Location& at) const {
    if constexpr (C::kSameKeys) {
      PerKeyTile<C::kKeyTiles> starts{};
      if (!in_blocks()) return starts;
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i) {
        const std::uint32_t page = params.page_size.quotient(first_row + clamped_key(step + 16 * i));
        starts.of[i] = at.of[i] * side.of_rows.b + (first_row - page * params.page_size.by) * side.of_rows.s;
      }
      return starts;
    } else {
      return at.page * side.of_rows.b + at.row * side.of_rows.s;
    }
  }
  __device__ __forceinline__ void load_rows(std::uint32_t tile, const DecodeOperand& side, std::uint64_t from, int step,
                                            const Location& at) const {
    const auto start = starts(side, step, at);
    std::uint32_t to = tile + lane_offset, swizzled = tile + (lane_offset ^ 64);
    asm volatile("" : "+r"(to), "+r"(swizzled));
    const bool in_row = lane_column < side.bytes;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      std::uint32_t row_info;
      if constexpr (C::kSameKeys)
        row_info =
            start.of[copy * kAtOnce / 16] + clamped_key(step + lane / C::kChunks + copy * kAtOnce) * side.of_rows.s;
      else row_info = __shfl_sync(~0u, start, copy, C::kChunks);
      // So many rows further on the turn is the same, but for bits that the lane's row of the first has not.
      static_assert(C::kChunks < 8 || kAtOnce % 4 == 0 || kAtOnce <= 2);
      const int first = copy * kAtOnce, turn_bits = C::kChunks < 8 ? 0 : first % 8;
      const std::uint32_t locate = turn_bits == 0   ? to
                                   : turn_bits == 4 ? swizzled
                                                    : tile + (lane_offset ^ turn_bits * 16);
      const std::uint64_t source = from + std::uint64_t{row_info} * 16;
      if (in_row) copy16(locate + first * C::kRowBytes, reinterpret_cast<const void*>(source));
    }
  }
  // The lane's key's; a scale of 1 where there are none.
  __device__ __forceinline__ void load_numbers(std::uint32_t to, const DecodeOperand& side, const CacheRow& at) const {
    const auto load = [&](std::uint32_t to, const float* from, const ShortStrides& s) {
      std::uint32_t number = at.page * s.b + hk * s.h + at.row * s.s;
      if (!side.grouped) return copy4(to, from + number);
#pragma unroll 1
      for (int g = 0; g < side.groups; ++g, number += s.d, to += 4 * C::kStepKeys) copy4(to, from + number);
    };
    if (side.groups == 0) return store4(to + side.scale_at, __float_as_uint(1));
    load(to + side.scale_at, side.quant.scale, side.of_scales);
    if (side.grouped && side.zeros) load(to + side.zero_at, side.quant.zero, side.of_zeros);
  }

  // The lane's key, of any strides and sizes.
  __device__ __noinline__ static void load_one_by_one(std::uint32_t slot, const DecodeOperand& side, std::uint32_t hk,
                                                      CacheRow at) {
    const int key = key_of(threadIdx.x % 32);
    const auto index = [&](const Strides& s) { return at.page * s.b + hk * s.h + at.row * s.s; };
    const std::uint32_t to = slot + key * C::kRowBytes;
    const std::uint8_t* const from = side.data + index(side.stride) * (C::kIs16Bit ? 2 : 1);
    constexpr int kElement = C::kIs16Bit ? 2 : 1;  // bytes
    for (int byte = 0; byte < side.bytes; ++byte)
      store1(to + (byte / 16 ^ swizzle(key)) * 16 + byte % 16,
             from[byte / kElement * side.stride.d * kElement + byte % kElement]);
    if (C::kIs16Bit) return;
    const Quantization& q = side.quant;
    if (side.groups == 0) store4(slot + 4 * key + side.scale_at, __float_as_uint(1));
    for (int g = 0; g < side.groups; ++g) {
      const std::uint32_t number = slot + (g * C::kStepKeys + key) * 4;
      store4(number + side.scale_at, __float_as_uint(q.scale[index(q.scale_stride) + g * q.scale_stride.d]));
      if (q.zero) store4(number + side.zero_at, __float_as_uint(q.zero[index(q.zero_stride) + g * q.zero_stride.d]));
    }
  }
};

}  // namespace rapt::cuda
