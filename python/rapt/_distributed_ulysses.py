"""Ulysses attention: an exchange gives each rank the whole sequence of some heads. Another brings the results back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt._distributed_check import Ranks
from rapt._distributed_kernel import backward, detached, forward, halves, keywords
from rapt._distributed_parts import Options, in_parts, in_sequence


def key_heads(hq: int, hk: int, size: int) -> list[list[int]]:
    """The key heads that each rank's query heads read. Raises if ranks would have unequal numbers of them."""
    if hq % size != 0:
        raise ValueError(f"q: got {hq} heads over {size} ranks; wanted a multiple of {size}, or ring_attention")
    if hk % size != 0 and size % hk != 0:
        wanted = f"a multiple or a divisor of {size}, or ring_attention"
        raise ValueError(f"k: got {hk} heads over {size} ranks; wanted {wanted}")
    count = max(hk // size, 1)
    return [[rank * hk // size + i for i in range(count)] for rank in range(size)]


def ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Tensor | None,
    sinks: Tensor | None,
    ranks: Ranks,
    options: Options,
    balanced: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    heads = key_heads(q.shape[1], k.shape[1], ranks.size)
    if len(heads) * len(heads[0]) > k.shape[1]:  # a head that several ranks read is sent to each of them
        repeated = torch.tensor([head for of_rank in heads for head in of_rank], device=k.device)
        k, v = k.index_select(1, repeated), v.index_select(1, repeated)
    q, k, v = (_to_heads(x, ranks, balanced) for x in (q, k, v))
    own = slice(ranks.rank * q.shape[1], (ranks.rank + 1) * q.shape[1])
    slopes, logits = (None if x is None else x[own] for x in (alibi, sinks))
    attention: Any = _Attention.apply
    out, lse = attention(q, k, v, slopes, logits, options)
    lse = _to_rows(lse[..., None], ranks, balanced)[..., 0] if with_lse else None
    return _to_rows(out, ranks, balanced), lse


def _to_heads(x: Tensor, ranks: Ranks, balanced: bool) -> Tensor:
    """[b, h, s / ranks, d] as [b, h / ranks, s, d]."""
    b, h, s, d = x.shape
    sent = x.view(b, ranks.size, h // ranks.size, s, d).permute(1, 3, 0, 2, 4)  # [rank, s, b, h, d]
    received = _exchange(sent, ranks).flatten(0, 1)
    return in_sequence(received, ranks.size, 0, balanced).permute(1, 2, 0, 3)


def _to_rows(x: Tensor, ranks: Ranks, balanced: bool) -> Tensor:
    """The inverse of _to_heads()."""
    b, h, s, d = x.shape
    sent = in_parts(x.permute(2, 0, 1, 3), ranks.size, 0, balanced).view(ranks.size, s // ranks.size, b, h, d)
    received = _exchange(sent, ranks)  # [rank, s, b, h, d]
    rows: Tensor = received.permute(2, 0, 3, 1, 4).reshape(b, ranks.size * h, s // ranks.size, d)
    return rows


class _Exchange(torch.autograd.Function):
    """Sends x[i] to rank i. The backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchange(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.exchange(grad), None


_exchange: Any = _Exchange.apply


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None, sinks: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        ctx.given = keywords(options, options.offset if options.positional or alibi is not None else None, alibi)
        out, lse = forward(q, k, v, q.dtype, sinks=sinks, **ctx.given)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = detached(ctx.saved_tensors)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dkv = backward(dout, dlse, q, k, v, out, lse, sinks=sinks, **ctx.given)
        dk, dv = halves(dkv, k.shape[3])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
