// split_kv for simple calls (is_dense() says which): all sequences are alike, all their rows see the same keys, rows
// are multiples of 16 bytes, and scores need no more than a scale. Bits are the same. But a thread block knows at once
// where its keys lie, and may go over several splits, one after another.
#pragma once

#include "cuda/kernels/split_kv.cuh"

namespace rapt::cuda {

// A thread block of a grid of (those of a kv head, kv heads, sequences): `params.each` splits, from `split` on.
struct DenseSplitBlock {
  struct {
    std::uint32_t b, hk, q_first;
  } head;
  const SplitKvParams& params;
  int split, row_begin, row_count;
  int begin, end;           // keys that rows see, counted from the first of `split`
  std::uint32_t first_row;  // where that one lies

  __device__ DenseSplitBlock(const SplitKvParams& params, int rows)
      : head{blockIdx.z, blockIdx.y, 0}, params(params), row_count(params.rows) {
    const SplitGrid& grid = params.grid;
    split = static_cast<int>(grid.tiles.quotient(blockIdx.x)) * params.each;
    row_begin = static_cast<int>(grid.tiles.remainder(blockIdx.x)) * rows;
    const int before = grid.keys * split;
    begin = max(grid.hidden - before, 0), end = min(grid.all_keys - before, grid.keys * params.each);
    if (end <= begin) begin = end = 0;
    first_row = static_cast<std::uint32_t>(grid.start) + before;
  }

  struct Row {
    std::uint32_t token, q_head;
  };
  // Row r of the sequence's and kv head's.
  __device__ Row row(int r) const {
    const Divisor& group = params.grid.group;
    const std::uint32_t token = group.quotient(r);
    return {token, head.hk * group.by + (r - token * group.by)};
  }
  __device__ std::int64_t row_at(const Strides& s, const Row& row) const {
    return head.b * s.b + row.q_head * s.h + row.token * s.s;
  }
  // What a split leaves of row r.
  __device__ float* partial(int r, int split) const {
    const Partials& partials = params.partials;
    const std::int64_t number = head.hk * partials.rows + head.b * partials.sequence_rows + r;
    return partials.data + number * partials.row_floats() + split * partials.floats;
  }
};

// QueryLoader for elements of 16 bits, which go to shared memory as they are, in one copy group with the ring's first
// tile.
template <class C>
struct QueryCopier {
  __device__ QueryCopier(const SplitKvParams& params, const DenseSplitBlock& block, std::uint32_t q) {
    constexpr int kChunks = C::kSize / 8, kAll = C::kRows * kChunks;  // of 16 bytes
    const ShortStrides& s = params.of_queries;
#pragma unroll
    for (int first = 0; first < kAll; first += kSplitKvThreads) {
      const int i = first + static_cast<int>(threadIdx.x), chunk = i % kChunks;
      if (kAll % kSplitKvThreads != 0 && i >= kAll) break;
      const auto row = block.row(min(block.row_begin + i / kChunks, block.row_count - 1));
      const std::uint32_t at = block.head.b * s.b + row.q_head * s.h + row.token * s.s;
      const bool exists = 8 * chunk < params.p.d;
      const auto* const from = static_cast<const std::uint8_t*>(params.p.q) + std::uint64_t{at} * 16;
      copy16(q + i / kChunks * C::kQueryPitch + 16 * chunk, exists ? from + 16 * chunk : from, exists ? 16 : 0);
    }
  }
  __device__ void store() const {
    copy_wait<C::kSlots - 1>();
  }
};

// What a thread block's warps have of a split, together.
template <class C>
struct DenseSplitResults {
  // O is staged in the slots of the warps' rings that are free, 8 rows and so many columns at a time.
  static constexpr int kWidth = std::min(C::kSize, C::kTileBytes / (8 * 4)), kPasses = C::kSize / kWidth;
  static_assert(kWidth % 32 == 0);

  alignas(16) float m[C::kRows][kSplitKvWarps];
  alignas(16) float l[C::kRows][kSplitKvWarps];
  std::uint32_t slot[kSplitKvWarps];

  // Partial results; or where a split is the only one, results: then `bad` gets a bit for each of the warp's rows that
  // is a fallback row.
  __device__ __forceinline__ void store(const SplitKvRows<C>& own, const DenseSplitBlock& block, int split,
                                        std::uint32_t free_slot, unsigned& bad) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float sum = own.over_keys(own.l[tile][b], Sum());
        if (lane < 4) m[own.row(tile, b)][warp] = own.m(tile, b, sum), l[own.row(tile, b)][warp] = sum;
      }
    if (lane == 0) slot[warp] = free_slot;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        constexpr int kProducts = kWidth / 16;
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int product = pass * kProducts + i;
            store4(place(free_slot, own.row(0, n % 2), own.column(product, n / 2) - pass * kWidth),
                   __float_as_uint(own.o[product][tile][n]));
          }
        __syncthreads();
#pragma unroll 1
        for (int r = warp; r < 8; r += kSplitKvWarps)
          if (block.row_begin + 8 * tile + r < block.row_count)
            store_row(block, split, 8 * tile + r, pass * kWidth, bad);
        __syncthreads();
      }
  }

 private:
  // Where a row's column lies in a slot. A lane's two rows lie in other banks than its neighbours'.
  __device__ static std::uint32_t place(std::uint32_t slot, int row, int column) {
    return slot + 4 * (row * kWidth + (column ^ row / 2 * 8));
  }
  // kWidth columns from `first` on of the block's row r, by a warp. WarpResults' sums, to the bit.
  __device__ __forceinline__ void store_row(const DenseSplitBlock& block, int split, int r, int first,
                                            unsigned& bad) const {
    const SplitKvParams& params = block.params;
    const AttentionParams& p = params.p;
    const int lane = threadIdx.x % 32, row = block.row_begin + r, dv = static_cast<int>(p.dv);
    RowSums sums = {-kInfinity, 0};
    float factor[kSplitKvWarps];
#pragma unroll
    for (int w = 0; w < kSplitKvWarps; ++w) sums.m = fmaxf(sums.m, m[r][w]);
#pragma unroll
    for (int w = 0; w < kSplitKvWarps; ++w) {
      factor[w] = exp2_approx(m[r][w] - shift_of(sums.m));
      sums.l = fmaf(l[r][w], factor[w], sums.l);
    }
    const auto sum_columns = [&](int column) {
      sums.o = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < kSplitKvWarps; ++w) {
        const float4 x = load16(place(slot[w], r % 8, column - first));
        const auto add = [&](float& sum, float x) { sum = __fadd_rn(sum, __fmul_rn(x, factor[w])); };
        add(sums.o.x, x.x), add(sums.o.y, x.y), add(sums.o.z, x.z), add(sums.o.w, x.w);
      }
    };
    const int end = min(first + kWidth, dv);
    if (params.finishes) {
      const auto at = block.row(row);
      const RowEnd row_end = {sink_of(p.score, at.q_head), 0, block.row_at(p.out_stride, at),
                              p.lse ? block.row_at(p.lse_stride, at) : 0};
      bool good = true;
#pragma unroll 1
      for (int column = first + 4 * lane; column < end; column += 128) {
        sum_columns(column);
        good &= row_end.store(p, sums, column, true);
      }
      if (!__all_sync(~0u, good)) bad |= 1u << r / kSplitKvWarps;
      return;
    }
    float* const to = block.partial(row, split);
#pragma unroll 1
    for (int column = first + 4 * lane; column < end; column += 128) {
      sum_columns(column);
      keep16(to + column, sums.o);
    }
    if (first == 0 && lane < 2)  // their whole sector, so that L2 need not read the rest
      keep16(to + Partials::m_at(p) + 4 * lane,
             lane == 0 ? make_float4(sums.m, sums.l, 0, 0) : make_float4(0, 0, 0, 0));
  }
};

template <class C>
__global__ void __launch_bounds__(kSplitKvThreads, C::kBlocks)
    split_kv_dense(const __grid_constant__ SplitKvParams params) {
  extern __shared__ __align__(512) std::uint8_t shared[];  // aligned as the longest row is
  __shared__ DenseSplitResults<C> results;
  __shared__ float q_sums[C::kPlain ? 1 : C::kSize / kGroupUnit * C::kRows];
  let_next_start();
  const DenseSplitBlock block(params, C::kRows);
  const std::uint32_t rings = shared_address(shared), q = rings + kSplitKvWarps * C::kSlots * params.slot_bytes;
  const KvRing<C> ring(params, block, rings);
  // Before keys, or they come behind these.
  const std::conditional_t<C::kPlain, QueryCopier<C>, QueryLoader<C>> queries(params, block, q);
  SplitKvSteps<C> steps(ring);
  queries.store();
  __syncthreads();
  if (!C::kPlain && params.k.zeros) {
    sum_queries<C>(q, q_sums);
    __syncthreads();
  }

  unsigned bad = 0;  // fallback rows of the warp's, for the end: a call from the loop would take registers
  int split = block.split, split_end = params.grid.keys;
#pragma unroll 1
  for (bool more = true; more; ++split, split_end += params.grid.keys) {
    SplitKvRows<C> own(params, q, q_sums);
    const auto finish_scores = [&](int key) {
      own.scale(params.scale_log2);
      if (key >= ring.begin && key + C::kStepKeys <= ring.end) return;
      for_each_four(own.s, [&](int place, float(&four)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = key + own.key(place / 8 / C::kTiles, e / 2);
          if (j < ring.begin || j >= ring.end) four[e] = -kInfinity;
        }
      });
    };
    const int end = min(split_end, ring.end);
    while (steps.key < end) steps.take(own, finish_scores);
    results.store(own, block, split, steps.free_slot(), bad);
    more = split_end < ring.end;
  }
  copy_wait<0>();

  const AttentionParams& p = params.p;
  const int warp = threadIdx.x / 32, b = static_cast<int>(blockIdx.z), hk = static_cast<int>(blockIdx.y);
  if (params.combines) {
    cluster_sync();
    const Head head(p, b, hk, {0, 0, p.sq, p.sk, 0});
    combine_in_cluster<void, kDecodeMaxHeadSize>(p, params.partials, head, params.splits, warp);
  }
  __syncwarp();  // before the same rows are stored once more
#pragma unroll 1
  for (int r = block.row_begin + warp; bad != 0; r += kSplitKvWarps, bad >>= 1)
    if (bad & 1) attend_rows<void, kDecodeMaxHeadSize, true>(p, b, hk, r, 1);
}

}  // namespace rapt::cuda
