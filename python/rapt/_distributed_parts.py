"""Parts of a sequence over ranks: their places in the sequence, and the pairs of queries and keys to compute."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Rows [begin, end) of a part are rows [start, start + end - begin) of the sequence."""

    begin: int
    end: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.end - self.begin


class Options(NamedTuple):
    """Query row i of the whole sequence sits at key position i + offset. A window of -1 is open."""

    causal: bool
    offset: int
    left: int
    right: int
    scale: float | None
    softcap: float | None

    @property
    def positional(self) -> bool:
        return self.causal or self.left >= 0 or self.right >= 0

    @property
    def reach(self) -> float:
        """A row at position p sees keys up to p + reach."""
        right = math.inf if self.right < 0 else self.right
        return min(right, 0) if self.causal else right

    def sees(self, q: Span, k: Span) -> bool:
        """Whether some row of q sees some key of k."""
        below = self.left >= 0 and k.stop - 1 < q.start + self.offset - self.left
        return not below and k.start <= q.stop - 1 + self.offset + self.reach

    def seen(self, q: Span, keys: int) -> slice:
        """Of `keys` keys of the sequence, those that rows of q see; one if they see none."""
        first, last = q.start + self.offset - self.left, q.stop - 1 + self.offset + self.reach
        begin = max(0, min(first, keys - 1)) if self.left >= 0 else 0
        return slice(begin, int(max(begin, min(last, keys - 1))) + 1)

    def sees_all(self, q: Span, k: Span) -> bool:
        """Whether all rows of q see all keys of k."""
        within = self.left < 0 or k.start >= q.stop - 1 + self.offset - self.left
        return within and k.stop - 1 <= q.start + self.offset + self.reach


class Block(NamedTuple):
    """One kernel call: the rows of spans [first, last) of a rank's queries, and keys [begin, end) of a rank's keys."""

    first: int
    last: int
    begin: int
    end: int
    align: int | None  # None: all rows see all keys
    offsets: tuple[int, ...] | None = None  # of packed sequences: rows and keys alike begin at these


def spans(rank: int, size: int, rows: int, balanced: bool) -> list[Span]:
    """A rank's part of `rows` rows: part `rank` of `size`, or chunks rank and 2 size - 1 - rank of 2 size."""
    if not balanced:
        return [Span(0, rows, rank * rows)]
    half = rows // 2
    head, tail = Span(0, half, rank * half), Span(half, rows, (2 * size - 1 - rank) * half)
    return [Span(0, rows, head.start)] if head.stop == tail.start else [head, tail]


def blocks(q_spans: list[Span], k_spans: list[Span], options: Options, has_alibi: bool) -> list[Block]:
    """The kernel calls for what these queries see of these keys. Neighbouring blocks become one call."""
    open_window = options.left < 0 and options.right < 0
    if q_spans == k_spans and options.causal and options.offset == 0 and open_window and not has_alibi:
        return [Block(0, len(q_spans), 0, k_spans[-1].end, 0)]  # later rows of a part are later rows of the sequence
    found: list[Block] = []
    for i, q in enumerate(q_spans):
        of_span: list[Block] = []
        for k in k_spans:
            if not options.sees(q, k):
                continue
            align = None if options.sees_all(q, k) and not has_alibi else q.start + options.offset - k.start
            if of_span and align is None and of_span[-1].align is None and of_span[-1].end == k.begin:
                of_span[-1] = of_span[-1]._replace(end=k.end)
            else:
                of_span.append(Block(i, i + 1, k.begin, k.end, align))
        # Rows of the previous span see the same keys, and no others: one call for both spans.
        before = [block for block in found if block.last == i]
        both = [block._replace(last=i + 1) for block in before]
        if len(both) == 1 and both[0].align is None and of_span == [both[0]._replace(first=i)]:
            found[-1] = both[0]
        else:
            found += of_span
    return found


def order(size: int, length: int, balanced: bool) -> list[slice]:
    """Pieces of the sequence in the order of the ranks' parts end to end."""
    return [slice(s.start, s.stop) for rank in range(size) for s in spans(rank, size, length // size, balanced)]


def in_sequence(parts: Tensor, size: int, dim: int, balanced: bool) -> Tensor:
    """The sequence, from the ranks' parts end to end along `dim`. `parts` itself if the order is the same."""
    if not balanced or size == 1:
        return parts
    pieces, begin = [], 0
    for piece in order(size, parts.shape[dim], balanced):
        pieces.append((piece.start, begin, piece.stop - piece.start))
        begin += piece.stop - piece.start
    return torch.cat([parts.narrow(dim, first, count) for _, first, count in sorted(pieces)], dim)


def in_parts(sequence: Tensor, size: int, dim: int, balanced: bool) -> Tensor:
    """The inverse of in_sequence()."""
    if not balanced or size == 1:
        return sequence
    pieces = order(size, sequence.shape[dim], balanced)
    return torch.cat([sequence.narrow(dim, piece.start, piece.stop - piece.start) for piece in pieces], dim)
