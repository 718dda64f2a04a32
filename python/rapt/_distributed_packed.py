"""All-gather attention over packed sequences (ragged batches), of which each rank has an equal share of the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rapt._distributed_check import Request, check_offsets
from rapt._distributed_kernel import backward, concatenated, detached, forward, keys_and_values
from rapt._scalars import boolean


class Share(NamedTuple):
    """The sequences with rows on a rank. They see keys [begin, end) of all tokens."""

    begin: int
    end: int
    rows: Tensor  # cu_seqlens_q
    keys: Tensor  # cu_seqlens_k


def share_of(offsets: list[int], first: int, count: int, causal: bool) -> Share:
    """Of tokens [first, first + count). With `causal`, the last key of each sequence is that of its last row here."""
    last = first + count
    rows, keys, begin = [0], [0], 0
    for start, stop in zip(offsets, offsets[1:]):
        if start >= last or stop <= first:
            continue
        if len(rows) == 1:
            begin = start
        rows.append(min(stop, last) - first)
        keys.append((min(stop, last) if causal else stop) - begin)
    return Share(begin, begin + keys[-1], torch.tensor(rows), torch.tensor(keys))


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        ranks, causal = request.ranks, request.options.causal
        share = share_of(cu_seqlens.tolist(), ranks.rank * q.shape[0], q.shape[0], causal)
        given = request.keywords(0) | {"sinks": request.sinks, "align": "bottom_right" if causal else None}
        given |= {"cu_seqlens_q": share.rows, "cu_seqlens_k": share.keys}
        out, lse = forward(q, *_gathered(k, v, request, share), q.dtype, **given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = request, share, given
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = detached(ctx.saved_tensors)
        request, share, given = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        dq, some = backward(dout, dlse, q, *_gathered(k, v, request, share), out, lse, **given)
        dkv = some.new_zeros((k.shape[0] * request.ranks.size, *some.shape[1:]))
        dkv[share.begin : share.end] = some
        dk, dv = keys_and_values(request.ranks.sum_of_parts(dkv), k.shape[-1])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _gathered(k: Tensor, v: Tensor, request: Request, share: Share) -> tuple[Tensor, Tensor]:
    return keys_and_values(request.ranks.gather(concatenated(k, v))[share.begin : share.end], k.shape[-1])


def as_batch(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as a batch of one sequence, so that the checks of batches apply. Raises for what packed sequences add to them."""
    named, q = {name: given[name] for name in ("q", "k", "v")}, given["q"]
    for name, x in named.items():
        if isinstance(x, Tensor) and x.dim() != 3:
            wanted = "[t, h, d]: this rank's share of all tokens"
            raise ValueError(f"{name}: got shape {list(x.shape)} with cu_seqlens; wanted {wanted}")
        if isinstance(x, Tensor) and isinstance(q, Tensor) and x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: got {x.shape[0]} tokens with cu_seqlens; wanted q's {q.shape[0]}")
    balanced, causal = (boolean(name, given[name]) for name in ("balanced", "causal"))
    if balanced:
        raise ValueError("balanced: got True with cu_seqlens; wanted False: a rank has a share of consecutive tokens")
    if given["align"] is not None:
        got = f"{given['align']!r} with cu_seqlens"
        raise ValueError(f"align: got {got}; wanted None: rows and keys are the same tokens")
    if not causal:
        for name in ("window", "alibi"):
            if given[name] is not None:
                raise ValueError(f"{name}: got one with cu_seqlens and without causal; wanted causal=True")
    check_offsets(given["cu_seqlens"])
    return given | {name: x.transpose(0, 1)[None] for name, x in named.items() if isinstance(x, Tensor)}
