// attention_latent's sizes, the parameters of its launches, and a thread block's keys and shared memory: a ring of two
// places for key blocks, which latent_load.cuh fills and latent_softmax.cuh empties, and what its warps exchange.
#pragma once

#include "cuda/hopper/split_block.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

constexpr int kRows = kLatentRows, kKeys = kLatentKeys;
constexpr int kPanels = 9, kLeftPanels = 4;  // the panels of a part
constexpr int kPanelBytes = kKeys * 128;
constexpr int kThreads = 384, kMathWarps = 8, kMathThreads = 32 * kMathWarps;
constexpr int kLoadRegisters = 72, kMathRegisters = 216;
constexpr int kBlockBytes = kPanels * kPanelBytes;
constexpr int kSharedBytes = 3 * kBlockBytes + kPanelBytes + 1024;  // Q, the ring of two key blocks, P
constexpr float kRescaleThreshold = 8;                              // lazy rescaling, as in attention_prefill
constexpr int kOutPitch = (kLatentMaxValueHeadDim + 8) * 4;         // bytes; neighbouring rows lie in other banks
static_assert(kRows * kOutPitch <= 2 * kBlockBytes, "O is left where keys were");
static_assert(kLoadRegisters + 2 * kMathRegisters <= 3 * (65536 / kThreads / 8 * 8),
              "or warpgroups wait for registers for ever: there are no more than the launch took");

constexpr int kMaxCluster = 2;  // thread blocks
constexpr int kMinKeys = 256;   // the fewest keys of a thread block, unless its cluster has fewer
// Named barriers: of each math warpgroup; of the weights for each; of all math threads.
constexpr int kGroupBarrier = 1, kWeightsBarrier = 3, kMathBarrier = 5;

struct LatentParams {
  AttentionParams p;
  PartialResults partials;
  SplitGrid grid;
  CUtensorMap q, k, v;
  Divisor cluster_size, page_size;  // thread blocks; keys of a page
  int box;                          // keys of a tensor map's box; 0: threads load keys
  bool separate_values;             // values are not columns of keys
  bool q_by_tma;
  bool modified, keep_in_l2;             // keep_in_l2: several tiles of rows read the same keys
  bool q_vector, kv_vector, out_vector;  // rows are aligned to 16 bytes, and contiguous
  bool writes_output;   // every sequence has one split, and results go to out instead of partial results
  bool from_registers;  // they go there from registers, as a thread block has all keys of its rows
};

// A thread block's share of its cluster's split, in keys counted from the split's first. Where the split is cut depends
// on how many keys it has, not on which of them rows see: else a row's bits would depend on the other rows of its tile.
struct LatentShare {
  int sharers;                // thread blocks of the cluster that have keys; at least one
  int first = 0, blocks = 0;  // the first key of its key blocks, and their number
  int end = 0;                // the end of the keys that any row sees

  __device__ LatentShare(const SplitBlock& block, int cluster, int rank) {
    const int even = (block.keys + cluster - 1) / cluster;
    const int size = max((even + kKeys - 1) / kKeys * kKeys, kMinKeys);
    sharers = max((block.keys + size - 1) / size, 1);
    const int begin = max(block.begin, size * rank);
    end = min(block.end, size * (rank + 1));
    if (end <= begin) return;
    first = begin / kKeys * kKeys, blocks = (end - first + kKeys - 1) / kKeys;
  }
  // The first key of the i-th block; blocks go from the last to the first.
  __device__ int key_of(int i) const { return first + (blocks - 1 - i) * kKeys; }
  // The warpgroup that has block i. It depends on the block's place in the sequence: else the order of a row's sums
  // would depend on other rows.
  __device__ int warpgroup_of(int i) const { return key_of(i) / kKeys % 2; }
};

// A place of the ring is filled in four parts of its columns, so that products begin with the first part.
constexpr int kParts = 4;
__host__ __device__ constexpr int part_begin(int part) {  // panels
  return 2 * part;
}
__host__ __device__ constexpr int part_end(int part) {
  return part == kParts - 1 ? kPanels : 2 * part + 2;
}
constexpr int kBarriers = 2 * (kParts + 2) + 1;

// The ring of two places for blocks of keys or values: the n-th block is in place n % 2. Each part has a full barrier;
// a place is emptied in halves, since each math warpgroup multiplies one half of the values. kByTma: TMA fills it; else
// threads do.
template <bool kByTma>
struct LatentRing {
  std::uint32_t barriers, data;

  __device__ std::uint32_t q_full() const { return barriers + (kBarriers - 1) * 8; }
  __device__ std::uint32_t slot(int n) const { return data + n % 2 * kBlockBytes; }
  __device__ std::uint32_t full(int n, int part) const { return barriers + (n % 2 * (kParts + 2) + part) * 8; }
  __device__ std::uint32_t empty(int n, int half) const { return full(n, kParts + half); }
  __device__ void wait_full(int n, int part) const {
    barrier_wait(full(n, part), n / 2 % 2);
    if constexpr (!kByTma) fence_async_proxy();  // by the readers: the writers do not wait for their copies
  }
  __device__ void wait_empty(int n, int half) const { barrier_wait(empty(n, half), n / 2 % 2 ^ 1); }
  __device__ void wait_full_half(int n, int half) const { wait_full(n, 2 * half), wait_full(n, 2 * half + 1); }
  // Called by whole warps that have read it; one lane arrives.
  __device__ void release(int n, int half) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(n, half));
  }
};

// What the math warps exchange.
struct LatentShared {
  std::uint64_t barriers[kBarriers];
  SplitRows<kRows> rows;
  float row_max[kRows];           // of the last block whose weights are in shared memory
  float row_sum[2][kRows];        // each warpgroup's, at the end
  unsigned fallback[kRows / 32];  // a bit for each row that falls back
};
static_assert(kSharedBytes + sizeof(LatentShared) <= 227 * 1024, "a thread block has no more");
// What a thread block leaves for its cluster, in the place of Q, beside O in the place of keys: row_max and row_sum of
// its own rows. And, for the rows that it merges: the factor of each thread block's O, and what turns the sum into
// results.
struct LatentResults {
  float row_max[kRows], row_sum[kRows];
  float factor[kRows][kMaxCluster], top[kRows], sum[kRows], root_scale[kRows], output_scale[kRows];
  std::int64_t out[kRows];
};

}  // namespace rapt::cuda
