// Where the keys and values of an attention call live.
#pragma once

#include "rapt/tensor.hpp"

namespace rapt {

/// Keys and values, and how their rows are found. Make one with a factory; new layouts are new factories. k and v are
/// of one type: f32, bf16 or f16.
struct KvSource {
  enum class Kind : std::uint8_t { strided, ragged };

  Kind kind = Kind::strided;
  TensorView k;           ///< strided: [b, hk, sk, d]; ragged: [total_k, hk, d]
  TensorView v;           ///< strided: [b, hk, sk, dv]; ragged: [total_k, hk, dv]
  TensorView seqlens;     ///< strided, optional: i32 or i64 [b], keys in use per sequence, 0 <= len <= sk
  TensorView cu_seqlens;  ///< ragged: i32 or i64 [b + 1], 0 = c[0] <= c[1] <= ... <= c[b] = total_k

  KvSource() = default;
  /// One [b, hk, sk, d] tensor each, optionally with a key length per sequence. Rows past a length are never read.
  static KvSource strided(const TensorView& k, const TensorView& v, const TensorView& seqlens = {}) {
    return {Kind::strided, k, v, seqlens, {}};
  }
  /// Sequences of unequal length laid end to end: sequence n owns rows [cu_seqlens[n], cu_seqlens[n + 1]).
  static KvSource ragged(const TensorView& k, const TensorView& v, const TensorView& cu_seqlens) {
    return {Kind::ragged, k, v, {}, cu_seqlens};
  }

 private:
  KvSource(Kind kind, const TensorView& k, const TensorView& v, const TensorView& seqlens, const TensorView& cu_seqlens)
      : kind(kind), k(k), v(v), seqlens(seqlens), cu_seqlens(cu_seqlens) {}
};

}  // namespace rapt
