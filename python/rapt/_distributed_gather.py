"""All-gather attention: each rank gathers all keys and values, and computes its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rapt._distributed_check import Ranks
from rapt._distributed_kernel import backward, detached, forward, halves, joined, keywords, padded, padding
from rapt._distributed_parts import Options, Span, in_parts, in_sequence, spans


class GatheredAttention(torch.autograd.Function):
    """Between forward and backward a rank keeps its own keys only: they are gathered again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi: Tensor | None,
        sinks: Tensor | None,
        ranks: Ranks,
        options: Options,
        balanced: bool,
    ) -> tuple[Tensor, Tensor]:
        keys, values = _gathered(k, v, ranks, balanced)
        whole = (*q.shape[:2], k.shape[1], q.shape[2] * ranks.size, keys.shape[2], k.shape[3], v.shape[3])
        out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)
        for span, at in _calls(q, ranks, options, balanced, alibi):
            rows = q[:, :, span.begin : span.end]
            before, count = 0, rows.shape[2]
            if q.is_cpu:
                features = (options, alibi is not None, sinks is not None)
                before, count = padding(whole, count, span.start, q.dtype, *features)
            align = None if at is None else at - before
            some, sums = forward(
                padded(rows, before, count), keys, values, q.dtype, sinks=sinks, **keywords(options, align, alibi)
            )
            taken = slice(before, before + rows.shape[2])
            out[:, :, span.begin : span.end], lse[:, :, span.begin : span.end] = some[:, :, taken], sums[:, :, taken]
        ctx.save_for_backward(q, k, v, alibi, sinks, out, lse)
        ctx.call = ranks, options, balanced
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, alibi, sinks, out, lse = detached(ctx.saved_tensors)
        ranks, options, balanced = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        keys, values = _gathered(k, v, ranks, balanced)
        dq, dkv = torch.empty_like(q), None
        for span, align in _calls(q, ranks, options, balanced, alibi):
            at = (slice(None), slice(None), slice(span.begin, span.end))
            of_rows = None if dlse is None else dlse[at]
            given = keywords(options, align, alibi)
            own, more = backward(dout[at], of_rows, q[at], keys, values, out[at], lse[at], sinks=sinks, **given)
            dq[at] = own
            dkv = more if dkv is None else dkv.add_(more)
        assert dkv is not None
        dk, dv = halves(_summed(dkv, ranks, balanced), k.shape[3])
        return dq, dk.to(k.dtype), dv.to(v.dtype), *[None] * 5


def _calls(
    q: Tensor, ranks: Ranks, options: Options, balanced: bool, alibi: Tensor | None
) -> Iterator[tuple[Span, int | None]]:
    """The rows of each kernel call, and the key position of the first; None where positions do not matter."""
    if not options.positional and alibi is None:
        yield Span(0, q.shape[2], 0), None
        return
    for span in spans(ranks.rank, ranks.size, q.shape[2], balanced):
        yield span, span.start + options.offset


def _gathered(k: Tensor, v: Tensor, ranks: Ranks, balanced: bool) -> tuple[Tensor, Tensor]:
    """The whole sequence's keys and values: views of one array [s, b, h, d + dv], in which parts lie end to end."""
    parts = ranks.gather(joined(k, v).permute(2, 0, 1, 3))
    return halves(in_sequence(parts, ranks.size, 0, balanced).permute(1, 2, 0, 3), k.shape[3])


def _summed(whole: Tensor, ranks: Ranks, balanced: bool) -> Tensor:
    """This rank's part of the sum of all ranks' gradients [b, h, s, d + dv].

    Each rank sends each part to its owner, who adds them in the order of ranks. This takes as many bytes as a
    reduce_scatter and gives the same bits in every run.
    """
    received = ranks.exchange(in_parts(whole.permute(2, 0, 1, 3), ranks.size, 0, balanced))
    total, *others = received.chunk(ranks.size)
    for other in others:
        total = total.add_(other)
    return total.permute(1, 2, 0, 3)
