// delta_rule: linear attention with a state S [d, dv] for each sequence and head, token by token as it is written,
//
//   S = a S,  u = beta (v - S^T k),  S = S + k u^T,  out = scale S^T q,
//
// in fp32, of any types and sizes. A thread block has some columns of a state, in registers from the first token to
// the last. Lanes share a column, whose sums they add in a tree, so bits depend on d alone, not on how columns are cut.
// Rows of tokens are prepared in shared memory, some tokens ahead.
#include <algorithm>
#include <array>

#include "cuda/kernels/delta_rule_columns.cuh"
#include "cuda/kernels/delta_rule_tokens.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr int kMaxReads = 8;  // query heads of a state head in a launch
constexpr int kMaxWarps = 8;
// From d = 128 on more columns to a lane mean fewer warps for a state, and a token takes as long.
constexpr std::array kConfigs = {DeltaRuleConfig{64, 4, false},  DeltaRuleConfig{128, 2, false},
                                 DeltaRuleConfig{256, 2, false}, DeltaRuleConfig{64, 4, true},
                                 DeltaRuleConfig{128, 2, true},  DeltaRuleConfig{256, 2, true}};

// The part of a state that a lane has: every so many runs of four rows, of kColumns columns.
template <DeltaRuleConfig kConfig>
struct State {
  static constexpr int kLanes = kConfig.lanes(), kRuns = kConfig.rows() / 4, kColumns = kConfig.columns;
  StateRun<kColumns> run[kRuns];

  static __device__ int row_of(int m) { return 4 * (kLanes * m + static_cast<int>(threadIdx.x) % kLanes); }
  static __device__ const float4& four(const float* row, int m) {
    return *reinterpret_cast<const float4*>(row + row_of(m));
  }

  __device__ void load(const DeltaRuleParams& p, std::int64_t slot, std::int64_t h, std::int64_t column) {
    for (auto& own : run)
      for (auto& row : own.s)
        for (float& x : row) x = 0;
    if (p.initial && slot >= 0) move<false>(p, p.initial, slot, h, column);
  }
  __device__ void store(const DeltaRuleParams& p, std::int64_t slot, std::int64_t h, std::int64_t column) {
    if (p.final && slot >= 0) move<true>(p, p.final, slot, h, column);
  }

  // From memory or to it, from column `column` on.
  template <bool kStores>
  __device__ void move(const DeltaRuleParams& p, const StateRows& rows, std::int64_t slot, std::int64_t h,
                       std::int64_t column) {
    const auto move_from = [&](auto* data) {
      data += rows.at(slot, h) + column * rows.dv_stride;
      using Element = std::remove_pointer_t<decltype(data)>;
      const auto is_aligned = [&](int count, std::int64_t stride) {
        const auto is_multiple = [&](std::int64_t x) { return x % (count * static_cast<int>(sizeof(Element))) == 0; };
        return is_multiple(reinterpret_cast<std::int64_t>(data)) && is_multiple(stride * sizeof(Element));
      };
      const int columns = static_cast<int>(min(p.dv - column, std::int64_t{kColumns})), d = static_cast<int>(p.d);
      const auto each_run = [&](const auto& move_run) {
#pragma unroll
        for (int m = 0; m < kRuns; ++m)
          if (row_of(m) < d) move_run(run[m], data + row_of(m) * rows.d_stride, d - row_of(m));
      };
      if (rows.dv_stride == 1 && columns == kColumns && is_aligned(kColumns, rows.d_stride))
        each_run([&](auto& own, auto* at, int n) { own.template move_rows<kStores>(at, rows.d_stride, n); });
      else if (rows.d_stride == 1 && columns == kColumns && d % 4 == 0 && is_aligned(4, rows.dv_stride))
        each_run([&](auto& own, auto* at, int) { own.template move_columns<kStores>(at, rows.dv_stride); });
      else
        each_run([&](auto& own, auto* at, int n) {
          own.template move_singly<kStores>(at, rows.d_stride, rows.dv_stride, n, columns);
        });
    };
    if (rows.type == DType::bf16) move_from(static_cast<__nv_bfloat16*>(rows.data));
    else move_from(static_cast<float*>(rows.data));
  }

  // What the lane has of the sums, for all of its columns.
  __device__ void decay_and_predict(const Record<kConfig>& token, float decay, float (&x)[kColumns]) {
#pragma unroll
    for (float& sum : x) sum = 0;
#pragma unroll
    for (int m = 0; m < kRuns; ++m) {
      const float4 of_all = make_float4(decay, decay, decay, decay);
      run[m].decay_and_predict(kConfig.channel_decay ? four(token.decay(), m) : of_all, four(token.k(), m), x);
    }
  }
  __device__ void write(const Record<kConfig>& token, const float (&u)[kColumns]) {
#pragma unroll
    for (int m = 0; m < kRuns; ++m) run[m].write(four(token.k(), m), u);
  }
  __device__ void read(const float* query, float (&y)[kColumns]) const {
#pragma unroll
    for (float& sum : y) sum = 0;
#pragma unroll
    for (int m = 0; m < kRuns; ++m) run[m].read(four(query, m), y);
  }
};

// The columns of a state that a thread block has, from the first token to the last. Tokens are prepared one group
// ahead of the recurrence, and loaded two groups ahead.
template <DeltaRuleConfig kConfig>
__device__ void run_columns(const DeltaRuleParams& p, const Reads& reads, std::int64_t b, std::int64_t h,
                            std::int64_t first_column, float* shared) {
  using Own = State<kConfig>;
  constexpr int kLanes = Own::kLanes, kColumns = Own::kColumns;
  const int warps = blockDim.x / 32, columns = warps * kConfig.warp_columns();
  const int size = kConfig.record_size(reads.count, columns);
  const int in_block = static_cast<int>(threadIdx.x) / kLanes * kColumns,
            mine = in_block + my_column<kLanes, 1, kColumns>();
  const bool writes = threadIdx.x % (kLanes / kColumns) == 0 && first_column + mine < p.dv;
  const TokenRange range = tokens_of(p, b);
  TokenPreparation<kConfig> tokens(p, reads, b, h, range, first_column, columns);
  tokens.load(0);
  Own state;
  state.load(p, initial_slot(p, b), h, first_column + in_block);
  std::int64_t out = token_at(p.out.stride, p.begin ? 0 : b, range.first, h * p.reads + reads.first) +
                     (first_column + mine) * p.out.stride.d;
  float *ready = shared, *coming = shared + warps * size;
  for (std::int64_t group = -warps; group < range.count; group += warps) {
    tokens.write(group + warps, coming);
    tokens.load(group + 2 * warps);
    const int n = group < 0 ? 0 : static_cast<int>(min(std::int64_t{warps}, range.count - group));
    for (int i = 0; i < n; ++i) {
      const Record<kConfig> token{ready + i * size};
      float sums[kColumns], u[kColumns];
      state.decay_and_predict(token, kConfig.channel_decay ? 1 : token.scalars(reads.count)[0], sums);
      const float v = token.v(reads.count)[mine], beta = token.scalars(reads.count)[1];
      spread_columns<kLanes, 1>(p.has_delta ? beta * (v - sum_of_columns<kLanes, 1>(sums)) : v, u);
      state.write(token, u);
      for (int r = 0; r < reads.count; ++r) {
        state.read(token.q(r), sums);
        const float read = sum_of_columns<kLanes, 1>(sums);
        if (writes) store(const_cast<void*>(p.out.data), p.out.type, out + r * p.out.stride.h, read);
      }
      out += p.out.stride.s;
      if (p.steps > 0 && reads.writes_state) state.store(p, slot_of(p, b, group + i), h, first_column + in_block);
    }
    __syncthreads();  // the next group's tokens are there, and this one's are done with
    float* const done = ready;
    ready = coming, coming = done;
  }
  if (p.steps == 0 && reads.writes_state) state.store(p, slot_of(p, b, 0), h, first_column + in_block);
}

template <int kD, int kColumns, bool kChannelDecay>
__global__ void __launch_bounds__(32 * kMaxWarps, 2)
    delta_rule(const __grid_constant__ DeltaRuleParams p, const Reads reads) {
  constexpr DeltaRuleConfig kConfig{kD, kColumns, kChannelDecay};
  extern __shared__ float4 shared[];
  const int columns = blockDim.x / 32 * kConfig.warp_columns();
  for (std::int64_t b = blockIdx.z; b < p.b; b += gridDim.z)
    for (std::int64_t h = blockIdx.y; h < p.h; h += gridDim.y)
      run_columns<kConfig>(p, reads, b, h, blockIdx.x * columns, reinterpret_cast<float*>(shared));
}

}  // namespace

cudaError_t launch_delta_rule(const DeltaRuleParams& p, cudaStream_t stream) {
  if (p.b == 0 || p.h == 0) return cudaSuccess;
  constexpr std::int64_t kMaxBlocks = 65535;  // of a grid's y and z
  const int d = p.d <= 64 ? 64 : p.d <= 128 ? 128 : 256;
  const DeltaRuleConfig config = *std::find_if(kConfigs.begin(), kConfigs.end(), [&](const DeltaRuleConfig& each) {
    return each.d == d && each.channel_decay == (p.decay == Decay::channel);
  });
  const auto shared_bytes = [&](int warps, int reads) {
    return 2 * static_cast<std::size_t>(warps * config.record_size(reads, warps * config.warp_columns())) *
           sizeof(float);
  };
  constexpr std::size_t kMaxSharedBytes = 64 << 10;  // which every GPU has
  const int max_reads = static_cast<int>(std::min<std::int64_t>(p.reads, kMaxReads));
  int warps = kMaxWarps;
  while (warps > 1 && (warps / 2 * config.warp_columns() >= p.dv || shared_bytes(warps, max_reads) > kMaxSharedBytes))
    warps /= 2;
  const int columns = warps * config.warp_columns();
  const dim3 blocks(static_cast<unsigned>(ceil_div(p.dv, columns)), static_cast<unsigned>(std::min(p.h, kMaxBlocks)),
                    static_cast<unsigned>(std::min(p.b, kMaxBlocks)));
  cudaError_t status = cudaSuccess;
  for (std::int64_t first = (p.reads - 1) / kMaxReads * kMaxReads; first >= 0 && status == cudaSuccess;
       first -= kMaxReads) {
    const Reads reads{static_cast<int>(first), static_cast<int>(std::min<std::int64_t>(p.reads - first, kMaxReads)),
                      first == 0};
    status = launch_one_of<kConfigs>(config, [&](auto index) {
      constexpr DeltaRuleConfig kConfig = kConfigs[index];
      return launch_clusters(1, false, delta_rule<kConfig.d, kConfig.columns, kConfig.channel_decay>, blocks,
                             static_cast<unsigned>(32 * warps), shared_bytes(warps, reads.count), stream, p, reads);
    });
  }
  return status;
}

}  // namespace rapt::cuda
