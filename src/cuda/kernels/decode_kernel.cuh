// attention_decode: out = softmax(q k^T) v of few rows over 16-bit or quantized keys and values, on tensor cores
// (mma.sync), with the keys split among thread blocks (split-KV).
//
// Launched by attention_decode.cu. Memory bounds it: a call reads K and V once. Each warp takes every fourth step of
// the split's keys, through a ring of its own in shared memory, so no warp waits for another before the end of the
// split. What the warps leave is added up by decode_store.cuh; partial results of several splits are combined in a
// cluster or by attention_combine.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/decode_store.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// A thread's share of the block's rows of Q, with zeros past the last column. The constructor requests all loads;
// store() writes bf16 components to shared memory, with columns in the order of a register's codes. Rows past the last
// one repeat it; their results are discarded.
template <class C>
struct QueryLoader {
  // A thread loads units of kWidth columns, those of a lane's 4 bytes of codes. Pair i of a unit is its columns i and i
  // + kPairs, which kPairs products use.
  static constexpr int kPairs = C::Coding::kPairs, kWidth = 2 * kPairs, kUnits = C::kSize / kWidth;
  static constexpr int kQueryUnits = C::kRows * kUnits,
                       kThreadUnits = (kQueryUnits + kDecodeThreads - 1) / kDecodeThreads;
  static constexpr int kWords = kWidth / (C::kComponents > 1 ? 1 : 2);
  const DType type;
  const std::uint32_t q;                     // address of the rows in shared memory
  std::uint32_t bits[kThreadUnits][kWords];  // of each unit, as in memory

  // The number of the thread's i-th unit among all of [kRows][kUnits].
  __device__ static unsigned unit(unsigned i) { return threadIdx.x + i * kDecodeThreads; }
  __device__ static bool exists(int i) { return kQueryUnits % kDecodeThreads == 0 || unit(i) < kQueryUnits; }

  template <class Block>
  __device__ QueryLoader(const DecodeParams& params, const Block& block, std::uint32_t q)
      : type(params.p.q_type), q(q) {
    if (C::kComponents > 1 && type == DType::f32) read<std::uint32_t>(params, block);
    else if (C::kComponents == 1 && type == DType::f8e4m3) read<std::uint8_t>(params, block);
    else read<std::uint16_t>(params, block);
  }
  __device__ void store() const {
#pragma unroll
    for (int i = 0; i < kThreadUnits; ++i) {
      if (!exists(i)) break;
      const unsigned row = unit(i) / kUnits, unit_of_row = unit(i) % kUnits;
      const unsigned place = unit_of_row / 4 * C::Coding::kChunk + unit_of_row % 4 * 2;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        std::uint32_t components[C::kComponents];
        if constexpr (C::kComponents == 1) {
          components[0] = type == DType::f8e4m3 ? pair_of_f8(i, pair) : pair_of_16bit(i, pair);
        } else {
          float low = element_as_float(i, pair), high = element_as_float(i, pair + kPairs);
          split_into_components(low, high, components);
        }
#pragma unroll
        for (int component = 0; component < C::kComponents; ++component)
          store4(q + (component * C::kRows + row) * C::kQueryPitch + 2 * (place + 8 * pair), components[component]);
      }
    }
  }

 private:
  // Element n of unit i, where elements have `size` bits.
  __device__ std::uint32_t element_bits(int i, int n, int size) const {
    return bits[i][n * size / 32] >> n * size % 32 & (size == 8 ? 0xff : 0xffff);
  }
  // A pair of 16-bit elements.
  __device__ std::uint32_t pair_of_16bit(int i, int pair) const {
    if constexpr (kPairs == 1) return bits[i][0];
    else return __byte_perm(bits[i][pair / 2], bits[i][(pair + kPairs) / 2], pair % 2 == 0 ? 0x5410 : 0x7632);
  }
  // A pair of f8e4m3 elements as bf16, which holds them exactly.
  __device__ std::uint32_t pair_of_f8(int i, int pair) const {
    const auto in_bf16 = [](std::uint32_t code) {
      return __float_as_uint(code_of_byte(static_cast<std::uint8_t>(code), DType::f8e4m3)) >> 16;
    };
    return in_bf16(element_bits(i, pair, 8)) | in_bf16(element_bits(i, pair + kPairs, 8)) << 16;
  }
  __device__ float element_as_float(int i, int n) const {
    if (type == DType::f32) return __uint_as_float(bits[i][n]);
    return __half2float(__ushort_as_half(static_cast<std::uint16_t>(element_bits(i, n, 16))));
  }

  template <class Bits, class Block>
  __device__ __forceinline__ void read(const DecodeParams& params, const Block& block) {
    struct alignas(kWidth * sizeof(Bits) < 16 ? kWidth * sizeof(Bits) : 16) Unit {
      Bits numbers[kWidth];
    };
    const AttentionParams& p = params.p;
    const auto* const data = static_cast<const Bits*>(p.q);
    const auto last_column = static_cast<unsigned>(p.d - 1);
#pragma unroll
    for (int i = 0; i < kThreadUnits; ++i) {
      if (!exists(i)) break;
      const auto row = block.row(min(block.row_begin + static_cast<int>(unit(i) / kUnits), block.row_count - 1));
      const unsigned first = unit(i) % kUnits * kWidth;
      Unit unit{};
      if (C::kSameKeys || params.vector_queries) {
        const ShortStrides& s = params.of_queries;
        const std::uint32_t at = static_cast<std::uint32_t>(block.head.b) * s.b +
                                 static_cast<std::uint32_t>(row.q_head) * s.h +
                                 static_cast<std::uint32_t>(block.head.q_first + row.token) * s.s;
        constexpr int kSixteen = 16 / sizeof(Bits);  // bytes
        if (first <= last_column) unit = *reinterpret_cast<const Unit*>(data + first + std::uint64_t{at} * kSixteen);
      } else if constexpr (!C::kSameKeys) {
        const Bits* const from = data + row_at(p.q_stride, block.head, row);
#pragma unroll
        for (int n = 0; n < kWidth; ++n) {
          const Bits x = from[min(first + n, last_column) * p.q_stride.d];
          unit.numbers[n] = first + n <= last_column ? x : Bits{0};
        }
      }
      memcpy(bits[i], &unit, sizeof unit);
    }
  }
};

// Sums over each unit of 32 columns of the rows of Q, by which keys' zeros are multiplied: [units][kRows].
template <class C>
__device__ void sum_queries(std::uint32_t q, float* sums) {
  for (int i = threadIdx.x; i < C::kSize / kGroupUnit * C::kRows; i += kDecodeThreads) {
    float sum = 0;
#pragma unroll
    for (int component = C::kComponents - 1; component >= 0; --component)
#pragma unroll 4
      for (int pair = 0; pair < kGroupUnit / 2; ++pair) {
        const int unit = i / C::kRows, row = component * C::kRows + i % C::kRows;
        const auto bf16x2 = __float_as_uint(load4(q + row * C::kQueryPitch + unit * 2 * kGroupUnit + 4 * pair));
        sum += __uint_as_float(bf16x2 << 16), sum += __uint_as_float(bf16x2 & 0xffff0000u);
      }
    sums[i] = sum;
  }
}

// A warp's loop over its steps. Its ring holds tiles of K and V in turn. The slot that was read last is refilled just
// before the next one is read: until then it is free for other use.
template <class C>
struct DecodePipeline {
  static constexpr int kStride = kDecodeWarps * C::kStepKeys, kAhead = C::kSlots / 2 * kStride;
  static constexpr bool kOdd = C::kSlots % 2 != 0;

  const KvRing<C>& ring;
  int key;             // first key of the next step
  std::uint32_t slot;  // the slot to read next

  __device__ __forceinline__ explicit DecodePipeline(const KvRing<C>& ring) : ring(ring), slot(ring.data) {
    // Which warp has a key does not depend on which keys are hidden: sums keep their order.
    key = ring.begin / kStride * kStride + uniform(threadIdx.x / 32) * C::kStepKeys;
#pragma unroll 1
    for (int i = 0, step = key; i < C::kSlots; i += 2, step += kStride) {
      const auto at = ring.locate(step);
      ring.template load<false>(slot, step, at), slot = ring.after(slot);
      if (i + 1 < C::kSlots) ring.template load<true>(slot, step, at), slot = ring.after(slot);
    }
    prefetched_ = ring.locate(key + kAhead);
  }
  template <class FinishScores>
  __device__ __forceinline__ void step(DecodeSoftmax<C>& softmax, FinishScores finish_scores) {
    if (consumed_slot_ != 0) {
      if constexpr (kOdd) ring.template load<false>(consumed_slot_, key + kAhead, prefetched_);
      else ring.template load<true>(consumed_slot_, key + kAhead - kStride, previous_);
    }
    const auto next = ring.locate(key + kAhead + kStride);
    wait();
    if constexpr (C::kIs16Bit) softmax.multiply_16bit_keys(slot);
    else softmax.multiply_keys(slot);
    __syncwarp();
    ring.template load<kOdd>(slot, key + kAhead, prefetched_);
    slot = ring.after(slot);
    finish_scores(key);
    softmax.softmax();
    wait();
    if constexpr (C::kIs16Bit) softmax.add_16bit_values(slot);
    else softmax.add_values(slot);
    __syncwarp();
    consumed_slot_ = slot, slot = ring.after(slot);
    previous_ = prefetched_, prefetched_ = next;
    key += kStride;
  }

  // A slot without data to come, until the next step.
  __device__ std::uint32_t free_slot() const {
    return consumed_slot_ != 0 ? consumed_slot_ : slot;
  }

 private:
  typename KvRing<C>::Location previous_, prefetched_;
  std::uint32_t consumed_slot_ = 0;  // the slot read last; 0: none, since address 0 is static shared memory

  __device__ static void wait() {  // until the tile in `slot` is complete
    copy_wait<C::kSlots - 1>();
    __syncwarp();
  }
};

// Where a thread block stores its rows, for DecodeResults.
struct StoredSplit {
  const DecodeParams& params;
  const SplitBlock& block;
  const int row_begin = block.row_begin, row_count = block.row_count;

  __device__ float* partial(int r, int split) const { return params.partials.at(block.head, r, split); }
  __device__ RowFinalizer row_end(int r) const { return RowFinalizer::of(block.head, r); }
};

// A thread block's rows of a split.
template <class C>
__device__ __forceinline__ void decode_split(const DecodeParams& params, const SplitBlock& block,
                                             std::uint8_t* shared) {
  __shared__ SplitRows<C::kRows> rows;
  __shared__ DecodeResults<C> results;
  __shared__ float q_sums[C::kSize / kGroupUnit * C::kRows], q_scales[C::kRows];
  const AttentionParams& p = params.p;
  const int warp = threadIdx.x / 32;
  const std::uint32_t rings = shared_address(shared), q = rings + kDecodeWarps * C::kSlots * params.slot_bytes;
  const QueryLoader<C> queries(params, block, q);  // requested before the keys, or their loads queue behind those
  const KvRing<C> ring(params, block, rings);
  DecodePipeline<C> steps(ring);
  rows.find(block);
  if (C::kComponents == 1 && params.scaled_queries && threadIdx.x < C::kRows)
    q_scales[threadIdx.x] =
        query_scale(block.head, block.row(min(block.row_begin + static_cast<int>(threadIdx.x), block.row_count - 1)));
  queries.store();
  __syncthreads();
  if (params.k.zeros) {
    sum_queries<C>(q, q_sums);
    __syncthreads();
  }
  // Keys that all rows see need no masking. Neither end of what a row sees moves down from row to row, but the last
  // rows may see nothing.
  const int all_from = params.modified ? ring.end : rows.from[C::kRows - 1],
            all_to = min(rows.to[0], rows.to[C::kRows - 1]);

  DecodeSoftmax<C> softmax(params, q, q_sums);
  const auto finish_scores = [&](int key) {
    if (C::kComponents == 1 && params.scaled_queries) softmax.scale_rows(q_scales);
    softmax.scale(p.score.scale_log2);
    if (key >= all_from && key + C::kStepKeys <= all_to) return;
    for_each_four(softmax.s, [&](int index, float(&four)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = softmax.row(index / 8 % C::kTiles, e % 2), j = key + softmax.key(index / 8 / C::kTiles, e / 2);
        if (j < rows.from[row] || j >= rows.to[row]) four[e] = -kInfinity;
        else if (params.modified) four[e] = rows.finish(block.head, row, block.first_key + j, four[e]);
      }
    });
  };
  while (steps.key < ring.end) steps.step(softmax, finish_scores);
  copy_wait<0>();
  unsigned fallback = 0;
  results.store(softmax, StoredSplit{params, block}, block.split, steps.free_slot(), fallback);
  attend_fallback_rows(p, static_cast<int>(block.head.b), static_cast<int>(block.head.hk), block.row_begin + warp,
                       fallback);
}

template <class C>
__global__ void __launch_bounds__(kDecodeThreads, C::kBlocksPerMultiprocessor)
    attention_decode(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(512) std::uint8_t shared[];  // aligned to the longest row
  launch_dependent_grids();
  const SplitBlock block(params.p, params.partials, params.grid, C::kRows);
  // Of a ragged call in 16 bits, attention_decode_m64 does the sequences with more rows.
  if (block.exists && (!C::kIs16Bit || block.row_count <= kFewRows)) decode_split<C>(params, block, shared);
  if (params.combines_in_cluster) {
    cluster_sync();
    unsigned cluster_block = blockIdx.x;
    asm volatile("" : "+r"(cluster_block));  // recomputes `block`, rather than keep it in registers until here
    const SplitBlock same_block(params.p, params.partials, params.grid, C::kRows, cluster_block);
    const int warp = threadIdx.x / 32;
    combine_in_cluster<void, kDecodeMaxHeadDim>(params.p, params.partials, same_block.head,
                                                SplitKeys(same_block.head, params.partials.rule).count, warp);
  }
  if (params.overlap_previous)
    wait_on_dependent_grids();  // so that a grid that depends on this one also depends on that one
}

}  // namespace rapt::cuda
