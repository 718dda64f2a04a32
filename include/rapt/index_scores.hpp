// The indexer of DeepSeek Sparse Attention (DSA): chooses the keys that a query attends to.
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

/// Arguments of index_scores(). Symbols: b sequences, sq queries with h index heads each, sk keys, which all index
/// heads share, d head dimension. Strides are non-negative.
struct IndexScoresArgs {
  TensorView q{};        ///< f32, bf16 or f16 [b, sq, h, d]
  TensorView k{};        ///< f32, bf16, f16, i8, f8e4m3 or f8e5m2 [b, sk, d]; with block_table [pages, page_size, d]
  TensorView weights{};  ///< f32 [b, sq, h]
  MutableTensorView scores{};   ///< optional f32 [b, sq, sk]; -inf for keys that a query does not see
  MutableTensorView indices{};  ///< optional i32 [b, sq, n], n >= 1: the n best keys of each query, best first
  TensorView k_scale{};      ///< f32 [b, sk] ([pages, page_size]): one scale per row of a quantised k; required for i8
  TensorView seqlens{};      ///< optional i32 or i64 [b]: number of keys, 0 <= len <= sk. Rows past it are never read
  TensorView block_table{};  ///< optional i32 or i64 [b, m]: key j of sequence i is row j % page_size of page
                             ///< block_table[i, j / page_size]. Requires seqlens
  TensorView key_begin{}, key_end{};  ///< optional i32 or i64 [b, sq]: a query sees keys [begin, end) only
  std::optional<float> scale{};       ///< default d^-1/2
  bool relu = true;                   ///< ReLU of each head's product, before its weight
  bool causal = true;                 ///< keys j <= i + offset
  std::optional<Align> align{};       ///< where query 0 sits among the keys, as for attention()
};

/// The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, 2025). It computes
///
///     scores[i, j] = scale * k_scale[j] * sum over h of weights[i, h] * relu(q[i, h] . k[j])
///
/// for the keys j that query i sees, and selects the n keys with the largest scores of each query. Give `scores`,
/// `indices` or both. Without `scores`, the call keeps a few times n of them, or about a thousand, per query that it
/// works on.
///
/// The selection is exact and follows a total order: the larger score first, of equal scores the lower position; -0
/// equals 0, and NaN counts as the largest. Only visible keys are selected, and none with a score of -inf. If fewer
/// than n remain, the other entries of `indices` are -1. Products and sums are fp32. The bits depend only on the inputs
/// and the ISA.
///
/// All tensors are on one device. On a GPU, values of seqlens and block_table are not validated: they are clamped to
/// what the tensors hold. Without `scores`, the workspace there holds the scores of as many queries as fit 256 MiB.
///
/// Throws Error before anything is written. Reentrant. `workspace` as for attention(). FLOPs (cost.hpp): q.k over the
/// visible (query, key) pairs, in all heads.
RAPT_API void index_scores(const IndexScoresArgs& args, const Context& context = default_context(),
                           std::span<std::byte> workspace = {});

/// The problem of an index_scores call: all that dispatch and planning use. Text form: "index_scores", then `key=value`
/// words in the order of the fields below. Words at their default are omitted.
///
///     index_scores dtype=bf16 b=1 sq=64 sk=8192 h=64 d=128 align=bottom_right topk=2048
///
/// max_workspace_bytes() covers problems with smaller b, sq and sk.
struct IndexScoresProblem {
  using Align = AttentionProblem::Align;

  DType q_dtype = DType::f32;  ///< text: q=, or dtype= for both types
  DType k_dtype = DType::f32;  ///< text: k=
  DeviceType device = DeviceType::cpu;
  std::int64_t b = 1;
  std::int64_t sq = 1;
  std::int64_t sk = 0;  ///< text default: sq; paged: the room of the block table
  std::int64_t h = 1;
  std::int64_t d = 0;
  bool causal = true;  ///< text: full, if false
  Align align = Align::none;
  std::int64_t align_offset = 0;  ///< text: align=N
  bool relu = true;               ///< text: linear, if false
  bool scales = false;            ///< k has scales
  bool lengths = false;           ///< text: seqlens
  bool key_ranges = false;        ///< text: ranges; key_begin or key_end is given
  std::int64_t page_size = 0;     ///< text: page=
  std::int64_t topk = 0;          ///< n; 0: no indices
  bool scores = false;            ///< scores are written; text default: if topk is 0

  friend bool operator==(const IndexScoresProblem&, const IndexScoresProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word.
  RAPT_API static IndexScoresProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static IndexScoresProblem of(const IndexScoresArgs& args);
};

}  // namespace rapt
