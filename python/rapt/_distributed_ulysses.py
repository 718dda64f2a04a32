"""Ulysses attention: an exchange gives each rank the whole sequence of some heads. Another brings the results back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rapt._distributed_check import Ranks, Request
from rapt._distributed_kernel import backward, detached, forward, keys_and_values, keywords, ragged
from rapt._distributed_parts import in_parts, in_sequence


def readers(hq: int, hk: int, size: int) -> int:
    """The number of ranks that read a key head. Raises if ranks would have unequal numbers of heads."""
    if hq % size != 0:
        raise ValueError(f"q: got {hq} heads over {size} ranks; wanted a multiple of {size}, or ring_attention")
    if hk % size != 0 and size % hk != 0:
        wanted = f"a multiple or a divisor of {size}, or ring_attention"
        raise ValueError(f"k: got {hk} heads over {size} ranks; wanted {wanted}")
    return max(size // hk, 1)


class UlyssesAttention(torch.autograd.Function):
    """One function for the kernel and all exchanges: ranks exchange the same tensors, whatever losses depend on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
        ranks, options, balanced, alibi, sinks, with_lse, offsets = request
        copies = readers(q.shape[1], k.shape[1], ranks.size)
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        q, k, v = (_to_heads(x, ranks, balanced) for x in (q, k, v))
        own = slice(ranks.rank * q.shape[1], (ranks.rank + 1) * q.shape[1])
        slopes, logits = (None if x is None else x[own] for x in (alibi, sinks))
        given = keywords(options, options.offset if request.has_positions else None, slopes)
        if offsets is not None:
            given = ragged(given, offsets, offsets, q.device)
        out, lse = forward(q, k, v, q.dtype, sinks=logits, **given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = request, copies, given | {"sinks": logits}
        ctx.set_materialize_grads(False)
        return _to_rows(out, ranks, balanced), _to_rows(lse[..., None], ranks, balanced)[..., 0] if with_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = detached(ctx.saved_tensors)
        request, copies, given = ctx.call
        ranks, balanced, with_lse = request.ranks, request.balanced, request.with_lse
        b, h, s, width = out.shape
        rows = b, h * ranks.size, s // ranks.size
        dout = _to_heads(out.new_zeros((*rows, width)) if dout is None else dout, ranks, balanced)
        if with_lse:
            dlse = lse.new_zeros(rows) if dlse is None else dlse
            dlse = _to_heads(dlse[..., None], ranks, balanced)[..., 0]
        dq, dkv = backward(dout, dlse, q, k, v, out, lse, **given)
        made = zip((dq, *keys_and_values(dkv, k.shape[3])), (q, k, v))
        dq, dk, dv = (_to_rows(grad.to(x.dtype), ranks, balanced) for grad, x in made)
        if copies > 1:
            dk, dv = (x.reshape(b, -1, copies, *x.shape[2:]).sum(2) for x in (dk, dv))
        return dq, dk, dv, None


def _to_heads(x: Tensor, ranks: Ranks, balanced: bool) -> Tensor:
    """[b, h, s / ranks, d] as [b, h / ranks, s, d]."""
    b, h, s, d = x.shape
    sent = x.view(b, ranks.size, h // ranks.size, s, d).permute(1, 3, 0, 2, 4)  # [rank, s, b, h, d]
    received = ranks.exchange(sent).flatten(0, 1)
    return in_sequence(received, ranks.size, 0, balanced).permute(1, 2, 0, 3)


def _to_rows(x: Tensor, ranks: Ranks, balanced: bool) -> Tensor:
    """The inverse of _to_heads()."""
    b, h, s, d = x.shape
    sent = in_parts(x.permute(2, 0, 1, 3), ranks.size, 0, balanced).view(ranks.size, s // ranks.size, b, h, d)
    received = ranks.exchange(sent)  # [rank, s, b, h, d]
    rows: Tensor = received.permute(2, 0, 3, 1, 4).reshape(b, ranks.size * h, s // ranks.size, d)
    return rows
