"""Exchange of heads (Ulysses): ranks that hold parts of a sequence get all their rows of some heads, and give the results
back. The whole sequence if these are all ranks, a longer part of it if they are one dimension of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, autograd
from torch.autograd.function import once_differentiable

from rapt._distributed_check import Ranks, Request
from rapt._distributed_parts import in_parts, in_sequence


def readers(hq: int, hk: int, size: int) -> int:
    """The number of ranks that read a key head. Raises if ranks would have unequal numbers of heads."""
    if hq % size != 0:
        raise ValueError(f"q: got {hq} heads over {size} ranks; wanted a multiple of {size}, or ring_attention over one dimension")
    if hk % size != 0 and size % hk != 0:
        wanted = f"a multiple or a divisor of {size}, or ring_attention over one dimension"
        raise ValueError(f"k: got {hk} heads over {size} ranks; wanted {wanted}")
    return max(size // hk, 1)


def by_heads(run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, request: Request, heads: Ranks) -> Any:
    """run(q, k, v, request) for the heads of this rank among `heads`, and the results for the rows of this rank.

    The ranks of `heads` hold successive parts, and request.ranks are those with the same heads. Also if balanced: parts
    i n to i n + n - 1 of n m are, put in order, part i of m."""
    to_heads, to_rows = cast(Any, _ToHeads.apply), cast(Any, _ToRows.apply)
    q, k, v = to_heads(q, k, v, heads, request.balanced)
    own = slice(heads.rank * q.shape[1], (heads.rank + 1) * q.shape[1])
    alibi, sinks = (None if x is None else x[own] for x in (request.alibi, request.sinks))
    out, lse = run(q, k, v, request._replace(alibi=alibi, sinks=sinks))
    return to_rows(out, lse if request.with_lse else None, heads, request.balanced)


class _ToHeads(autograd.Function):
    """One function for q, k and v, and one for out and lse: ranks exchange the same tensors, whatever losses depend on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, balanced: bool) -> tuple[Tensor, ...]:
        copies = readers(q.shape[1], k.shape[1], ranks.size)
        ctx.call = ranks, balanced, copies
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        return tuple(_to_heads(x, ranks, balanced) for x in (q, k, v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, balanced, copies = ctx.call
        dq, dk, dv = (_to_rows(grad, ranks, balanced) for grad in grads)
        if copies > 1:
            dk, dv = (x.reshape(x.shape[0], -1, copies, *x.shape[2:]).sum(2) for x in (dk, dv))
        return dq, dk, dv, None, None


class _ToRows(autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor | None, ranks: Ranks, balanced: bool) -> tuple[Any, ...]:
        ctx.call = ranks, balanced
        return _to_rows(out, ranks, balanced), None if lse is None else _to_rows(lse[..., None], ranks, balanced)[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
        ranks, balanced = ctx.call
        dout = _to_heads(dout, ranks, balanced)
        return dout, None if dlse is None else _to_heads(dlse[..., None], ranks, balanced)[..., 0], None, None


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
