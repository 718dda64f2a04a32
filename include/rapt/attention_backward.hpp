// Gradients of attention().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/attention.hpp"

namespace rapt {

/// Arguments of attention_backward(): the forward's inputs and results, the gradients of its results, and the gradients
/// to write. Each gradient that is written has the shape of its input, is f32, bf16 or f16 independently, and overlaps
/// no other tensor. Empty gradients are not computed. Give at least one.
struct AttentionBackwardArgs {
  TensorView q{};             ///< as in AttentionArgs
  KvSource kv{};              ///< strided, ragged or gathered, not quantised
  TensorView out{};           ///< attention()'s result
  TensorView lse{};           ///< attention()'s result; required
  ScoreSpec score{};          ///< the forward's
  TensorView cu_seqlens_q{};  ///< the forward's
  TensorView dout{};          ///< f32, bf16 or f16, of out's shape, with any strides, also those of an expanded scalar
  TensorView dlse{};          ///< optional f32, of lse's shape: for losses that depend on lse (merged results, z-loss)
  MutableTensorView dq{}, dk{}, dv{};
  MutableTensorView dbias{};   ///< of score.bias; the sum over the dimensions that broadcast
  MutableTensorView dsinks{};  ///< of score.sinks
  MutableTensorView dalibi{};  ///< of score.alibi, the slopes
};

/// Gradients of sum(dout * out) + sum(dlse * lse). The call recomputes scores from q, k and lse block by block (Dao et
/// al., 2022). Extra memory is O(rows), or up to 64 times that for few rows, never rows x keys. A GPU keeps the scores'
/// gradients of some heads besides, in up to 256 MiB. Sums are fp32 for all types, and every gradient is rounded once.
/// Rows that see no key get and contribute no gradient, except that their sink gets their dlse. Gradients of keys past
/// a length are 0.
///
/// With gathered keys, dk and dv have the shape of the pool. A row of the pool gets the sum over all tokens that list
/// it, once per listing. A row that no token lists gets 0 and is not read. Extra memory is then O(rows) of one head of
/// a pool, d + dv floats per row (twice that for fewer than 32 query heads per KV head), never the keys of all lists.
///
/// The bits of dq depend on what the bits of `out` depend on. Those of dk and dv depend on the rows of their sequence
/// and KV head. None depend on threads, the executor or the other sequences of a batch. Throws Error before anything is
/// written. Reentrant. `workspace` as for attention(). docs/contract.md states the bounds.
///
/// FLOPs (cost.hpp): q.k, dout.v, and the sums of dq, dk and dv over the attended (row, key) pairs.
RAPT_API void attention_backward(const AttentionBackwardArgs& args, const Context& context = default_context(),
                                 std::span<std::byte> workspace = {});

/// The problem of an attention_backward call: the forward's problem, with `lse` always true, and the gradients. Text
/// form: "attention_backward", the forward's words, and the words of the fields below.
///
///     attention_backward dtype=bf16 b=2 hq=8 hk=2 sq=512 d=64 causal dsinks
///     attention_backward dtype=bf16 hq=128 hk=1 sq=512 sk=2048 d=576 dv=512 gathered pool=65536
struct AttentionBackwardProblem : AttentionProblem {
  static constexpr std::uint8_t kDq = 1, kDk = 2, kDv = 4, kAll = 7;

  DType dout_dtype = DType::f32;  ///< text: dout=; default: out's. Gradients that are written may have any float type
  std::uint8_t grads = kAll;      ///< which of dq, dk and dv; text: grads= and their letters, "qk"; default: all
  bool dlse = false;
  bool dbias = false;
  bool dsinks = false;
  bool dalibi = false;
  std::int64_t pool = 0;  ///< gathered: rows of k that a sequence's lists refer to; text default: sk

  friend bool operator==(const AttentionBackwardProblem&, const AttentionBackwardProblem&) = default;

  /// Reads the text form, as AttentionProblem::parse() does.
  RAPT_API static AttentionBackwardProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static AttentionBackwardProblem of(const AttentionBackwardArgs& args);
};

}  // namespace rapt
