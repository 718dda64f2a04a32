// A thread block that does one split of the keys for some rows of a sequence and kv head, and how its warps' results
// are stored.
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/tile/divisor.hpp"
#include "cuda/tile/fallback_rows.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {

// The numbering of thread blocks: first the tiles of rows of a split, which read the same keys; then the splits of a kv
// head, the heads, the sequences.
struct SplitGrid {
  Divisor tiles, splits, heads, group;  // tiles of rows; splits; kv heads; query heads of a kv head
  unsigned blocks = 0;
  // Whether all rows of all sequences see the same keys, so that no thread block works out its own. The first split
  // starts at key `start`; from there on are `all_keys` keys, of which the first `hidden` are not seen, and `keys` keys
  // to a split.
  bool same_keys = false;
  int keys = 0, all_keys = 0, hidden = 0;
  std::int64_t start = 0;

  SplitGrid() = default;
  SplitGrid(const AttentionParams& p, const PartialResults& partials, std::int64_t tiles)
      : tiles(tiles),
        splits(partials.splits),
        heads(p.hk),
        group(p.group),
        blocks(static_cast<unsigned>(partials.sequences * p.hk * partials.splits * tiles)) {
    if (!are_alike(p) || p.sq == 0 || p.sq > p.score.modifier_rows) return;
    const Sequence s = sequence_of(p, p, 0);
    const auto seen = [&](std::int64_t token) {
      return visible_keys(p.score, token, token + row_offset(p.score, s), s.oldest, s.len_k);
    };
    const KeyRange of_first = seen(0), of_last = seen(s.len_q - 1);  // neither end moves down from row to row
    if (of_first.first != of_last.first || of_first.last != of_last.last) return;
    const SplitKeys all(p, s, partials.rule);
    same_keys = true, keys = all.keys, start = all.first;
    all_keys = static_cast<int>(std::max<std::int64_t>(all.last - start, 0));
    hidden = static_cast<int>(of_first.first - start);
  }
};

// A thread block's split and rows.
struct SplitBlock {
  const SplitGrid& grid;
  Head head;
  int split, row_begin = 0, row_count;  // its first row, and the rows of the sequence and kv head
  std::int64_t first_key = 0;           // the split's first key
  int keys = 0;                         // keys of the split
  int begin = 0, end = 0;               // keys that any of the block's rows sees, counted from first_key
  bool exists = false;

  // Each block has `rows` rows, or rows_of(rows of the sequence and kv head). `number` is the block's number, or the
  // cluster's where each cluster counts as a block.
  template <class RowsOf>
  __device__ SplitBlock(const AttentionParams& p, const PartialResults& partials, const SplitGrid& grid, RowsOf rows_of,
                        unsigned number = blockIdx.x)
      : SplitBlock(grid, head_of(p, partials, grid, grid.tiles.quotient(number)),
                   grid.splits.remainder(grid.tiles.quotient(number))) {
    const int rows = rows_of(row_count);
    row_begin = static_cast<int>(grid.tiles.remainder(number)) * rows;
    if (row_begin < row_count) find_keys(partials, rows);
  }
  __device__ SplitBlock(const AttentionParams& p, const PartialResults& partials, const SplitGrid& grid, int rows,
                        unsigned number = blockIdx.x)
      : SplitBlock(
            p, partials, grid, [rows](int) { return rows; }, number) {}

  // Row r of the sequence and kv head: a pair of token and head of the group.
  __device__ Row row(int r) const {
    const unsigned number = static_cast<unsigned>(r), first = static_cast<unsigned>(head.hk) * grid.group.by;
    return Row(head, grid.group.quotient(number), first + grid.group.remainder(number));
  }

 private:
  __device__ SplitBlock(const SplitGrid& grid, const Head& head, unsigned split)
      : grid(grid), head(head), split(static_cast<int>(split)), row_count(decode_rows(head)) {}
  __device__ static Head head_of(const AttentionParams& p, const PartialResults& partials, const SplitGrid& grid,
                                 unsigned split_number) {
    const unsigned number = grid.splits.quotient(split_number);
    return Head(p, partials.first + grid.heads.quotient(number), grid.heads.remainder(number));
  }

  __device__ void find_keys(const PartialResults& partials, int rows) {
    if (grid.same_keys) {
      const int before = grid.keys * split;
      first_key = grid.start + before;
      exists = split == 0 || before < grid.all_keys;
      keys = end = min(grid.all_keys - before, grid.keys);
      begin = max(grid.hidden - before, 0);
    } else {
      find_keys_of_rows(SplitKeys(head, partials.rule), rows);
    }
    if (end <= begin) begin = end = 0;  // no key is read, as `begin` may lie past the last
  }
  __device__ void find_keys_of_rows(const SplitKeys& all, int rows) {
    first_key = all.first + std::int64_t{all.keys} * split;
    exists = split == 0 || first_key < all.last;
    if (!exists) return;
    keys = static_cast<int>(clamp_to(all.last - first_key, 0, all.keys));
    // Neither end moves down from row to row, but rows past the mask's last see nothing.
    const Row top = row(row_begin), bottom = row(min(row_begin + rows, row_count) - 1);
    const std::int64_t last_token = min(bottom.token + 1, head.p.score.modifier_rows) - 1;
    begin = static_cast<int>(clamp_to(top.first - first_key, 0, keys));
    if (last_token >= top.token) end = static_cast<int>(clamp_to(Row(head, last_token, 0).last - first_key, 0, keys));
  }
};

// The keys that the block's rows see of its split, counted from first_key.
template <int kCount>
struct SplitRows {
  int token[kCount], q_head[kCount], from[kCount], to[kCount];

  // Called by one thread for each row. Rows past the last one see what it sees, so that they cause no masking.
  __device__ void find(const SplitBlock& block, unsigned thread = threadIdx.x) {
    const int i = static_cast<int>(thread);
    if (i >= kCount) return;
    const Row row = block.row(min(block.row_begin + i, block.row_count - 1));
    token[i] = static_cast<int>(row.token), q_head[i] = static_cast<int>(row.q_head);
    if (block.grid.same_keys) {
      from[i] = block.begin, to[i] = block.end;
    } else {
      from[i] = static_cast<int>(clamp_to(row.first - block.first_key, 0, block.keys));
      to[i] = static_cast<int>(clamp_to(row.last - block.first_key, 0, block.keys));
    }
  }
  // Row i's offset.
  __device__ std::int64_t row_at(const Head& head, int i, const Strides& s) const {
    return head.b * s.b + q_head[i] * s.h + (head.q_first + token[i]) * s.s;
  }
  __device__ float finish(const Head& head, int i, std::int64_t key, float score) const {
    // finish_score() takes references, for which these would be kept in memory all the time: so it gets copies.
    const Head copy = head;
    Row row;
    row.token = token[i], row.q_head = q_head[i];
    return finish_score(copy, row, key, score);
  }
};

// Each warp's results of its kRows rows: row_max and row_sum here, O in shared memory.
template <int kWarps, int kRows>
struct WarpResults {
  alignas(16) float row_max[kRows][kWarps];
  alignas(16) float row_sum[kRows][kWarps];
  struct {
    float root_scale, output_scale;
    bool trusted;
  } finish[kWarps * kRows];  // of rows whose sequence has one split

  // Stores partial results of the split, or results if no sequence's keys are split. Warps `step` apart share rows.
  // Warp w's O begins at out + w * warp_stride, in rows of `width` floats; both are multiples of 4.
  __device__ __forceinline__ void store(const SplitBlock& block, const PartialResults& partials, bool writes_output,
                                        int step, const float* out, int width, int warp_stride) {
    const Sums sums{*this, step, out, width, warp_stride};
    const int rows = min(step * kRows, block.row_count - block.row_begin);
    if (writes_output) finish_rows(block, sums, rows);
    else store_partials(block, partials, sums, rows);
  }

 private:
  struct Sums {
    const WarpResults& of_warps;
    const int step;
    const float* const out;
    const int width, warp_stride;

    // The first warp that has the block's row r, and the row's number there.
    __device__ int first(int r) const { return step == 1 ? 0 : r / kRows; }
    __device__ int row(int r) const { return step == 1 ? r : r % kRows; }
    // The largest row_max; each warp's row_sum and O are multiplied by factor().
    __device__ float top(int r) const {
      float top = -kInfinity;
      for (int w = first(r); w < kWarps; w += step) top = fmaxf(top, of_warps.row_max[row(r)][w]);
      return top;
    }
    __device__ float factor(int r, int w, float top) const { return rescale_factor(of_warps.row_max[row(r)][w], top); }
    __device__ float row_sum(int r, float top) const {
      float sum = 0;
      for (int w = first(r); w < kWarps; w += step) sum = fmaf(of_warps.row_sum[row(r)][w], factor(r, w, top), sum);
      return sum;
    }
    __device__ float4 columns(int r, float top, int column) const {
      float4 sum = make_float4(0, 0, 0, 0);
      for (int w = first(r); w < kWarps; w += step) {
        const float4 x = *reinterpret_cast<const float4*>(out + w * warp_stride + row(r) * width + column);
        const float f = factor(r, w, top);
        const auto add = [&](float sum, float x) { return __fadd_rn(sum, __fmul_rn(x, f)); };
        sum = make_float4(add(sum.x, x.x), add(sum.y, x.y), add(sum.z, x.z), add(sum.w, x.w));
      }
      return sum;
    }
  };

  __device__ __forceinline__ void store_partials(const SplitBlock& block, const PartialResults& partials,
                                                 const Sums& sums, int rows) const {
    const int stats_offset = static_cast<int>(PartialResults::stats_offset(block.head.p));
    float* const partial = partials.at(block.head, block.row_begin, block.split);
    const unsigned next_row = partials.row_floats();
    for (int r = threadIdx.x; r < rows; r += 32 * kWarps) {
      const float top = sums.top(r);
      *reinterpret_cast<float2*>(partial + r * next_row + stats_offset) = make_float2(top, sums.row_sum(r, top));
    }
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < rows; r += kWarps)
#pragma unroll 1
      for (int column = threadIdx.x % 32 * 4; column < stats_offset; column += 128)
        keep16(partial + r * next_row + column, sums.columns(r, sums.top(r), column));
  }

  // The same bits as attention_combine makes of a single split.
  __device__ __forceinline__ void finish_rows(const SplitBlock& block, const Sums& sums, int rows) {
    const Head& head = block.head;
    const AttentionParams& p = head.p;
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x; r < rows; r += 32 * kWarps) {
      const Row row = block.row(block.row_begin + r);
      const float all = sums.top(r), total_sum = sums.row_sum(r, all);
      const FinalizedRow f = finalize_row(all, total_sum, sink_of(head, row), alibi_shift_log2(head, row));
      const bool trusted = (all == -kInfinity || fabsf(all) < kHugeScore) && is_finite(total_sum);
      finish[r] = {f.root_scale, f.sum == 0 ? 0.f : 1 / f.sum, trusted};
      if (p.lse) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
    }
    __syncthreads();
    unsigned fallback = 0;  // recomputed at the end: a call in the loop would take registers
    for (int r = threadIdx.x / 32, i = 0; r < rows; r += kWarps, ++i) {
      const std::int64_t out = row_at(p.out_stride, head, block.row(block.row_begin + r));
      const auto [root_scale, output_scale, trusted] = finish[r];
      bool falls_back = !trusted;
      for (int column = 4 * lane; column < p.dv; column += 128) {
        const float4 four = sums.columns(r, sums.top(r), column);
        for (int n = 0; n < 4 && column + n < p.dv; ++n) {
          const float x = n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
          falls_back |= !is_finite(x);
          cuda::store(p.out, p.out_type, out + (column + n) * p.out_stride.d,
                      output_scale == 0 ? 0.f : x * root_scale * root_scale * output_scale);
        }
      }
      if (__any_sync(~0u, falls_back)) fallback |= 1u << i;
    }
    __syncwarp();
#pragma unroll 1
    for (int r = threadIdx.x / 32; fallback != 0; r += kWarps, fallback >>= 1)
      if (fallback & 1)
        recompute_rows<void, kDecodeMaxHeadDim, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk),
                                                      block.row_begin + r, 1);
  }
};

}  // namespace rapt::cuda
