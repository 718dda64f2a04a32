"""Ring attention: keys and values travel from rank to rank, and each rank merges what its queries see of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

import rapt
from rapt import _core
from rapt._distributed_check import Ranks, Request
from rapt._distributed_kernel import added, backward, concatenated, detached, forward, keys_and_values, ragged
from rapt._distributed_packed import cut, packed_blocks
from rapt._distributed_parts import Block, Span, blocks


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        ranks, own = request.ranks, _spans(request, q)
        sinks, found = request.sinks, [_Segment(0, q.shape[2], [])]
        kv = concatenated(k, v).contiguous()
        for step in range(ranks.size):
            travel = _Exchange(ranks)
            arriving = travel.pass_on(kv) if step + 1 < ranks.size else kv
            keys, values = keys_and_values(kv, k.shape[3])
            for block in _blocks(own, k, request, step):
                rows, taken = _rows(own, block), slice(block.begin, block.end)
                some = q[:, :, rows], keys[:, :, taken], values[:, :, taken]
                given = _keywords(request, block, q.device)
                if rows == slice(0, q.shape[2]):  # the first call for all rows adds the sinks
                    given["sinks"], sinks = sinks, None
                state = forward(*some, torch.float32, **given)
                found = _joined(found, _Segment(rows.start, rows.stop, [state]))
            travel.wait()
            kv = arriving
        if sinks is not None:
            found = _joined(found, _Segment(0, q.shape[2], [_sink_state(q, v, sinks)]))
        out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)
        for segment in found:
            segment.write(out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.request = request
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = detached(ctx.saved_tensors)
        request = ctx.request
        ranks, own = request.ranks, _spans(request, q)
        dout = torch.zeros_like(out) if dout is None else dout
        dq: Tensor | None = None
        kv = concatenated(k, v).contiguous()
        home = _Exchange(ranks)  # the gradients of these keys, summed over the ranks that they have passed
        sums: Tensor | None = None
        for step in range(ranks.size):
            # Both messages of this step are under way before the kernel runs: the next keys, and the sums, which the
            # previous rank sends when its kernel is done.
            behind, sums = home, home.arriving
            travel = _Exchange(ranks)
            arriving = travel.pass_on(kv) if step + 1 < ranks.size else kv
            keys, values = keys_and_values(kv, k.shape[3])
            found: Tensor | None = None
            for block in _blocks(own, k, request, step):
                rows, taken = _rows(own, block), slice(block.begin, block.end)
                of_rows = None if dlse is None else dlse[:, :, rows]
                some = (dout[:, :, rows], of_rows, q[:, :, rows], keys[:, :, taken], values[:, :, taken])
                given = _keywords(request, block, q.device)
                dq_part, dkv_part = backward(*some, out[:, :, rows], lse[:, :, rows], **given)
                dq, found = added(dq, dq_part, rows, q.shape[2]), added(found, dkv_part, taken, kv.shape[2])
            behind.wait()
            dkv = kv.new_zeros(kv.shape, dtype=torch.float32) if found is None else found
            if sums is not None:
                dkv += sums
            home = _Exchange(ranks)
            home.pass_on(dkv)
            travel.wait()
            kv = arriving
        home.wait()
        dq = torch.zeros_like(q) if dq is None else dq.to(q.dtype)
        dk, dv = keys_and_values(dkv if home.arriving is None else home.arriving, k.shape[3])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


class _Segment(NamedTuple):
    """Rows [begin, end), and up to two results that are still to merge: the last merge writes the result."""

    begin: int
    end: int
    states: list[tuple[Tensor, Tensor]]

    def part(self, begin: int, end: int) -> _Segment:
        at = slice(begin - self.begin, end - self.begin)
        return _Segment(begin, end, [(out[:, :, at], lse[:, :, at]) for out, lse in self.states])

    def write(self, out: Tensor, lse: Tensor) -> None:
        out, lse = (x[:, :, self.begin : self.end] for x in (out, lse))
        if self.states:
            outs, lses = zip(*self.states)
            _core.merge_states(outs, lses, out, lse)
        else:
            out.zero_(), lse.fill_(-torch.inf)


def _joined(segments: list[_Segment], more: _Segment) -> list[_Segment]:
    """The segments with the results of `more`, cut where these begin and end."""
    found = []
    for segment in segments:
        inner = {row for row in (more.begin, more.end) if segment.begin < row < segment.end}
        for begin, end in pairwise(sorted({segment.begin, *inner, segment.end})):
            states = segment.part(begin, end).states
            if more.begin <= begin < more.end:
                if len(states) == 2:
                    outs, lses = zip(*states)
                    states = [rapt.merge_states(outs, lses, return_lse=True)]
                states = states + more.part(begin, end).states
            found.append(_Segment(begin, end, states))
    return found


class _Exchange:
    """A message to the next rank and one from the previous rank, both under way until wait()."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.work: list[Any] = []
        self.sent: Tensor | None = None  # its memory must live until it is sent
        self.arriving: Tensor | None = None

    def pass_on(self, x: Tensor) -> Tensor:
        """Starts both. Returns where the message from the previous rank will be after wait()."""
        if self.ranks.size == 1:
            return x
        self.sent = x = x.contiguous()
        arriving = torch.empty_like(x)
        self.arriving = arriving
        there = dist.P2POp(dist.isend, x, self.ranks.peer(1), self.ranks.group)
        back = dist.P2POp(dist.irecv, arriving, self.ranks.peer(-1), self.ranks.group)
        with self.ranks.messages():
            self.work = dist.batch_isend_irecv([there, back])
        return arriving

    def wait(self) -> None:
        with self.ranks.messages(), record_function("rapt.distributed.wait"):
            for work in self.work:
                work.wait()
        self.sent = None


def _spans(request: Request, x: Tensor, rank: int | None = None) -> list[Span]:
    spans = request.spans(x, rank)
    return spans if request.offsets is None else cut(spans, request.offsets)


def _blocks(own: list[Span], k: Tensor, request: Request, step: int) -> list[Block]:
    theirs = _spans(request, k, (request.ranks.rank - step) % request.ranks.size)
    features = request.options, request.alibi is not None
    if request.offsets is None:
        return blocks(own, theirs, *features)
    return packed_blocks(own, theirs, request.offsets, *features)


def _keywords(request: Request, block: Block, device: torch.device) -> dict[str, Any]:
    given = request.keywords(block.align)
    if block.offsets is None:
        return given
    return ragged(given, block.offsets, block.offsets, device)


def _rows(own: list[Span], block: Block) -> slice:
    return slice(own[block.first].begin, own[block.last - 1].end)


def _sink_state(q: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is a partial result with out 0, and its logit as lse."""
    lse = sinks.to(torch.float32).view(1, -1, 1).expand(q.shape[:3])
    return lse.new_zeros((1, 1, 1, 1)).expand(*q.shape[:3], v.shape[3]), lse
