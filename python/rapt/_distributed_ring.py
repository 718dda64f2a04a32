"""Ring attention: keys and values travel from rank to rank, and each rank merges what its queries see of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

import rapt
from rapt._distributed_check import Ranks, Request
from rapt._distributed_kernel import backward, concatenated, detached, forward, keys_and_values, ragged
from rapt._distributed_packed import cut, packed_blocks
from rapt._distributed_parts import Block, Span, blocks


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        ranks, own = request.ranks, _spans(request, q)
        sinks = request.sinks if request.offsets is None else None  # the first call for packed sequences adds them
        states: list[tuple[Tensor, Tensor] | None] = [_sink_state(q, v, span, sinks) for span in own]
        kv = concatenated(k, v).contiguous()
        for step in range(ranks.size):
            travel = _Exchange(ranks)
            arriving = travel.pass_on(kv) if step + 1 < ranks.size else kv
            keys, values = keys_and_values(kv, k.shape[3])
            for block in _blocks(own, k, request, step):
                rows, taken = _rows(own, block), slice(block.begin, block.end)
                some = q[:, :, rows], keys[:, :, taken], values[:, :, taken]
                sinks = None if block.offsets is None else request.sinks
                out, lse = forward(*some, torch.float32, sinks=sinks, **_keywords(request, block, q.device))
                for i in range(block.first, block.last):
                    at = slice(own[i].begin - rows.start, own[i].end - rows.start)
                    states[i] = _merged(states[i], out[:, :, at], lse[:, :, at])
            travel.wait()
            kv = arriving
        parts = [_empty_state(q, v, span) if state is None else state for state, span in zip(states, own)]
        out = torch.cat([part for part, _ in parts], 2).to(q.dtype)
        lse = torch.cat([part for _, part in parts], 2)
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
        dq = q.new_zeros(q.shape, dtype=torch.float32)
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
            dkv = kv.new_zeros(kv.shape, dtype=torch.float32)
            for block in _blocks(own, k, request, step):
                rows, taken = _rows(own, block), slice(block.begin, block.end)
                of_rows = None if dlse is None else dlse[:, :, rows]
                some = (dout[:, :, rows], of_rows, q[:, :, rows], keys[:, :, taken], values[:, :, taken])
                given = _keywords(request, block, q.device)
                dq_part, dkv_part = backward(*some, out[:, :, rows], lse[:, :, rows], **given)
                dq[:, :, rows] += dq_part
                dkv[:, :, taken] += dkv_part
            behind.wait()
            if sums is not None:
                dkv += sums
            home = _Exchange(ranks)
            home.pass_on(dkv)
            travel.wait()
            kv = arriving
        home.wait()
        dk, dv = keys_and_values(dkv if home.arriving is None else home.arriving, k.shape[3])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


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
        self.sent, arriving = x, torch.empty_like(x)
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


def _merged(state: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if state is None:
        return out, lse
    merged: tuple[Tensor, Tensor] = rapt.merge_states([state[0], out], [state[1], lse], return_lse=True)
    return merged


def _sink_state(q: Tensor, v: Tensor, span: Span, sinks: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """A sink is a partial result with out 0, and its logit as lse."""
    if sinks is None:
        return None
    out, lse = _empty_state(q, v, span)
    return out, lse.copy_(sinks.view(1, -1, 1))


def _empty_state(q: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    rows = (*q.shape[:2], span.end - span.begin)
    out = q.new_zeros((*rows, v.shape[3]), dtype=torch.float32)
    return out, q.new_full(rows, -torch.inf, dtype=torch.float32)
