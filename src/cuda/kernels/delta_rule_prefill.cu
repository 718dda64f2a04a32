// delta_rule_prefill: delta_rule of many tokens by products on tensor cores, in chunks of 16 tokens, of bf16 rows. One
// or two warpgroups of a thread block have 64 columns of a state each, in registers from the first token to the last.
// The others prepare, in turn, what the state's products need of each chunk: its record (delta_rule_chunk.cuh). Chunks
// begin at the sequence's first token, and columns do not depend on each other, so bits do not depend on how columns
// are given to thread blocks. A token whose products would leave the range of numbers goes by the recurrence, and so do
// those after it in its chunk.
#include <array>

#include "cuda/kernels/delta_rule_chunk_factors.cuh"
#include "cuda/kernels/delta_rule_chunk_state.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr int kRecords = 4;
constexpr std::int64_t kColumns = kDeltaRulePrefillColumns;  // of a warpgroup

struct DeltaRulePrefillConfig {
  int d, state_groups;  // rows of a state, padded; warpgroups with columns of it
  bool channel_decay;
  friend constexpr bool operator==(const DeltaRulePrefillConfig&, const DeltaRulePrefillConfig&) = default;

  // Warpgroups that prepare chunks.
  RAPT_HOST_DEVICE constexpr int factor_groups() const { return state_groups == 1 ? 3 : 2; }
  RAPT_HOST_DEVICE constexpr int threads() const { return 128 * (state_groups + factor_groups()); }
  // Of each thread; a block has 65536.
  RAPT_HOST_DEVICE constexpr int state_registers() const { return state_groups == 1 ? 176 : 152; }
  RAPT_HOST_DEVICE constexpr int factor_registers() const { return state_groups == 1 ? 112 : 104; }
};

constexpr auto kConfigs = [] {
  std::array<DeltaRulePrefillConfig, 8> all{};
  for (unsigned i = 0; i < all.size(); ++i) all[i] = {i & 1 ? 64 : 128, i & 2 ? 1 : 2, (i & 4) != 0};
  return all;
}();

template <int kD>
constexpr int shared_bytes(int factor_groups) {
  return 1024 + kRecords * ChunkRecord<kD>::kBytes + factor_groups * FactorMemory<kD>::kBytes;
}

template <int kD, int kStateGroups, bool kChannelDecay>
__global__ void __launch_bounds__(DeltaRulePrefillConfig{kD, kStateGroups, kChannelDecay}.threads(), 1)
    delta_rule_prefill(const __grid_constant__ DeltaRuleParams p) {
  constexpr DeltaRulePrefillConfig kConfig{kD, kStateGroups, kChannelDecay};
  constexpr int kFactorGroups = kConfig.factor_groups();
  using Record = ChunkRecord<kD>;
  using Memory = FactorMemory<kD>;
  extern __shared__ std::byte shared[];
  __shared__ std::uint64_t barriers[2 * kRecords];  // each record's: it is there; it is not needed any more
  const std::uint32_t records = (shared_address(shared) + 1023) / 1024 * 1024,
                      memory = records + kRecords * Record::kBytes;
  const auto record = [&](std::int64_t chunk) {
    return Record{records + static_cast<std::uint32_t>(chunk % kRecords) * Record::kBytes};
  };
  const auto is_there = [&](std::int64_t chunk) { return shared_address(barriers + chunk % kRecords); };
  const auto is_done = [&](std::int64_t chunk) { return shared_address(barriers + kRecords + chunk % kRecords); };
  const auto parity = [](std::int64_t chunk) { return static_cast<int>(chunk / kRecords % 2); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRecords; ++i) barrier_init(is_there(i), 4), barrier_init(is_done(i), 4 * kStateGroups);
    fence_barrier_init();
  }
  __syncthreads();
  const std::int64_t parts = ceil_div(p.dv, kColumns * kStateGroups), head = blockIdx.x / parts;
  const std::int64_t b = head / p.h, h = head % p.h;
  const TokenRange range = tokens_of(p, b);
  const std::int64_t chunks = ceil_div(range.count, std::int64_t{kChunk});
  const int group = uniform(threadIdx.x / 128);
  if (group >= kStateGroups) {
    registers_decrease<kConfig.factor_registers()>();
    const int own = group - kStateGroups;
    ChunkFactors<kD, kChannelDecay> factors(p, b, h, range, Memory{memory + own * Memory::kBytes}, 1 + own);
    factors.load(own * kChunk);
    for (std::int64_t chunk = own; chunk < chunks; chunk += kFactorGroups) {
      barrier_wait(is_done(chunk), 1 - parity(chunk));
      factors.write(record(chunk), chunk * kChunk, (chunk + kFactorGroups) * kChunk);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(is_there(chunk));
    }
  } else {
    registers_increase<kConfig.state_registers()>();
    ChunkState<kD> state(p, b, h, range, static_cast<int>((blockIdx.x % parts * kStateGroups + group) * kColumns));
    state.load(p.initial, initial_slot(p, b));
    state.load_values(0);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      barrier_wait(is_there(chunk), parity(chunk));
      state.advance(record(chunk), chunk * kChunk, [&] {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(is_done(chunk));
      });
    }
    state.store(p.final, slot_of(p, b, 0));
  }
}

}  // namespace

cudaError_t launch_delta_rule_prefill(const DeltaRuleParams& p, int state_groups, cudaStream_t stream) {
  if (p.b == 0 || p.h == 0) return cudaSuccess;
  const DeltaRulePrefillConfig config{p.d <= 64 ? 64 : 128, state_groups, p.decay == Decay::channel};
  const std::int64_t blocks = p.b * p.h * ceil_div(p.dv, kColumns * state_groups);
  return launch_one_of<kConfigs>(config, [&](auto index) {
    constexpr DeltaRulePrefillConfig kConfig = kConfigs[index];
    return launch_kernel(false, delta_rule_prefill<kConfig.d, kConfig.state_groups, kConfig.channel_decay>,
                         static_cast<unsigned>(blocks), static_cast<unsigned>(kConfig.threads()),
                         static_cast<std::size_t>(shared_bytes<kConfig.d>(kConfig.factor_groups())), stream, p);
  });
}

}  // namespace rapt::cuda
