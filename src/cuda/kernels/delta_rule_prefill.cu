// delta_rule_prefill: delta_rule of many tokens by products on tensor cores, in chunks of 16 tokens, of bf16 rows. One
// warpgroup of a thread block has 64 columns of a state, in registers. The others
// prepare, in turn, what the state's products need of each chunk: its record (delta_rule_chunk.cuh). Two blocks with
// columns of the same state are a cluster: each prepares every other chunk, and copies the record to the other. Chunks
// begin at the sequence's first token. Where there are more states than run at once, clusters get equal shares of all
// tokens (delta_rule_chunk_parts.cuh). A token whose products would leave the range of numbers goes by the recurrence,
// and so do those after it in its chunk.
#include <algorithm>
#include <array>

#include "cuda/hopper/cluster.cuh"
#include "cuda/kernels/delta_rule_chunk_factors.cuh"
#include "cuda/kernels/delta_rule_chunk_parts.cuh"
#include "cuda/kernels/delta_rule_chunk_state.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/device_limits.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr int kFactorGroups = 3;  // warpgroups that prepare chunks
constexpr int kRecords = 6;
constexpr int kColumns = 64;  // of a thread block

// The record of a chunk, and the parity of its barriers' phase.
struct RecordTurn {
  int at, parity = 0;
  __device__ void advance() {
    if (++at == kRecords) at = 0, parity ^= 1;
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
__global__ void __launch_bounds__(kThreads, 1)
    delta_rule_prefill(const __grid_constant__ DeltaRuleParams p, StateHandover handover) {
  using Record = ChunkRecord<kD>;
  using Memory = FactorMemory<kD>;
  constexpr int kStep = kBlocks * kFactorGroups, kRounds = kRecords / kStep;  // of a group, through the records
  static_assert(kRecords % kStep == 0);
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
  __shared__ StateParts parts;
  if (threadIdx.x < 32)
    parts.find(p, static_cast<int>(blockIdx.x / kBlocks), static_cast<int>(gridDim.x / kBlocks),
               handover.states != nullptr);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRecords; ++i) barrier_init(is_there({i}), 1), barrier_init(is_done({i}), 4 * kBlocks);
    fence_barrier_init();
  }
  cluster_sync();
  const int block = uniform(static_cast<int>(cluster_rank()));
  const int group = uniform(threadIdx.x / 128);
  if (group > 0) {
    registers_decrease<kFactorRegisters>();
    int first = block + kBlocks * (group - 1);  // of the group's chunks
    ChunkFactors<kD, kChannelDecay> factors(p, Memory{memory + (group - 1) * Memory::kBytes}, group);
    int token = first * kChunk;
    for (int i = 0, round = 0;; ++round, token += kStep * kChunk) {
      while (token >= factors.end() && i < parts.count()) {
        const StatePart part = parts.part(p, i++);
        token += part.begin - ceil_div(factors.end(), kChunk) * kChunk;
        factors.start(part, token);
      }
      if (token >= factors.end()) break;
      asm volatile("" : "+r"(first));  // or all addresses in the record are kept in registers
      const RecordTurn turn{first + kStep * (round % kRounds), round / kRounds % 2};
      barrier_wait(is_done(turn), 1 - turn.parity);
      factors.write(record(turn), token, token + kStep * kChunk, round % 4, [&] {
        barrier_arrive(is_there(turn));
        if constexpr (kBlocks > 1) copy_to_block(record(turn).at, Record::kBytes, is_there(turn), 1 - block);
      });
    }
  } else {
    registers_increase<kStateRegisters>();
    RecordTurn turn{0};
    for (int i = 0; i < parts.count(); ++i) {
      const StatePart part = parts.part(p, i);
      ChunkState<kD> state(p, part, block * kColumns);
      if (part.is_begun) state.take_over(handover, static_cast<int>(blockIdx.x) - kBlocks);
      else state.load(p.initial, initial_slot(p, part.b));
      int token = part.begin;
      state.load_values(token);
      while (token < part.end) {
        typename ChunkState<kD>::Rest rest;
        bool has_rest = false;
        // A warp may leave this loop alone, and meet the others at the loop's products later: it must stay one loop, as
        // each product is one instruction for the four warps.
        for (; !has_rest && token < part.end; token += kChunk, turn.advance()) {
          barrier_wait(is_there(turn), turn.parity);
          has_rest = state.advance(record(turn), token, rest, [&] {
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive_at_block(is_done(turn), turn.at % kBlocks);
          });
        }
        if (has_rest) state.finish(token - kChunk, rest);
      }
      if (part.is_for_next) state.hand_over(handover, static_cast<int>(blockIdx.x));
      else state.store(p.final, slot_of(p, part.b, 0));
    }
  }
  cluster_sync();  // before this, the other block may arrive here
}

// Padded rows of a state, and thread blocks of its columns.
int rows_of(std::int64_t d) {
  return d <= 64 ? 64 : 128;
}
int blocks_of(std::int64_t dv) {
  return dv <= kColumns ? 1 : 2;
}
// As many as run at once, if there are states for them.
std::int64_t clusters_of(std::int64_t states, int blocks) {
  return std::min<std::int64_t>(states, std::max(1, multiprocessors() / blocks));
}
constexpr std::size_t kReadyBytes = 4 * sizeof(int);  // of a block

}  // namespace

std::size_t delta_rule_prefill_workspace(std::int64_t states, std::int64_t d, std::int64_t dv) {
  const int blocks = blocks_of(dv);
  const std::int64_t clusters = clusters_of(states, blocks);
  if (clusters == states) return 0;
  return static_cast<std::size_t>(clusters * blocks * rows_of(d) * kColumns) * sizeof(float) +
         static_cast<std::size_t>(clusters * blocks) * kReadyBytes;
}

cudaError_t launch_delta_rule_prefill(const DeltaRuleParams& p, std::byte* workspace, cudaStream_t stream) {
  if (p.b == 0 || p.h == 0) return cudaSuccess;
  const DeltaRulePrefillConfig config{rows_of(p.d), blocks_of(p.dv), p.decay == Decay::channel};
  const std::int64_t states = p.b * p.h, clusters = clusters_of(states, config.blocks),
                     blocks = clusters * config.blocks;
  StateHandover handover{};
  if (clusters < states) {
    handover.states = reinterpret_cast<float4*>(workspace);
    handover.ready = reinterpret_cast<int*>(handover.states + blocks * config.d * kColumns / 4);
    const cudaError_t status =
        cudaMemsetAsync(handover.ready, 0, static_cast<std::size_t>(blocks) * kReadyBytes, stream);
    if (status != cudaSuccess) return status;
  }
  return launch_one_of<kConfigs>(config, [&](auto index) {
    constexpr DeltaRulePrefillConfig kConfig = kConfigs[index];
    return launch_clusters(kConfig.blocks, false, delta_rule_prefill<kConfig.d, kConfig.blocks, kConfig.channel_decay>,
                           static_cast<unsigned>(blocks), unsigned{kThreads},
                           static_cast<std::size_t>(kSharedBytes<kConfig.d>), stream, p, handover);
  });
}

}  // namespace rapt::cuda
