// index_scores_tiles: scores of q in bf16 and k in bf16 or codes of 8 bits on Hopper's tensor cores.
//
//   for each item of a thread block: some queries of a sequence, whose heads are 2 N rows of Q, and a split of the keys
//     load Q and the weights                                         (producers, an item ahead)
//     for each block of 128 keys, of which some query sees one:
//       load K                                                       (producers, by TMA; codes by threads)
//       S = K Q^T, [128 keys, N] for each of two math warpgroups, in halves of 64 keys
//       score[key, query] = sum over the query's heads of relu(S) w, times the key's scale
//
// Keys are the rows of S, so that a thread has N / 4 columns of two keys, and adds up most of a query's heads in
// registers, where their weights are, too. With N = 128 and d = 128, a block is 2048 cycles of the tensor cores, about
// 700 instruction slots of each scheduler for the sums, and 32 KiB from L2.
//
// The order of a score's sums depends on h alone: a thread's columns, lanes 0 + 1 and 2 + 3, both. Padding heads would
// make NaN of an infinite key: sums that are NaN are computed again without them.
#include <algorithm>

#include "cuda/kernels/index_scores_load.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

// s = K Q^T of 64 keys.
template <class C>
__device__ __forceinline__ void multiply(float (&s)[C::kColumns / 2], std::uint32_t keys, std::uint32_t queries) {
  pin(s);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kD / 16; ++step) {
    const int panel = step / 4, within = step % 4 * 2;
    wgmma_abt<IndexElement>(s, matrix_at(keys + panel * C::kKeyPanel) + within,
                            matrix_at(queries + panel * C::kQueryPanel) + within, step > 0);
  }
  wgmma_commit();
}

// A lane's part of the scores: the sums over its columns, of two keys and each query.
template <class C, bool kAll>
__device__ __forceinline__ void add_heads(float (&sum)[2][C::kQueries], const float (&s)[C::kColumns / 2],
                                          const float (&weights)[C::kColumns / 4], float floor, int heads) {
  constexpr int kEights = C::kHeads / 8;
#pragma unroll
  for (int query = 0; query < C::kQueries; ++query)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x = 0;
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int column = query * kEights + j;
          float raised;  // fmaxf() would drop a NaN
          asm("max.NaN.f32 %0, %1, %2;" : "=f"(raised) : "f"(s[4 * column + 2 * row + b]), "f"(floor));
          if (kAll || 8 * j + static_cast<int>(threadIdx.x) % 4 * 2 + b < heads)
            x = fmaf(raised, weights[2 * column + b], x);
        }
      sum[row][query] = x;
    }
}

// Sums over four lanes: each ends with the key of row lane % 2, and every second query from lane / 2 % 2 on.
template <int kQueries>
__device__ __forceinline__ void add_lanes(const float (&sum)[2][kQueries], float (&score)[(kQueries + 1) / 2]) {
  const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
  float of_row[kQueries];
#pragma unroll
  for (int query = 0; query < kQueries; ++query) {
    const float own = odd ? sum[1][query] : sum[0][query], other = odd ? sum[0][query] : sum[1][query];
    of_row[query] = own + __shfl_xor_sync(~0u, other, 1);
  }
  if constexpr (kQueries == 1) {
    score[0] = of_row[0] + __shfl_xor_sync(~0u, of_row[0], 2);
  } else {
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) {
      const float own = upper ? of_row[2 * i + 1] : of_row[2 * i], other = upper ? of_row[2 * i] : of_row[2 * i + 1];
      score[i] = own + __shfl_xor_sync(~0u, other, 2);
    }
  }
}

template <class C>
__device__ void compute(const IndexTilesParams& params, const typename C::Queries& q, const typename C::Keys& k,
                        const float* all_weights) {
  constexpr int kScores = (C::kQueries + 1) / 2;
  const IndexScoresParams& p = params.p;
  const int lane = threadIdx.x % 32, group = uniform((static_cast<int>(threadIdx.x) - kProducers) / 128),
            own_query = C::kQueries == 1 ? 0 : lane / 2 % 2;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + lane % 2 * 8;  // of each half
  const bool stores = C::kQueries > 1 || lane / 2 % 2 == 0;
  const float floor = p.relu ? 0 : -kInfinity;
  unsigned i = 0, n = 0;
  for (IndexItemNumbers numbers(params); numbers; numbers.next()) {
    const IndexItem<C> item(params, numbers.index);
    if (item.is_empty()) continue;
    const std::int64_t token = item.token + group * C::kQueries + own_query;
    float* const out = p.scores + item.b * p.scores_stride.b + token * p.scores_stride.s;
    int first[kScores], last[kScores];
#pragma unroll
    for (int query = 0; query < kScores; ++query) {
      const int from = group * C::kQueries + own_query + 2 * query;
      first[query] = __shfl_sync(~0u, item.first, from), last[query] = __shfl_sync(~0u, item.last, from);
    }
    q.wait_full(i);
    float weights[C::kColumns / 4];
    const float* const from = all_weights + (i % C::kQuerySlots * kGroups + group) * C::kColumns;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(from + 8 * j + lane % 4 * 2);
      weights[2 * j] = two.x, weights[2 * j + 1] = two.y;
    }
    const std::uint32_t queries = q.slot(i) + group * C::kQueryBytes;
    const bool has_queries = item.token + group * C::kQueries < item.token_end;

    if (!has_queries) {
      for (int key = item.first_block(); key < item.end; key += kKeys, ++n) k.wait_full(n), k.release(n);
    } else {
      float low[C::kColumns / 2], high[C::kColumns / 2], scales[2] = {1, 1};  // products of each half of a block
      const auto finish = [&](const float(&s)[C::kColumns / 2], int key, float scale) __attribute__((always_inline)) {
        float sum[2][C::kQueries], score[kScores];
        add_heads<C, true>(sum, s, weights, floor, C::kHeads);
        if (p.h < C::kHeads) {
          bool has_nan = false;
#pragma unroll
          for (int query = 0; query < C::kQueries; ++query)
            has_nan |= sum[0][query] != sum[0][query] || sum[1][query] != sum[1][query];
          if (__any_sync(~0u, has_nan)) add_heads<C, false>(sum, s, weights, floor, static_cast<int>(p.h));
        }
        add_lanes<C::kQueries>(sum, score);
#pragma unroll
        for (int query = 0; query < kScores; ++query)
          if (stores && key < item.split_end && token + 2 * query < item.token_end)
            out[2 * query * p.scores_stride.s + key * p.scores_stride.d] =
                key >= first[query] && key < last[query] ? score[query] * scale : -kInfinity;
      };
      for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
        const int own = key + row;
        k.wait_full(n);
        multiply<C>(low, k.slot(n), queries);
        multiply<C>(high, k.slot(n) + kHalfKeys * 128, queries);
        if (p.k_scale)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = min(max(own + half * kHalfKeys, item.begin), item.end - 1);
            scales[half] = p.k_scale[IndexKeyRow(params, item.b, j).at(p.k_scale_stride)];
          }
        wgmma_wait<1>();
        pin(low);
        finish(low, own, scales[0]);
        wgmma_wait<0>();
        pin(high);
        k.release(n);
        finish(high, own + kHalfKeys, scales[1]);
      }
    }
    __syncwarp();
    q.release(i++);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) index_scores_tiles(const __grid_constant__ IndexTilesParams params) {
  extern __shared__ __align__(1024) std::byte shared[];
  const std::uint32_t base = shared_address(shared);
  const typename C::Queries q{base + C::kBarriersAt, base, kGroups * C::kQueryBytes};
  const typename C::Keys k{base + C::kBarriersAt + C::kQuerySlots * 16,
                           base + C::kQuerySlots * kGroups * C::kQueryBytes, C::kKeyBytes};
  auto* const weights = reinterpret_cast<float*>(shared + C::kWeightsAt);
  if (threadIdx.x == 0) {
    q.init(kProducers, kGroups * 4), k.init(params.k_by_tma ? 1 : kProducers, kGroups * 4);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    registers_decrease<kProducerRegisters>();
    produce<C>(params, q, k, weights);
  } else {
    registers_increase<kMathRegisters>();
    compute<C>(params, q, k, weights);
  }
}

template <class C>
cudaError_t launch(IndexTilesParams params, cudaStream_t stream) {
  constexpr std::int64_t kRounds = 16, kMinBlocks = 4;
  const IndexScoresParams& p = params.p;
  params.q_by_tma =
      params.q_vector &&
      make_map(
          params.q, p.q_type, p.q,
          {{p.d, 1, 64}, {p.h, p.q_stride.h, C::kHeads}, {p.sq, p.q_stride.s, C::kQueries}, {p.b, p.q_stride.b, 1}});
  params.box = p.page_size == 0 ? kKeys : static_cast<int>(std::gcd(p.page_size, std::int64_t{kKeys}));
  const bool paged = p.page_size > 0;
  params.k_by_tma = p.k_type == DType::bf16 && params.k_vector && params.box % 8 == 0 &&
                    make_map(params.k, p.k_type, p.k,
                             {{p.d, 1, 64},
                              {paged ? p.page_size : p.sk, p.k_stride.s, params.box},
                              {1, 0, 1},
                              {paged ? p.page_count : p.b, p.k_stride.b, 1}});
  params.page_size = Divisor(p.page_size);

  // If there are few queries, so many splits of the keys that thread blocks of a GPU share them evenly.
  const std::int64_t processors = multiprocessors(), blocks = ceil_div(p.sk, kKeys);
  params.tiles = ceil_div(params.queries.tokens(), kGroups * C::kQueries);
  const std::int64_t all = params.queries.sequences() * params.tiles;
  std::int64_t split_blocks = blocks;
  if (all < kRounds / 4 * processors) {
    const std::int64_t share = ceil_div(blocks * all, processors);
    split_blocks = std::min(std::max(share / kRounds, std::min(share, kMinBlocks)), blocks);
  }
  params.split_keys = static_cast<int>(split_blocks * kKeys);
  params.items = all * ceil_div(blocks, split_blocks);
  return launch_kernel(false, index_scores_tiles<C>, static_cast<unsigned>(std::min(params.items, processors)),
                       kThreads, C::kSharedBytes, stream, params);
}

template <int kD>
cudaError_t launch_for_heads(const IndexTilesParams& params, cudaStream_t stream) {
  const std::int64_t h = params.p.h;
  if (h <= 8) return launch<IndexConfig<kD, 8>>(params, stream);
  if (h <= 16) return launch<IndexConfig<kD, 16>>(params, stream);
  if (h <= 24) return launch<IndexConfig<kD, 24>>(params, stream);
  if (h <= 32) return launch<IndexConfig<kD, 32>>(params, stream);
  if (h <= 48) return launch<IndexConfig<kD, 48>>(params, stream);
  if (h <= 64) return launch<IndexConfig<kD, 64>>(params, stream);
  if (h <= 96) return launch<IndexConfig<kD, 96>>(params, stream);
  return launch<IndexConfig<kD, 128>>(params, stream);
}

}  // namespace

cudaError_t launch_index_scores_tiles(const IndexScoresParams& p, const IndexQueries& queries, cudaStream_t stream) {
  if (queries.sequences() == 0 || queries.tokens() == 0 || p.sk == 0) return cudaSuccess;
  IndexTilesParams params{};
  params.p = p, params.queries = queries;
  params.q_vector = is_vector(p.q, p.q_stride, 2);
  params.k_vector = is_vector(p.k, p.k_stride, p.k_type == DType::bf16 ? 2 : 1);
  return p.d <= 64 ? launch_for_heads<64>(params, stream) : launch_for_heads<128>(params, stream);
}

}  // namespace rapt::cuda
