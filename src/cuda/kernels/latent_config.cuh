// What attention_latent is compiled for, what a launch gets, and what a thread block has: its keys, and in shared
// memory the places for them (latent_load.cuh fills these, latent_rows.cuh empties them) and what its warps tell each
// other.
#pragma once

#include "cuda/hopper/split_block.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

constexpr int kRows = kLatentRows, kKeys = kLatentKeys;
constexpr int kPanels = 9, kLeftPanels = 4;  // of 64 columns; those of the left half, the others are the right one's
constexpr int kPanelBytes = kKeys * 128;
constexpr int kThreads = 384, kMathWarps = 8, kMathThreads = 32 * kMathWarps;
constexpr int kLoadRegisters = 72, kMathRegisters = 216;
constexpr int kBlockBytes = kPanels * kPanelBytes;
constexpr int kSharedBytes = 3 * kBlockBytes + kPanelBytes + 1024;  // Q, two places for keys, P
constexpr float kRescaleThreshold = 8;  // a row's maximum moves only when it grows by more, as in attention_prefill
constexpr int kOutPitch = (kLatentMaxValueHeadSize + 8) * 4;  // bytes; rows next to each other meet different banks
static_assert(kRows * kOutPitch <= 2 * kBlockBytes, "O is left where keys were");
static_assert(kLoadRegisters + 2 * kMathRegisters <= 3 * (65536 / kThreads / 8 * 8),
              "or warpgroups wait for registers for ever: there are no more than the launch took");

constexpr int kMaxCluster = 2;  // thread blocks
constexpr int kMinKeys = 256;   // of a thread block, unless its cluster has fewer
// Numbered barriers: of each math warpgroup, of weights for each, of all math threads.
constexpr int kGroupBarrier = 1, kWeightsBarrier = 3, kMathBarrier = 5;

struct LatentParams {
  AttentionParams p;
  PartialResults partials;
  SplitGrid grid;
  CUtensorMap q, k, v;
  Divisor cluster_size, page_size;  // thread blocks; keys
  int box;                          // keys of a tensor map's box; 0: keys are loaded by threads
  bool separate_values;             // values are not columns of keys
  bool q_by_tma;
  bool modified, keep_in_l2;             // keep: keys are read by several tiles of rows
  bool q_vector, kv_vector, out_vector;  // 16 bytes at a time
  bool writes_output;                    // no sequence's keys are split, and results are stored at once
};

// What a thread block of a cluster has of its split, whose keys are counted from the split's first. Where it is cut
// depends on how many these are, not on which of them rows see: or a row's bits would depend on what else is in its
// tile.
struct LatentShare {
  int sharers;                // thread blocks that have keys, or one
  int first = 0, blocks = 0;  // the first key of its blocks, and how many these are
  int end = 0;                // of the keys that any row sees

  __device__ LatentShare(const SplitBlock& block, int cluster, int rank) {
    const int even = (block.keys + cluster - 1) / cluster;
    const int size = max((even + kKeys - 1) / kKeys * kKeys, kMinKeys);
    sharers = max((block.keys + size - 1) / size, 1);
    const int begin = max(block.begin, size * rank);
    end = min(block.end, size * (rank + 1));
    if (end <= begin) return;
    first = begin / kKeys * kKeys, blocks = (end - first + kKeys - 1) / kKeys;
  }
  // Blocks come from the last to the first.
  __device__ int key_of(int i) const { return first + (blocks - 1 - i) * kKeys; }
  // Which warpgroup has block i: by its keys' place in the sequence, or the sums of a row's weights would depend on
  // what other rows see.
  __device__ int warpgroup_of(int i) const { return key_of(i) / kKeys % 2; }
};

// The two places for blocks of keys or values, of which the n-th to come is in place n % 2. It comes in four parts of
// its columns, each with a barrier, so that products begin with the first; and it goes in halves, since of values each
// math warpgroup multiplies one.
struct LatentRing {
  std::uint32_t barriers, data;

  static constexpr int kParts = 4, kBarriers = 2 * (kParts + 2) + 1;
  __host__ __device__ static constexpr int begin(int part) { return 2 * part; }  // panels
  __host__ __device__ static constexpr int end(int part) { return part == kParts - 1 ? kPanels : 2 * part + 2; }

  __device__ std::uint32_t q_full() const { return barriers + (kBarriers - 1) * 8; }
  __device__ std::uint32_t slot(int n) const { return data + n % 2 * kBlockBytes; }
  __device__ std::uint32_t full(int n, int part) const { return barriers + (n % 2 * (kParts + 2) + part) * 8; }
  __device__ std::uint32_t empty(int n, int half) const { return full(n, kParts + half); }
  __device__ void wait_full(int n, int part) const { barrier_wait(full(n, part), n / 2 % 2); }
  __device__ void wait_empty(int n, int half) const { barrier_wait(empty(n, half), n / 2 % 2 ^ 1); }
  __device__ bool is_empty(int n, int half) const { return barrier_is_done(empty(n, half), n / 2 % 2 ^ 1); }
  __device__ void wait_full_half(int n, int half) const { wait_full(n, 2 * half), wait_full(n, 2 * half + 1); }
  // By each warp that has read it.
  __device__ void release(int n, int half) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(n, half));
  }
};

// What the math warps tell each other.
struct LatentShared {
  std::uint64_t barriers[LatentRing::kBarriers];
  SplitRows<kRows> rows;
  float row_max[kRows];     // of the last block whose weights are there
  float row_sum[2][kRows];  // of either warpgroup, at the end
};
// What a thread block leaves for its cluster where Q was, beside O where keys were: first m and l of its own. Then, of
// the rows that it merges, what each thread block's O is multiplied by, and what makes results of the sum.
struct LatentResults {
  float row_max[kRows], row_sum[kRows];
  float factor[kRows][kMaxCluster], top[kRows], sum[kRows], root_scale[kRows], output_scale[kRows];
  std::int64_t out[kRows];
};

}  // namespace rapt::cuda
