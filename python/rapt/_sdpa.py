"""rapt's kernels in the terms of PyTorch's scaled_dot_product_attention: shapes, memory, and the calls themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapt import _core, _refusals
from rapt._attention import forward_arguments

pytorch: Any = functional.scaled_dot_product_attention


def profiled(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def record(*inputs: Any) -> Tensor:
        with torch._C._profiler._RecordFunctionFast("rapt::scaled_dot_product_attention", inputs[:3]):
            return run(*inputs)

    return record


def merged(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> tuple[Tensor, bool]:
    """attn_mask and is_causal as the one mask that they are together, which PyTorch takes for some shapes only."""
    if not is_causal or mask.dim() < 2 or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return mask, is_causal
    rows, keys = q.shape[-2], k.shape[-2]
    if mask.shape[-2] not in (1, rows) or mask.shape[-1] not in (1, keys):
        return mask, is_causal
    above = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).triu(1)
    return mask & ~above if mask.dtype is torch.bool else mask.masked_fill(above, -torch.inf), False


def rounded(mask: Tensor, q: Tensor) -> Tensor:
    """A float32 mask as one of the query's 16-bit type: PyTorch's CUDA kernels take no other float mask. Numbers past its range
    become its largest, as rows that they hide stay rows with keys."""
    if mask.dtype is not torch.float32 or q.dtype not in (torch.bfloat16, torch.float16):
        return mask
    most = torch.finfo(q.dtype).max
    return torch.where(mask.isinf(), mask, mask.clamp(-most, most)).to(q.dtype)


def result_like(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, batch: list[int], gqa: bool) -> Tensor:
    """Memory for the result, laid out as by PyTorch on CPUs, on GPUs too: like the query where its fused kernel would run."""
    shape = (*batch, q.shape[-2], v.shape[-1])
    fused = q.shape == shape and q.dim() == k.dim() == v.dim() == 4 and (mask is None or mask.dim() != 3)
    fused = fused and q.shape[0] == k.shape[0] == v.shape[0] and (gqa or q.shape[1] == k.shape[1] == v.shape[1])
    if fused and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and k.shape[-2] > 0:
        return torch.empty_like(q, requires_grad=False)
    return q.new_empty(shape)


def lse_like(q: Tensor, batch: list[int]) -> Tensor:
    return q.new_empty((*batch, q.shape[-2]), dtype=torch.float32)


def _fold(t: Tensor, batch: list[int], heads: int | None = None) -> Tensor:
    """[..., h, rows, columns] with its dimensions before the heads broadcast and made one; a view where that can be.
    `heads`: how many there are to be, of one."""
    if t.dim() == 4 and len(batch) == 2 and t.shape[0] == batch[0] and heads in (None, t.shape[1]):
        return t  # as most are
    while t.dim() < max(len(batch), 1) + 2:
        t = t.unsqueeze(0)
    return t.expand(*batch[:-1], heads or t.shape[-3], *t.shape[-2:]).reshape(
        math.prod(batch[:-1]), heads or t.shape[-3], *t.shape[-2:]
    )


def _calls(mask: Tensor | None, lead: list[int], with_dropout: bool) -> list[tuple[Any, ...] | None]:
    """The kernel's calls, each by its index into the dimensions before the heads, of sizes `lead`; None: one call for all. The
    mask has one stride along the dimensions that an index leaves, so that none is written out for those that share it.

    With dropout, whose mask differs from call to call, the calls depend on shapes alone: the backward's mask may lie in memory
    in another way.
    """
    if mask is None or len(lead) < 2 or all(size == 1 for size in mask.shape[:-3]):
        return [None]
    mask = _of_rank(mask, len(lead) + 3)
    batches: list[list[int]] = []
    for i in range(len(lead)):
        if lead[i] == 1:
            continue
        if batches:
            before, shared = batches[-1][-1], mask.shape[i] == 1
            one_stride = shared or (not with_dropout and mask.stride(before) == lead[i] * mask.stride(i))
            if shared == (mask.shape[before] == 1) and one_stride:
                batches[-1].append(i)
                continue
        batches.append([i])
    if len(batches) == 1:
        return [None]
    kept = max(batches, key=lambda batch: math.prod(lead[i] for i in batch))
    return list(itertools.product(*([slice(None)] if n == 1 or i in kept else range(n) for i, n in enumerate(lead))))


def _of_rank(t: Tensor, rank: int) -> Tensor:
    return t[(None,) * (rank - t.dim())]


def _parts(tensors: Sequence[Tensor | None], lead: list[int], at: tuple[Any, ...] | None) -> list[Any]:
    """Views of a call's part of what has been folded."""
    if at is None:
        return list(tensors)
    left = sum(type(i) is slice for i in at)
    return [t if t is None else t.view(*lead, *t.shape[1:])[at].flatten(0, left - 1) for t in tensors]


def _part_of_mask(mask: Tensor | None, lead: list[int], at: tuple[Any, ...] | None) -> Any:
    """The same of a mask, of at most four dimensions."""
    if mask is None or mask.dim() <= 3 or len(lead) < 2:
        return mask
    mask = _of_rank(mask, len(lead) + 3)
    if at is not None:
        mask = mask[tuple(0 if size == 1 and type(i) is int else i for i, size in zip(at, mask.shape))]
    return mask.flatten(0, -4)


def batch_of(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> list[int]:
    batch = _refusals.batch_shape(q.shape, k.shape, v.shape, gqa)
    assert batch is not None
    return batch


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    *,
    with_lse: bool = False,
) -> Any:
    """The result, and lse or None."""
    batch = batch_of(q, k, v, gqa)
    out = to = result_like(q, k, v, mask, batch, gqa)
    sums = to_sums = lse_like(q, batch) if with_lse else None
    lead = batch[:-1]
    if len(batch) > 2:
        q, k, v, to = (_fold(t, batch) for t in (q, k, v, out))
        to_sums = None if sums is None else sums.view(math.prod(lead), *sums.shape[-2:])
    for number, at in enumerate(_calls(mask, lead, dropout_p != 0)):
        its_q, its_k, its_v, its_out, its_lse = _parts((q, k, v, to, to_sums), lead, at)
        modifiers = (_part_of_mask(mask, lead, at), is_causal, scale)
        _core.sdpa(its_q, its_k, its_v, *modifiers, its_out, its_lse, dropout_p, number_of(seed, number))
    return out, sums


def number_of(seed: Tensor | None, call: int = 0) -> int | None:
    """Of one of the kernel's calls, each with a dropout mask of its own."""
    if seed is None:
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        got = "dropout in a CUDA graph, whose replays would all drop the same weights"
        raise ValueError(f"dropout_p: got {got}; wanted no dropout, or PyTorch's")
    return int(seed) + call


def forward(*inputs: Any) -> Tensor:
    """The kernel, on tensors that _refusals.refusal() let through: query, key, value, attn_mask, is_causal, scale, enable_gqa,
    and dropout_p and its seed."""
    out: Tensor
    out, _ = run(*inputs)
    return out


def gradients(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
    dropout_p: float,
    wanted: Sequence[bool],
    *,
    compute: bool = True,
    into: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Of q, k, v and a float mask, those that are wanted; laid out as they are, or in memory that is given for [b, h, s, d].
    `compute`: or their memory only."""
    batch = batch_of(q, k, v, gqa)
    lead, heads = batch[:-1], batch[-1] if batch else 1
    key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (k, v))
    repeated = None if key_heads == value_heads else heads
    tensors = [_fold(q, batch, heads), _fold(k, batch, repeated), _fold(v, batch, repeated)]
    memory: list[Tensor | None] = [*into, None] if into else [
        _gradient_of(inner, outer) if want else None for inner, outer, want in zip(tensors, (q, k, v), wanted)
    ] + [_gradient_of_mask(mask, lead) if mask is not None and wanted[3] else None]
    if compute and any(t is not None and t.numel() > 0 for t in memory):
        calls = _calls(mask, lead, dropout_p != 0)
        of_mask = memory[3]
        whole = of_mask is None or calls == [None]
        if of_mask is not None and not whole:  # which calls add to
            of_mask = memory[3] = of_mask.new_zeros(of_mask.shape, dtype=torch.float32)
        dout = torch.zeros_like(out) if grad_out is None else grad_out
        sums, dlse = (
            t if t is None or len(batch) == 2 else t.reshape(math.prod(lead), heads, t.shape[-1]) for t in (lse, grad_lse)
        )
        folded = (*tensors, _fold(out.detach(), batch), _fold(dout, batch), sums, dlse, *memory[:3])
        with torch.no_grad():
            for number, at in enumerate(calls):
                *inputs, its_out, its_dout, its_sums, its_dlse, dq, dk, dv = _parts(folded, lead, at)
                bias, dbias = (_part_of_mask(t, lead, at) for t in (mask, of_mask))
                boolean = bias is not None and bias.dtype is torch.bool
                own = dbias if whole else torch.empty_like(dbias)
                _core.attention_backward(
                    forward_arguments(
                        *inputs,
                        causal=is_causal,
                        align="top_left",
                        scale=scale,
                        mask=bias if boolean else None,
                        bias=None if boolean else bias,
                        dropout_p=dropout_p,
                        seed=number_of(seed, number),
                        out=its_out,
                    ),
                    (its_dout, its_sums, its_dlse, dq, dk, dv, own, None, None),
                )
                if not whole:
                    dbias += own
    return [
        None if inner is None or outer is None else _summed(inner, outer, batch)
        for inner, outer in zip(memory, (q, k, v, mask))
    ]


def _gradient_of_mask(mask: Tensor, lead: list[int]) -> Tensor:
    """Memory for it, for the library to sum what broadcasts. Dimensions that are made one are so in the gradient, too."""
    return mask.new_empty(mask.shape) if len(lead) > 1 else torch.empty_like(mask, requires_grad=False)


def _gradient_of(inner: Tensor, outer: Tensor) -> Tensor:
    """Memory for it. What is to be summed still is rounded after that."""
    if inner.numel() != outer.numel():
        return inner.new_empty(inner.shape, dtype=torch.float32)
    return torch.empty_like(inner, requires_grad=False)


def _summed(gradient: Tensor, outer: Tensor, batch: list[int]) -> Tensor:
    """The gradient of `outer`, which was broadcast and folded."""
    if gradient.numel() == outer.numel():
        return (gradient if gradient.dim() == outer.dim() else gradient.reshape(outer.shape)).to(outer.dtype)
    if gradient.dim() == 4 and len(batch) > 2:
        gradient = gradient.reshape(*batch[:-1], *gradient.shape[1:])
    return gradient.sum_to_size(outer.shape[-gradient.dim() :]).to(outer.dtype).reshape(outer.shape)
