// A thread block that goes over one split of a sequence's keys for some of its rows, and what its warps leave.
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {

// Which split and which rows: blocks of one split side by side, as they read the same keys.
struct SplitBlock {
  Head head;
  int split, row_begin, row_count;  // the block's first row, and how many the sequence and kv head have
  std::int64_t first_key = 0;       // of the split
  int keys = 0;                     // of the split
  int begin = 0, end = 0;           // those that any of the block's rows sees, counted from the split's first
  bool exists = false;

  // Of `tiles` blocks for the rows, each has `rows`.
  __device__ SplitBlock(const AttentionParams& p, const Partials& partials, int tiles, int rows)
      : SplitBlock(p, partials, blockIdx.x / static_cast<unsigned>(tiles), blockIdx.x % static_cast<unsigned>(tiles),
                   rows) {}

 private:
  __device__ SplitBlock(const AttentionParams& p, const Partials& partials, unsigned number, unsigned tile, int rows)
      : head(p, number / partials.splits / static_cast<unsigned>(p.hk),
             number / partials.splits % static_cast<unsigned>(p.hk)),
        split(static_cast<int>(number % partials.splits)),
        row_begin(static_cast<int>(tile) * rows),
        row_count(static_cast<int>(p.sq * p.group)) {
    const SplitKeys all(head, partials.max_splits);
    exists = row_begin < row_count && split < all.count;
    if (!exists) return;
    first_key = all.first + std::int64_t{all.keys} * split;
    keys = static_cast<int>(clamp_to(all.last - first_key, 0, all.keys));
    // Neither end moves down from row to row, but rows past the mask's see nothing.
    const Row top = row_of(head, row_begin), bottom = row_of(head, min(row_begin + rows, row_count) - 1);
    const std::int64_t last_token = min(bottom.token + 1, p.score.modifier_rows) - 1;
    begin = static_cast<int>(clamp_to(top.first - first_key, 0, keys));
    if (last_token >= top.token) end = static_cast<int>(clamp_to(Row(head, last_token, 0).last - first_key, 0, keys));
  }
};

// What the block's rows see of its split, whose keys are counted from its first.
template <int kCount>
struct SplitRows {
  int token[kCount], q_head[kCount], from[kCount], to[kCount];

  // By one thread of each row. Rows past the last see what it sees: nothing is masked for them alone.
  __device__ void find(const SplitBlock& block) {
    const int i = threadIdx.x;
    if (i >= kCount) return;
    const Row row = row_of(block.head, min(block.row_begin + i, block.row_count - 1));
    token[i] = static_cast<int>(row.token), q_head[i] = static_cast<int>(row.q_head);
    from[i] = static_cast<int>(clamp_to(row.first - block.first_key, 0, block.keys));
    to[i] = static_cast<int>(clamp_to(row.last - block.first_key, 0, block.keys));
  }
  __device__ float finish(const Head& head, int i, std::int64_t key, float score) const {
    Row row;
    row.token = token[i], row.q_head = q_head[i];
    return finish_score(head, row, key, score);
  }
};

// What each warp leaves of its kRows rows: m and l; and O, relative to the largest m of those that share rows.
template <int kWarps, int kRows>
struct WarpResults {
  float m[kWarps][kRows], l[kWarps][kRows];

  // Of warps `first`, `first` + step, ...
  __device__ float top(int first, int step, int row) const {
    float top = -kInfinity;
    for (int w = first; w < kWarps; w += step) top = fmaxf(top, m[w][row]);
    return top;
  }
  // The split's partial results. Warps `step` apart share rows; of warp w, `out` has rows of `width` from w * apart on.
  __device__ void store(const SplitBlock& block, const Partials& partials, int step, const float* out, int width,
                        int apart) const {
    const AttentionParams& p = block.head.p;
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < step * kRows && block.row_begin + r < block.row_count; r += kWarps) {
      const int first = r / kRows, row = r % kRows;
      float* const partial = partials.at(block.head, block.row_begin + r, block.split);
      for (int column = lane; column < p.dv; column += 32) {
        float sum = 0;
        for (int w = first; w < kWarps; w += step) sum += out[w * apart + row * width + column];
        partial[column] = sum;
      }
      if (lane != 0) continue;
      const float all = top(first, step, row);
      float sum = 0;
      for (int w = first; w < kWarps; w += step) sum = fmaf(l[w][row], exp2_approx(m[w][row] - shift_of(all)), sum);
      partial[Partials::m_at(p)] = all, partial[Partials::m_at(p) + 1] = sum;
    }
  }
};

}  // namespace rapt::cuda
