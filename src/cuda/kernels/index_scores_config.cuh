// index_scores_tiles's sizes, the parameters of its launches, and its items of work.
#pragma once

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/index_scores.hpp"
#include "cuda/tile/element.cuh"

namespace rapt::cuda {

using IndexElement = __nv_bfloat16;  // that Q and K are multiplied as

constexpr int kKeys = 128, kHalfKeys = 64;    // of a block; of a product
constexpr int kProducers = 256, kGroups = 2;  // threads; math warpgroups, of 128 threads each
constexpr int kThreads = kProducers + 128 * kGroups;
constexpr int kProducerRegisters = 64, kMathRegisters = 192;
static_assert(kProducers * kProducerRegisters + kGroups * 128 * kMathRegisters <= 65536);

// Of a kernel: columns of d and heads of a query, padded.
template <int kDepth, int kPaddedHeads>
struct IndexConfig {
  static constexpr int kD = kDepth, kHeads = kPaddedHeads;
  static constexpr int kColumns = kHeads % 3 == 0 ? 96 : kHeads == 8 ? 64 : 128;  // N: a warpgroup's
  static constexpr int kQueries = kColumns / kHeads;                              // of a warpgroup
  static constexpr int kQueryBytes = kColumns * kD * 2;                           // of a warpgroup
  static constexpr int kKeyBytes = kKeys * kD * 2;
  static constexpr int kQueryPanel = kColumns * 128, kKeyPanel = kKeys * 128;
  static constexpr int kQuerySlots = 2, kKeySlots = 3;
  static constexpr int kWeightsAt = kQuerySlots * kGroups * kQueryBytes + kKeySlots * kKeyBytes;
  static constexpr int kBarriersAt = kWeightsAt + kQuerySlots * kGroups * kColumns * 4;
  static constexpr int kSharedBytes = kBarriersAt + (kQuerySlots + kKeySlots) * 16;
  static_assert(kSharedBytes <= 227 << 10 && kQueryBytes % 1024 == 0 && kColumns % 32 == 0);
  static_assert(kGroups * kQueries <= 32);  // a lane for each query of an item

  using Queries = Ring<kQuerySlots>;
  using Keys = Ring<kKeySlots>;
};

struct IndexTilesParams {
  CUtensorMap q, k;
  IndexScoresParams p;
  IndexQueries queries;
  std::int64_t tiles, items;  // of a sequence's queries; all
  int split_keys;             // of a split, a multiple of kKeys
  int box;                    // keys that TMA loads at a time: a block, or what always lies in one page
  Divisor page_size;
  bool q_by_tma, k_by_tma;
  bool q_vector, k_vector;  // whether threads can copy rows 16 bytes at a time
};

// The items of a thread block. Every other round goes through the thread blocks backwards: items get shorter.
struct IndexItemNumbers {
  const IndexTilesParams& params;
  std::int64_t index = blockIdx.x, first = 0;  // first: of the round

  __device__ explicit IndexItemNumbers(const IndexTilesParams& params) : params(params) {}
  __device__ explicit operator bool() const { return index < params.items; }
  __device__ void next() {
    index = 2 * (first + gridDim.x) - 1 - index;
    first += gridDim.x;
  }
};

// What a thread block works on: queries [token, token_end) and keys [split_begin, split_end) of sequence b.
template <class C>
struct IndexItem {
  std::int64_t b, token, token_end;
  int split_begin, split_end;
  int first, last;  // the keys of the split that query token + lane sees
  int begin, end;   // the keys of the split that some query sees

  // The last queries come first: where that differs, they see the most keys. All queries have a split before the next.
  __device__ IndexItem(const IndexTilesParams& params, std::int64_t index) {
    const IndexScoresParams& p = params.p;
    const std::int64_t sequences = params.queries.sequences(), all = params.tiles * sequences;
    const auto split = static_cast<int>(index / all);
    const std::int64_t of_split = index - split * all, tile = of_split / sequences;
    b = params.queries.b_begin + of_split - tile * sequences;
    token = params.queries.token_begin + (params.tiles - 1 - tile) * (kGroups * C::kQueries);
    token_end = min(token + kGroups * C::kQueries, params.queries.token_end);
    split_begin = split * params.split_keys;
    split_end = static_cast<int>(min(std::int64_t{split_begin} + params.split_keys, p.sk));
    const std::int64_t own = token + threadIdx.x % 32;
    const KeyRange seen = own < token_end ? visible_keys(p, b, sequence_of(p, p, b), own) : KeyRange{0, 0};
    first = static_cast<int>(clamp_to(seen.first, split_begin, split_end));
    last = static_cast<int>(clamp_to(seen.last, first, split_end));
    begin = __reduce_min_sync(~0u, first < last ? first : split_end);
    end = __reduce_max_sync(~0u, first < last ? last : begin);
  }
  __device__ int first_block() const { return begin / kKeys * kKeys; }
  __device__ int blocks() const { return (end - first_block() + kKeys - 1) / kKeys; }
  __device__ bool is_empty() const { return begin >= end; }
};

}  // namespace rapt::cuda
