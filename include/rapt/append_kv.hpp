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

/// Arguments of append_kv(). Symbols: b sequences, hk KV heads, n new rows per sequence, d and dv head dimension of
/// keys and of values. k_new and v_new are f32, bf16 or f16, with any non-negative strides. Every sequence has n new
/// rows. With cu_seqlens, each sequence has its own number of new rows.
struct AppendKvArgs {
  TensorView k_new{};       ///< [b, hk, n, d]; with cu_seqlens [total, hk, d]
  TensorView v_new{};       ///< [b, hk, n, dv]; with cu_seqlens [total, hk, dv]
  KvCache cache{};          ///< its tensors overlap neither each other nor any input, except v in k: see append_kv()
  TensorView seqlens{};     ///< i32 or i64 [b]: number of keys of each sequence before the call
  TensorView cu_seqlens{};  ///< optional i32 or i64 [b + 1]: the new rows of sequence i are [c[i], c[i + 1])
};

/// Writes new keys and values to a KV cache, rounded or quantised to the cache's type. The new rows of sequence i go to
/// key positions seqlens[i], seqlens[i] + 1, and so on. All other rows keep their contents. The caller updates the
/// lengths. If a sequence has more new rows than a ring has rows, the last ones are kept.
///
/// Rows of the cache's own type are copied. Rows of another float type are rounded once, to nearest even. A code is the
/// nearest to x / scale + zero; halfway between two codes, either is possible. Scales and zeros with an element for
/// every row are computed from each group of the new row, and written with the row. Scales and zeros that broadcast
/// over rows or sequences (pages) are inputs. Reading an element x back gives y, with A the largest |x| of the group.
/// In addition, fp32 rounding of (code - zero) * scale changes y by up to 2^-21 A:
///
///     i8, i4x2  |y - x| <= scale / 2. Computed scales: A / 127 (i4x2: A / 7); with zeros (max - min) / 255
///               (i4x2: / 15), and at least A 2^-20. A scale is at least 2^-126. It is 1 for a group of zeros,
///               which reads back as zeros.
///     f8e4m3    |y - x| <= max(2^-4 |x|, 2^-10 scale). Computed scales: A / 448, with the same exceptions.
///     f8e5m2    |y - x| <= max(2^-3 |x|, 2^-17 scale). Computed scales: A / 57344, with the same exceptions.
///
/// With given scales, values past the range of the type saturate at -128 and 127, -8 and 7, +-448 or +-57344. 8-bit
/// floats without scales have a scale of 1. Given scales must be finite and positive, given zeros finite. NaN and Inf
/// are never hidden. In 8-bit floats the element becomes NaN (in f8e5m2 Inf stays Inf). In i8 and i4x2 with a computed
/// scale the whole group reads back as NaN; with a given scale NaN and Inf are errors. 8-bit floats take no zeros.
/// k_zero (v_zero) has an element for every row if and only if k_scale (v_scale) has.
///
/// v may be a range of k's columns (latent attention: k's rows contain v's). Then v is a view of k's memory with k's
/// strides that begins at one of its columns, v_new is a view of the same columns of k_new, and only k is written. If k
/// has scales (and zeros), v begins and ends with a group, and v_scale (v_zero) is a view of the scales (zeros) of
/// these columns.
///
/// With k_tail, the last columns of k_new go to k_tail and the others to k.
///
/// Throws Error, before anything is written, for a KvSource that is invalid, for rows past the end of a strided cache
/// or of a block table, for a table entry that is no page, and if two new rows have the same place in a page. Sequences
/// may share pages, but writing to a shared row changes it for all of them. If a sequence forks, copy its last, partly
/// filled page. Reentrant. The bits do not depend on the ISA, the device or the number of threads. `workspace` as for
/// attention().
///
/// All tensors are on one device. On a GPU, values of lengths, tables, scales and rows are not validated. Rows without
/// a place in the cache are not written. If two rows have the same place, one of them is written. Given scales and
/// zeros are used as they are, and NaN becomes the smallest value of an integer type. FLOPs (cost.hpp): none.
RAPT_API void append_kv(const AppendKvArgs& args, const Context& context = default_context(),
                        std::span<std::byte> workspace = {});

/// The problem of an append_kv call: all that dispatch and planning use. Text form: "append_kv", then `key=value` words
/// in the order of the fields below. The fields of CacheProblem follow `ragged`. Words at their default are omitted.
///
///     append_kv b=8 hk=8 n=1 sk=4096 d=128
///     append_kv new=bf16 kv=i8 b=8 hk=8 n=64 sk=4096 d=128 page=16 groups=1
///
/// max_workspace_bytes() covers problems with smaller b, n and ragged.
struct AppendKvProblem : CacheProblem {
  DType new_dtype = DType::f32;  ///< of k_new; text: new=, or dtype= for both types
  DType kv_dtype = DType::f32;   ///< of the cache; text: kv=
  DeviceType device = DeviceType::cpu;
  std::int64_t b = 1;
  std::int64_t hk = 1;
  std::int64_t n = 0;   ///< new rows of each sequence; ragged: of the longest sequence
  std::int64_t sk = 0;  ///< keys that a sequence has room for; rings: rows of the ring
  std::int64_t d = 0;
  std::int64_t dv = 0;              ///< text default: d
  std::int64_t ragged = -1;         ///< new rows of all sequences; -1: n rows of each sequence
  std::int64_t k_groups = 0;        ///< scales per row of k; text: k_groups=, or groups= for both; 0: none
  std::int64_t v_groups = 0;        ///< scales per row of v
  bool zeros = false;               ///< text: zeros; k or v has zero points
  std::int64_t k_tail = 0;          ///< the last columns of d, not quantised; text: tail=; 0: none
  DType k_tail_dtype = DType::f32;  ///< text: tail_dtype=
  bool given_scales = false;        ///< text: given_scales; scales are inputs, not computed from the rows
  bool values_are_keys = false;     ///< text: values_are_keys; v is a range of k's columns, and only k is written

  friend bool operator==(const AppendKvProblem&, const AppendKvProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word.
  RAPT_API static AppendKvProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static AppendKvProblem of(const AppendKvArgs& args);
};

}  // namespace rapt
