// Calls on PyTorch's tensors that nothing intercepts: no checks in Python, no dispatcher.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace rapt::python {
namespace nb = nanobind;

/// rapt.torch.scaled_dot_product_attention where all of this holds: tensors are exactly Tensors or Parameters, with
/// memory of their own on the CPU or one GPU, of types and shapes that rapt has kernels for and would be chosen for;
/// and no mode, transform, tracer, autocast, profiler or dropout is at work. Else NotImplemented, with nothing done:
/// rapt.torch knows what comes next, and why. Takes fewer shapes than that: equal ranks of 2 to 4, equal batches,
/// nothing empty. Where a gradient is to be recorded that is rapt's to compute, rapt._sdpa_autograd.recorded() makes
/// the result.
nb::object eager_sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, nb::handle dropout_p,
                      nb::handle is_causal, nb::handle scale, nb::handle enable_gqa);

/// Its gradients, where no gradient of them is to be recorded: a tuple of those of query, key, value and
/// attn_mask, None for what is not wanted. Takes plain tensors of four dimensions, whose gradients have their shapes
/// with nothing left to sum. Else NotImplemented, for rapt._sdpa.gradients(), whose arguments these are, or the
/// operator. Modes and profilers are not asked for: those that come after the forward do not see this call.
nb::object eager_sdpa_gradients(nb::handle grad_out, nb::handle grad_lse, nb::handle query, nb::handle key,
                                nb::handle value, nb::handle attn_mask, nb::handle out, nb::handle lse, nb::handle seed,
                                bool is_causal, nb::handle scale, bool enable_gqa, nb::handle dropout_p,
                                const nb::list& wanted);

/// The same for rapt.transformers, where no gradient is to be recorded: [b, h, n, d] to [b, n, h, dv], rows and keys
/// ending together. attention_mask is boolean or additive, position_bias additive, sinks [hq], sliding_window (of
/// causal calls) how many keys a row sees.
nb::object eager_attention(nb::handle query, nb::handle key, nb::handle value, nb::handle attention_mask,
                           nb::handle position_bias, nb::handle sinks, bool causal, nb::handle sliding_window,
                           nb::handle softcap, nb::handle scaling, nb::handle dropout);

/// The same as kernels of PyTorch's dispatcher, of the arguments of rapt._sdpa_autograd's operators: `out`, (out, lse),
/// or the gradients that are wanted. What comes from there has no modes, transforms and gradients left to be asked for,
/// and goes to no other kernel because that would be faster.
nb::object dispatched_sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask,
                           nb::handle is_causal, nb::handle scale, nb::handle enable_gqa, nb::handle dropout_p,
                           nb::handle seed, bool with_lse);
nb::object dispatched_sdpa_gradients(nb::handle grad_out, nb::handle grad_lse, nb::handle query, nb::handle key,
                                     nb::handle value, nb::handle attn_mask, nb::handle out, nb::handle lse,
                                     nb::handle seed, bool is_causal, nb::handle scale, bool enable_gqa,
                                     nb::handle dropout_p, const nb::list& wanted);

/// A kernel for a device: `function` of this module, one of those above, and otherwise(*inputs) where it returns
/// NotImplemented.
nb::object dispatched(const nb::str& function, const nb::object& otherwise);
/// A kernel for a device's key of autograd, registered with keyset: where the dispatcher would go from there to the
/// device's kernel at once (`plain`: the raw keyset of such calls), and no gradient is to be recorded, it is
/// `function`; else, and where that returns NotImplemented, otherwise(keyset, *inputs).
nb::object dispatched_above_autograd(const nb::str& function, const nb::object& otherwise, std::uint64_t plain);

}  // namespace rapt::python
