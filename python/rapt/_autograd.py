"""Gradients in PyTorch's autograd: what rapt's operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rapt import _refusals
from rapt._operators import Operator


def register_gradients(
    plain: Operator,
    with_lse: Operator,
    backward: Operator,
    count: int,
    run: Callable[..., Any],
    gradients: Callable[..., list[Tensor | None]],
    by_extension: Callable[..., Any] | None = None,
    otherwise: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """Gives the operator `plain` gradients, of its first `count` arguments, which are tensors or None.

    Its last argument is a seed or None, those between are options. The operators `with_lse` and `backward`, and the functions
    run(*inputs, with_lse=True) and gradients() that they call, compute (out, lse) of the same arguments, and the gradients of
    (grad_out, grad_lse, *tensors, out, lse, seed, *options, wanted), of which `backward` returns those that are wanted.
    `by_extension` is gradients() of calls that the extension takes as they are; of others it returns NotImplemented.
    otherwise(keyset, *inputs of `plain`) runs calls whose gradients are not rapt's; of others it returns NotImplemented.

    Returns what eager calls take in place of the operators where a gradient is to be recorded, in a third of their time. The first is
    of all arguments of `plain`, and (out, lse) or None where that is still to be computed; the second, of those of `with_lse`.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], in_graph: bool = True) -> None:
        *options, seed = inputs[count:]
        ctx.save_for_backward(*inputs[:count], *output, seed)
        ctx.options, ctx.in_graph = options, in_graph
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if _refusals.is_batched(grad_out) or _refusals.is_batched(grad_lse):
            raise NotImplementedError(
                "is_grads_batched: got a batch of gradients of rapt's attention (vmap over its backward); wanted one call for "
                "each, or PyTorch's own attention: with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ..."
            )
        wanted, saved = list(ctx.needs_input_grad[:count]), ctx.saved_tensors
        inputs = (grad_out, grad_lse, *saved, *ctx.options, wanted)
        made: Any = NotImplemented
        if not ctx.in_graph and not torch.is_grad_enabled():  # as it is for create_graph
            if by_extension is not None:
                made = by_extension(*inputs)
            # The forward has looked at its inputs. Gradients come from anywhere, and hooks may save something else.
            if made is NotImplemented and _refusals.is_eager(grad_out, grad_lse, *saved):
                made = gradients(*inputs)
        if made is NotImplemented:
            some = iter(backward(*inputs))
            made = [next(some) if want else None for want in wanted]
        return (*made, *[None] * (len(ctx.options) + 1))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:
            *inputs, made = given
            out, lse = run(*inputs, with_lse=True) if made is None else made
            setup_context(ctx, tuple(inputs), (out, lse), False)
            result: Tensor = out
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            return (*differentiate(ctx, *grads), None)

    class AttentionAndLse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            output: tuple[Tensor, Tensor] = run(*inputs, with_lse=True)
            setup_context(ctx, inputs, output, False)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            return differentiate(ctx, *grads)

    with_lse.register_autograd(differentiate, setup_context=setup_context)
    by_pytorch = "PyTorch's own attention where second derivatives are taken: "
    by_pytorch += "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ..."
    backward.register_autograd(no_second_derivatives("attention", by_pytorch))

    def run_recorded(keyset: Any, *inputs: Any) -> Any:
        if _refusals.needs_grad(*inputs[:count]):
            made = NotImplemented if otherwise is None else otherwise(keyset, *inputs)
            return with_lse(*inputs)[0] if made is NotImplemented else made
        with torch._C._AutoDispatchBelowAutograd():
            return plain.overload.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    for device in ("CPU", "CUDA", "Meta"):
        plain.set_autograd(device, run_recorded)
    return Attention.apply, AttentionAndLse.apply


def check_wanted(wanted: Sequence[bool], *names: str) -> None:
    """What the schema of an operator's backward lets through."""
    if len(wanted) != len(names):
        raise ValueError(f"wanted: got {list(wanted)}; wanted {len(names)} bools, of {', '.join(names)}")


def no_second_derivatives(of: str, wanted: str = "first derivatives only") -> Callable[..., Any]:
    """What an operator that computes gradients of rapt's `of` has as its own backward."""

    def refuse(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"create_graph: got a gradient of rapt's {of} to differentiate; wanted {wanted}")

    return refuse
