"""Sequences of a cache that begin with the same tokens, whose keys and values lie in memory once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _model_attention
from rapt._codes import OnlyForRapt, Rows


@dataclass(slots=True, eq=False)
class SharedRows(OnlyForRapt):
    """Rows [b, h, n, d] in parts, one behind the other: [g, h, any, d], of which each row serves b / g neighbouring sequences."""

    batch: int
    parts: tuple[Rows, ...]

    @property
    def shape(self) -> torch.Size:
        _, h, _, d = self.parts[0].shape
        return torch.Size((self.batch, h, sum(part.shape[2] for part in self.parts), d))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def is_cpu(self) -> bool:
        return self.parts[0].is_cpu

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dim(self) -> int:
        return 4

    def numel(self) -> int:
        return self.shape.numel()


def by_parts(function: Callable[..., Rows], *rows: Any) -> Any:
    """function(*rows), or of each part of them."""
    if not isinstance(rows[0], SharedRows):
        return function(*rows)
    return SharedRows(rows[0].batch, tuple(function(*parts) for parts in zip(*(x.parts for x in rows))))


def forward(
    query: Tensor,
    key: Any,
    value: Any,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    left: int,
    *options: Any,
) -> Tensor:
    """_model_attention.forward(), whose keys and values may be SharedRows. A part that sequences share is read once for all of them."""
    if not isinstance(key, SharedRows):
        return _model_attention.forward(query, key, value, mask, bias, sinks, causal, left, *options)
    if left >= 0 or any(options[2:3]):  # dropout
        raise ValueError(
            "past_key_values: got a fork of a rapt.transformers.Cache for attention with a sliding window or dropout; "
            "wanted a fork of a Cache(model.config), whose layers with windows have copies, and model.eval()"
        )
    b, hq, n, d = query.shape
    outs, lses, end = [], [], 0
    last = len(key.parts) - 1
    for i, (k, v) in enumerate(zip(key.parts, value.parts)):
        groups, begin, end = k.shape[0], end, end + k.shape[2]
        per_group = b // groups
        q, seen, added, sink = query, _columns(mask, begin, end), _columns(bias, begin, end), sinks if i == 0 else None
        if groups < b:  # rows of neighbouring sequences are rows of one
            q = query.view(groups, per_group, hq, n, d).transpose(1, 2).reshape(groups, hq, per_group * n, d)
            seen, added = _grouped(seen, b, groups, n), _grouped(added, b, groups, n)
            if sink is not None and sink.dim() > 1:  # one for each row
                sink = _grouped(sink, b, groups, n)
        # A row sees all keys of the parts before its own.
        inputs = (q, k, v, seen, added, sink, causal and i == last, -1)
        out, lse = _model_attention.run(*inputs, *options[:2], with_lse=True)
        assert lse is not None
        outs.append(out.view(b, n, hq, -1).transpose(1, 2))
        lses.append(lse.view(groups, hq, per_group, n).transpose(1, 2).reshape(b, hq, n))
    result = torch.empty_like(outs[0])
    rapt.merge_states(outs, lses, out=result)
    return result.transpose(1, 2)


def _columns(x: Tensor | None, begin: int, end: int) -> Tensor | None:
    return x if x is None or x.shape[-1] == 1 else x[..., begin:end]


def _grouped(x: Tensor | None, b: int, groups: int, n: int) -> Tensor | None:
    """[g, h or 1, b / g * n, m] of a mask or bias that broadcasts to [b, h, n, m]."""
    if x is None:
        return None
    x = x.view((1,) * (4 - x.dim()) + x.shape)
    x = x.expand(b, -1, n, -1).reshape(groups, b // groups, x.shape[1], n, x.shape[-1])
    return x.transpose(1, 2).flatten(2, 3)


def select(part: Rows, index: Tensor, batch: int) -> Rows:
    """A part for other sequences of its batch: itself where it serves them as it lies, else a copy."""
    groups = part.shape[0]
    wanted = index // (batch // groups)
    serves_all = len(index) % groups == 0 and bool((wanted.view(groups, -1) == torch.arange(groups, device=index.device)[:, None]).all())
    return part if groups == 1 or serves_all else part.index_select(0, wanted.to(part.device))
