"""Sparse attention of transformers' models (DeepSeek-V3.2, GLM-5): keys that an indexer has chosen for each token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

import rapt
from rapt import _refusals
from rapt._codes import Codes, Rows, arrays_of


def masked(mask: Tensor | None, indices: Tensor, m: int) -> Tensor:
    """The mask that shows the chosen keys, of those that `mask` shows."""
    if mask is None:
        raise ValueError("indices: got them without attention_mask; wanted a mask, of causality at least")
    chosen = indices.new_zeros((*indices.shape[:2], m), dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype is torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def prefers_lists(n: int, m: int, chosen: int, heads: int, is_cuda: bool) -> bool:
    """Whether lists of so many chosen keys take less time than a mask, which reads all m keys, but for many rows at once.

    Measured on AVX-512 and AMX, n queries take the time in which lists get through m (1 + n / 24) entries. A GPU multiplies 64 rows
    at a time: by lists those of the heads that share keys, by a mask of up to n queries, too.
    """
    if is_cuda:
        return chosen * max(min(64 // max(heads, 1), n), 1) < m
    return 24 * n * chosen <= m * (24 + n)


def takes(query: Tensor, key: Rows, value: Rows, mask: Tensor | None, indices: Tensor, sinks: Tensor | None) -> bool:
    """Whether over_lists() may compute a call without dropout, window and modifiers of scores, and in less time than by a mask."""
    if mask is None or mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] != key.shape[2]:
        return False
    heads = query.shape[1] // max(key.shape[1], 1)
    if not prefers_lists(query.shape[2], key.shape[2], indices.shape[-1], heads, query.is_cuda):
        return False
    if is_dynamo_compiling() or not (query.is_cpu or query.is_cuda) or not _refusals.is_eager(query, mask, indices, sinks):
        return False
    if isinstance(key, Codes) or isinstance(value, Codes):
        return sinks is None or sinks.dim() == 1
    if not _refusals.is_eager(key, value):
        return False
    gqa = query.shape[1] != key.shape[1]
    plain = not _refusals.needs_grad(query, key, value, sinks) and (sinks is None or sinks.dim() == 1)
    return plain and not _refusals.refusal(query, key, value, None, gqa)


def over_lists(
    query: Tensor, key: Rows, value: Rows, mask: Tensor, indices: Tensor, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """[b, n, hq, dv], from the chosen keys alone. An indexer lists a key once, and where it sees too few, hidden ones as well."""
    b, hq, n, _ = query.shape
    shown = mask[:, 0].expand(b, n, -1).gather(-1, indices.long())
    out = query.new_empty((b, n, hq, value.shape[-1]))
    k, v, coding = arrays_of(key, value)
    with torch.no_grad():
        rapt.attention(
            *(query, k, v), indices=torch.where(shown, indices, -1), scale=scale, sinks=sinks, out=out.transpose(1, 2), **coding
        )
    return out
