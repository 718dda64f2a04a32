#include "operations/attention_backward/cuda_choice.hpp"

#include <algorithm>

namespace rapt::cuda {
namespace {

constexpr std::int64_t kMaxDsBytes = std::int64_t{256} << 20;
// These many occupy a Hopper GPU's multiprocessors almost twice. Fewer would wait for the last of them.
constexpr std::int64_t kKeysOfBlock = 128, kMinBlocks = 250;

// Not of ragged sequences, whose lengths the host does not know.
bool is_dense(const AttentionParams& p) {
  return p.total_q < 0 && p.total_k < 0;
}

}  // namespace

int key_sharers(const AttentionParams& p) {
  // The parts are added up, so their number may not depend on the batch.
  constexpr std::int64_t kMinTiles = 24, kMinTilesOfHead = 2;
  constexpr int kMaxSharers = 4;                // a cluster of 4 finds room in most of a GPU's multiprocessors
  if (!are_alike(p) || p.group == 1) return 1;  // lengths that the host does not know
  const std::int64_t blocks = p.hk * ceil_div(p.sk, kKeysOfBlock), tiles = ceil_div(p.sq, kBackwardTile),
                     most = std::min(tiles / kMinTilesOfHead, p.group * tiles / kMinTiles);
  int sharers = 1;
  while (sharers < kMaxSharers && sharers * blocks < kMinBlocks && 2 * sharers <= most) sharers *= 2;
  return sharers;
}

DsPortions ds_portions(const AttentionParams& p) {
  DsPortions made{ceil_div(p.sk, kBackwardTile), ceil_div(p.sq, kBackwardTile) * p.group};
  const std::int64_t of_head = made.key_tiles * made.row_tiles * kDsTileBytes, heads = p.b * p.hk;
  if (!is_dense(p) || of_head == 0 || of_head > kMaxDsBytes || heads == 0) return made;
  const std::int64_t portions = ceil_div(heads, kMaxDsBytes / of_head), in_portion = ceil_div(heads, portions);
  if (portions == 1 || in_portion * ceil_div(p.sk, kKeysOfBlock) >= kMinBlocks) made.heads = in_portion;
  return made;
}

std::int64_t max_ds_bytes(const AttentionParams& p) {
  const DsPortions sizes = ds_portions(p);
  const double all =
      static_cast<double>(p.b * p.hk) * static_cast<double>(sizes.key_tiles * sizes.row_tiles) * kDsTileBytes;
  return !is_dense(p) ? 0 : all < kMaxDsBytes ? static_cast<std::int64_t>(all) : kMaxDsBytes;
}

}  // namespace rapt::cuda
