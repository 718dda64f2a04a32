// select_topk: rows of scores -> positions of the n largest of each.
//
// A thread block, or a warp if there are many rows, reads a row once and selects in shared memory. Of long rows a
// sample gives a bound first, which keeps most scores out of the buffer; if it was too high, the row is read again
// without. Of few long rows, several thread blocks select from parts of each row into lists in the workspace, and a
// second launch selects from these. Of an n too large for shared memory, a thread block sorts the whole row in the
// workspace.
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cmath>

#include "cuda/kernels/select_topk.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/topk.cuh"

namespace rapt::cuda {
namespace {

constexpr int kBlock = 256;  // threads that select from a row, unless there are so many rows that a warp does
// Thread blocks that a multiprocessor holds, at least: of warps, as many as each of its kind can.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kWarpsHeld = 16;
#else
constexpr int kWarpsHeld = 32;
#endif
template <int kThreads>
constexpr int kBlocksHeld = kThreads == kBlock ? 3 : kWarpsHeld;
// Steps whose scores a thread copies to shared memory ahead.
template <int kThreads>
constexpr std::uint32_t kAhead = kThreads == kBlock ? 2 : 1;
constexpr int kMaxSplits = 32;               // parts of a row: lanes
constexpr std::int64_t kSplitScores = 8192;  // that a part has at least

// How a call's rows are selected.
struct Launch {
  int capacity;  // candidates in a thread block's buffer
  int n, size;   // that it selects, and that it sorts
  int splits;    // parts of a row; 1: no lists
  int list;      // candidates of a part
  int rank;      // in a sample of the row, whose score bounds the n-th largest; 0: no sample
};
struct Part {
  int count;
  bool bounded;
};

__device__ std::int64_t row_offset(const SelectTopkParams& p, const Strides& s, std::int64_t row) {
  return row / (p.h * p.s) * s.b + row / p.s % p.h * s.h + row % p.s * s.s;
}

// Scores [begin, end) of a row, at places that count from a multiple of 16 bytes, if they are neighbours.
struct RowScores {
  const float* base;
  std::int64_t stride;
  std::uint32_t skipped, begin, end;  // places before position 0; the part's

  __device__ RowScores(const SelectTopkParams& p, std::int64_t row, std::int64_t first, std::int64_t last)
      : base(p.scores + row_offset(p, p.scores_stride, row)), stride(p.scores_stride.d) {
    skipped = stride == 1 ? reinterpret_cast<std::uintptr_t>(base) / sizeof(float) % 4 : 0;
    base -= skipped, begin = static_cast<std::uint32_t>(first) + skipped,
                     end = static_cast<std::uint32_t>(last) + skipped;
  }
  // The four from a multiple of 4 on; -inf outside of the part.
  __device__ ScoreGroup group(std::uint32_t at) const {
    float4 x;
    if (stride == 1 && at >= begin && at + 4 <= end) {
      x = __ldg(reinterpret_cast<const float4*>(base + at));
    } else {
      float four[4];
      const float* from = base + at * stride;
#pragma unroll
      for (int i = 0; i < 4; ++i, from += stride) four[i] = at + i >= begin && at + i < end ? __ldg(from) : -kInfinity;
      x = {four[0], four[1], four[2], four[3]};
    }
    return {x, at - skipped};
  }
};

template <int kThreads>
struct Ahead {
  float4 scores[kAhead<kThreads>][2][kThreads];
};

// Offers scores step by step. What lies in whole steps of 16 bytes is copied to shared memory some steps ahead, the
// first ones at once.
template <int kThreads>
class Scan {
 public:
  __device__ Scan(const RowScores& scores, Ahead<kThreads>& ahead)
      : scores_(scores),
        ahead_(ahead),
        start_(scores.begin / 4 * 4),
        from_(scores.base + start_ + 4 * threadIdx.x),
        steps_((scores.end - start_ + kStep - 1) / kStep),
        first_(min(scores.begin > start_ ? 1u : 0u, steps_)),
        last_(scores.stride == 1 ? max((scores.end - start_) / kStep, first_) : first_) {
    from_ += first_ * kStep;
#pragma unroll
    for (std::uint32_t i = 0; i < kAhead<kThreads>; ++i) copy(first_ + i);
  }

  __device__ void offer_to(Selection<kThreads>& best) {
    const auto load = [&](std::uint32_t step, ScoreGroup(&groups)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) groups[i] = scores_.group(place(step, i));
    };
    const auto take = [&](std::uint32_t step, ScoreGroup(&groups)[2]) {
      __pipeline_wait_prior(kAhead<kThreads> - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) groups[i] = {slot(step, i), place(step, i) - scores_.skipped};
      copy(step + kAhead<kThreads>);
    };
    best.template offer<ScoreGroup>(0, first_, load);
    best.template offer<ScoreGroup>(first_, last_, take);
    best.template offer<ScoreGroup>(last_, steps_, load);
  }

 private:
  static constexpr std::uint32_t kStep = Selection<kThreads>::kStep;

  __device__ std::uint32_t place(std::uint32_t step, int i) const {
    return start_ + step * kStep + 4 * (i * kThreads + threadIdx.x);
  }
  __device__ float4& slot(std::uint32_t step, int i) const {
    return ahead_.scores[step % kAhead<kThreads>][i][threadIdx.x];
  }
  // Called for one step after another.
  __device__ void copy(std::uint32_t step) {
    if (step < last_)
#pragma unroll
      for (int i = 0; i < 2; ++i) __pipeline_memcpy_async(&slot(step, i), from_ + 4 * i * kThreads, sizeof(float4));
    from_ += kStep;
    __pipeline_commit();
  }

  const RowScores scores_;
  Ahead<kThreads>& ahead_;
  const std::uint32_t start_;
  const float* from_;                         // the thread's scores of the next step to copy
  const std::uint32_t steps_, first_, last_;  // steps [first_, last_) are copied
};

// A bound that, by a sample of the row, more than n scores exceed: by one step of groups of four that lie evenly apart.
template <int kThreads>
__device__ Candidate bound_of_sample(Selection<kThreads>& best, const RowScores& row, std::int64_t size, int rank) {
  best.start(rank, kAll);
  const auto apart = static_cast<std::uint32_t>(4 * (size / Selection<kThreads>::kStep));
  best.template offer<ScoreGroup>(0, 1, [&](std::uint32_t, ScoreGroup(&groups)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) groups[i] = row.group(apart * (i * kThreads + threadIdx.x));
  });
  best.raise_low(rank + rank / 8);
  // Scores equal to the bound count, and there is an order between those of -0 and the number before that has no score.
  return max(kAll, Candidate{order_of(best.low()) - 2} << 32);
}

// Selects from the scores [begin, end) of a row, and leaves up to `most`: those above a bound that a sample of the row
// gives, if that leaves n, or all. Returns the bound.
template <int kThreads>
__device__ Candidate select_scores(Selection<kThreads>& best, Ahead<kThreads>& ahead, const SelectTopkParams& p,
                                   const Launch& launch, std::int64_t row, std::int64_t begin, std::int64_t end,
                                   int most, int rank) {
  const RowScores scores(p, row, begin, end);
  Candidate bound = kAll;
  for (;;) {
    Scan<kThreads> scan(scores, ahead);
    if (rank) bound = bound_of_sample(best, RowScores(p, row, 0, p.sk), p.sk, rank);
    best.start(launch.n, bound);
    scan.offer_to(best);
    best.prune(most);
    if (end - begin < p.sk || bound == kAll || best.count() >= launch.n) return bound;
    bound = kAll, rank = 0;
  }
}

template <int kThreads>
__device__ void store_sorted(const SelectTopkParams& p, const Launch& launch, std::int64_t row,
                             Selection<kThreads> best) {
  std::int32_t* const indices = p.indices + row_offset(p, p.indices_stride, row);
  if constexpr (kThreads == kBlock)
    if (launch.size > kSegment && best.store_by_bins(indices, p.indices_stride.d, p.n)) return;
  best.prune(launch.size);
  best.sort(launch.size);
  for (std::int64_t i = threadIdx.x; i < p.n; i += kThreads)
    indices[i * p.indices_stride.d] = i < best.count() ? position_of(best[i]) : -1;
}

// A thread block's shared memory, before the candidates.
template <int kThreads>
struct BlockShared {
  Ahead<kThreads> ahead;
  typename Selection<kThreads>::Shared selection;
};
template <int kThreads>
__device__ BlockShared<kThreads>& block_shared() {
  extern __shared__ __align__(16) std::byte memory[];
  return *reinterpret_cast<BlockShared<kThreads>*>(memory);
}
template <int kThreads>
__device__ Selection<kThreads> selection_in(BlockShared<kThreads>& shared, const Launch& launch) {
  return {shared.selection, reinterpret_cast<Candidate*>(&shared + 1), launch.capacity};
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocksHeld<kThreads>)
    select_topk(const __grid_constant__ SelectTopkParams p, const __grid_constant__ Launch launch, Candidate* lists,
                Part* made) {
  launch_dependent_grids();
  auto& shared = block_shared<kThreads>();
  Selection<kThreads> best = selection_in(shared, launch);
  const std::int64_t parts = p.b * p.h * p.s * launch.splits, width = round_up(ceil_div(p.sk, launch.splits), 4);
  for (std::int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    const std::int64_t row = part / launch.splits, begin = part % launch.splits * width;
    const Candidate bound =
        select_scores(best, shared.ahead, p, launch, row, begin, min(begin + width, p.sk), launch.list, launch.rank);
    if (launch.splits == 1) {
      store_sorted(p, launch, row, best);
      continue;
    }
    for (int i = threadIdx.x; i < best.count(); i += kThreads) lists[part * launch.list + i] = best[i];
    if (threadIdx.x == 0) made[part] = {best.count(), bound != kAll};
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocksHeld<kThreads>)
    merge_lists(const __grid_constant__ SelectTopkParams p, const __grid_constant__ Launch launch,
                const Candidate* lists, const Part* made) {
  wait_on_dependent_grids();
  auto& shared = block_shared<kThreads>();
  Selection<kThreads> best = selection_in(shared, launch);
  int* const ends = best.scratch();  // of the parts' candidates, one after another
  for (std::int64_t row = blockIdx.x; row < p.b * p.h * p.s; row += gridDim.x) {
    const int lane = threadIdx.x % 32;
    const Part part = lane < launch.splits ? made[row * launch.splits + lane] : Part{};
    const int so_far = sum_so_far(part.count), count = __shfl_sync(~0u, so_far, 31);
    const bool bounded = __shfl_sync(~0u, part.bounded, 0);
    if (bounded && count < launch.n) {
      select_scores(best, shared.ahead, p, launch, row, 0, p.sk, launch.list, 0);
    } else {
      best.start(launch.n, kAll);
      if (threadIdx.x < 32) ends[lane] = so_far;
      __syncthreads();
      const auto load = [&](int at) {
        ListGroup group;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = at + i * kThreads;
          int list = 0;  // whose candidates end behind j
          for (int half = kMaxSplits / 2; half > 0; half /= 2) list += j >= ends[list + half - 1] ? half : 0;
          group.candidate[i] =
              j < count ? lists[(row * launch.splits + list) * launch.list + j - (list ? ends[list - 1] : 0)] : 0;
        }
        return group;
      };
      constexpr int kStep = Selection<kThreads>::kStep;
      best.template offer<ListGroup>(0, (count + kStep - 1) / kStep, [&](std::uint32_t step, ListGroup(&groups)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          groups[i] = load(static_cast<int>(step) * kStep + 4 * i * kThreads + static_cast<int>(threadIdx.x));
      });
    }
    store_sorted(p, launch, row, best);
  }
}

// A stable radix sort of whole rows, by 8 bits of the order at a time; between them the workspace has the row twice.
constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32, kDigits = 256;

__global__ void __launch_bounds__(kSortThreads)
    sort_rows(const __grid_constant__ SelectTopkParams p, Candidate* workspace) {
  __shared__ std::uint32_t starts[kDigits], places[kSortWarps][kDigits];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Candidate* const buffers = workspace + blockIdx.x * 2 * p.sk;
  for (std::int64_t row = blockIdx.x; row < p.b * p.h * p.s; row += gridDim.x) {
    const float* const scores = p.scores + row_offset(p, p.scores_stride, row);
    std::int32_t* const indices = p.indices + row_offset(p, p.indices_stride, row);
    for (int pass = 0; pass < 4; ++pass) {
      const Candidate* const from = buffers + (pass % 2 ? 0 : p.sk);
      Candidate* const to = buffers + (pass % 2 ? p.sk : 0);
      const auto read = [&](std::int64_t i) {
        return pass == 0 ? candidate_of(scores[i * p.scores_stride.d], static_cast<std::uint32_t>(i)) : from[i];
      };
      const auto digit_of = [&](Candidate c) { return ~order_of(c) >> 8 * pass & (kDigits - 1); };
      if (threadIdx.x < kDigits) starts[threadIdx.x] = 0;
      __syncthreads();
      for (std::int64_t i = threadIdx.x; i < p.sk; i += kSortThreads) atomicAdd(&starts[digit_of(read(i))], 1);
      __syncthreads();
      if (threadIdx.x == 0)
        for (std::uint32_t digit = 0, start = 0; digit < kDigits; ++digit) {
          const std::uint32_t size = starts[digit];
          starts[digit] = start, start += size;
        }
      for (std::int64_t i = threadIdx.x; i < round_up(p.sk, kSortThreads); i += kSortThreads) {
        for (int digit = lane; digit < kDigits; digit += 32) places[warp][digit] = 0;
        __syncwarp();
        const Candidate c = i < p.sk ? read(i) : 0;
        const std::uint32_t digit = i < p.sk ? digit_of(c) : kDigits;
        const unsigned peers = __match_any_sync(~0u, digit);
        const int before = __popc(peers & ((1u << lane) - 1));
        if (before == 0 && i < p.sk) places[warp][digit] = __popc(peers);
        __syncthreads();
        if (threadIdx.x < kDigits) {
          std::uint32_t place = starts[threadIdx.x];
          for (auto& of_warp : places) {
            const std::uint32_t size = of_warp[threadIdx.x];
            of_warp[threadIdx.x] = place, place += size;
          }
          starts[threadIdx.x] = place;
        }
        __syncthreads();
        if (i < p.sk) {
          const std::uint32_t place = places[warp][digit] + before;
          if (pass < 3) to[place] = c;
          else if (place < p.n) indices[place * p.indices_stride.d] = order_of(c) > kHidden ? position_of(c) : -1;
        }
        __syncwarp();
      }
      __syncthreads();
    }
    for (std::int64_t i = p.sk + threadIdx.x; i < p.n; i += kSortThreads) indices[i * p.indices_stride.d] = -1;
  }
}

// The sizes of a call, and how its rows are selected; no capacity: by sorting them.
template <int kThreads>
Launch launch_of(const SelectTopkParams& p) {
  using Block = Selection<kThreads>;
  Launch made{};
  made.n = static_cast<int>(std::min<std::int64_t>(std::min(p.n, p.sk), 1 << 20));
  made.size = kSegment;
  while (made.size < made.n) made.size *= 2;
  // Candidates that a thread block has room for, alone and where a multiprocessor holds two.
  const auto room = [](int blocks) {
    constexpr int kReserved = 1024;  // bytes of each block that CUDA uses
    const int bytes = (max_shared_bytes() + kReserved) / blocks - kReserved;
    return (bytes - static_cast<int>(sizeof(BlockShared<kThreads>))) / static_cast<int>(sizeof(Candidate));
  };
  const int least = std::max(made.size, Block::kStep + made.n + made.n / 4 + 32);
  if (least > room(1)) return made;
  made.capacity = least, made.list = std::min(2 * made.n + 128, least - Block::kStep);
  // Bins take the n largest once more, beside the candidates. A larger n is sorted in place.
  const int with_bins = 3 * made.n + 256;
  if (kThreads == kBlock && made.n <= 4096 && with_bins <= room(1)) {
    const int for_two = room(2) >= made.n / 2 * 5 + 256 ? std::min(room(2), with_bins) : with_bins;
    made.capacity = std::max(least, for_two);
    made.list = std::min(2 * made.n + 128, made.capacity - std::max(Block::kStep, made.n + Block::kMaxBin));
  }
  const std::int64_t rows = at_least_1(p.b * p.h * p.s);
  made.splits = 1;
  if (kThreads == kBlock && p.sk >= 4 * made.n)
    made.splits = static_cast<int>(
        std::clamp<std::int64_t>(std::min(2 * multiprocessors() / rows, p.sk / kSplitScores), 1, kMaxSplits));
  if (p.sk >= 4 * std::max(Block::kStep, made.n)) {
    // The rank that the n-th largest has in the sample on average, and three and a half standard deviations.
    const double expected = static_cast<double>(made.n) * Block::kStep / static_cast<double>(p.sk);
    made.rank = static_cast<int>(expected + 3.5 * std::sqrt(expected)) + 4;
  }
  return made;
}

template <int kThreads>
cudaError_t launch_selection(const SelectTopkParams& p, const Launch& launch, std::byte* workspace,
                             cudaStream_t stream) {
  const std::int64_t rows = p.b * p.h * p.s, parts = rows * launch.splits;
  constexpr std::int64_t kMaxBlocks = 1 << 20;
  const auto blocks = [&](std::int64_t items) { return static_cast<unsigned>(std::min(items, kMaxBlocks)); };
  const std::size_t bytes =
      sizeof(BlockShared<kThreads>) + static_cast<std::size_t>(launch.capacity) * sizeof(Candidate);
  auto* const lists = reinterpret_cast<Candidate*>(workspace);
  auto* const made = reinterpret_cast<Part*>(lists + parts * launch.list);
  const cudaError_t status =
      launch_kernel(false, select_topk<kThreads>, blocks(parts), kThreads, bytes, stream, p, launch, lists, made);
  if (launch.splits == 1 || status != cudaSuccess) return status;
  return launch_kernel(true, merge_lists<kThreads>, blocks(rows), kThreads, bytes, stream, p, launch, lists, made);
}

// A warp for a row: of many rows, which need not be short if few are selected of each.
bool selects_by_warps(const SelectTopkParams& p) {
  const std::int64_t blocks = p.b * p.h * p.s / multiprocessors();
  return std::min(p.n, p.sk) <= 512 && (p.sk <= 2048 ? blocks >= 4 : p.sk <= 8192 && blocks >= 16);
}
std::int64_t sorted_at_once(const SelectTopkParams& p) {
  return std::min<std::int64_t>(p.b * p.h * p.s, multiprocessors());
}

}  // namespace

bool select_topk_needs_workspace(const SelectTopkParams& p) {
  return launch_of<kBlock>(p).splits != 1 && !selects_by_warps(p);
}

std::size_t select_topk_workspace(const SelectTopkParams& p) {
  const Launch launch = launch_of<kBlock>(p);
  if (launch.capacity == 0) return static_cast<std::size_t>(sorted_at_once(p) * 2 * p.sk) * sizeof(Candidate);
  if (p.sk < std::max(2 * kSplitScores, std::int64_t{4} * launch.n)) return 0;
  // As many parts as rows can have; fewer rows have no more.
  const std::int64_t parts = std::min<std::int64_t>(p.b * p.h * p.s * kMaxSplits, 2 * multiprocessors());
  return static_cast<std::size_t>(round_up(parts * (launch.list * sizeof(Candidate) + sizeof(Part)), 16));
}

cudaError_t launch_select_topk(const SelectTopkParams& p, std::byte* workspace, cudaStream_t stream) {
  if (selects_by_warps(p)) return launch_selection<32>(p, launch_of<32>(p), workspace, stream);
  const Launch launch = launch_of<kBlock>(p);
  if (launch.capacity > 0) return launch_selection<kBlock>(p, launch, workspace, stream);
  return launch_kernel(false, sort_rows, static_cast<unsigned>(sorted_at_once(p)), kSortThreads, 0, stream, p,
                       reinterpret_cast<Candidate*>(workspace));
}

}  // namespace rapt::cuda
