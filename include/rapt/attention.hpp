// Scaled dot-product attention: prefill, decode, cross attention, MHA, GQA and MQA through one call.
#pragma once

#include <cstddef>
#include <span>

#include "rapt/attention_problem.hpp"
#include "rapt/context.hpp"
#include "rapt/kv_source.hpp"
#include "rapt/score.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// Arguments of attention(). Symbols: b batch, hq query heads, hk KV heads (hq % hk == 0; query head h reads KV head
/// floor(h / (hq / hk))), sq query rows, sk key rows, d head dimension of queries and keys, dv head dimension of
/// values. Strides are non-negative.
///
/// q, k, v and out are f32, bf16 or f16. q may also be f8e4m3, and k and v quantised (kv_source.hpp). k and v have one
/// type; q and out may differ from it and from each other. bias, alibi and sinks are f32, bf16 or f16, each
/// independently. lse is f32. For all types, inputs count as given, sums and the softmax are fp32, and out is rounded
/// once, to nearest even. An element x of f8e4m3 queries counts as x * q_scale, with its row's scale, or as x without
/// scales.
struct AttentionArgs {
  TensorView q{};  ///< [b, hq, sq, d]; with cu_seqlens_q [total_q, hq, d]
  KvSource kv{};   ///< keys and values, of one type
  MutableTensorView
      out{};          ///< [b, hq, sq, dv]; with cu_seqlens_q [total_q, hq, dv]. Overlaps neither an input nor itself
  ScoreSpec score{};  ///< scale, masks, bias and other score modifiers
  MutableTensorView lse{};    ///< optional f32 [b, hq, sq] ([total_q, hq]): log of the sum of exp of the final scores
  TensorView cu_seqlens_q{};  ///< optional i32 or i64 [b + 1]: q and out are ragged. Ragged keys then have the same b
  TensorView
      q_scale{};  ///< optional f32, with f8e4m3 queries: [b, hq, sq, 1] ([total_q, hq, 1]); b (total_q) and sq may be 1
};

/// Scaled dot-product attention: out = softmax(score(q k^T)) v (Vaswani et al., 2017), computed block by block as in
/// FlashAttention (Dao et al., 2022). One function covers prefill, decode and cross attention, and MHA, GQA and MQA.
/// docs/contract.md specifies every corner case.
///
/// Extra memory is O(threads x block), independent of the lengths, and at most 64 (dv + 17) floats for each row of a
/// sequence of up to 64 rows (tokens x group). A sequence of up to 2048 rows needs no more than one of 64 rows.
/// Gathered keys need 112 bytes more for each query token; on GPUs 8 bytes for each entry of each list, and 4
/// for each query head of each token.
///
/// Throws Error, before anything is written, on bad arguments, and std::bad_alloc if an allocation fails. Reentrant.
/// The bits of a row of `out` depend only on the row's own inputs, on the numbers of rows (per KV head: tokens x
/// group), keys and KV heads of its sequence, on the number of keys that the sequence's rows see, and on the ISA. These
/// numbers choose the kernel and the splits of the keys.
///
/// A `workspace` that is not empty replaces the context's memory. It lies on the tensors' device, is aligned to 64
/// bytes, overlaps no tensor and has at least Plan::workspace_bytes() bytes for this call; otherwise attention() throws
/// Error. max_workspace_bytes() is enough for many calls. Only gathered keys on CPUs with lists that are not full
/// allocate memory in addition: 8 bytes for each query token, and if a list has gaps, a copy of all lists without the
/// gaps.
///
/// FLOPs (cost.hpp): q.k and p.v over the attended (row, key) pairs, without the softmax.
RAPT_API void attention(const AttentionArgs& args, const Context& context = default_context(),
                        std::span<std::byte> workspace = {});

/// Attention of dense tensors: q [b, hq, sq, d], k [b, hk, sk, d], v [b, hk, sk, dv] and out [b, hq, sq, dv].
inline void attention(const TensorView& q, const TensorView& k, const TensorView& v, const MutableTensorView& out,
                      const ScoreSpec& score = {}, const Context& context = default_context()) {
  attention(AttentionArgs{q, KvSource::strided(k, v), out, score, {}, {}}, context);
}

}  // namespace rapt
