// The keys and values of an attention call, and their layout.
#pragma once

#include "rapt/tensor.hpp"

namespace rapt {

/// The keys and values of an attention call. Make one with a factory function; each layout has one. k and v have one
/// type: f32, bf16 or f16, or a quantised type: i8, f8e4m3, f8e5m2 or i4x2. Symbols: b sequences, hk KV heads, sk key
/// rows, d and dv head dimension of keys and of values.
///
/// An element x of a quantised k counts as (x - zero) * scale, with the scale and zero of its group. The d elements of
/// a row form equal groups; scale and zero have one element per group. i8 and i4x2 need scales; 8-bit floats without
/// scales count as they are. With i4x2, rows of k and v have d / 2 and dv / 2 bytes; d and dv are even.
///
/// With `k_tail`, keys have more columns than a quantised k: the columns of k_tail, which are not quantised, follow
/// those of k, and q has as many columns as both. DeepSeek's latent caches keep the rotary part of a key this way.
struct KvSource {
  /// The layout of keys and values; kv_kinds.def lists them.
  enum class Kind : std::uint8_t {
#define RAPT_KV_KIND(name, NAME, value, text, positions) name = value,
#include "rapt/kv_kinds.def"
  };

  Kind kind = Kind::strided;
  TensorView k;        ///< strided, ring: [b, hk, sk, d]; ragged: [total_k, hk, d]; paged: [pages, hk, page_size, d];
                       ///< gathered: [b or 1, hk, sk, d]
  TensorView v;        ///< the same shapes, with dv in place of d
  TensorView seqlens;  ///< i32 or i64 [b]: number of keys of each sequence. strided: optional, 0 <= len <= sk
  TensorView cu_seqlens;   ///< ragged: i32 or i64 [b + 1], 0 = c[0] <= c[1] <= ... <= c[b] = total_k
  TensorView block_table;  ///< paged: i32 or i64 [b, n]: key j of sequence i is row j % page_size of page
                           ///< block_table[i, j / page_size]
  TensorView indices;      ///< gathered: i32 or i64 [b, sq, n]: the keys of each query token, for all heads
  TensorView counts;       ///< gathered, optional: i32 or i64 [b, sq]: entries that count, 0 <= count <= n
  TensorView k_scale,
      v_scale;  ///< f32, optional: shape of k or v with groups for d; sizes of 1 in b (pages) and s broadcast
  TensorView k_zero, v_zero;  ///< f32, optional, shapes as for the scales; default 0
  TensorView k_tail;          ///< f32, bf16 or f16, optional, with a quantised k: k's shape with any size in place of d

  KvSource() = default;
  /// One tensor each: k [b, hk, sk, d] and v [b, hk, sk, dv]. `seqlens`, if given, has the number of keys of each
  /// sequence. Rows past a length are never read.
  static KvSource strided(const TensorView& k, const TensorView& v, const TensorView& seqlens = {}) {
    return {Kind::strided, k, v, seqlens};
  }
  /// Sequences of unequal length end to end: sequence i has the rows [cu_seqlens[i], cu_seqlens[i + 1]).
  static KvSource ragged(const TensorView& k, const TensorView& v, const TensorView& cu_seqlens) {
    KvSource kv(Kind::ragged, k, v, {});
    kv.cu_seqlens = cu_seqlens;
    return kv;
  }
  /// Pages of any size from 1, which sequences may share. Rows past a length, table entries past the page of a
  /// sequence's last key, and table entries of pages that no row sees because of a window are never read and may hold
  /// anything.
  static KvSource paged(const TensorView& k, const TensorView& v, const TensorView& block_table,
                        const TensorView& seqlens) {
    KvSource kv(Kind::paged, k, v, seqlens);
    kv.block_table = block_table;
    return kv;
  }
  /// Ring buffers of sk rows: key j of a sequence is in row j % sk. `seqlens` may exceed sk; the ring holds the last sk
  /// keys. Takes no bias and no mask. A query row that sees an overwritten key is an error: windows need window_left +
  /// query rows <= sk. With a window that is open to the left, rows that see the last key see the last sk keys.
  static KvSource ring(const TensorView& k, const TensorView& v, const TensorView& seqlens) {
    return {Kind::ring, k, v, seqlens};
  }
  /// A list of keys for each query token, for sparse attention: token t of sequence i attends, in all heads, to rows
  /// indices[i, t, :] of the sequence's k and v. With a first dimension of 1, k and v are a pool of rows that all
  /// sequences share. Pages [pages, page_size, hk, d] are a pool of pages x page_size rows, in which a row's index is
  /// page * page_size + offset.
  ///
  /// A negative entry, and an entry at or past the token's count, stands for no key, and nothing is read for it. A key
  /// that is listed twice counts twice. An entry of sk or more is an error. The list alone determines which keys a
  /// token attends to: causal, window, align, bias, mask, alibi, dropout and ragged queries are errors.
  static KvSource gathered(const TensorView& k, const TensorView& v, const TensorView& indices,
                           const TensorView& counts = {}) {
    KvSource kv(Kind::gathered, k, v, {});
    kv.indices = indices, kv.counts = counts;
    return kv;
  }
  /// The same keys and values, quantised with these scales and optional zeros.
  KvSource quantized(const TensorView& scale_of_k, const TensorView& scale_of_v, const TensorView& zero_of_k = {},
                     const TensorView& zero_of_v = {}) const {
    KvSource kv = *this;
    kv.k_scale = scale_of_k, kv.v_scale = scale_of_v, kv.k_zero = zero_of_k, kv.v_zero = zero_of_v;
    return kv;
  }
  /// The same keys, with these columns after those of k.
  KvSource with_tail(const TensorView& tail_of_k) const {
    KvSource kv = *this;
    kv.k_tail = tail_of_k;
    return kv;
  }

 private:
  KvSource(Kind layout, const TensorView& keys, const TensorView& values, const TensorView& lengths)
      : kind(layout), k(keys), v(values), seqlens(lengths) {}
};

}  // namespace rapt
