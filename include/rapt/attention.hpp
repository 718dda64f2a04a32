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

/// Shapes: b batch, hq query heads, hk key/value heads (hq % hk == 0; query head h reads head floor(h / (hq / hk))),
/// sq query rows, sk key rows, d query/key head size, dv value head size. Any non-negative strides.
/// q, k, v and out are f32, bf16 or f16, q also f8e4m3, k and v also quantised (kv_source.hpp); k and v agree, q and
/// out may differ from them and from each other. Whatever the types, sums and the softmax are fp32, inputs count as
/// given, and out is rounded once, to nearest even. An element x of f8e4m3 queries counts as x * q_scale, with the
/// scale of its row, or without scales as it is. bias, alibi and sinks are f32, bf16 or f16, each by itself; lse is
/// f32.
struct AttentionArgs {
  TensorView q{};           ///< [b, hq, sq, d]; with cu_seqlens_q [total_q, hq, d]
  KvSource kv{};            ///< keys and values, of one type
  MutableTensorView out{};  ///< [b, hq, sq, dv]; with cu_seqlens_q [total_q, hq, dv]. Overlaps nothing, itself included
  ScoreSpec score{};        ///< scale, masks, bias, ...
  MutableTensorView lse{};  ///< optional f32 [b, hq, sq] ([total_q, hq]): log of the sum of exp of the final scores
  TensorView cu_seqlens_q{};  ///< optional i32 or i64 [b + 1]: q and out are ragged; ragged keys then have the same b
  TensorView q_scale{};       ///< optional f32, of f8e4m3 queries: [b, hq, sq, 1] ([total_q, hq, 1]); sizes of 1 in b
                              ///< (total_q) and sq broadcast
};

/// out = softmax(score(q k^T)) v in extra memory of O(threads x block), whatever the lengths, and at most 64 (dv + 17)
/// floats for each row of a sequence of up to 64 rows (tokens x group); one of up to 2048 rows takes no more than one
/// of 64. With gathered keys each query token takes 112 bytes beside. See docs/contract.md for the semantics of every
/// corner. Throws Error (before anything is written) on bad arguments, std::bad_alloc when memory cannot be had.
/// Reentrant. The bits of a row of `out` depend on that row's own inputs, on the numbers of rows (of each key head:
/// tokens x heads of a group), keys and key heads of its sequence and of the keys that its rows see (by which the
/// kernel is chosen and long keys are cut), and on the ISA only. A `workspace` that is not empty is used instead of the
/// context's memory. It lies on the tensors' device, starts at a multiple of 64 bytes, overlaps no tensor and has what
/// Plan::workspace_bytes() says of the call (else Error); max_workspace_bytes() is enough for many calls. Only lists of
/// gathered keys that are not full take memory beside it: 8 bytes for each query token, and where some list has gaps, a
/// copy of all of them without the gaps.
/// FLOPs (cost.hpp): q.k and p.v over the attended (row, key) pairs, without the softmax.
RAPT_API void attention(const AttentionArgs& args, const Context& context = default_context(),
                        std::span<std::byte> workspace = {});

/// The same for dense tensors.
inline void attention(const TensorView& q, const TensorView& k, const TensorView& v, const MutableTensorView& out,
                      const ScoreSpec& score = {}, const Context& context = default_context()) {
  attention(AttentionArgs{q, KvSource::strided(k, v), out, score, {}, {}}, context);
}

}  // namespace rapt
