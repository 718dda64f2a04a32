// attention_decode_same_keys: attention_decode, with the same bits, for calls in which all rows of a sequence see the
// same keys, but for a mask and a bias that they share (takes_same_keys() has the whole condition). A thread block
// finds its keys with fewer instructions and, where all sequences see the same keys, may go over several splits in
// turn.
#pragma once

#include "cuda/hopper/key_modifiers.cuh"
#include "cuda/kernels/decode_kernel.cuh"

namespace rapt::cuda {

// A thread block's splits: `split` and those after it, splits / blocks of them or one more. Where sequences may be
// shorter than the largest, blocks without splits come last in the grid; otherwise some multiprocessors would get
// several blocks with splits and others none.
template <class C>
struct SameKeysBlock {
  struct {
    std::uint32_t b, hk, q_first;
  } head;
  const DecodeParams& params;
  int split, row_begin, row_count;
  int keys, splits;         // keys of a split; splits of the sequence
  int begin, end;           // keys that rows see, counted from the first key of `split`
  std::uint32_t first_row;  // row of that key in its sequence
  bool exists;

  // The grid: `blocks` thread blocks for each tile of rows of a sequence and kv head.
  static dim3 grid(unsigned blocks, unsigned tiles, unsigned hk, unsigned b) {
    return C::kDense ? dim3(blocks * tiles, hk, b) : dim3(hk * tiles, b, blocks);
  }
  static dim3 cluster(unsigned blocks, unsigned tiles) {
    return C::kDense ? dim3(blocks * tiles) : dim3(tiles, 1, blocks);
  }

  __device__ explicit SameKeysBlock(const DecodeParams& params) : params(params), row_count(params.rows) {
    const SplitGrid& grid = params.grid;
    const unsigned number = grid.tiles.quotient(blockIdx.x);
    row_begin = static_cast<int>(grid.tiles.remainder(blockIdx.x)) * C::kRows;
    if constexpr (C::kDense) head = {blockIdx.z, blockIdx.y, 0};
    else head = {blockIdx.y, number, 0};
    const int block = static_cast<int>(C::kDense ? number : blockIdx.z);
    if (C::kDense || grid.same_keys) {
      keys = grid.keys, splits = params.splits;
      find_keys(block, grid.start, grid.all_keys, grid.hidden);
    } else {
      const Sequence sequence = sequence_of(params.p, params.p, head.b);
      const SplitKeys all(params.p, sequence, params.partials.rule);
      keys = all.keys, splits = all.count;
      find_keys(block, all.first, max(static_cast<int>(all.last - all.first), 0),
                static_cast<int>(visible_keys(params.p.score, sequence).first - all.first));
    }
  }

  struct Row {
    std::uint32_t token, q_head;
  };
  // Row r of the sequence and kv head.
  __device__ Row row(int r) const {
    const Divisor& group = params.grid.group;
    const std::uint32_t token = group.quotient(r);
    return {token, head.hk * group.by + (r - token * group.by)};
  }
  __device__ std::int64_t row_at(const Strides& s, const Row& row) const {
    return head.b * s.b + row.q_head * s.h + row.token * s.s;
  }
  // Where a split stores its partial result of row r.
  __device__ float* partial(int r, int split) const {
    const PartialResults& partials = params.partials;
    const std::int64_t number = head.hk * partials.rows + head.b * partials.sequence_rows + r;
    return partials.data + number * partials.row_floats() + split * partials.floats;
  }
  __device__ RowFinalizer row_end(int r) const {
    const AttentionParams& p = params.p;
    const Row at = row(r);
    return {sink_of(p.score, at.q_head), 0, row_at(p.out_stride, at), p.lse ? row_at(p.lse_stride, at) : 0};
  }

 private:
  // Finds the block's keys: the sequence's rows see `all` keys from key `first` on, but not the first `hidden` of them.
  __device__ void find_keys(int block, std::int64_t first, int all, int hidden) {
    const int blocks = static_cast<int>(params.blocks.by),
              splits_per_block = static_cast<int>(params.blocks.quotient(splits));
    // The remainder goes to the last blocks, as the last split may be short; or to the first blocks, if there are fewer
    // splits than blocks.
    const int remainder = splits - splits_per_block * blocks,
              first_with_extra = splits_per_block > 0 ? blocks - remainder : 0;
    split = block * splits_per_block + max(min(block - first_with_extra, remainder), 0);
    const int count = splits_per_block + (block >= first_with_extra && block < first_with_extra + remainder ? 1 : 0),
              before = keys * split;
    exists = count > 0;
    begin = max(hidden - before, 0), end = min(all - before, keys * count);
    if (end <= begin) begin = end = 0;
    first_row = static_cast<std::uint32_t>(first) + before;
  }
};

// QueryLoader for 16-bit keys: copies queries to shared memory unchanged, in one cp.async group with the ring's first
// tile.
template <class C>
struct QueryCopier {
  __device__ QueryCopier(const DecodeParams& params, const SameKeysBlock<C>& block, std::uint32_t q) {
    constexpr int kChunks = C::kSize / 8, kQueryChunks = C::kRows * kChunks;  // of 16 bytes
    const ShortStrides& s = params.of_queries;
#pragma unroll
    for (int first = 0; first < kQueryChunks; first += kDecodeThreads) {
      const int i = first + static_cast<int>(threadIdx.x), chunk = i % kChunks;
      if (kQueryChunks % kDecodeThreads != 0 && i >= kQueryChunks) break;
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

template <class C>
__global__ void __launch_bounds__(kDecodeThreads, C::kBlocksPerMultiprocessor)
    attention_decode_same_keys(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(512) std::uint8_t shared[];  // aligned to the longest row
  __shared__ DecodeResults<C> results;
  __shared__ float q_sums[C::kIs16Bit ? 1 : C::kSize / kGroupUnit * C::kRows];
  launch_dependent_grids();
  const SameKeysBlock<C> block(params);
  if (!block.exists && !params.combines_in_cluster) return;
  const std::uint32_t rings = shared_address(shared), q = rings + kDecodeWarps * C::kSlots * params.slot_bytes;
  const KvRing<C> ring(params, block, rings);
  // Requested before the keys, or their loads queue behind those.
  const std::conditional_t<C::kIs16Bit, QueryCopier<C>, QueryLoader<C>> queries(params, block, q);
  DecodePipeline<C> steps(ring);
  queries.store();
  __syncthreads();
  if (!C::kIs16Bit && params.k.zeros) {
    sum_queries<C>(q, q_sums);
    __syncthreads();
  }

  unsigned fallback =
      0;  // the warp's fallback rows; recomputed at the end, since a call in the loop would take registers
  const AttentionParams& p = params.p;
  std::conditional_t<C::kModified, KeyModifiers<C::kStepKeys>, NoModifiers> modifiers(
      p.score, block.head.b, block.first_row, steps.key, ring.end);
  int split = block.split, split_end = block.keys;
#pragma unroll 1
  for (bool has_split = block.exists; has_split; ++split, split_end += block.keys) {
    DecodeSoftmax<C> softmax(params, q, q_sums);
    const auto finish_scores = [&](int key) {
      softmax.scale(params.scale_log2);
      const float of_lane = modifiers.next(DecodePipeline<C>::kStride);
      const bool changes = C::kModified && __any_sync(~0u, of_lane != 0);
      if (!changes && key >= ring.begin && key + C::kStepKeys <= ring.end) return;
      for_each_four(softmax.s, [&](int index, float(&four)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int of_step = softmax.key(index / 8 / C::kTiles, e / 2), j = key + of_step;
          if (changes) four[e] = with_modifier(four[e], __shfl_sync(~0u, of_lane, of_step));
          if (j < ring.begin || j >= ring.end) four[e] = -kInfinity;
        }
      });
    };
    const int end = min(split_end, ring.end);
    while (steps.key < end) steps.step(softmax, finish_scores);
    results.store(softmax, block, split, steps.free_slot(), fallback);
    has_split = split_end < ring.end;
  }
  copy_wait<0>();

  const int warp = threadIdx.x / 32, b = static_cast<int>(block.head.b), hk = static_cast<int>(block.head.hk);
  if (params.combines_in_cluster) {
    cluster_sync();
    const Head head(p, b, hk, {0, 0, p.sq, p.sk, 0});
    combine_in_cluster<void, kDecodeMaxHeadDim>(p, params.partials, head, block.splits, warp);
  }
  attend_fallback_rows(p, b, hk, block.row_begin + warp, fallback);
}

}  // namespace rapt::cuda
