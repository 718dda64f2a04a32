"""Attention as flash-attn lays it out, [b, s, h, d] or ragged [total, h, d]: operators and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _core, _flops, _refusals, _seed
from rapt._attention import forward_arguments
from rapt._autograd import check_wanted, register_gradients
from rapt._operators import Operator, attention_schemas
from rapt._sdpa import number_of

# How the operators call their arguments, for rapt's names of them.
_NAMES = {"alibi": "alibi_slopes", "sinks": "s_aux", "scale": "softmax_scale", "window": "window_size"}
_renamed = _refusals.renamed(**_NAMES)
_LEARNT = ("q", "k", "v", "alibi_slopes", "s_aux")


def _result(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _lse(q: Tensor) -> Tensor:
    """Memory for [b, h, s], of ragged queries [total, h]."""
    shape = q.shape[:2] if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=torch.float32)


def used_rows(x: Tensor, borders: Tensor | None) -> int:
    """How many rows of x belong to sequences: flash-attn takes buffers that have more. On a GPU all, as nobody looks
    at borders there."""
    if borders is None or borders.numel() == 0 or not borders.is_cpu:
        return x.shape[0]
    return min(max(int(borders[-1]), 0), x.shape[0])


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2) if x.dim() == 4 else x


def _modifiers(
    k: Tensor,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    cache_leftpad: Tensor | None,
    scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> dict[str, Any]:
    """The arguments of rapt.attention after q, k and v."""
    mask = None
    if cache_leftpad is not None:
        room = k.shape[1] * (1 if block_table is None else block_table.shape[1])
        mask = torch.arange(room, device=k.device) >= cache_leftpad[:, None]
    return {
        "causal": causal,
        "align": "bottom_right",
        "window": (left, right),
        "scale": scale,
        "mask": None if mask is None else mask[:, None, None],
        "softcap": softcap or None,
        "alibi": alibi_slopes,
        "sinks": s_aux,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "cache_seqlens": cache_seqlens,
        "block_table": block_table,
        "dropout_p": dropout_p,
        "seed": number_of(seed),
    }


def run(q: Tensor, k: Tensor, v: Tensor, *given: Any, with_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """The result, and lse or None, of what _modifiers() is given. Rows of no sequence are 0, and their lse -inf."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run(q, k, v, *given, with_lse=with_lse)
    out, lse = _result(q, v), None
    cu_seqlens_q, cu_seqlens_k = given[2:4]
    rows, keys = used_rows(q, cu_seqlens_q), used_rows(k, cu_seqlens_k)
    to = out
    if rows < q.shape[0]:
        q, to = q[:rows], out[:rows]
        out[rows:] = 0
    if keys < k.shape[0]:
        k, v = k[:keys], v[:keys]
    with _renamed:
        made = rapt.attention(
            *(_heads_first(q), _heads_first(k), _heads_first(v)),
            **_modifiers(k, *given),
            out=_heads_first(to),
            return_lse=with_lse,
        )
    if with_lse:
        lse = made[1]
        if rows < out.shape[0]:
            lse = torch.cat((lse, lse.new_full((out.shape[0] - rows, lse.shape[1]), -torch.inf)))
    return out, lse


def _gradients(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    cache_leftpad: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    *rest: Any,
    compute: bool = True,
) -> list[Tensor | None]:
    """Of all tensors that are learnt, those that are wanted; None for the others."""
    *options, wanted = rest
    learnt = (q, k, v, alibi_slopes, s_aux)
    memory = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if want and x is not None else None
        for x, want in zip(learnt, wanted)
    ]
    made = [*memory, *[None] * (len(wanted) - len(memory))]
    if not compute or all(x is None or x.numel() == 0 for x in memory):
        return made
    dout = torch.zeros_like(out) if grad_out is None else grad_out
    rows, keys = used_rows(q, cu_seqlens_q), used_rows(k, cu_seqlens_k)

    def part(x: Tensor | None, count: int) -> Tensor | None:
        return None if x is None else x[:count]

    dq, dk, dv, dalibi, dsinks = memory
    with torch.no_grad():
        for x, count, borders in ((dq, rows, cu_seqlens_q), (dk, keys, cu_seqlens_k), (dv, keys, cu_seqlens_k)):
            if x is not None and borders is not None and not borders.is_cpu:
                x.zero_()  # rows of no sequence, which the host cannot tell
            elif x is not None and count < x.shape[0]:
                x[count:] = 0
        if cu_seqlens_q is not None:
            q, out, dout, lse = q[:rows], out[:rows], dout[:rows], lse[:rows]
            grad_lse, dq = part(grad_lse, rows), part(dq, rows)
        if cu_seqlens_k is not None:
            k, v, dk, dv = k[:keys], v[:keys], part(dk, keys), part(dv, keys)
        lengths = (cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, cache_leftpad)
        given: tuple[Any, ...] = (alibi_slopes, s_aux, *lengths, *options, seed)
        inputs = [_heads_first(x) for x in (q, k, v)]
        into = [x if x is None else _heads_first(x) for x in (dq, dk, dv)]
        _core.attention_backward(
            forward_arguments(*inputs, **_modifiers(k, *given), out=_heads_first(out.detach())),
            (_heads_first(dout), lse, grad_lse, *into, None, dsinks, dalibi),
        )
    return made


def _forward(*inputs: Any) -> Tensor:
    return run(*inputs)[0]


def _forward_with_lse(*inputs: Any) -> Any:
    return run(*inputs, with_lse=True)


def _backward(*inputs: Any) -> list[Tensor]:
    """Those of the gradients of q, k, v, alibi_slopes and s_aux that are wanted."""
    check_wanted(inputs[-1], *_LEARNT, *["a tensor without gradients"] * 5)
    return [x for x in _gradients(*inputs) if x is not None]


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return _result(q, v)


def _fake_with_lse(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _result(q, v), _lse(q)


def _fake_backward(grad_out: Tensor | None, grad_lse: Tensor | None, *inputs: Any) -> list[Tensor]:
    return [x for x in _gradients(grad_out, grad_lse, *inputs, compute=False) if x is not None]


_NAME = "flash_attention"
_FORWARD, _WITH_LSE, _BACKWARD = attention_schemas(
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? s_aux, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cache_seqlens, Tensor? block_table, Tensor? cache_leftpad",
    "float? softmax_scale, bool causal, SymInt left, SymInt right, float softcap",
)
_operator = Operator(_NAME, _forward, _fake, ("CPU", "CUDA"), schema=_FORWARD)
_operator_with_lse = Operator(_NAME + "_with_lse", _forward_with_lse, _fake_with_lse, ("CPU", "CUDA"), schema=_WITH_LSE)
_backward_operator = Operator(_NAME + "_backward", _backward, _fake_backward, ("CPU", "CUDA"), schema=_BACKWARD)
_run, _run_with_lse = register_gradients(_operator, _operator_with_lse, _backward_operator, 10, run, _gradients)


def _pairs(given: Sequence[Any]) -> Any:
    """Of a row and a key, in all heads."""
    q, k, _, _, _, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, _ = given
    if cu_seqlens_q is None:
        return _flops.pairs_of(_heads_first(q), _heads_first(k), cache_seqlens, block_table, None, None)
    lengths = cache_seqlens if cu_seqlens_k is None else cu_seqlens_k.diff()
    max_pairs = q.shape[0] * prod(k.shape[: 2 if k.dim() == 4 else 1])
    return q.shape[1] * _flops.total(cu_seqlens_q.diff() * lengths, 1, max_pairs)


@_flops.counted(_NAME, _NAME + "_with_lse")
def _flops_of(*given: Any, out_val: Any) -> Any:
    return _flops.forward(_pairs(given[:10]), given[0].shape[-1], given[2].shape[-1])


@_flops.counted(_NAME + "_backward")
def _flops_of_backward(*given: Any, out_val: Any) -> Any:
    return _flops.backward(_pairs(given[2:12]), given[2].shape[-1], given[4].shape[-1])


def differentiates(
    q: Tensor, v: Tensor, alibi_slopes: Tensor | None, s_aux: Tensor | None, softcap: float | None, dropout_p: float
) -> bool:
    """Whether rapt computes gradients of such a call."""
    if not q.is_cuda:
        return True
    slopes = _refusals.learnt(alibi_slopes)
    modifiers = {"alibi": alibi_slopes, "dalibi": slopes, "sinks dsinks": s_aux, "softcap=1": softcap or None}
    return dropout_p == 0 and _refusals.cuda_differentiates(q, v, modifiers)


def attend(
    tensors: tuple[Any, ...],
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    dropout_p: float = 0.0,
    *,
    with_lse: bool = False,
    name: str = "q",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse (or None) and dropout's seed (or None) of q, k, v, alibi_slopes, s_aux, cu_seqlens_q, cu_seqlens_k,
    cache_seqlens, block_table and cache_leftpad, all but three or None. `name`: the caller's, of q."""
    q, _, v, alibi_slopes, s_aux = tensors[:5]
    grad = _refusals.needs_grad(*tensors)
    if grad and not differentiates(q, v, alibi_slopes, s_aux, softcap, dropout_p):
        got = f"tensors on {q.device}, and a call whose gradients no fast kernel computes there"
        wanted = "bfloat16 or float16 and no dropout or gradient of alibi_slopes on Hopper, tensors on the cpu, or torch.no_grad()"
        raise NotImplementedError(f"{name}: got {got}; wanted {wanted}")
    seed = None if dropout_p == 0 else _seed.new_seed()
    inputs = (*tensors, scale, causal, *window, softcap, dropout_p, seed)
    lse: Tensor | None = None
    eager = _refusals.is_eager(*tensors)
    if eager and not grad:
        out, lse = run(*inputs, with_lse=with_lse)
    elif with_lse:
        out, lse = (_run_with_lse if eager else _operator_with_lse)(*inputs)
    else:
        out = _run(*inputs, None) if eager else _operator(*inputs)
    return out, lse, seed
