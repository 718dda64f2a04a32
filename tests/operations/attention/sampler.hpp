// Random problems of a size that float64 can follow.
#pragma once

#include <cstdint>
#include <random>

#include "rapt/problem.hpp"

namespace rapt::testing {

/// What sample() may vary beyond sizes and head counts, which it always does.
struct SampleOptions {
  bool positions = false;  ///< causal, window, align with negative and large offsets, alibi
  bool scores = false;     ///< scale, softcap, bias, mask, sinks, dropout
  bool lengths = false;    ///< ragged queries and keys, key lengths
  bool layouts = false;
  bool types = false;   ///< q, kv and out of f32, bf16 and f16: a third each all f32, all of one 16-bit type, mixed
  bool caches = false;  ///< keys and values of quantised types too, in pages, in rings, gathered; f8e4m3 queries
  std::int64_t products = std::int64_t{1} << 24;  ///< about as many as the products of q.k and p.v may come to
};

inline constexpr SampleOptions kEverything{true, true, true, true, true, false};
inline constexpr SampleOptions kEverythingCached{true, true, true, true, true, true};

/// A valid problem with lse; the same for the same state of `random`. Sizes are odd more often than not: d and dv
/// reach 576, sq and sk about 300, groups 1, 2, 3, 5 and 7.
AttentionProblem sample(std::mt19937_64& random, const SampleOptions& options);

/// The same for gradients: mostly all of them, now and then some. With types, dout has one of its own, too.
AttentionBackwardProblem sample_backward(std::mt19937_64& random, SampleOptions options);

}  // namespace rapt::testing
