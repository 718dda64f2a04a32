// delta_rule_prefill: delta_rule of many tokens by products on tensor cores, in chunks of 16 tokens, of bf16 rows. One
// warpgroup of a thread block has 64 columns of a state, in registers from the first token to the last. The others
// prepare, in turn, what the state's products need of each chunk: its record (delta_rule_chunk.cuh). Two blocks with
// columns of the same state are a cluster: each prepares every other chunk, and copies the record to the other. Chunks
// begin at the sequence's first token. A token whose products would leave the range of numbers goes by the recurrence,
// and so do those after it in its chunk.
#include <array>

#include "cuda/hopper/cluster.cuh"
#include "cuda/kernels/delta_rule_chunk_factors.cuh"
#include "cuda/kernels/delta_rule_chunk_state.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr int kFactorGroups = 3;  // warpgroups that prepare chunks
constexpr int kRecords = 6;
constexpr std::int64_t kColumns = 64;  // of a thread block

// The record of a chunk, and the parity of its barriers' phase. A step of more than kRecords would miss
// phases.
struct RecordTurn {
  int at, parity = 0;
  __device__ void advance(int chunks) {
    at += chunks;
    if (at >= kRecords) at -= kRecords, parity ^= 1;
  }
};

struct DeltaRulePrefillConfig {
  int d, blocks;  // rows of a state, padded; thread blocks of a cluster
  bool channel_decay;
  friend constexpr bool operator==(const DeltaRulePrefillConfig&, const DeltaRulePrefillConfig&) = default;
};

constexpr auto kConfigs = [] {
  std::array<DeltaRulePrefillConfig, 8> all{};
  for (unsigned i = 0; i < all.size(); ++i) all[i] = {i & 1 ? 64 : 128, i & 2 ? 1 : 2, (i & 4) != 0};
  return all;
}();

// Of each thread; a block has 65536.
constexpr int kThreads = 128 * (1 + kFactorGroups), kStateRegisters = 176, kFactorRegisters = 112;

template <int kD>
constexpr int kSharedBytes = 1024 + kRecords* ChunkRecord<kD>::kBytes + kFactorGroups* FactorMemory<kD>::kBytes;

template <int kD, int kBlocks, bool kChannelDecay>
__global__ void __launch_bounds__(kThreads, 1) delta_rule_prefill(const __grid_constant__ DeltaRuleParams p) {
  using Record = ChunkRecord<kD>;
  using Memory = FactorMemory<kD>;
  constexpr int kStep = kBlocks * kFactorGroups;
  static_assert(kStep <= kRecords && kRecords % kBlocks == 0);
  extern __shared__ std::byte shared[];
  __shared__ std::uint64_t barriers[2 * kRecords];  // each record's: it is there; no block needs it any more
  std::uint32_t records = (shared_address(shared) + 1023) / 1024 * 1024, barriers_at = shared_address(barriers);
  asm volatile("" : "+r"(records), "+r"(barriers_at));  // or they are computed again for each chunk
  const std::uint32_t memory = records + kRecords * Record::kBytes;
  const auto record = [&](const RecordTurn& turn) {
    return Record{records + static_cast<std::uint32_t>(turn.at * Record::kBytes)};
  };
  const auto is_there = [&](const RecordTurn& turn) { return barriers_at + static_cast<std::uint32_t>(8 * turn.at); };
  const auto is_done = [&](const RecordTurn& turn) {
    return barriers_at + static_cast<std::uint32_t>(8 * (kRecords + turn.at));
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRecords; ++i) barrier_init(is_there({i}), 1), barrier_init(is_done({i}), 4 * kBlocks);
    fence_barrier_init();
  }
  cluster_sync();
  const unsigned block = cluster_rank();
  const std::int64_t parts = ceil_div(p.dv, kColumns * kBlocks) * kBlocks, head = blockIdx.x / parts;
  const std::int64_t b = head / p.h, h = head % p.h;
  const TokenRange range = tokens_of(p, b);
  const int group = uniform(threadIdx.x / 128);
  if (group > 0) {
    registers_decrease<kFactorRegisters>();
    RecordTurn turn{static_cast<int>(block) + kBlocks * (group - 1)};
    ChunkFactors<kD, kChannelDecay> factors(p, b, h, range, Memory{memory + (group - 1) * Memory::kBytes}, group);
    std::int64_t token = turn.at * kChunk;
    factors.load(token);
    for (; token < range.count; token += kStep * kChunk, turn.advance(kStep)) {
      barrier_wait(is_done(turn), 1 - turn.parity);
      factors.write(record(turn), token, token + kStep * kChunk, [&] {
        barrier_arrive(is_there(turn));
        if constexpr (kBlocks > 1) copy_to_block(record(turn).at, Record::kBytes, is_there(turn), 1 - block);
      });
    }
  } else {
    registers_increase<kStateRegisters>();
    RecordTurn turn{0};
    ChunkState<kD> state(p, b, h, range, static_cast<int>(blockIdx.x % parts * kColumns));
    state.load(p.initial, initial_slot(p, b));
    state.load_values(0);
    std::int64_t token = 0;
    while (token < range.count) {
      typename ChunkState<kD>::Rest rest;
      bool has_rest = false;
      // A warp may leave this loop alone, and meet the others at the loop's products later: it must stay one loop, as
      // each product is one instruction for the four warps.
      for (; !has_rest && token < range.count; token += kChunk, turn.advance(1)) {
        barrier_wait(is_there(turn), turn.parity);
        has_rest = state.advance(record(turn), token, rest, [&] {
          __syncwarp();
          if (threadIdx.x % 32 == 0) arrive_at_block(is_done(turn), turn.at % kBlocks);
        });
      }
      if (has_rest) state.finish(token - kChunk, rest);
    }
    state.store(p.final, slot_of(p, b, 0));
  }
  cluster_sync();  // before this, the other block may arrive here
}

}  // namespace

cudaError_t launch_delta_rule_prefill(const DeltaRuleParams& p, cudaStream_t stream) {
  if (p.b == 0 || p.h == 0) return cudaSuccess;
  const DeltaRulePrefillConfig config{p.d <= 64 ? 64 : 128, p.dv <= kColumns ? 1 : 2, p.decay == Decay::channel};
  const std::int64_t blocks = p.b * p.h * ceil_div(p.dv, kColumns * config.blocks) * config.blocks;
  return launch_one_of<kConfigs>(config, [&](auto index) {
    constexpr DeltaRulePrefillConfig kConfig = kConfigs[index];
    return launch_clusters(kConfig.blocks, false, delta_rule_prefill<kConfig.d, kConfig.blocks, kConfig.channel_decay>,
                           static_cast<unsigned>(blocks), unsigned{kThreads},
                           static_cast<std::size_t>(kSharedBytes<kConfig.d>), stream, p);
  });
}

}  // namespace rapt::cuda
