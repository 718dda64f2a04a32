// attention_prefill's sizes for a PrefillConfig, and the parameters of its launches.
#pragma once

#include <type_traits>

#include "cuda/hopper/schedule.cuh"
#include "cuda/kernels/prefill_config.hpp"

namespace rapt::cuda {

// A row whose keys together weigh less than this share of its sink falls back: weights in T are too coarse there.
template <class T>
constexpr float kMinKeyWeight = std::is_same_v<T, __half> ? 0x1p-16f : 0x1p-20f;

// The sizes of a kernel's tiles, rings and register shares.
template <PrefillConfig kConfig>
struct Prefill {
  using Element = std::conditional_t<kConfig.element == DType::f16, __half, __nv_bfloat16>;
  static constexpr int kSize = kConfig.head_dim, kColumns = kConfig.columns;
  // Rows lie in shared memory in panels of kPanel columns, kRowBytes to a panel's row.
  static constexpr int kPanel = kSize % 64 == 0 ? 64 : 32, kPanels = kSize / kPanel, kRowBytes = 2 * kPanel;
  static constexpr bool kTma = kConfig.tma, kModified = kConfig.modified, kSplit = kConfig.split_kv;
  static constexpr bool kQuantized = kConfig.quantized, kDense = kConfig.dense;
  static constexpr bool kWarpSpecialized = kConfig.warp_specialized;
  static constexpr int kGroups = kConfig.math_warpgroups, kLoadThreads = kWarpSpecialized ? 128 : 0;
  static constexpr int kThreads = kLoadThreads + 128 * kGroups;
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kConfig.block_k;
  // Thread blocks on a multiprocessor. With two, one block's tile begins while the other's ends.
  static constexpr int kBlocksPerMultiprocessor =
      !kWarpSpecialized || (kGroups == 1 && kSize <= (kSplit ? 128 : 96)) ? 2 : 1;
  static constexpr int kCodeRegisters = kSize == 256 ? 88 : 120;  // what O leaves
  static constexpr int kLoadRegisters = kQuantized     ? kCodeRegisters
                                        : kGroups > 2  ? 32
                                        : kGroups == 1 ? 88
                                        : kTma         ? 56
                                                       : 72;
  static constexpr int kMathRegisters = kQuantized     ? 252 - kCodeRegisters / 2
                                        : kGroups == 3 ? 160
                                        : kGroups == 1 ? 168
                                        : kTma         ? 224
                                                       : 216;
  // Whether math warpgroups take registers from the one that loads; else the launch gives all of them enough.
  static constexpr bool kTradesRegisters = kWarpSpecialized && (kGroups > 1 || kBlocksPerMultiprocessor > 1);
  static constexpr int kProducers = kTma ? 96 : 128;             // threads that put tiles into shared memory
  static constexpr int kStages = kSplit && kSize == 64 ? 4 : 2;  // blocks of K, and of V, in shared memory
  // A row's shift moves only when the row's maximum exceeds it by more (lazy rescaling), so that O is rarely rescaled.
  // Weights are therefore up to 2^kRescaleThreshold.
  static constexpr float kRescaleThreshold = 8;
  // Weights are 2^kShift times as large as they are in the formula: fp16 has a short range below 1.
  static constexpr float kShift = kConfig.element == DType::f16 ? 7 : 0, kOne = kConfig.element == DType::f16 ? 128 : 1;
  static constexpr int kRowsBytes = kRows * kSize * 2, kBlockBytes = kKeys * kSize * 2;
  // Who stores results from Q's place in shared memory: the math warps by TMA, where the next tile's Q has a place of
  // its own; or a thread of the first warpgroup.
  static constexpr bool kStoresByProducer = kDense && kWarpSpecialized;
  static constexpr int kQueryTiles = kSize == 64 || kStoresByProducer ? 3 : kSize == 256 ? 1 : 2;
  static constexpr bool kStoresByTma = kTma && kQueryTiles > 1 && !kStoresByProducer;
  // The scales of a block's keys and values. There are more places than stages, because scales are read after the
  // block's products, when the block's own place may have been filled again.
  static constexpr int kScaleBytes = kQuantized ? 2 * kKeys * 4 : 0, kScaleBlocks = 2 * kStages;
  static constexpr int kScalesAt = kQueryTiles * kRowsBytes + 2 * kStages * kBlockBytes;
  static constexpr int kSharedBytes = kScalesAt + kScaleBlocks * kScaleBytes + 1024;
  static_assert(!kSplit || kSplitUnit % kKeys == 0);
  static_assert(!kTradesRegisters || kLoadRegisters + kGroups * kMathRegisters <=
                                         65536 / (kThreads * kBlocksPerMultiprocessor) / 8 * 8 * (kGroups + 1),
                "warpgroups would wait for registers for ever: there are no more than the launch took");
  using Tiles = Tiling<kRows>;
};

struct PrefillParams : TileGrid {
  CUtensorMap q, k, v, out;  // where TMA loads them, and stores out
  bool out_by_tma;
  bool writes_output;        // kSplit: every sequence has one split, and results go to out instead of partial results
  bool overlap_previous;     // starts while the previous launch of the call ends (programmatic dependent launch)
  bool combines_in_cluster;  // kSplit: the splits of a kv head are a cluster, which combines their partial results
  float inner, outer;        // factors of scores, before and after modifiers; a negative scale's sign goes to Q
  bool q_vector, kv_vector;  // rows are aligned to 16 bytes, and contiguous
  bool mask_pairs, bias_pairs;  // two neighbouring keys are one aligned word
  Divisor page_size;
  int box;                    // keys of a tensor map's box
  std::uint32_t code_offset;  // of codes: Codes::offset
};

template <class C>
using Blocks = Ring<C::kStages>;
template <class C>
using QueryRing = Ring<C::kQueryTiles>;

}  // namespace rapt::cuda
