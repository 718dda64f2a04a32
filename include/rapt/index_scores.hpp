// The indexer of sparse attention (DeepSeek Sparse Attention, DSA): which keys a query should attend to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "rapt/attention_problem.hpp"
#include "rapt/context.hpp"
#include "rapt/score.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// Shapes: b sequences of sq queries with h index heads each, and sk keys, which all heads share; d head size. Any
/// non-negative strides.
struct IndexScoresArgs {
  TensorView q{};        ///< [b, sq, h, d], f32, bf16 or f16
  TensorView k{};        ///< [b, sk, d], of these types, i8, f8e4m3 or f8e5m2; with block_table [pages, page_size, d]
  TensorView weights{};  ///< f32 [b, sq, h]
  MutableTensorView scores{};   ///< optional f32 [b, sq, sk]; -inf for keys that a query does not see
  MutableTensorView indices{};  ///< optional i32 [b, sq, n], n >= 1: the n best keys of each query, best first
  TensorView k_scale{};         ///< f32 [b, sk] ([pages, page_size]): one for each row of a quantised k; i8 needs it
  TensorView seqlens{};         ///< optional i32 or i64 [b]: keys in use, 0 <= len <= sk. Rows past it are never read
  TensorView block_table{};     ///< optional i32 or i64 [b, m]: key j of sequence i is row j % page_size of page
                                ///< table[i, j / page_size]; needs seqlens
  TensorView key_begin{}, key_end{};  ///< optional i32 or i64 [b, sq]: a query sees keys [begin, end) only
  std::optional<float> scale{};       ///< default d^-1/2
  bool relu = true;                   ///< of each head's product, before it is weighted; else none
  bool causal = true;                 ///< keys j <= i + offset
  std::optional<Align> align{};       ///< where query 0 sits, as for attention()
};

/// scores[i, j] = scale * k_scale[j] * sum over h of weights[i, h] * relu(q[i, h] . k[j]), for the keys j that query i
/// sees, and of each query the n keys of the largest scores: at least one of `scores` and `indices` is given. Without
/// `scores` no more of them is kept than a few times n, or about a thousand.
///
/// The selection is exact, and a total order makes it one: the larger score first, of equal ones the lower position; -0
/// equals 0, and NaN counts as the largest. Only visible keys are selected, and none of score -inf; with fewer than n
/// the rest of `indices` is -1. Products and sums are fp32. Bits depend on the ISA only.
///
/// Throws Error before anything is written. Reentrant. `workspace` as for attention().
/// FLOPs (cost.hpp): q.k over the visible (query, key) pairs, in all heads.
RAPT_API void index_scores(const IndexScoresArgs& args, const Context& context = default_context(),
                           std::span<std::byte> workspace = {});

/// What dispatch and planning see of an index_scores call. Text form: "index_scores", then `key=value` words in the
/// order of the fields below; words at their default are left out.
///
///     index_scores dtype=bf16 b=1 sq=64 sk=8192 h=64 d=128 align=bottom_right topk=2048
///
/// max_workspace_bytes() holds for problems with smaller b, sq, sk.
struct IndexScoresProblem {
  using Align = AttentionProblem::Align;

  DType q_dtype = DType::f32;  ///< text: q=, or dtype= for both
  DType k_dtype = DType::f32;  ///< text: k=
  std::int64_t b = 1;
  std::int64_t sq = 1;
  std::int64_t sk = 0;  ///< text default: sq; paged: what the block table has room for
  std::int64_t h = 1;
  std::int64_t d = 0;
  bool causal = true;  ///< text: full, if not
  Align align = Align::none;
  std::int64_t align_offset = 0;  ///< text: align=N
  bool relu = true;               ///< text: linear, if not
  bool scales = false;            ///< of k
  bool lengths = false;           ///< text: seqlens
  bool key_ranges = false;        ///< text: ranges; key_begin or key_end is given
  std::int64_t page_size = 0;     ///< text: page=
  std::int64_t topk = 0;          ///< n; 0: no indices
  bool scores = false;            ///< text default: without topk they are wanted

  friend bool operator==(const IndexScoresProblem&, const IndexScoresProblem&) = default;

  /// Throws Error naming the word it cannot read or has read before.
  RAPT_API static IndexScoresProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static IndexScoresProblem of(const IndexScoresArgs& args);
};

}  // namespace rapt
