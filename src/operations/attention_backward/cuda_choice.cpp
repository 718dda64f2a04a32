#include "operations/attention_backward/cuda_choice.hpp"

#include <algorithm>

namespace rapt::cuda {
namespace {

constexpr std::int64_t kMaxDsBytes = std::int64_t{256} << 20;

// Not of ragged sequences, whose lengths the host does not know.
bool is_dense(const AttentionParams& p) {
  return p.total_q < 0 && p.total_k < 0;
}

int sharers_of_sizes(const AttentionParams& p) {
  // The parts are added up, so their number may not depend on the batch.
  constexpr std::int64_t kMinTiles = 24, kMinTilesOfHead = 2;
  constexpr std::int64_t kMinBlocks = 250;  // almost twice a Hopper GPU's multiprocessors
  constexpr int kMaxSharers = 4;            // a cluster of 4 finds room in most of a GPU's multiprocessors
  if (p.group == 1) return 1;
  const std::int64_t blocks = p.hk * ceil_div(p.sk, kBackwardKeys), tiles = ceil_div(p.sq, kBackwardTile),
                     most = std::min(tiles / kMinTilesOfHead, p.group * tiles / kMinTiles);
  int sharers = 1;
  while (sharers < kMaxSharers && sharers * blocks < kMinBlocks && 2 * sharers <= most) sharers *= 2;
  return sharers;
}

}  // namespace

int key_sharers(const AttentionParams& p) {
  return are_alike(p) ? sharers_of_sizes(p) : 1;  // else of lengths that the host does not know
}

DsSlots ds_slots(const AttentionParams& p) {
  // Thread blocks that start between the last for dk and dv of a head and its first for dq: enough that the former have
  // ended, which takes longer in causal calls. And between its last for dq and the first of the head that gets its
  // slot.
  constexpr std::int64_t kAfterKeys = 240, kLeastAfterKeys = 160, kAfterRows = 96;
  DsSlots made{ceil_div(p.sk, kBackwardTile), ceil_div(p.sq, kBackwardTile), p.group};
  const std::int64_t heads = p.b * p.hk;
  if (!is_dense(p) || heads == 0) return made;
  const std::int64_t of_slot = made.slot_bytes();
  if (of_slot == 0 || of_slot > kMaxDsBytes) return made;
  // By sizes alone: a plan does not know whether a call gives lengths.
  const std::int64_t of_head =
      sharers_of_sizes(p) * ceil_div(p.sk, kBackwardKeys) + p.group * ceil_div(p.sq, kBackwardRowsOfDs);
  const auto heads_after = [&](std::int64_t blocks) { return ceil_div(blocks, of_head); };
  const std::int64_t most = kMaxDsBytes / of_slot, others = 1 + heads_after(kAfterRows);
  made.lag = std::max(std::min(heads_after(kAfterKeys), most - others), heads_after(kLeastAfterKeys));
  const std::int64_t wanted = std::min(heads, made.lag + others);
  if (wanted <= most) made.slots = wanted;
  return made;
}

std::int64_t max_ds_bytes(const AttentionParams& p) {
  const std::int64_t heads = p.b * p.hk;
  if (!is_dense(p) || heads == 0) return 0;
  return std::min(heads * std::min(ds_slots(p).slot_bytes(), kMaxDsBytes), kMaxDsBytes);
}

}  // namespace rapt::cuda
