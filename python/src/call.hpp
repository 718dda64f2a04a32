// One attention call as Python gives it.
#pragma once

#include "array.hpp"
#include "rapt/attention.hpp"
#include "rapt/plan.hpp"

namespace rapt::python {

/// The arguments of rapt.attention, in its order.
struct AttentionArguments {
  nb::handle q, k, v, causal, align, window, scale, mask, bias, softcap, alibi, sinks, cu_seqlens_q, cu_seqlens_k,
      block_table, cache_seqlens, ring, k_scale, v_scale, k_zero, v_zero, kv_dtype, out, return_lse, threads, isa;
};

/// rapt.attention: `out`, or (out, lse). Refuses what cannot be read (TypeError, ValueError); the library checks the
/// rest. Without the GIL where it works.
nb::object attention(const AttentionArguments& arguments);
/// rapt.explain.
Plan explain(const AttentionArguments& arguments);

/// The views of a call of PyTorch's scaled_dot_product_attention on tensors of 2 to 4 dimensions, whose shapes and
/// dtypes somebody has checked. Leading dimensions broadcast, attn_mask (ndim 0: none) is boolean or additive, the
/// causal diagonal starts top left, and key heads are repeated in order for GQA.
struct SdpaViews {
  MutableTensorView q, k, v, attn_mask, out;
};
AttentionArgs sdpa_args(const SdpaViews& views, std::optional<float> scale, bool is_causal);

/// The same into `out`, whose shape is that of the result.
void sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, bool is_causal, nb::handle scale,
          nb::handle out);

/// Runs a call on PyTorch's threads, or its current stream, without the GIL.
void run_as_torch(const AttentionArgs& args);

}  // namespace rapt::python
