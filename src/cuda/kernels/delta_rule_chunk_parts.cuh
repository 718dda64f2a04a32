// Which chunks of which states a cluster of delta_rule_prefill computes. Of more states than clusters, each cluster
// gets an equal share of all tokens, in the states' order, so that a state may begin in one share and end in the next.
// A cluster computes the beginning of its last state first, and hands the state over; then the states that are its own;
// then the end of its first state. By then the cluster before has begun that one long ago, so clusters hardly ever
// wait, and only for an earlier one, which the GPU has started before.
#pragma once

#include "cuda/kernels/delta_rule_chunk.cuh"

namespace rapt::cuda {

// Where states that are not finished wait for the next cluster.
struct StateHandover {
  float4* states;  // [blocks][kD / 8][128]; null: no more states than clusters
  int* ready;      // [blocks][4]: of each warp; 0 at first
};

struct StatePart {
  int b, h;
  std::int64_t first;          // of the sequence's tokens, in the tensors
  int begin, end;              // tokens of the sequence
  bool is_begun, is_for_next;  // the cluster before has begun the state; the next one goes on with it
};

// Where a cluster's share begins and ends. In shared memory, as registers are short.
class StateParts {
 public:
  // By one warp. `is_shared`: there are more states than clusters.
  __device__ void find(const DeltaRuleParams& p, int cluster, int clusters, bool is_shared) {
    Cut from{cluster, 0}, to{cluster + 1, 0};
    if (is_shared) {
      // A share has room for the longest state, so that none lies in more than two.
      const std::int64_t all = position(p, p.b),
                         share = max(ceil_div(all, std::int64_t{clusters}), longest(p) + kStateTokens);
      from = cut_at(p, min(cluster * share, all)), to = cut_at(p, min((cluster + 1) * share, all));
    }
    if (threadIdx.x % 32 == 0) from_ = from, to_ = to;
  }

  // The same in all lanes, which the compiler is told: loops over chunks then have uniform registers.
  __device__ int count() const { return uniform(max(to_.state - from_.state, 0) + (to_.chunk > 0 ? 1 : 0)); }
  __device__ StatePart part(const DeltaRuleParams& p, int i) const {
    const Cut from{uniform(from_.state), uniform(from_.chunk)}, to{uniform(to_.state), uniform(to_.chunk)};
    const int for_next = to.chunk > 0 ? 1 : 0, begun = from.chunk > 0 ? 1 : 0,
              last = to.state - from.state + for_next - 1;
    const bool is_for_next = i < for_next, is_begun = !is_for_next && i == last && begun;
    const int state = is_for_next ? to.state : is_begun ? from.state : from.state + i - for_next + begun;
    const int heads = static_cast<int>(p.h);
    const int b = uniform(state / heads), h = uniform(state % heads);
    const TokenRange range = tokens_of(p, b);
    const int end = is_for_next ? to.chunk * kChunk : static_cast<int>(range.count);
    return {b, h, range.first, is_begun ? from.chunk * kChunk : 0, uniform(end), is_begun, is_for_next};
  }

 private:
  static constexpr std::int64_t kStateTokens = 5 * kChunk;  // as long as a state's load and store take, about
  struct Cut {
    int state, chunk;
  };

  // The work before sequence b, in tokens: those of all heads, and kStateTokens for each state.
  __device__ static std::int64_t position(const DeltaRuleParams& p, std::int64_t b) {
    const auto first = [&](std::int64_t i) { return p.begin ? clamp_to(p.begin[i], 0, p.total) : i * p.t; };
    return p.h * (first(b) - first(0) + kStateTokens * b);
  }
  __device__ static std::int64_t longest(const DeltaRuleParams& p) {
    if (!p.begin) return p.t;
    unsigned most = 0;
    for (std::int64_t b = threadIdx.x % 32; b < p.b; b += 32)
      most = max(most, static_cast<unsigned>(tokens_of(p, b).count));
    return __reduce_max_sync(~0u, most);
  }
  __device__ static Cut cut_at(const DeltaRuleParams& p, std::int64_t at) {
    std::int64_t b = 0, end = p.b + 1;  // position(b) <= at; not so at the end
    while (b + 1 < end) {
      const std::int64_t middle = (b + end) / 2;
      if (position(p, middle) <= at) b = middle;
      else end = middle;
    }
    if (b == p.b) return {static_cast<int>(b * p.h), 0};
    const std::int64_t cost = tokens_of(p, b).count + kStateTokens, in_sequence = at - position(p, b),
                       h = clamp_to(in_sequence / cost, 0, p.h - 1),
                       tokens = min(in_sequence - h * cost, cost - 1) - kStateTokens;
    return {static_cast<int>(b * p.h + h), static_cast<int>(max(tokens, std::int64_t{0}) / kChunk)};
  }

  Cut from_, to_;
};

}  // namespace rapt::cuda
