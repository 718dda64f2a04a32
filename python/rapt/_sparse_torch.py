"""rapt.torch.sparse_attention: attention over a list of keys for each query token, as PyTorch's operator with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _flops, _refusals
from rapt._autograd import check_wanted, no_second_derivatives
from rapt._scalars import boolean, real

# What the operators are given, in this order: these, scale and softcap.
_TENSORS = ("q", "k", "v", "sinks", "indices", "counts")
_LEARNT = _TENSORS[:4]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor indices, Tensor? counts"


def _arguments(given: Any) -> dict[str, Any]:
    return dict(zip(_TENSORS + ("scale", "softcap"), given))


@torch.library.custom_op(
    "rapt::sparse_attention",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}, float? scale, float? softcap) -> (Tensor, Tensor)",
)
def _operator(*given: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = rapt.attention(**_arguments(given), return_lse=True)
    return out, lse


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(
    "rapt::sparse_attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, float? scale, float? softcap, bool[] wanted)"
    " -> Tensor[]",
)
def _backward_operator(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    """Those of the gradients of q, k, v and sinks that are wanted."""
    *inputs, wanted = given
    check_wanted(wanted, *_LEARNT)
    want: Any = [name for name, is_wanted in zip(_LEARNT, wanted) if is_wanted]
    with torch.no_grad():
        made = rapt.attention_backward(dout, out=out.detach(), lse=lse, dlse=dlse, want=want, **_arguments(inputs))
    return [getattr(made, "d" + name) for name in want]


@_backward_operator.register_fake
def _(_dout: Any, _dlse: Any, _out: Any, _lse: Any, *given: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, want in zip(given, given[-1]) if want]


_backward_operator.register_autograd(no_second_derivatives("sparse attention"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(_TENSORS)])
    ctx.options = inputs[len(_TENSORS) :]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[: len(_LEARNT)])
    some = iter(_backward_operator(dout, dlse, out, lse, *tensors, *ctx.options, wanted))
    made = [next(some) if want else None for want in wanted]
    return (*made, *[None] * (len(_TENSORS) - len(_LEARNT) + len(ctx.options)))


_operator.register_autograd(_differentiate, setup_context=_setup_context)


@_flops.counted("sparse_attention")
def _flops_of(*given: Any, out_val: Any) -> Any:
    q, k, v, _, indices, counts = given[:6]
    return _flops.forward(_flops.pairs_of(q, k, None, None, indices, counts), q.shape[-1], v.shape[-1])


@_flops.counted("sparse_attention_backward")
def _flops_of_backward(*given: Any, out_val: Any) -> Any:
    q, k, v, _, indices, counts = given[4:10]
    return _flops.backward(_flops.pairs_of(q, k, None, None, indices, counts), q.shape[-1], v.shape[-1])


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    counts: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """rapt.attention(q, k, v, indices=indices, ...) for PyTorch tensors, with gradients on the CPU and as an operator
    under torch.compile.

    Takes and returns what rapt.attention does, for float32, bfloat16 or float16: query token t of sequence n attends,
    in all heads, to rows indices[n, t] of k[n] and v[n], or of a pool that all sequences share. Gradients go to q, k, v
    and sinks, also through lse. A row of k or v gets the sum over all tokens that list it, or 0. v may be a view of k,
    as in latent attention: PyTorch then adds both gradients. The selection has no gradient, and there are no second
    derivatives. Raises TypeError or ValueError, which names the argument.
    """
    tensors = (q, k, v, sinks, indices, counts)
    named = dict(zip(_TENSORS, tensors))
    _refusals.check_tensors(named, "rapt.attention")
    if _refusals.needs_grad(*tensors):
        _refusals.check_tensors(named, "rapt.attention", "gradients of gathered keys have no GPU kernels yet")
    for name, x in (("q", q), ("k", k), ("v", v), ("indices", indices)):
        if x is None:  # rapt.attention would take it for all keys
            raise TypeError(f"{name}: got None; wanted a tensor")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES:
            wanted = "torch.float32, torch.bfloat16 or torch.float16 (rapt.attention takes quantised ones)"
            raise TypeError(f"{name}: got {x.dtype}; wanted {wanted}")
    return_lse = boolean("return_lse", return_lse)
    if not _refusals.needs_grad(*tensors) and _refusals.is_eager(*tensors):
        return rapt.attention(**_arguments((*tensors, scale, softcap)), return_lse=return_lse)
    out, lse = _operator(*tensors, real("scale", scale), real("softcap", softcap))
    return (out, lse) if return_lse else out
