// attention_decode's loads: each warp copies a step's keys or values, and their scales, to its own ring in shared
// memory.
#pragma once

#include "cuda/kernels/decode_config.cuh"

namespace rapt::cuda {

// The batch entry or page that holds a key, and the row there.
struct CacheRow {
  std::uint32_t page, row;
};
// A number for each 16 keys of a step: pages of attention_decode_same_keys are multiples of 16 keys.
template <int kKeyTiles>
struct PerKeyTile {
  std::uint32_t of[kKeyTiles];
};

// A warp's ring of tiles of K or V, with their scales. Rows are contiguous: chunk c of row r is stored at c ^
// swizzle(r), so that the same chunk of 8 rows lies in different banks.
template <class C>
struct KvRing {
  static constexpr int kAtOnce = 32 / C::kChunks;  // rows that a warp copies with one instruction
  static constexpr int kCopies = C::kStepKeys / kAtOnce;

  // Where a step's keys lie, worked out a step before they are loaded: their pages, or the row of the lane's key.
  using Location = std::conditional_t<C::kSameKeys, PerKeyTile<C::kKeyTiles>, CacheRow>;

  const DecodeParams& params;
  std::uint32_t data, last;  // addresses of the ring's first slot and its last
  const int lane = threadIdx.x % 32;
  const std::uint32_t b, hk;
  const int begin, end;     // keys of the split that some row of the block sees
  std::uint32_t first_row;  // row of the split's first key, counted through the sequence's pages
  // The lane's 16 bytes of the rows that a warp copies at once: their column, their offset in a tile, and the address
  // of the kv head's first row of K and V.
  int lane_column;
  std::uint32_t lane_offset;
  std::uint64_t k_from, v_from;  // attention_decode_same_keys, without pages: of the split's first key
  // The key of a step whose location the lane works out: of the keys that its kChunks lanes copy, the i-th lane has the
  // i-th.
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
    // Keeps these in registers, where there are enough, instead of recomputing them for every copy.
    asm volatile("" : "+r"(lane_offset), "+l"(k_from), "+l"(v_from));
    if (C::kTiles == 1) asm volatile("" : "+r"(lane_column), "+r"(lane_key), "+r"(data), "+r"(last));
    // Rows of fewer columns than kSize are padded with zeros: new shared memory may hold NaN. K and V may leave their
    // numbers to each other there: those meet zeros of Q, or become columns of O that do not exist. (A code that is NaN
    // makes its row a fallback row.)
    if (params.k.bytes == C::kRowBytes && params.v.bytes == C::kRowBytes) return;
    for (std::uint32_t i = 16 * lane; i < bytes(); i += 512) store16(data + i, make_uint4(0, 0, 0, 0));
    __syncwarp();
  }

  __device__ static int swizzle(int row) { return C::kChunks < 8 ? row * C::kChunks / 8 % C::kChunks : row % 8; }
  // The lane's key of a step; lanes without one repeat another's.
  __device__ static int key_of(int lane) { return (lane % C::kChunks * kAtOnce + lane / C::kChunks) % C::kStepKeys; }
  __device__ bool has_key() const { return kCopies == C::kChunks || lane % C::kChunks < kCopies; }
  __device__ std::uint32_t bytes() const { return C::kSlots * params.slot_bytes; }
  // The next slot of the ring.
  __device__ std::uint32_t after(std::uint32_t slot) const { return slot == last ? data : slot + params.slot_bytes; }

  __device__ bool in_blocks() const { return !C::kDense && params.in_blocks; }

  // The key, clamped to those that some row sees: its codes are finite, or that row falls back anyway.
  __device__ std::uint32_t clamped_key(int key) const {
    return static_cast<std::uint32_t>(max(min(key, end - 1), begin));
  }
  // Locates a step's keys. Called a step ahead, as it may read the page table.
  __device__ Location locate(int step) const {
    if constexpr (C::kSameKeys) {
      Location at{};
      if (!in_blocks() || step >= end) return at;
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
        at.of[i] = page_of(params.page_size.quotient(first_row + clamped_key(step + 16 * i)));
      return at;
    } else {
      // key_index() of semantics/sequence.hpp in 32 bits, for the lane's key.
      const std::uint32_t row = first_row + clamped_key(step + lane_key);
      if (!params.in_blocks) return {b, row};
      const std::uint32_t in_page = params.page_size.remainder(row);
      if (params.p.ring) return {b, in_page};
      if (step >= end) return {};  // the table may be empty
      return {page_of(params.page_size.quotient(row)), in_page};
    }
  }

  // Copies the step's keys or values, if there are any, to a slot.
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
  // The offset of each 16 keys' first row, less key times stride; or the offset of the lane's key.
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
      std::uint32_t row_offset;  // in units of 16 bytes
      if constexpr (C::kSameKeys)
        row_offset =
            start.of[copy * kAtOnce / 16] + clamped_key(step + lane / C::kChunks + copy * kAtOnce) * side.of_rows.s;
      else row_offset = __shfl_sync(~0u, start, copy, C::kChunks);
      // The swizzle of a row `first` rows further on differs in constant bits, since the lane's first row has these
      // bits 0.
      static_assert(C::kChunks < 8 || kAtOnce % 4 == 0 || kAtOnce <= 2);
      const int first = copy * kAtOnce, turn_bits = C::kChunks < 8 ? 0 : first % 8;
      const std::uint32_t target = turn_bits == 0   ? to
                                   : turn_bits == 4 ? swizzled
                                                    : tile + (lane_offset ^ turn_bits * 16);
      const std::uint64_t source = from + std::uint64_t{row_offset} * 16;
      if (in_row) copy16(target + first * C::kRowBytes, reinterpret_cast<const void*>(source));
    }
  }
  // Copies the scales and zeros of the lane's key; a scale of 1 where there are none.
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

  // Copies the lane's key byte by byte, for any strides and sizes.
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
