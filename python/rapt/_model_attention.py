"""Attention as transformers' layers mean it, [b, hq, n, d] to [b, n, hq, dv]: eager calls, operators and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _core, _flops, _refusals
from rapt._attention import forward_arguments
from rapt._autograd import check_wanted, register_gradients
from rapt._codes import Rows, arrays_of
from rapt._operators import Operator, attention_schemas
from rapt._sdpa import number_of


def _result(query: Tensor, value: Rows) -> Tensor:
    b, h, n, _ = query.shape
    return query.new_empty((b, n, h, value.shape[-1]))


def run(
    query: Tensor,
    key: Rows,
    value: Rows,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    left: int,
    softcap: float | None,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    *,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """forward(), and log of the sum of exp of scores [b, hq, n] if it is asked for."""
    out, lse = _result(query, value), None
    k, v, coding = arrays_of(key, value)
    row_sinks, sinks = (sinks, None) if sinks is not None and sinks.dim() > 1 else (None, sinks)
    with torch.no_grad():
        done = rapt.attention(
            *(query, k, v),
            causal=causal,
            window=(left, -1) if left >= 0 else None,
            align="bottom_right",
            scale=scale,
            mask=mask,
            bias=bias,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            seed=number_of(seed),
            out=out.transpose(1, 2),
            return_lse=with_lse or row_sinks is not None,
            **coding,
        )
        if isinstance(done, tuple):
            lse = done[1]
        if row_sinks is not None and lse is not None:  # they join the denominator, which is exp(lse)
            own = row_sinks[..., 0].float().expand(lse.shape)
            share = torch.sigmoid(lse - own).masked_fill(lse == -torch.inf, 0)  # of no keys, whatever the sink
            out *= share[..., None].transpose(1, 2).to(out.dtype)
            lse = torch.logaddexp(lse, own)
    return out, lse


def forward(*inputs: Any) -> Tensor:
    """query, key, value [b, h, n, d], mask, bias, sinks [hq] or [b, hq, n, 1] or None, causal and a window to the left (-1:
    none) of rows and keys that end together, softcap or None, scale, dropout_p and its seed."""
    return run(*inputs)[0]


def _gradients(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    causal: bool,
    left: int,
    softcap: float | None,
    scale: float,
    dropout_p: float,
    wanted: Sequence[bool],
    *,
    compute: bool = True,
) -> list[Tensor | None]:
    """Of query, key, value, mask (none), bias and sinks, those that are wanted."""
    inputs = (query, key, value, None, bias, sinks)
    memory = [
        torch.empty_like(t, requires_grad=False) if want and t is not None else None for t, want in zip(inputs, wanted)
    ]
    if not compute:
        return memory
    dout = torch.zeros_like(out) if grad_out is None else grad_out
    with torch.no_grad():
        rows = None
        if sinks is not None and sinks.dim() > 1:
            rows, sinks, (*memory, drows) = sinks, None, memory
            # Seen from a row, its sink is a key whose value is 0. Nothing else of it matters, once it is in lse.
            if drows is not None:
                delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
                delta = delta if grad_lse is None else delta - grad_lse
                share = torch.exp(rows[..., 0].float() - lse).masked_fill(lse == -torch.inf, 0)  # no sink, and no keys
                every = -share * delta
                drows.copy_(every[..., None].sum_to_size(rows.shape))
            memory.append(None)
        if any(t is not None and t.numel() > 0 for t in memory):
            dq, dk, dv, _, dbias, dsinks = memory
            _core.attention_backward(
                forward_arguments(
                    *(query, key, value),
                    causal=causal,
                    align="bottom_right",
                    window=(left, -1) if left >= 0 else None,
                    scale=scale,
                    mask=mask,
                    bias=bias,
                    softcap=softcap,
                    sinks=sinks,
                    dropout_p=dropout_p,
                    seed=number_of(seed),
                    out=out.detach().transpose(1, 2),
                ),
                (dout.transpose(1, 2), lse, grad_lse, dq, dk, dv, dbias, dsinks, None),
            )
        if rows is not None:
            memory[5] = drows
    return memory


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _result(query, value)


def _forward_with_lse(*inputs: Any) -> Any:
    return run(*inputs, with_lse=True)


def _fake_with_lse(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _result(query, value), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(*inputs: Any) -> list[Tensor]:
    """Those of the gradients of query, key, value, mask, bias and sinks that are wanted."""
    check_wanted(inputs[-1], "query", "key", "value", "mask", "bias", "sinks")
    return [t for t in _gradients(*inputs) if t is not None]


def _fake_backward(grad_out: Tensor | None, grad_lse: Tensor | None, *inputs: Any) -> list[Tensor]:
    return [t for t in _gradients(grad_out, grad_lse, *inputs, compute=False) if t is not None]


_FORWARD, _WITH_LSE, _BACKWARD = attention_schemas(
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks",
    "bool causal, SymInt left, float? softcap, float scale",
)
_operator = Operator("attention", forward, _fake, ("CPU", "CUDA"), schema=_FORWARD)
_operator_with_lse = Operator("attention_with_lse", _forward_with_lse, _fake_with_lse, ("CPU", "CUDA"), schema=_WITH_LSE)
_backward_operator = Operator("attention_backward", _backward, _fake_backward, ("CPU", "CUDA"), schema=_BACKWARD)
operator = _operator.overload

_flops.counted("attention", "attention_with_lse")(_flops.attention)
_flops.counted("attention_backward")(_flops.attention_backward(8))


def forward_with_gradients(*inputs: Any) -> Tensor:
    """forward() of eager calls where a gradient is to be recorded."""
    out: Tensor = _run(*inputs, None) if differentiates(*inputs) else operator(*inputs)
    return out


def differentiates(*inputs: Any) -> bool:
    """Whether rapt computes the gradients of such a call."""
    query, _, value, mask, bias, sinks, _, _, softcap, _, dropout_p = (*inputs, 0.0)[:11]
    if not query.is_cuda:
        return True
    sinks = None if sinks is None or sinks.dim() > 1 else sinks  # _gradients() adds those of rows
    modifiers = {"mask=1": mask, "bias=1": bias, "dbias": _refusals.learnt(bias), "sinks dsinks": sinks, "softcap=1": softcap}
    modifiers["dropout=0.5"] = dropout_p or None
    return _refusals.cuda_differentiates(query, value, modifiers)


# Elsewhere the backward is that of PyTorch's operators, of the attention computed again.


def _differentiate_again(
    attention: Callable[..., Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of `tensors`, of those that are wanted, where rapt does not compute them: PyTorch's, of attention(*tensors), which
    computes by PyTorch's operators what rapt's kernel has computed."""
    again = torch.is_grad_enabled()  # create_graph: PyTorch's backward may have one of its own, or says that it has none
    with torch.enable_grad():
        # Aliases of their own: query, key and value may be one tensor.
        inputs = [
            t if t is None else t.view_as(t) if again else t.detach().requires_grad_(want) for t, want in zip(tensors, wanted)
        ]
        out = attention(*inputs)
    learnt = [t for t, want in zip(inputs, wanted) if want and t is not None]
    # Of no keys, PyTorch's result does not depend on the mask.
    made = iter(torch.autograd.grad(out, learnt, grad, create_graph=again, allow_unused=True))
    return [next(made) if want else None for want in wanted]


def _setup_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *options, dropout_p, _ = inputs[6:]
    if dropout_p != 0:  # of fake tensors no kernel says it
        got = f"{dropout_p} for tensors on {inputs[0].device}, and a call whose gradients no fast kernel computes there"
        raise ValueError(f"dropout_p: got {got}; wanted 0, or tensors on the cpu")
    ctx.save_for_backward(*inputs[:6])
    ctx.options = options


def _backward_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    def attention(*tensors: Any) -> Tensor:
        return composed(*tensors, *ctx.options)

    made = _differentiate_again(attention, ctx.saved_tensors, ctx.needs_input_grad[:6], grad)
    return (*made, *[None] * (len(ctx.options) + 2))


_run_again = _operator.autograd_of(_backward_again, _setup_again, "CUDA")


def _otherwise(keyset: Any, *inputs: Any) -> Any:
    return NotImplemented if differentiates(*inputs) else _run_again(keyset, *inputs)


_run, _ = register_gradients(_operator, _operator_with_lse, _backward_operator, 6, run, _gradients, otherwise=_otherwise)


def composed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    left: int,
    softcap: float | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """forward() by PyTorch's operators, with the matrix of scores."""
    b, h, n, _ = query.shape
    m, group = key.shape[2], h // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(m, device=query.device) - torch.arange(m - n, m, device=query.device)[:, None]
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if bias is not None:
        scores = scores + bias
        hidden = hidden | (bias == -torch.inf)
    if left >= 0:
        hidden = hidden | (distance < -left)
    if mask is not None:
        hidden = hidden | ~mask
    # Twice, so that a row that is hidden altogether is 0 and has no gradient.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        rows = sinks if sinks.dim() > 1 else sinks[:, None, None]
        scores = torch.cat([scores, rows.float().expand(b, h, n, 1)], -1)
    p = torch.softmax(scores, -1)[..., :m].masked_fill(hidden, 0)
    p = torch.nn.functional.dropout(p, dropout).to(value.dtype)
    return (p @ value).transpose(1, 2).contiguous()
