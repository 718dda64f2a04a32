// One attention call as Python gives it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "array.hpp"
#include "cache.hpp"
#include "rapt/attention.hpp"
#include "rapt/attention_backward.hpp"
#include "rapt/context.hpp"
#include "rapt/plan.hpp"

namespace rapt::python {

/// The context of a call with these arrays; `threads`, `isa` and `kernel` as in rapt.attention. PyTorch's own threads
/// where one is its tensor: two pools that take turns slow each other down.
Context context_of(const Arrays& arrays, nb::handle threads, nb::handle isa, Device device,
                   nb::handle kernel = nb::none());

/// The argument `align` of rapt.attention and its relatives; None is not given.
std::optional<Align> align_of(nb::handle object);

/// The arguments `dropout_p`, `seed` and `offset` of rapt.attention.
std::optional<Dropout> dropout_of(nb::handle p, nb::handle seed, nb::handle offset);

/// How many arguments of rapt.attention ScoreSpec::for_each() goes through.
inline constexpr std::size_t kScoreArguments = [] {
  std::size_t count = 0;
  ScoreSpec().for_each([&](const auto&...) { ++count; });
  return count;
}();

/// The arguments of rapt.attention, in its order.
struct AttentionArguments {
  nb::handle q, k, v;
  std::array<nb::handle, kScoreArguments> score;
  nb::handle cu_seqlens_q;
  KeyArguments keys;
  nb::handle q_scale, dropout_p, seed, offset, out, return_lse, threads, isa, kernel;
};

/// rapt.attention: `out`, or (out, lse). Refuses what cannot be read (TypeError, ValueError); the library checks the
/// rest. Without the GIL where it works.
nb::object attention(const AttentionArguments& arguments);
/// rapt.explain.
Plan explain(const AttentionArguments& arguments);
/// rapt.explain_problem. Throws Error.
Plan explain_problem(std::string_view problem, nb::handle threads, nb::handle isa);

/// What rapt.attention_backward has beside the forward's arguments: its result, the gradients of its results, and the
/// arrays to write gradients to, or None.
struct GradientArguments {
  nb::handle dout, lse, dlse, dq, dk, dv, dbias, dsinks, dalibi;
};
/// rapt.attention_backward. Refuses as attention() does.
void attention_backward(const AttentionArguments& forward, const GradientArguments& gradients);

/// rapt.dropout_mask, into `mask`.
void write_dropout_mask(nb::handle p, nb::handle seed, nb::handle offset, nb::handle mask);

/// The views of a call of PyTorch's scaled_dot_product_attention on tensors of 2 to 4 dimensions, whose shapes and
/// dtypes somebody has checked. Leading dimensions broadcast, attn_mask (ndim 0: none) is boolean or additive, the
/// causal diagonal starts top left, and key heads are repeated in order for GQA.
struct SdpaViews {
  MutableTensorView q, k, v, attn_mask, out, lse{};  ///< lse [.., h, s], or none
};
AttentionArgs sdpa_args(const SdpaViews& views, std::optional<float> scale, bool is_causal);

/// The same into `out`, whose shape is that of the result, and into `lse` if it is not None. `seed` is
/// that of dropout, None without it.
void sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, bool is_causal, nb::handle scale,
          nb::handle out, nb::handle lse, nb::handle dropout_p, nb::handle seed);

/// Runs a call on PyTorch's threads, or its current stream, without the GIL.
void run_as_torch(const AttentionArgs& args);
void run_as_torch(const AttentionBackwardArgs& args);

}  // namespace rapt::python
