// delta_rule_decode: one token of each sequence, bound by reading and writing states. A thread block has a whole state,
// which bulk copies bring to shared memory and back while other blocks work on theirs. Two passes over it there: decay
// and prediction; then, from the same products, what the token writes and reads. Sums have delta_rule's order, so the
// first token of a longer sequence has the same bits.
#include <array>

#include "cuda/hopper/ptx.cuh"
#include "cuda/kernels/delta_rule_columns.cuh"
#include "cuda/kernels/delta_rule_tokens.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr int kColumns = 4;  // of a lane

// Template parameters of a kernel.
struct DeltaRuleDecodeConfig {
  int d;  // rows of a state, padded
  bool channel_decay;
  bool keys_first;  // a state is [d, dv], not [dv, d]
  bool bf16;        // its type; else fp32
  friend constexpr bool operator==(const DeltaRuleDecodeConfig&, const DeltaRuleDecodeConfig&) = default;
};

constexpr auto kConfigs = [] {
  std::array<DeltaRuleDecodeConfig, 16> all{};
  for (unsigned i = 0; i < all.size(); ++i) all[i] = {i & 1 ? 64 : 128, (i & 2) != 0, (i & 4) != 0, (i & 8) != 0};
  return all;
}();

template <int kD, bool kChannelDecay, bool kKeysFirst, bool kBf16>
__global__ void __launch_bounds__(256, 3)
    delta_rule_decode(const __grid_constant__ DeltaRuleParams p, int state_bytes) {
  constexpr DeltaRuleConfig kLanesConfig{kD, kColumns, kChannelDecay};
  constexpr int kLanes = kLanesConfig.lanes(), kRuns = kLanesConfig.rows() / 4;  // of 4 rows
  // Lanes that lie side by side read neighbours, whichever way a state lies.
  constexpr int kStep = kKeysFirst ? 32 / kLanes : 1;
  using Element = std::conditional_t<kBf16, __nv_bfloat16, float>;
  extern __shared__ __align__(128) std::byte shared[];
  auto* const state = reinterpret_cast<Element*>(shared);
  const Record<kLanesConfig> token{reinterpret_cast<float*>(shared + state_bytes)};
  const int columns = blockDim.x / 32 * kLanesConfig.warp_columns(), d = static_cast<int>(p.d),
            dv = static_cast<int>(p.dv);
  const std::uint32_t barrier = shared_address(token.at + kLanesConfig.record_size(1, columns));
  const std::int64_t b = blockIdx.y, h = blockIdx.x, from = p.initial ? initial_slot(p, b) : -1;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    fence_barrier_init();
    if (from >= 0) {
      barrier_arrive_expecting(barrier, state_bytes);
      bulk_load(shared_address(state), static_cast<const Element*>(p.initial.data) + p.initial.at(from, h), state_bytes,
                barrier, false);
    }
  }
  const TokenRange range = tokens_of(p, b);
  TokenPreparation<kLanesConfig> tokens(p, {0, 1, true}, b, h, range, 0, columns);
  tokens.load(0);
  if (from < 0)
    for (int i = threadIdx.x; i < d * dv; i += blockDim.x) state[i] = static_cast<Element>(0.f);
  tokens.write(0, token.at);
  __syncthreads();
  if (from >= 0) barrier_wait(barrier, 0);

  if (range.count > 0) {
    // kLanes lanes share kColumns columns, from `column` on. Each holds some of their rows and
    // ends with one column's sum.
    const int lane = threadIdx.x % 32, row_lane = lane / kStep % kLanes;
    const int column_group = kKeysFirst ? lane % kStep : lane / kLanes;
    const int column = (static_cast<int>(threadIdx.x) / 32 * (32 / kLanes) + column_group) * kColumns;
    const int own_column = column + my_column<kLanes, kStep, kColumns>();
    const auto row_of = [&](int m) { return 4 * (kLanes * m + row_lane); };
    const auto four = [&](const float* row, int m) { return *reinterpret_cast<const float4*>(row + row_of(m)); };
    const float decay = token.scalars(1)[0], beta = token.scalars(1)[1], v = token.v(1)[own_column];
    const auto decays = [&](int m) {
      return kLanesConfig.channel_decay ? four(token.decay(), m) : make_float4(decay, decay, decay, decay);
    };
    const auto move = [&]<bool kStores>(std::bool_constant<kStores>, StateRun<kColumns>& run, int m) {
      if (row_of(m) >= d || column >= dv) return;
      if constexpr (kKeysFirst) run.template move_rows<kStores>(state + row_of(m) * dv + column, dv, 4);
      else run.template move_columns<kStores>(state + column * d + row_of(m), d);
    };
    const auto load = [&](int m) {
      StateRun<kColumns> run{};
      move(std::false_type(), run, m);
      return run;
    };
    float x[kColumns] = {}, y[kColumns] = {}, u[kColumns];  // of S^T k and S^T q; what the token writes
#pragma unroll
    for (int m = 0; m < kRuns; ++m) load(m).decay_and_predict(decays(m), four(token.k(), m), x);
    spread_columns<kLanes, kStep>(p.has_delta ? beta * (v - sum_of_columns<kLanes, kStep>(x)) : v, u);
#pragma unroll
    for (int m = 0; m < kRuns; ++m) {
      StateRun<kColumns> run = load(m);
      const float4 k = four(token.k(), m);
      run.decay_and_predict(decays(m), k, x);  // for the decay
      run.write(k, u);
      run.read(four(token.q(0), m), y);
      move(std::true_type(), run, m);
    }
    const float out = sum_of_columns<kLanes, kStep>(y);
    const std::int64_t at = token_at(p.out.stride, p.begin ? 0 : b, range.first, h) + own_column * p.out.stride.d;
    if (row_lane % (kLanes / kColumns) == 0 && own_column < dv)
      store(const_cast<void*>(p.out.data), p.out.type, at, out);
  }
  const std::int64_t to = p.final ? slot_of(p, b, 0) : -1;
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x != 0 || to < 0) return;
  bulk_store(static_cast<Element*>(p.final.data) + p.final.at(to, h), shared_address(state), state_bytes);
  tma_store_commit();
  tma_store_wait_read();
}

}  // namespace

cudaError_t launch_delta_rule_decode(const DeltaRuleParams& p, cudaStream_t stream) {
  if (p.b == 0 || p.h == 0) return cudaSuccess;
  const StateRows& rows = p.final ? p.final : p.initial;
  const DeltaRuleDecodeConfig config{p.d <= 64 ? 64 : 128, p.decay == Decay::channel, rows.dv_stride == 1,
                                     rows.type == DType::bf16};
  const DeltaRuleConfig lanes{config.d, kColumns, config.channel_decay};
  const int state_bytes = static_cast<int>(p.d * p.dv) * (config.bf16 ? 2 : 4), columns_of_warp = lanes.warp_columns();
  int warps = 4;  // which is enough to prepare a token
  while (warps * columns_of_warp < p.dv) warps *= 2;
  const dim3 blocks(static_cast<unsigned>(p.h), static_cast<unsigned>(p.b));
  return launch_one_of<kConfigs>(config, [&](auto index) {
    constexpr DeltaRuleDecodeConfig kConfig = kConfigs[index];
    const int token_floats = lanes.record_size(1, warps * columns_of_warp) + 4;
    return launch_clusters(
        1, false, delta_rule_decode<kConfig.d, kConfig.channel_decay, kConfig.keys_first, kConfig.bf16>, blocks,
        static_cast<unsigned>(32 * warps),
        static_cast<std::size_t>(state_bytes) + static_cast<std::size_t>(token_floats) * sizeof(float), stream, p,
        state_bytes);
  });
}

}  // namespace rapt::cuda
