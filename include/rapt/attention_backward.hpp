// Gradients of attention().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/attention.hpp"

namespace rapt {

/// What the forward call had and gave, the gradients of its results, and where those of its inputs go. Every gradient
/// that is written has the shape of what it is the gradient of, is f32, bf16 or f16 by itself, and overlaps nothing;
/// those left empty are not computed.
struct AttentionBackwardArgs {
  TensorView q{};             ///< as in AttentionArgs
  KvSource kv{};              ///< strided, ragged or gathered, not quantised
  TensorView out{};           ///< as attention() gave it
  TensorView lse{};           ///< likewise; not optional here
  ScoreSpec score{};          ///< the forward's
  TensorView cu_seqlens_q{};  ///< the forward's
  TensorView dout{};          ///< f32, bf16 or f16, of out's shape; any strides, those of an expanded scalar too
  TensorView dlse{};          ///< optional f32, of lse's shape: for losses that depend on lse (merged results, z-loss)
  MutableTensorView dq{}, dk{}, dv{};
  MutableTensorView dbias{};   ///< of score.bias; where the bias broadcasts, its gradients are summed
  MutableTensorView dsinks{};  ///< of score.sinks
  MutableTensorView dalibi{};  ///< of score.alibi, the slopes
};

/// Gradients of sum(dout * out) + sum(dlse * lse), by recomputing scores from q, k and lse block by block: extra memory
/// is O(rows), or up to 64 times that where they are few, never rows x keys. Sums are fp32 whatever the types, and
/// every gradient is rounded once. Rows that see no key give and get nothing (but a sink gets their dlse), and
/// gradients of keys past a length are 0.
///
/// With gathered keys dk and dv have the pool's shape: a row has the sum over all tokens that list it, as often as they
/// do, and one that no token lists has 0, nothing of it being read. Extra memory is then O(rows) of one head of a pool,
/// d + dv floats each (twice that for less than 32 query heads of a key head), never the keys of all lists.
///
/// The bits of dq depend on what those of `out` depend on; those of dk and dv on the rows of their sequence and kv
/// head; none on threads, executor, or the other sequences of a batch. Throws Error before anything is written.
/// Reentrant. `workspace` as for attention(). docs/contract.md has the bounds.
/// FLOPs (cost.hpp): q.k, dout.v, and the sums of dq, dk and dv over the attended (row, key) pairs.
RAPT_API void attention_backward(const AttentionBackwardArgs& args, const Context& context = default_context(),
                                 std::span<std::byte> workspace = {});

/// What dispatch and planning see of an attention_backward call: the forward's problem, whose `lse` is always true, and
/// the gradients. Text form: "attention_backward", the forward's words, and those of the fields below.
///
///     attention_backward dtype=bf16 b=2 hq=8 hk=2 sq=512 d=64 causal dsinks
///     attention_backward dtype=bf16 hq=128 hk=1 sq=512 sk=2048 d=576 dv=512 gathered pool=65536
struct AttentionBackwardProblem : AttentionProblem {
  static constexpr std::uint8_t kDq = 1, kDk = 2, kDv = 4, kAll = 7;

  DType dout_dtype = DType::f32;  ///< text: dout=; default: out's. Gradients that are written may have any type
  std::uint8_t grads = kAll;      ///< which of dq, dk and dv; text: grads= and their letters, "qk"; default: all
  bool dlse = false;
  bool dbias = false;
  bool dsinks = false;
  bool dalibi = false;
  std::int64_t pool = 0;  ///< gathered: rows of k that the lists of a sequence choose from; text default: sk

  friend bool operator==(const AttentionBackwardProblem&, const AttentionBackwardProblem&) = default;

  /// As AttentionProblem::parse().
  RAPT_API static AttentionBackwardProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static AttentionBackwardProblem of(const AttentionBackwardArgs& args);
};

}  // namespace rapt
