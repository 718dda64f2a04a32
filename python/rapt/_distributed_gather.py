"""All-gather attention: each rank gathers all keys and values, and computes its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rapt._distributed_check import Request
from rapt._distributed_kernel import (
    added,
    backward,
    concatenated,
    detached,
    forward,
    keys_and_values,
    padded,
    padding,
    ragged,
)
from rapt._distributed_packed import cut_head, share_of
from rapt._distributed_parts import Span, in_parts, in_sequence
from rapt._scalars import Alignment


class GatheredAttention(torch.autograd.Function):
    """Between forward and backward a rank keeps its own keys only: they are gathered again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        keys, values = _gathered(k, v, request)
        whole = (*q.shape[:2], k.shape[1], q.shape[2] * request.ranks.size, keys.shape[2], k.shape[3], v.shape[3])
        parts = []
        for span, seen, given in _calls(q, request):
            rows = q[:, :, span.begin : span.end]
            before, count = 0, rows.shape[2]
            if q.is_cpu and request.offsets is None:
                features = (request.options, request.alibi is not None, request.sinks is not None)
                before, count = padding(whole, count, span.start, q.dtype, *features)
                if request.has_positions:
                    given["align"] -= before
            rows = padded(rows, before, count)
            some, sums = forward(rows, keys[:, :, seen], values[:, :, seen], q.dtype, sinks=request.sinks, **given)
            taken = slice(before, before + span.end - span.begin)
            parts.append((some[:, :, taken], sums[:, :, taken]))
        out, lse = (x[0].contiguous() if len(x) == 1 else torch.cat(x, 2) for x in zip(*parts))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.request = request
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = detached(ctx.saved_tensors)
        request = ctx.request
        dout = torch.zeros_like(out) if dout is None else dout
        keys, values = _gathered(k, v, request)
        dq = torch.empty_like(q)
        dkv: Tensor | None = None
        for span, seen, given in reversed([*_calls(q, request)]):  # the last rows of a causal part see the most keys
            if request.offsets is None and request.has_positions:  # kernels write gradients of all keys that they are given
                seen = request.options.seen(span, keys.shape[2])
                given["align"] -= seen.start
            at = (slice(None), slice(None), slice(span.begin, span.end))
            of_rows = None if dlse is None else dlse[at]
            some = q[at], keys[:, :, seen], values[:, :, seen], out[at], lse[at]
            dq[at], more = backward(dout[at], of_rows, *some, sinks=request.sinks, **given)
            dkv = added(dkv, more, seen, keys.shape[2])
        assert dkv is not None
        dk, dv = keys_and_values(_summed(dkv, request), k.shape[3])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def _calls(q: Tensor, request: Request) -> Iterator[tuple[Span, slice, dict[str, Any]]]:
    """The rows, the keys and the arguments of each kernel call."""
    if request.offsets is None and not request.has_positions:
        yield Span(0, q.shape[2], 0), slice(None), request.keywords(None)
        return
    for span in request.spans(q):
        if request.offsets is None:
            yield span, slice(None), request.keywords(span.start + request.options.offset)
        else:
            causal = request.options.causal
            cut = request.has_positions and not causal
            for piece in cut_head(span, request.offsets) if cut else [span]:
                share = share_of(request.offsets, piece, causal)
                align: Alignment = "bottom_right" if causal else piece.start - share.begin
                given = request.keywords(align if request.has_positions else None)
                yield piece, slice(share.begin, share.end), ragged(given, share.rows, share.keys, q.device)


def _gathered(k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """The whole sequence's keys and values: views of one array [s, b, h, d + dv], in which parts lie end to end."""
    if request.ranks.size == 1:
        return k, v
    parts = request.ranks.gather(concatenated(k, v).permute(2, 0, 1, 3))
    return keys_and_values(in_sequence(parts, request.ranks.size, 0, request.balanced).permute(1, 2, 0, 3), k.shape[3])


def _summed(whole: Tensor, request: Request) -> Tensor:
    """This rank's part of the sum of all ranks' gradients [b, h, s, d + dv]."""
    parts = in_parts(whole.permute(2, 0, 1, 3), request.ranks.size, 0, request.balanced)
    return request.ranks.sum_of_parts(parts).permute(1, 2, 0, 3)
