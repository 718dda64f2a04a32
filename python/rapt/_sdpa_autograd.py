"""scaled_dot_product_attention as PyTorch's operators, with gradients: for its dispatcher, and for eager calls without that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rapt import _refusals, _sdpa


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> None:
    misfit = _refusals.misfit(q, k, v, mask, gqa)
    if misfit:
        raise ValueError(
            f"rapt::scaled_dot_product_attention: got {misfit}; wanted what"
            " torch.nn.functional.scaled_dot_product_attention takes, of float32, bfloat16 or float16"
        )


@torch.library.custom_op("rapt::scaled_dot_product_attention", mutates_args=(), device_types=("cpu", "cuda"))
def operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    _check(query, key, value, attn_mask, enable_gqa)
    return _sdpa.forward(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, seed)


@operator.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    _check(query, key, value, attn_mask, enable_gqa)
    return _sdpa.result_like(query, key, value, attn_mask, _sdpa.batch_of(query, key, value, enable_gqa), enable_gqa)


@torch.library.custom_op("rapt::scaled_dot_product_attention_with_lse", mutates_args=(), device_types="cpu")
def _operator_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, attn_mask, enable_gqa)
    out, lse = _sdpa.run(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, seed, lse=True)
    return out, lse


@_operator_with_lse.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, attn_mask, enable_gqa)
    batch = _sdpa.batch_of(query, key, value, enable_gqa)
    return _sdpa.result_like(query, key, value, attn_mask, batch, enable_gqa), _sdpa.lse_like(query, batch)


@torch.library.custom_op("rapt::scaled_dot_product_attention_backward", mutates_args=(), device_types="cpu")
def _backward_operator(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Those of the gradients of query, key, value and attn_mask that are wanted."""
    tensors = (query, key, value, attn_mask, out, lse, seed)
    made = _sdpa.gradients(grad_out, grad_lse, *tensors, is_causal, scale, enable_gqa, dropout_p, wanted)
    return [t for t in made if t is not None]


@_backward_operator.register_fake
def _(grad_out: Tensor | None, grad_lse: Tensor | None, *inputs: Any) -> list[Tensor]:
    return [t for t in _sdpa.gradients(grad_out, grad_lse, *inputs, compute=False) if t is not None]


def no_second_derivatives(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "create_graph: got a gradient of rapt's attention to differentiate; wanted PyTorch's own attention where second "
        "derivatives are taken: with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ..."
    )


_backward_operator.register_autograd(no_second_derivatives)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    # Of no keys, the result does not depend on the mask, nor on anything else.
    wanted = list(ctx.needs_input_grad[:4])
    inputs = (grad_out, grad_lse, *ctx.saved_tensors, *ctx.options, wanted)
    made: list[Tensor | None]
    if ctx.in_graph or torch.is_grad_enabled():  # create_graph
        some = iter(_backward_operator(*inputs))
        made = [next(some) if want else None for want in wanted]
    else:
        made = _sdpa.gradients(*inputs)
    return (*made, *[None] * 5)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], in_graph: bool = True) -> None:
    *tensors, is_causal, scale, enable_gqa, dropout_p, seed = inputs
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.options, ctx.in_graph = (is_causal, scale, enable_gqa, dropout_p), in_graph
    ctx.set_materialize_grads(False)


_operator_with_lse.register_autograd(_backward, setup_context=_setup_context)


class _Function(torch.autograd.Function):
    """The operator with its gradients for eager calls, in a third of its time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _sdpa.run(*inputs, lse=True)
        _setup_context(ctx, inputs, output, False)
        out: Tensor = output[0]
        return out

    backward = staticmethod(_backward)


# Where rapt has no backward (on GPUs) it is PyTorch's, of the attention computed again.


def _setup_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, attn_mask, ctx.is_causal, ctx.scale, ctx.enable_gqa, dropout_p, _ = inputs
    assert dropout_p == 0
    ctx.save_for_backward(query, key, value, attn_mask)


def _backward_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *saved, attn_mask = ctx.saved_tensors
    if ctx.needs_input_grad[3]:
        saved.append(attn_mask)
    is_causal = ctx.is_causal
    again = torch.is_grad_enabled()  # create_graph: PyTorch's backward may have one of its own, or says that it has none
    with torch.enable_grad():
        # Aliases of their own: query, key and value may be one tensor.
        inputs = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in saved]
        query, key, value, mask = *inputs[:3], inputs[3] if len(inputs) > 3 else attn_mask
        if mask is not None:
            mask, is_causal = _sdpa.merged(query, key, mask, is_causal)
            if mask.is_cuda and mask.is_floating_point():
                mask = mask.to(query.dtype)  # PyTorch's CUDA kernels take no other
        out = _sdpa.pytorch(query, key, value, mask, 0.0, is_causal, scale=ctx.scale, enable_gqa=ctx.enable_gqa)
    # Of no keys, PyTorch's result does not depend on the mask.
    grads = torch.autograd.grad(out, inputs, grad, create_graph=again, allow_unused=True)
    return (*grads[:3], grads[3] if len(grads) > 3 else None, *[None] * 5)


operator.register_autograd(_backward_again, setup_context=_setup_again)


class _FunctionAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _sdpa.forward(*inputs)
        _setup_again(ctx, inputs, output)
        return output

    backward = staticmethod(_backward_again)


def forward_with_gradients(*inputs: Any) -> Tensor:
    """_sdpa.forward() of eager calls where a gradient is to be recorded."""
    function = _Function if inputs[0].is_cpu else _FunctionAgain
    out: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


def on_cpu_with_gradients(library: Any, plain: Any, with_lse: Any, tensors: int) -> None:
    """Has `with_lse` run in place of the operator `plain` on the CPU where gradients of its first arguments, that many, are to
    be recorded. torch.library knows one backward for all devices."""

    def run(keyset: Any, *inputs: Any) -> Any:
        if _refusals.needs_grad(*inputs[:tensors]):
            return with_lse(*inputs)[0]
        with torch._C._AutoDispatchBelowAutograd():
            return plain.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    library.impl(plain, run, "AutogradCPU", with_keyset=True)


_library = torch.library.Library("rapt", "FRAGMENT")  # type: ignore[no-untyped-call]
on_cpu_with_gradients(_library, torch.ops.rapt.scaled_dot_product_attention.default, _operator_with_lse, 4)
