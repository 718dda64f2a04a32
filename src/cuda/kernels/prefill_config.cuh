// What attention_prefill is compiled for, and what a launch gets: for those who fill its rings (prefill_load.cuh),
// those who empty them (prefill_softmax.cuh) and the kernel itself.
#pragma once

#include <type_traits>

#include "cuda/hopper/schedule.cuh"

namespace rapt::cuda {

// Where all keys together weigh less beside a sink, their weights are no longer as exact as T.
template <class T>
constexpr float kMinKeyWeight = std::is_same_v<T, __half> ? 0x1p-16f : 0x1p-20f;

// The kernel for elements T and head sizes up to kColumns, in tiles of rows for kGroups warpgroups against blocks of
// kKeys keys. Products have kColumns columns, and shared memory kSize. kSplit: of few rows, over splits of their keys.
// kQuantised: K and V are codes, which become elements T on their way to shared memory.
template <class T, int kSize_, bool kTma_, bool kModified_, bool kSplit_, int kGroups_, int kColumns_ = kSize_,
          int kKeys_ = (kSize_ > 128 || kSplit_) ? 64 : 128, bool kQuantised_ = false>
struct Config {
  using Element = T;
  static constexpr int kSize = kSize_, kColumns = kColumns_;
  // Shared memory has panels of so many columns, in rows of so many bytes.
  static constexpr int kPanel = kSize % 64 == 0 ? 64 : 32, kPanels = kSize / kPanel, kRowBytes = 2 * kPanel;
  static constexpr bool kTma = kTma_;            // else K and V are loaded by the threads of the first warpgroup
  static constexpr bool kModified = kModified_;  // scores need more than a scale
  static constexpr bool kSplit = kSplit_;
  static constexpr bool kQuantised = kQuantised_;
  static constexpr bool kDense =
      false;  // tiles are DenseTile: attention_prefill_dense's and attention_prefill_unspecialized's
  static constexpr bool kUnspecialized = false;  // attention_prefill_unspecialized's
  static constexpr int kGroups = kGroups_, kLoadThreads = 128, kThreads = kLoadThreads + 128 * kGroups;
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kKeys_;
  // On a multiprocessor. Short tiles: one begins while another ends.
  static constexpr int kBlocks = kGroups == 1 && kSize <= (kSplit ? 128 : 96) ? 2 : 1;
  static constexpr int kCodeRegisters = kSize == 256 ? 88 : 120;  // as many as O leaves
  static constexpr int kLoadRegisters = kQuantised     ? kCodeRegisters
                                        : kGroups > 2  ? 32
                                        : kGroups == 1 ? 88
                                        : kTma         ? 56
                                                       : 72;
  static constexpr int kMathRegisters = kQuantised     ? 252 - kCodeRegisters / 2
                                        : kGroups == 3 ? 160
                                        : kGroups == 1 ? 168
                                        : kTma         ? 224
                                                       : 216;
  static constexpr bool kTradesRegisters = kGroups > 1 || kBlocks > 1;  // else all have enough
  static constexpr int kProducers = kTma ? 96 : 128;                    // threads that put tiles into shared memory
  static constexpr int kStages = kSplit && kSize == 64 ? 4 : 2;         // blocks of K and of V at a time
  // A row's shift moves only when it grows by more, and O is rarely rescaled. Where it is the maximum so far, weights
  // are then up to 2^kRescaleThreshold.
  static constexpr float kRescaleThreshold = 8;
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0, kOne = std::is_same_v<T, __half> ? 128 : 1;
  static constexpr int kRowsBytes = kRows * kSize * 2, kBlockBytes = kKeys * kSize * 2;
  static constexpr int kQueryTiles = kSize == 64 ? 3 : kSize == 256 ? 1 : 2;  // that there is room for
  // The scales of a block's keys and of its values, of more blocks than there are stages: they are read when the keys
  // have been multiplied and their place may have others.
  static constexpr int kScaleBytes = kQuantised ? 2 * kKeys * 4 : 0, kScaleBlocks = 2 * kStages;
  static constexpr int kScalesAt = kQueryTiles * kRowsBytes + 2 * kStages * kBlockBytes;
  static constexpr int kSharedBytes = kScalesAt + kScaleBlocks * kScaleBytes + 1024;
  // Math warps have TMA store results by way of Q's place, if the next one has another; kStoresByProducer: a thread
  // does that does nothing else.
  static constexpr bool kStoresByTma = kTma && kQueryTiles > 1, kStoresByProducer = false;
  static_assert(!kSplit || kSplitUnit % kKeys == 0);
  static_assert(!kTradesRegisters ||
                    kLoadRegisters + kGroups * kMathRegisters <= 65536 / (kThreads * kBlocks) / 8 * 8 * (kGroups + 1),
                "or warpgroups wait for registers for ever: there are no more than the launch took");
  using Tiles = Tiling<kRows>;
};

// The same for attention_prefill_dense: dense sequences that are all alike, whose tiles take little room.
template <class Base>
struct Dense : Base {
  static constexpr bool kDense = true, kStoresByTma = false, kStoresByProducer = true;
  static constexpr int kQueryTiles = 3;
};

// The same for attention_prefill_unspecialized, which has no loading warpgroup: such sequences in heads of up to 64
// columns.
template <class T, int kColumns, int kKeys>
struct UnspecializedConfig : Config<T, 64, true, false, false, 2, kColumns, kKeys> {
  static constexpr bool kDense = true, kUnspecialized = true;
  static constexpr int kLoadThreads = 0, kThreads = 256, kBlocks = 2;
};

struct PrefillParams : TileGrid {
  CUtensorMap q, k, v, out;  // if TMA loads them, or stores it
  bool out_by_tma;
  bool writes_output;        // no sequence's keys are split, and results are stored at once
  bool overlap_previous;     // to begin while the launch before, of this call, is at work
  bool combines_in_cluster;  // the thread blocks of a sequence and kv head are a cluster, and combine their partial
                             // results
  float inner, outer;        // scales of scores, before and after the modifiers; Q takes the sign
  bool q_vector, kv_vector;  // 16 bytes at a time
  Divisor page_size;
  int box;                    // keys of a tensor map's box
  std::uint32_t code_offset;  // of codes: Codes::offset
};

template <class C>
using Blocks = Ring<C::kStages>;
template <class C>
using QueryRing = Ring<C::kQueryTiles>;

}  // namespace rapt::cuda
