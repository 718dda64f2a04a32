"""Packed sequences (ragged batches) over ranks, of which each rank has an equal share of the tokens."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from torch import Tensor

from rapt._distributed_check import check_offsets
from rapt._distributed_kernel import to_batch
from rapt._distributed_parts import Block, Options, Span, blocks


class Share(NamedTuple):
    """The sequences with rows on a rank. They see keys [begin, end) of all tokens."""

    begin: int
    end: int
    rows: list[int]  # cu_seqlens_q
    keys: list[int]  # cu_seqlens_k


def share_of(offsets: list[int], span: Span, causal: bool) -> Share:
    """Of these tokens. With `causal`, the last key of each sequence is that of its last row here."""
    first, last = span.start, span.stop
    rows, keys, begin = [0], [0], 0
    for start, stop in zip(offsets, offsets[1:]):
        if start >= last or stop <= first:
            continue
        if len(rows) == 1:
            begin = start
        rows.append(min(stop, last) - first)
        keys.append((min(stop, last) if causal else stop) - begin)
    return Share(begin, begin + keys[-1], rows, keys)


def cut_head(span: Span, offsets: list[int]) -> list[Span]:
    """Rows of a sequence that begins before the span, and the others: these sit at the first keys of their sequences."""
    following = bisect_right(offsets, span.start)
    middle = span.begin + offsets[following] - span.start
    if offsets[following - 1] == span.start or middle >= span.end:
        return [span]
    return [span._replace(end=middle), Span(middle, span.end, offsets[following])]


def cut(part: list[Span], offsets: list[int]) -> list[Span]:
    """The spans of a part, cut where sequences end."""
    found = []
    for span in part:
        start, following = span.start, bisect_right(offsets, span.start)
        while start < span.stop:
            stop = min(offsets[following], span.stop)
            if start < stop:  # or the sequence is empty
                found.append(Span(span.begin + start - span.start, span.begin + stop - span.start, start))
            start, following = stop, following + 1
    return found


def packed_blocks(
    own: list[Span], theirs: list[Span], offsets: list[int], options: Options, has_alibi: bool
) -> list[Block]:
    """The kernel calls for what these queries see of these keys, of spans from cut(). One call is for what all rows see
    of the rank's own spans. The others are few: two disjoint ranges of tokens have at most one sequence in common."""
    found = []
    if own == theirs:
        align = 0 if options.positional or has_alibi else None
        found.append(Block(0, len(own), 0, own[-1].end, align, (0, *(span.end for span in own))))
    of_sequence: dict[int, list[Span]] = {}
    for k in theirs:
        of_sequence.setdefault(bisect_right(offsets, k.start), []).append(k)
    for i, q in enumerate(own):
        for k in of_sequence.get(bisect_right(offsets, q.start), []):
            if k != q:
                found += [block._replace(first=i, last=i + 1) for block in blocks([q], [k], options, has_alibi)]
    return found


def as_batch(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as a batch of one, so that the checks of batches apply. Raises for what packed sequences add."""
    named, q = {name: given[name] for name in ("q", "k", "v")}, given["q"]
    for name, x in named.items():
        if isinstance(x, Tensor) and x.dim() != 3:
            wanted = "[t, h, d]: this rank's share of all tokens"
            raise ValueError(f"{name}: got shape {list(x.shape)} with cu_seqlens; wanted {wanted}")
        if isinstance(x, Tensor) and isinstance(q, Tensor) and x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: got {x.shape[0]} tokens with cu_seqlens; wanted q's {q.shape[0]}")
    if given["align"] is not None:
        got = f"{given['align']!r} with cu_seqlens"
        raise ValueError(f"align: got {got}; wanted None: rows and keys are the same tokens")
    check_offsets(given["cu_seqlens"])
    return given | {name: to_batch(x) for name, x in named.items() if isinstance(x, Tensor)}
