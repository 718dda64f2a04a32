// Where the keys and values of an attention call live.
#pragma once

#include "rapt/tensor.hpp"

namespace rapt {

/// Keys and values, and how their rows are found. Make one with a factory; new layouts are new factories. k and v are
/// of one type: f32, bf16 or f16, or of a quantised one: i8, f8e4m3, f8e5m2 or i4x2.
///
/// An element x of a quantised k counts as (x - zero) * scale, with the scale and zero of its group: the d elements of
/// a row are cut into equal groups, of which scale and zero have one element each. i8 and i4x2 need scales; without
/// them an 8-bit float counts as it is. With i4x2, k and v have d / 2 and dv / 2 bytes in place of elements; d and dv
/// are even.
///
/// With `k_tail`, keys are longer than the rows of a quantised k: the columns of k_tail, which are not quantised,
/// follow those of k, and q has as many columns as both. DeepSeek's latent caches keep the rotary part of a key so.
struct KvSource {
  enum class Kind : std::uint8_t {
#define RAPT_KV_KIND(name, NAME, value, text, positions) name = value,
#include "rapt/kv_kinds.def"
  };

  Kind kind = Kind::strided;
  TensorView k;        ///< strided, ring: [b, hk, sk, d]; ragged: [total_k, hk, d]; paged: [pages, hk, page_size, d];
                       ///< gathered: [b or 1, hk, sk, d]
  TensorView v;        ///< likewise, of dv
  TensorView seqlens;  ///< i32 or i64 [b]: keys in use per sequence. strided: optional, 0 <= len <= sk
  TensorView cu_seqlens;   ///< ragged: i32 or i64 [b + 1], 0 = c[0] <= c[1] <= ... <= c[b] = total_k
  TensorView block_table;  ///< paged: i32 or i64 [b, n]: key j of sequence i is row j % page_size of page table[i, j /
                           ///< page_size]
  TensorView indices;      ///< gathered: i32 or i64 [b, sq, n]: the keys of each query token, the same for all heads
  TensorView counts;       ///< gathered, optional: i32 or i64 [b, sq]: how many of the n count, 0 <= count <= n
  TensorView k_scale,
      v_scale;  ///< f32, optional: shape of k or v with groups for d; sizes of 1 in b (pages) and s broadcast
  TensorView k_zero, v_zero;  ///< f32, optional, likewise; 0 where none is given
  TensorView k_tail;          ///< f32, bf16 or f16, optional, beside a quantised k: k's shape with any size for d

  KvSource() = default;
  /// One [b, hk, sk, d] tensor each, optionally with a key length per sequence. Rows past a length are never read.
  static KvSource strided(const TensorView& k, const TensorView& v, const TensorView& seqlens = {}) {
    return {Kind::strided, k, v, seqlens};
  }
  /// Sequences of unequal length laid end to end: sequence n owns rows [cu_seqlens[n], cu_seqlens[n + 1]).
  static KvSource ragged(const TensorView& k, const TensorView& v, const TensorView& cu_seqlens) {
    KvSource kv(Kind::ragged, k, v, {});
    kv.cu_seqlens = cu_seqlens;
    return kv;
  }
  /// Pages of any size from 1 that sequences may share. Rows past a length, table entries past the page of a sequence's
  /// last key, and entries of pages that no row sees (a window has left them) are never read and may hold anything.
  static KvSource paged(const TensorView& k, const TensorView& v, const TensorView& block_table,
                        const TensorView& seqlens) {
    KvSource kv(Kind::paged, k, v, seqlens);
    kv.block_table = block_table;
    return kv;
  }
  /// Ring buffers of sk rows: key j of a sequence lies in row j % sk, so that of its `seqlens` keys, any number, the
  /// last sk are there. Takes no bias and no mask. Refused where a query row would see a key that is overwritten:
  /// windows need window_left + query rows <= sk; open to the left, rows see the last sk keys if they see the last one.
  static KvSource ring(const TensorView& k, const TensorView& v, const TensorView& seqlens) {
    return {Kind::ring, k, v, seqlens};
  }
  /// A list of keys for each query token: token t of sequence i attends to rows indices[i, t, :] of its k and v, in all
  /// heads. This is what sparse attention with a selection of keys needs. With a first dimension of 1, k and v are a
  /// pool of rows that all sequences share: pages [pages, page_size, hk, d] are one of pages x page_size rows, in which
  /// the index of a row is page * page_size + offset.
  ///
  /// A negative entry (-1) and entries at or past the token's count stand for no key; nothing is read for them. A key
  /// counts as often as it is listed. An entry of sk or more is refused. Which keys a token may see is up to its list:
  /// causal, window, align, bias, mask, alibi and dropout are refused, and so are ragged queries.
  static KvSource gathered(const TensorView& k, const TensorView& v, const TensorView& indices,
                           const TensorView& counts = {}) {
    KvSource kv(Kind::gathered, k, v, {});
    kv.indices = indices, kv.counts = counts;
    return kv;
  }
  /// The same keys and values, quantised with these scales and, where not empty, zeros.
  KvSource quantized(const TensorView& scale_of_k, const TensorView& scale_of_v, const TensorView& zero_of_k = {},
                     const TensorView& zero_of_v = {}) const {
    KvSource kv = *this;
    kv.k_scale = scale_of_k, kv.v_scale = scale_of_v, kv.k_zero = zero_of_k, kv.v_zero = zero_of_v;
    return kv;
  }
  /// The same keys, each with these columns behind its own.
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
