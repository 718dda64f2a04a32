// What index_scores_tiles's producers load: queries and weights of an item, then its blocks of keys. They also store
// the scores of keys that no query sees.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/kernels/index_scores_config.cuh"

namespace rapt::cuda {

// Loads an item's rows of Q by TMA, by one thread; zeros for heads and queries that do not exist.
template <class C>
__device__ void load_queries_by_tma(const IndexTilesParams& params, const IndexItem<C>& item, std::uint32_t to,
                                    std::uint32_t barrier) {
  const int groups = item.token + C::kQueries < item.token_end ? kGroups : 1;
  barrier_arrive_expecting(barrier, groups * C::kQueryBytes);
  for (int group = 0; group < groups; ++group)
#pragma unroll
    for (int panel = 0; panel < C::kD / 64; ++panel)
      tma_load(to + group * C::kQueryBytes + panel * C::kQueryPanel, &params.q, panel * 64, 0,
               static_cast<int>(item.token) + group * C::kQueries, static_cast<int>(item.b), barrier, false);
}

// The same by the producers.
template <class C>
__device__ void load_queries(const IndexTilesParams& params, const IndexItem<C>& item, std::uint32_t to) {
  const IndexScoresParams& p = params.p;
  for (int row = threadIdx.x / 32 * 32; row < kGroups * C::kColumns; row += kProducers) {
    const int own = row + static_cast<int>(threadIdx.x) % 32, head = own % C::kHeads;
    const std::int64_t token = item.token + own / C::kHeads;
    const std::int64_t at = item.b * p.q_stride.b + token * p.q_stride.s + head * p.q_stride.h;
    load_rows<C::kD, 4>(32, to + row / C::kColumns * C::kQueryBytes + row % C::kColumns * 128, C::kQueryPanel, p.q,
                        token < item.token_end && head < p.h ? at : -1, p.q_stride.d, static_cast<int>(p.d),
                        params.q_vector, 0);
  }
}

// The weights of an item's columns, times the scale.
template <class C>
__device__ void load_weights(const IndexScoresParams& p, const IndexItem<C>& item, float* weights) {
  for (int own = threadIdx.x; own < kGroups * C::kColumns; own += kProducers) {
    const int head = own % C::kHeads;
    const std::int64_t token = item.token + own / C::kHeads;
    const bool exists = token < item.token_end && head < p.h;
    const std::int64_t at = item.b * p.weights_stride.b + token * p.weights_stride.s + head * p.weights_stride.h;
    weights[own] = exists ? p.weights[at] * p.scale : 0.f;
  }
}

// Where key `key` of sequence b is. Without branches that lanes take differently, which wgmma would wait for.
struct IndexKeyRow {
  std::int64_t entry, row;

  __device__ __forceinline__ IndexKeyRow(const IndexTilesParams& params, std::int64_t b, int key) : entry(b), row(key) {
    const IndexScoresParams& p = params.p;
    if (p.page_size == 0) return;
    const unsigned page = params.page_size.quotient(key);
    row = key - static_cast<int>(page * params.page_size.by);
    entry = clamp_to(p.pages.element(b * p.pages_stride_b + page * p.pages.stride), 0, p.page_count - 1);
  }
  __device__ std::int64_t at(const Strides& s) const { return entry * s.b + row * s.s; }
};

// The boxes of key blocks, one for each lane of a warp. A box that no query sees is put past the last row of a page:
// TMA writes zeros for it, and its page need not exist.
struct IndexKeyBox {
  int row, entry;

  template <class C>
  __device__ static IndexKeyBox of(const IndexTilesParams& params, const IndexItem<C>& item, int block) {
    const int key = block + static_cast<int>(threadIdx.x) % 32 * params.box;
    if (params.p.page_size > 0 && (key >= item.end || key + params.box <= item.begin))
      return {static_cast<int>(params.page_size.by), 0};
    const IndexKeyRow first(params, item.b, key);
    return {static_cast<int>(first.row), static_cast<int>(first.entry)};
  }
};

constexpr int kWarpKeys = kKeys / (kProducers / 32);  // of a block, that a warp loads by threads

// Rows of codes on their way from memory to a block of bf16, in registers of a warp. Of 8 rows, each pass has the
// 16-byte chunks of a panel: 8 lanes that store together have all banks.
template <class C>
struct IndexCodeRows {
  static constexpr int kChunks = kWarpKeys / 8 * (C::kD / 64);  // of 16 codes; of a lane
  uint4 chunks[kChunks];

  __device__ static int row_of(int i) { return i / (C::kD / 64) * 8 + static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ static int chunk_of(int i) { return i % (C::kD / 64) * 4 + static_cast<int>(threadIdx.x) % 4; }

  // `at`: the offset of row lane % kWarpKeys; negative: it is 0.
  __device__ __forceinline__ void load(const IndexTilesParams& params, std::int64_t at, int i) {
    const IndexScoresParams& p = params.p;
    const int chunk = chunk_of(i);
    const std::int64_t start = __shfl_sync(~0u, at, row_of(i));
    chunks[i] = make_uint4(0, 0, 0, 0);
    if (start < 0 || 16 * chunk >= p.d) return;
    chunks[i] = *reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(p.k) + start + 16 * chunk);
  }
  __device__ __forceinline__ void load(const IndexTilesParams& params, std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) load(params, at, i);
  }
  // Stores the rows to the block that begins at `to`, in the layout of cuda/hopper/pipeline.cuh's load_rows(), and
  // loads those of the next block.
  template <DType kType>
  __device__ __forceinline__ void store(std::uint32_t to, const IndexTilesParams& params, std::int64_t next) {
    const Codes<kType> codes{Codes<kType>::kOffset};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      std::uint32_t pairs[4][2];
      const std::uint32_t bytes[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) codes.template widen_in_order<IndexElement>(bytes[n], pairs[n]);
      load(params, next, i);
      const int row = row_of(i), chunk = chunk_of(i);
      const std::uint32_t panel = to + chunk / 4 * C::kKeyPanel + row * 128;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store16(panel + chunk_place<128>(row, chunk % 4 * 2 + half) * 16,
                make_uint4(pairs[2 * half][0], pairs[2 * half][1], pairs[2 * half + 1][0], pairs[2 * half + 1][1]));
    }
  }
};

// Stores -inf for keys [first, last) of the item's queries, by the producers but one warp, which loads by TMA.
template <class C>
__device__ void hide_keys(const IndexScoresParams& p, const IndexItem<C>& item, int first, int last) {
  if (threadIdx.x < 32) return;
  for (std::int64_t token = item.token; token < item.token_end; ++token) {
    float* const row = p.scores + item.b * p.scores_stride.b + token * p.scores_stride.s;
    for (int key = first + static_cast<int>(threadIdx.x) - 32; key < last; key += kProducers - 32)
      row[key * p.scores_stride.d] = -kInfinity;
  }
}

// Loads the blocks of keys of an item, from the n-th of the ring on, by one warp.
template <class C>
__device__ void load_keys_by_tma(const IndexTilesParams& params, const IndexItem<C>& item, const typename C::Keys& k,
                                 unsigned n) {
  const int lane = threadIdx.x % 32;
  IndexKeyBox next = IndexKeyBox::of(params, item, item.first_block());
  for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
    const IndexKeyBox box = next;
    next = IndexKeyBox::of(params, item, key + kKeys);  // a block ahead: the page table is in device memory
    k.wait_empty(n);
    if (lane == 0) barrier_arrive_expecting(k.full(n), C::kKeyBytes);
    __syncwarp();
    if (lane * params.box < kKeys)
#pragma unroll
      for (int panel = 0; panel < C::kD / 64; ++panel)
        tma_load(k.slot(n) + panel * C::kKeyPanel + lane * params.box * 128, &params.k, panel * 64, box.row, 0,
                 box.entry, k.full(n), true);
    __syncwarp();
  }
}

// The same two columns at a time, for codes that are not aligned to 16 bytes.
template <class C>
__device__ void load_codes(std::uint32_t to, const IndexScoresParams& p, std::int64_t at) {
  const auto* const codes = static_cast<const std::uint8_t*>(p.k);
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kWarpKeys * C::kD / 2; i += 32) {
    const int row = i / (C::kD / 2), column = i % (C::kD / 2) * 2;
    const std::int64_t start = __shfl_sync(~0u, at, row);
    const auto element = [&](int n) -> std::uint32_t {
      if (start < 0 || column + n >= p.d) return 0;
      return __float_as_uint(code_of_byte(codes[start + (column + n) * p.k_stride.d], p.k_type)) >> 16;
    };
    store4(to + column / 64 * C::kKeyPanel + row * 128 + chunk_place<128>(row, column / 8 % 8) * 16 + column % 8 * 2,
           element(0) | element(1) << 16);
  }
}

// IndexCopies of the producers that are on their way, and the barrier of the last ones.
class IndexCopies {
 public:
  // The copies since the call before belong to `barrier`.
  __device__ void add(std::uint32_t barrier) {
    copy_commit();
    if (barrier_) finish<1>();
    barrier_ = barrier;
  }
  __device__ void finish() {
    if (barrier_) finish<0>();
    barrier_ = 0;
  }

 private:
  template <int kPending>
  __device__ void finish() const {
    copy_wait<kPending>();
    fence_async_proxy();
    barrier_arrive(barrier_);
  }
  std::uint32_t barrier_ = 0;
};

// The same in any layout and of any type, by the producers.
template <class C>
__device__ void load_keys(const IndexTilesParams& params, const IndexItem<C>& item, const typename C::Keys& k,
                          unsigned n, IndexCopies& copies) {
  const IndexScoresParams& p = params.p;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpKeys;
  const auto row_at = [&](int block) {
    const int own = block + warp_row + static_cast<int>(threadIdx.x) % kWarpKeys;
    return own >= item.begin && own < item.end ? IndexKeyRow(params, item.b, own).at(p.k_stride) : -1;
  };
  if (p.k_type != DType::bf16) {
    copies.finish();
    IndexCodeRows<C> rows;
    if (params.k_vector) rows.load(params, row_at(item.first_block()));
    for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
      const std::uint32_t to = k.slot(n) + warp_row * 128;
      k.wait_empty(n);
      if (params.k_vector)
        with_dtype<set_of(DType::i8) | kFp8Types>(
            p.k_type, [&](auto type) __attribute__((always_inline)) {
              rows.template store<decltype(type)::value>(to, params, row_at(key + kKeys));
            });
      else load_codes<C>(to, p, row_at(key));
      fence_async_proxy();
      barrier_arrive(k.full(n));
    }
    return;
  }
  for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
    k.wait_empty(n);
    load_rows<C::kD, 8>(kWarpKeys, k.slot(n) + warp_row * 128, C::kKeyPanel, p.k, row_at(key), p.k_stride.d,
                        static_cast<int>(p.d), params.k_vector, 0);
    copies.add(k.full(n));
  }
}

template <class C>
__device__ void produce(const IndexTilesParams& params, const typename C::Queries& q, const typename C::Keys& k,
                        float* weights) {
  const IndexScoresParams& p = params.p;
  IndexCopies copies;
  unsigned i = 0, n = 0;
  for (IndexItemNumbers numbers(params); numbers; numbers.next()) {
    const IndexItem<C> item(params, numbers.index);
    if (item.is_empty()) {
      hide_keys(p, item, item.split_begin, item.split_end);
      continue;
    }
    q.wait_empty(i);
    load_weights(p, item, weights + i % C::kQuerySlots * (kGroups * C::kColumns));
    if (!params.q_by_tma) load_queries<C>(params, item, q.slot(i)), copies.add(q.full(i));
    else if (threadIdx.x == 0) load_queries_by_tma<C>(params, item, q.slot(i), q.full(i));
    else barrier_arrive(q.full(i));
    ++i;
    if (!params.k_by_tma) {
      load_keys<C>(params, item, k, n, copies);
    } else {
      copies.finish();  // math warps free no slot for keys before they have the queries
      if (threadIdx.x < 32) load_keys_by_tma<C>(params, item, k, n);
    }
    n += item.blocks();
    hide_keys(p, item, item.split_begin, item.first_block());
    hide_keys(p, item, min(item.first_block() + item.blocks() * kKeys, item.split_end), item.split_end);
  }
  copies.finish();
}

}  // namespace rapt::cuda
