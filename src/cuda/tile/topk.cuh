// Selects the n largest scores of a row, in a total order: the larger score first, of equal scores the lower position.
#pragma once

#include <cstdint>

#include "core/pod.hpp"

namespace rapt::cuda {

// A score with its position, in the order of the selection: the score's order, then ~position. No two are equal, so the
// order in which threads collect candidates does not show in the result.
using Candidate = std::uint64_t;

constexpr std::uint32_t kHidden = 0x007fffff, kInfinite = 0xff800000;  // the order of -inf, and of inf
constexpr Candidate kAll = Candidate{kHidden} << 32;                   // a bound that excludes -inf alone

// Maps scores to integers of the same order. -0 equals 0, and every NaN is the largest.
__device__ inline std::uint32_t order_of(float score) {
  const float x = score + 0.f;
  const std::uint32_t bits = __float_as_uint(x);
  const std::uint32_t order = bits ^ (bits >> 31 ? ~0u : 1u << 31);
  return x == x ? order : ~0u;
}
__device__ inline float score_of(std::uint32_t order) {
  return __uint_as_float(order ^ (order >> 31 ? 1u << 31 : ~0u));
}
__device__ inline Candidate candidate_of(float score, std::uint32_t position) {
  return Candidate{order_of(score)} << 32 | ~position;
}
__device__ inline std::int32_t position_of(Candidate c) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(c));
}
__device__ inline std::uint32_t order_of(Candidate c) {
  return static_cast<std::uint32_t>(c >> 32);
}

// The sum over the lanes up to this one.
__device__ inline int sum_so_far(int x) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, x, distance);
    if (threadIdx.x % 32 >= distance) x += before;
  }
  return x;
}

// Sorting, the largest first: a bitonic network whose exchanges all put the larger candidate first.
constexpr int kSegment = 128;  // candidates that a warp sorts in registers, 4 neighbours to a lane

__device__ inline void exchange(Candidate& a, Candidate& b) {
  const Candidate larger = max(a, b);
  b = min(a, b), a = larger;
}
// With the lane `lane ^ mask`; kReversed: with its candidates from the last on.
template <bool kReversed>
__device__ inline void exchange_lanes(Candidate (&c)[4], int mask, bool first) {
  Candidate other[4];
  for (int i = 0; i < 4; ++i) other[i] = __shfl_xor_sync(~0u, c[kReversed ? 3 - i : i], mask);
  for (int i = 0; i < 4; ++i) c[i] = (c[i] > other[i]) == first ? c[i] : other[i];
}
// Merges a bitonic sequence of `size` candidates; the steps of larger strides were done.
__device__ inline void merge_lanes(Candidate (&c)[4], int size) {
  const int lane = threadIdx.x % 32;
  for (int mask = size / 8; mask > 0; mask /= 2) exchange_lanes<false>(c, mask, (lane & mask) == 0);
  exchange(c[0], c[2]), exchange(c[1], c[3]);
  exchange(c[0], c[1]), exchange(c[2], c[3]);
}
__device__ inline void sort_lanes(Candidate (&c)[4]) {
  const int lane = threadIdx.x % 32;
  exchange(c[0], c[1]), exchange(c[2], c[3]);
  exchange(c[0], c[3]), exchange(c[1], c[2]);
  exchange(c[0], c[1]), exchange(c[2], c[3]);
#pragma unroll
  for (int size = 8; size <= kSegment; size *= 2) {
    exchange_lanes<true>(c, size / 4 - 1, (lane & size / 8) == 0);
    merge_lanes(c, size / 2);
  }
}

// Four neighbours that a thread offers at a time: scores, or candidates of a list. Scores are collected as they are,
// and become candidates later: most are never collected.
struct ScoreGroup {
  static constexpr bool kOrdered = false;
  float score[4];
  std::uint32_t last;  // ~position of the first

  ScoreGroup() = default;
  __device__ ScoreGroup(const float4& x, std::uint32_t position) : score{x.x, x.y, x.z, x.w}, last(~position) {}
  __device__ Candidate operator[](int i) const { return Candidate{__float_as_uint(score[i])} << 32 | (last - i); }
  // A score that is excluded with all below it: `low`'s, or if the group does not begin behind its position, so that an
  // equal score may rank higher, one a little below. -0 has an order of its own, but no score. A group that begins
  // before position 0 has a `last` of 0 to 2.
  __device__ float excluded(Candidate low) const {
    const bool behind = last < static_cast<std::uint32_t>(low) && last > 2;
    return score_of(min(max(order_of(low) - (behind ? 0 : 2), kHidden), kInfinite));
  }
  // The bits of those that are not excluded.
  __device__ unsigned above(float excluded) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (score[i] <= excluded ? 0u : 1u) << i;
    return bits;
  }
};
struct ListGroup {
  static constexpr bool kOrdered = true;
  Candidate candidate[4];

  __device__ Candidate operator[](int i) const { return candidate[i]; }
  __device__ Candidate excluded(Candidate low) const { return low - 1; }
  __device__ unsigned above(Candidate excluded) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (candidate[i] <= excluded ? 0u : 1u) << i;
    return bits;
  }
};

// Selects the largest of what a thread block is offered. They are collected in shared memory if low() does not exclude
// them. When the buffer is full, a radix selection raises low() and drops the others.
template <int kThreads>
class Selection {
 public:
  static constexpr int kGroups = 2, kStep = 4 * kGroups * kThreads;  // candidates offered at a time
  static constexpr int kBins = 4 * kThreads, kMaxBin = 128;  // bins; candidates of one that store_by_bins() takes
  struct alignas(16) Shared {
    int bins[kBins];
    int warp_sums[kThreads / 32];
    int count;  // of the candidates in the buffer
    int kept, bin, bin_size;
    int scratch[32];
    Candidate least[kThreads / 32], most[kThreads / 32];
  };

  __device__ Selection(Shared& shared, Candidate* buffer, int capacity)
      : s_(shared), buffer_(buffer), capacity_(capacity) {}

  // Begins to select n of those that `low` does not exclude; the buffer holds n + kStep at least.
  __device__ void start(int n, Candidate low) {
    __syncthreads();
    n_ = n, ordered_ = 0, low_ = low;
    set_count(0);
  }
  __device__ int count() const { return count_; }
  __device__ int* scratch() { return s_.scratch; }  // 32, for the caller
  __device__ Candidate low() const { return low_; }
  __device__ Candidate operator[](int i) const { return buffer_[i]; }

  // Offers the groups of steps [begin, end): groups_of(step, groups) gives a thread's. The lanes of a warp go together;
  // warps wait for each other only where the buffer may have no room for a step of them all.
  template <class Group, class GroupsOf>
  __device__ void offer(std::uint32_t begin, std::uint32_t end, GroupsOf groups_of) {
    for (std::uint32_t step = begin; begin < end;) {
#pragma unroll 1
      for (; step < end && __all_sync(~0u, count_now() <= capacity_ - kStep); ++step) {
        Group groups[kGroups];
        groups_of(step, groups);
        collect(groups);
      }
      const bool any_left = __syncthreads_or(step < end);
      count_ = count_now();
      if (Group::kOrdered) ordered_ = count_;
      if (!any_left) return;
      prune(capacity_ - kStep);
    }
  }

  // Makes candidates of the scores that were collected since the last time.
  __device__ void order() {
    __syncthreads();
#pragma unroll 1
    for (int i = ordered_ + threadIdx.x; i < count_; i += kThreads) {
      const Candidate c = buffer_[i];
      buffer_[i] = Candidate{order_of(__uint_as_float(order_of(c)))} << 32 | static_cast<std::uint32_t>(c);
    }
    ordered_ = count_;
    __syncthreads();
  }

  // Raises low() until it excludes all but `most`, of which n or more are left; false if there are no more than that.
  __device__ bool raise_low(int most) {
    order();
    if (count_ <= most) return false;
    Candidate low = low_, range = ~low;  // where the n-th largest is: [low, low + range]
    int above = 0;                       // candidates behind that
    for (;;) {
      const int shift = max(0, 64 - __clzll(static_cast<long long>(range)) - kBinBits);
      reinterpret_cast<int4*>(s_.bins)[threadIdx.x] = {};
      __syncthreads();
      for_candidates([&](Candidate c) {
        if (c - low <= range) atomicAdd(&s_.bins[(c - low) >> shift], 1);
      });
      __syncthreads();
      find_bin(above);
      low += static_cast<Candidate>(s_.bin) << shift;
      if (s_.kept <= most) break;
      range = min(range - (static_cast<Candidate>(s_.bin) << shift), (Candidate{1} << shift) - 1);
      above = s_.kept - s_.bin_size;
    }
    low_ = low;
    return true;
  }
  // Moves the candidates from low_ on to the front. Each round reads before any is written, to places read before.
  __device__ void drop_smaller() {
    const int kept = s_.kept;
    __syncthreads();
    if (threadIdx.x == 0) s_.kept = 0;
    __syncthreads();
#pragma unroll 1
    for (int base = 0; base < count_; base += 4 * kThreads) {
      Candidate c[4];
      int mine = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = base + i * kThreads + threadIdx.x;
        c[i] = at < count_ ? buffer_[at] : 0;
        mine += c[i] >= low_;
      }
      int place = reserve(s_.kept, mine);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (c[i] >= low_) buffer_[place++] = c[i];
    }
    set_count(kept);
    ordered_ = kept;
  }

  // Leaves up to `most` candidates, n or more, the n largest among them.
  __device__ void prune(int most) {
    if (raise_low(most)) drop_smaller();
  }

  // Sorts up to `size` candidates, a power of two; the buffer has room for them. Zeros follow the smallest.
  __device__ void sort(int size) {
    order();
    for (int i = count_ + threadIdx.x; i < size; i += kThreads) buffer_[i] = 0;
    __syncthreads();
    for_segments(size, sort_lanes);
    for (int merged = 2 * kSegment; merged <= size; merged *= 2) {
      for_pairs(size, [&](int i) {
        const int first = i / (merged / 2) * merged, at = i % (merged / 2);
        exchange(buffer_[first + at], buffer_[first + merged - 1 - at]);
      });
      for (int stride = merged / 4; stride >= kSegment; stride /= 2)
        for_pairs(size, [&](int i) {
          const int at = i / stride * 2 * stride + i % stride;
          exchange(buffer_[at], buffer_[at + stride]);
        });
      for_segments(size, [](Candidate(&c)[4]) { merge_lanes(c, kSegment); });
    }
  }

  // Stores the positions of the n largest, in order, then -1: each candidate's rank in its bin is counted. False, and
  // nothing is stored, where a bin has too many for that.
  __device__ bool store_by_bins(std::int32_t* indices, std::int64_t stride, std::int64_t n) {
    order();
    if (count_ + min(count_, n_ + kMaxBin) > capacity_) return false;
    Candidate least = ~Candidate{0}, most = 0;
    for_candidates([&](Candidate c) { least = min(least, c - 1), most = max(most, c); });
    ++least;
    for (int mask = 16; mask > 0; mask /= 2)
      least = min(least, __shfl_xor_sync(~0u, least, mask)), most = max(most, __shfl_xor_sync(~0u, most, mask));
    if (threadIdx.x % 32 == 0) s_.least[threadIdx.x / 32] = least, s_.most[threadIdx.x / 32] = most;
    reinterpret_cast<int4*>(s_.bins)[threadIdx.x] = {};
    if (threadIdx.x == 0) s_.bin = kBins, s_.kept = count_;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) least = min(least, s_.least[warp]), most = max(most, s_.most[warp]);
    const int shift = max(0, 64 - __clzll(static_cast<long long>(most - least)) - kBinBits);
    const auto bin_of = [&](Candidate c) { return static_cast<int>((most - c) >> shift); };
    for_candidates([&](Candidate c) {
      if (c > 0) atomicAdd(&s_.bins[bin_of(c)], 1);
    });
    __syncthreads();
    const int4 own = reinterpret_cast<const int4*>(s_.bins)[threadIdx.x];
    const int sizes[4] = {own.x, own.y, own.z, own.w};
    int start = sum_before(own.x + own.y + own.z + own.w), starts[4];
    bool full = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      starts[i] = start, full |= start < n_ && sizes[i] > kMaxBin;
      if (start < n_ && start + sizes[i] >= n_) s_.bin = 4 * threadIdx.x + i, s_.kept = start + sizes[i];
      start += sizes[i];
    }
    reinterpret_cast<int4*>(s_.bins)[threadIdx.x] = {starts[0], starts[1], starts[2], starts[3]};
    if (__syncthreads_or(full)) return false;
    Candidate* const by_bin = buffer_ + count_;
    const int last = s_.bin, kept = s_.kept;
    for_candidates([&](Candidate c) {
      if (c > 0 && bin_of(c) <= last) by_bin[atomicAdd(&s_.bins[bin_of(c)], 1)] = c;
    });
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kept; i += kThreads) {
      const Candidate c = by_bin[i];
      const int bin = bin_of(c), end = s_.bins[bin];
      int rank = bin == 0 ? 0 : s_.bins[bin - 1];
#pragma unroll 1
      for (int j = rank; j < end; j += 4)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (j + k < end) rank += by_bin[j + k] > c;
      if (rank < n_) indices[rank * stride] = position_of(c);
    }
#pragma unroll 1
    for (std::int64_t i = min(count_, n_) + threadIdx.x; i < n; i += kThreads) indices[i * stride] = -1;
    return true;
  }

 private:
  static constexpr int kWarps = kThreads / 32, kBinBits = kThreads == 32 ? 7 : 10;
  static_assert(1 << kBinBits == kBins);

  // While other warps count on. After a warp sees room for a step of all, each warp adds one step at most before it
  // looks again.
  __device__ int count_now() const {
    return *const_cast<volatile int*>(&s_.count);
  }
  __device__ void set_count(int count) {
    count_ = count;
    if (threadIdx.x == 0) s_.count = count;
    __syncthreads();
  }

  template <class Group>
  __device__ void collect(const Group (&groups)[kGroups]) {
    const auto excluded = groups[0].excluded(low_);  // its positions are the lowest
    const unsigned mine = groups[0].above(excluded) | groups[1].above(excluded) << 4;
    int place = 0;
    if constexpr (kWarps > 1) {
      if (mine == 0) return;
      place = atomicAdd(&s_.count, __popc(mine));
    } else {
      if (!__any_sync(~0u, mine != 0)) return;
      place = reserve(s_.count, __popc(mine));
    }
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      const bool taken = mine >> i & 1;
      if (taken) buffer_[place] = groups[i / 4][i % 4];
      place += taken;
    }
  }

  // Where the thread's `mine` elements go: behind those of other threads, which `counter` counts.
  __device__ static int reserve(int& counter, int mine) {
    const int sum = sum_so_far(mine);
    int first = 0;
    if (threadIdx.x % 32 == 31 && sum > 0) first = atomicAdd(&counter, sum);
    return __shfl_sync(~0u, first, 31) + sum - mine;
  }

  // The sum over the threads before this one.
  __device__ int sum_before(int x) {
    const int so_far = sum_so_far(x);
    if (threadIdx.x % 32 == 31) s_.warp_sums[threadIdx.x / 32] = so_far;
    __syncthreads();
    int sum = so_far - x;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += warp < threadIdx.x / 32 ? s_.warp_sums[warp] : 0;
    return sum;
  }

  // The bin of the n-th largest candidate, its size, and how many are in it or above; a thread has 4 bins, the first
  // thread the highest.
  __device__ void find_bin(int above) {
    const int last = kThreads - 1 - threadIdx.x;
    const int4 own = reinterpret_cast<const int4*>(s_.bins)[last];
    const int sum = own.x + own.y + own.z + own.w;
    int kept = above + sum_before(sum);
    if (kept < n_ && kept + sum >= n_) {
      const int sizes[4] = {own.w, own.z, own.y, own.x};
      int size = 0, bin = 4 * last + 4;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (kept < n_) size = sizes[i], kept += size, --bin;
      s_.bin = bin, s_.bin_size = size, s_.kept = kept;
    }
    __syncthreads();
  }

  template <class F>
  __device__ void for_candidates(F f) {
#pragma unroll 1
    for (int base = threadIdx.x; base < count_; base += 4 * kThreads) {
      Candidate c[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = base + i * kThreads < count_ ? buffer_[base + i * kThreads] : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) f(c[i]);
    }
  }
  template <class F>
  __device__ void for_segments(int size, F f) {
#pragma unroll 1
    for (int first = threadIdx.x / 32 * kSegment; first < size; first += kWarps * kSegment) {
      auto* const at = reinterpret_cast<ulonglong2*>(buffer_ + first) + threadIdx.x % 32 * 2;
      const ulonglong2 a = at[0], b = at[1];
      Candidate c[4] = {a.x, a.y, b.x, b.y};
      f(c);
      at[0] = {c[0], c[1]}, at[1] = {c[2], c[3]};
    }
    __syncthreads();
  }
  template <class F>
  __device__ void for_pairs(int size, F f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < size / 2; i += kThreads) f(i);
    __syncthreads();
  }

  Shared& s_;
  Candidate* const buffer_;
  const int capacity_;
  int n_, count_, ordered_;
  Candidate low_;
};

}  // namespace rapt::cuda
