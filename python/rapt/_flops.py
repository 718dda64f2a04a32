"""How many floating-point operations torch.utils.flop_counter.FlopCounterMode counts for rapt's operators.

They are counted as PyTorch counts its own attention: products of matrices only, 2 for a multiply-add; all keys, whatever causal
and masks hide; gradients of all inputs, whichever are wanted; and lengths as they are, or the longest that is possible where
they cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import flop_counter


def counted(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a formula of these of rapt's operators: a function of the operator's arguments and its result, out_val."""
    return flop_counter.register_flop_formula([getattr(torch.ops.rapt, name) for name in names], get_raw=True)


def attention(*given: Any, out_val: Any) -> Any:
    """Of q, k [.., sk, d] and v [.., sk, dv], ..."""
    _, k, v = given[:3]
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    return forward(prod(out.shape[:-1]) * k.shape[-2], k.shape[-1], v.shape[-1])


def attention_backward(index_of_out: int) -> Callable[..., Any]:
    def count(*given: Any, out_val: Any) -> Any:
        _, _, _, k, v = given[:5]
        return backward(prod(given[index_of_out].shape[:-1]) * k.shape[-2], k.shape[-1], v.shape[-1])

    return count


def forward(pairs: Any, d: Any, dv: Any) -> Any:
    """`pairs` of a row and a key, in all heads."""
    return 2 * pairs * (d + dv)


def backward(pairs: Any, d: Any, dv: Any) -> Any:
    """Scores again, dP, dV, dQ and dK."""
    return 2 * pairs * (3 * d + 2 * dv)


def total(lengths: Tensor | None, count: Any, max_length: Any) -> Any:
    """The sum of `count` lengths, each `max_length` where they are not known."""
    if lengths is None or isinstance(lengths, (FakeTensor, FunctionalTensor)) or lengths.device.type == "meta":
        return count * max_length
    return int(lengths.sum())


def pairs_of(q: Tensor, k: Tensor, seqlens: Any, block_table: Any, indices: Any, counts: Any) -> Any:
    """Of rows of q [b, h, sq, d] and keys of k [.., sk, d]: those on lists, or those that lengths and pages leave."""
    b, h, sq, _ = q.shape
    if indices is not None:
        return h * total(counts, b * sq, indices.shape[-1])
    return h * sq * total(seqlens, b, k.shape[-2] * (1 if block_table is None else block_table.shape[1]))
