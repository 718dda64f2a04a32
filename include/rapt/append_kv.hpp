// Writing new keys and values to a KV cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/context.hpp"
#include "rapt/kv_cache.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// New keys and values are f32, bf16 or f16, of any strides: n per sequence, or with cu_seqlens any number for each.
struct AppendKvArgs {
  TensorView k_new{};       ///< [b, hk, n, d]; with cu_seqlens [total, hk, d]
  TensorView v_new{};       ///< [b, hk, n, dv]; with cu_seqlens [total, hk, dv]
  KvCache cache{};          ///< overlaps nothing else here, its own tensors included; but see append_kv for v in k
  TensorView seqlens{};     ///< i32 or i64 [b]: keys of each sequence before the call
  TensorView cu_seqlens{};  ///< optional i32 or i64 [b + 1]: sequence i has the new rows [c[i], c[i + 1])
};

/// Writes the new rows of sequence i at key positions seqlens[i], seqlens[i] + 1, ... of the cache. All other rows stay
/// as they are; lengths are the caller's to add to. Of more new rows than a ring has, the last stay.
///
/// Rows of the cache's own type are copied, those of other floats rounded once, to nearest even. Codes are the nearest
/// to x / scale + zero; halfway between two, either. Scales and zeros that have an element for every row are computed
/// from each group of the new row and written with it; those that broadcast over rows or sequences (pages) are inputs.
/// An element x then reads back as y (A: the largest |x| of the group; + what fp32 rounding of (code - zero) * scale
/// adds, within 2^-21 A):
///
///     i8, i4x2  |y - x| <= scale / 2. Computed scales: A / 127 (7 for i4x2); with zeros (max - min) / 255 (15), never
///               less than A 2^-20. A scale is at least 2^-126, and 1 for a group of zeros, which reads back as zeros.
///     f8e4m3    |y - x| <= max(2^-4 |x|, 2^-10 scale)
///     f8e5m2    |y - x| <= max(2^-3 |x|, 2^-17 scale). Computed scales: A / 448 and A / 57344, with the same
///     exceptions.
///
/// With given scales (8-bit floats may do without, which is a scale of 1) what is past the end of the type becomes its
/// largest or smallest finite number: -128 and 127, -8 and 7, +-448, +-57344. Given scales and zeros must be finite,
/// scales positive. NaN and Inf are never hidden: in 8-bit floats they alone become NaN (in f8e5m2 Inf stays Inf); in
/// i8 and i4x2 the whole group reads as NaN where its scale is computed, and is refused where it is given. 8-bit floats
/// take no zeros, and k_zero (v_zero) has elements for every row just where k_scale (v_scale) has.
///
/// v may be columns of k (latent attention: k's rows hold v's): a view of its memory with k's strides that begins at
/// one of its columns. Then v_new is the same columns of k_new, a view likewise, and k alone is written. Where k has
/// scales (and zeros), v begins and ends with a group, and v_scale is a view of the scales of these columns.
///
/// With k_tail, the last columns of k_new go there, and the others to k.
///
/// Throws Error, before anything is written, for what KvSource does not allow, for rows past the end of a strided cache
/// or of a block table, for a table entry that is no page, and when two new rows would land on the same row of a page.
/// Pages may be shared, but a row that another sequence reads is overwritten for both: copy the last, partly filled
/// page of a sequence that forks. Reentrant. Bits do not depend on the ISA, the device or on threads. `workspace` as
/// for attention().
///
/// All tensors are on one device. On a GPU nobody looks at their values: rows that have no place in the cache, by
/// lengths or a table that would be refused, are not written; of two rows with one place either is; given scales and
/// zeros are taken as they are, and NaN becomes the smallest number that integers have.
/// FLOPs (cost.hpp): none.
RAPT_API void append_kv(const AppendKvArgs& args, const Context& context = default_context(),
                        std::span<std::byte> workspace = {});

/// What dispatch and planning see of an append_kv call. Text form: "append_kv", then `key=value` words in the order of
/// the fields below, those of CacheProblem after `ragged`; words at their default are left out.
///
///     append_kv b=8 hk=8 n=1 sk=4096 d=128
///     append_kv new=bf16 kv=i8 b=8 hk=8 n=64 sk=4096 d=128 page=16 groups=1
///
/// max_workspace_bytes() holds for problems with smaller b, n, ragged.
struct AppendKvProblem : CacheProblem {
  DType new_dtype = DType::f32;  ///< of k_new; text: new=, or dtype= for both
  DType kv_dtype = DType::f32;   ///< of the cache; text: kv=
  DeviceType device = DeviceType::cpu;
  std::int64_t b = 1;
  std::int64_t hk = 1;
  std::int64_t n = 0;   ///< new rows of each sequence; ragged: the longest
  std::int64_t sk = 0;  ///< keys that a sequence has room for; of rings their rows
  std::int64_t d = 0;
  std::int64_t dv = 0;              ///< text default: d
  std::int64_t ragged = -1;         ///< total; -1: n rows of each sequence
  std::int64_t k_groups = 0;        ///< scales per row of k; text: k_groups=, or groups= for both; 0: none
  std::int64_t v_groups = 0;        ///< of v
  bool zeros = false;               ///< text: zeros; k or v has zero points
  std::int64_t k_tail = 0;          ///< the last of d, which are not quantised; text: tail=; 0: none
  DType k_tail_dtype = DType::f32;  ///< text: tail_dtype=
  bool given_scales = false;        ///< text: given_scales; they are inputs, not computed from the rows
  bool values_are_keys = false;     ///< text: values_are_keys; v is columns of k, which alone are written

  friend bool operator==(const AppendKvProblem&, const AppendKvProblem&) = default;

  /// Throws Error naming the word it cannot read or has read before.
  RAPT_API static AppendKvProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static AppendKvProblem of(const AppendKvArgs& args);
};

}  // namespace rapt
