// attention_backward's sizes, and the parameters of its launches.
#pragma once

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/backward_config.hpp"
#include "cuda/kernels/backward_rows.cuh"

namespace rapt::cuda {

inline constexpr int kMaxBackwardStages = 4;

// What a tile has of modifiers: bits of pairs that are hidden or dropped; or also numbers that change scores.
enum class TileModifiers { none, bits, scores };

// A thread block has kOwn rows or keys ("own") and goes through the others in tiles of 64 ("other"): for dk and dv own
// are keys and other are query rows, for dq the other way round.
template <class T, int kSize_, bool kOfKeys_, bool kKeepsDs_ = false, bool kGrouped_ = false,
          TileModifiers kModifiers = TileModifiers::none>
struct BackwardConfig {
  using Element = T;
  static constexpr int kSize = kSize_;         // columns of rows in shared memory, of d and dv alike
  static constexpr bool kOfKeys = kOfKeys_;    // dk and dv; else dq
  static constexpr bool kKeepsDs = kKeepsDs_;  // dS is left in memory for dq
  static constexpr bool kReadsDs = false;
  static constexpr bool kModified = kModifiers != TileModifiers::none, kScores = kModifiers == TileModifiers::scores;
  static constexpr bool kGrouped = kGrouped_;  // keys may meet the rows of several query heads
  static constexpr int kGroups = 2;            // math warpgroups, with 64 own rows each
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kOwn = kBackwardTile * kGroups;
  static_assert(kOwn == kBackwardKeys);
  static constexpr int kPanels = kSize / 64;
  static constexpr int kOwnPanel = kOwn * 128, kOtherPanel = kBackwardTile * 128;  // bytes
  static constexpr int kOwnBytes = kPanels * kOwnPanel, kOtherBytes = kPanels * kOtherPanel;
  // A place of the ring: the two tensors' rows; for keys also the rows' lse and delta; modifiers.
  static constexpr int kRowsAt = 2 * kOtherBytes, kModifiersAt = kRowsAt + (kOfKeys ? 1024 : 0);
  // Of an own row's shifts: padded, so that math lanes with different ones meet in no bank.
  static constexpr int kShiftsPitch = (kBackwardTile + 8) * 4;
  static constexpr int kBitsBytes = kModified ? kOwn * kBackwardTile / 8 : 0;
  static constexpr int kPlaceBytes = kModifiersAt + 2 * kBitsBytes + (kScores ? kOwn * kShiftsPitch : 0);
  static constexpr int kStages = !kScores ? kMaxBackwardStages : kSize == 64 ? 3 : 2;
  static constexpr int kStagedBytes = kScores ? 16 << 10 : 0;  // of a bias, on its way to the ring
  static constexpr int kStagedAt = 2 * kOwnBytes + kStages * kPlaceBytes;
  static constexpr int kSharedBytes = 1024 + kStagedAt + kStagedBytes;
  static constexpr int kLoadRegisters = !kModified ? 40 : kSize == 64 ? 88 : 56;
  static constexpr int kMathRegisters = !kModified ? 232 : kSize == 64 ? 208 : 224;
  // Whether a tile's scores run beside the sums of the tile before: registers must have room for the operands of these.
  // (Where dS is kept, 64 columns would leave it, but gain nothing.)
  static constexpr bool kOverlaps = !kModified && (!kOfKeys || (kSize == 64 && !kKeepsDs));
  static_assert(kGroups == 2, "take_turn() and pass_turn() are of two warpgroups");
  static_assert(kLoadRegisters + kGroups * kMathRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "warpgroups would wait for registers for ever: there are no more than the launch took");
  static_assert(kSharedBytes <= 227 << 10);
};

struct BackwardParams {
  AttentionBackwardParams p;
  BackwardRows rows;
  int heads, tiles;  // the launch's heads, of rows query heads; thread blocks of each, not counting sharers
  int section;       // heads whose tiles are interleaved, so that what they read stays in L2
  int sharers;       // of the same keys: thread blocks of a cluster, which divide the rows' tiles among them
  // Where dS is kept:
  BackwardOrder order;
  int row_tiles;         // thread blocks for dq of a query head
  std::byte* ds;         // tiles of dS: [slots][query heads of a kv head][tiles of keys][tiles of rows]
  int ds_slots;          // these
  int ds_keys, ds_rows;  // these tiles
  CUtensorMap q, k, v, dout;
  bool tma;                               // the maps describe all rows; else threads load them
  bool q_vector, kv_vector, dout_vector;  // rows are aligned to 16 bytes, and contiguous
  bool mask_vector, bias_vector;          // so are eight keys that begin at a multiple of eight; of a mask to 8 bytes
};

}  // namespace rapt::cuda
