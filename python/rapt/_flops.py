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


def _attention(*given: Any, out_val: Any) -> Any:
    """Of q, k [.., sk, d] and v [.., sk, dv], ..."""
    _, k, v = given[:3]
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    return _forward(prod(out.shape[:-1]) * k.shape[-2], k.shape[-1], v.shape[-1])


def _attention_backward(place_of_out: int) -> Callable[..., Any]:
    def count(*given: Any, out_val: Any) -> Any:
        _, _, _, k, v = given[:5]
        return _backward(prod(given[place_of_out].shape[:-1]) * k.shape[-2], k.shape[-1], v.shape[-1])

    return count


def _forward(pairs: Any, d: Any, dv: Any) -> Any:
    """`pairs` of a row and a key, in all heads."""
    return 2 * pairs * (d + dv)


def _backward(pairs: Any, d: Any, dv: Any) -> Any:
    """Scores again, dP, dV, dQ and dK."""
    return 2 * pairs * (3 * d + 2 * dv)


def _total(lengths: Tensor | None, count: Any, most: Any) -> Any:
    """The sum of `count` lengths, each `most` where they are not known."""
    if lengths is None or isinstance(lengths, (FakeTensor, FunctionalTensor)) or lengths.device.type == "meta":
        return count * most
    return int(lengths.sum())


def _latent_pairs(q: Tensor, k: Tensor, seqlens: Any, block_table: Any, indices: Any, counts: Any) -> Any:
    b, h, sq, _ = q.shape
    if indices is not None:
        return h * _total(counts, b * sq, indices.shape[-1])
    return h * sq * _total(seqlens, b, k.shape[-2] * (1 if block_table is None else block_table.shape[1]))


def _latent_attention(*given: Any, out_val: Any) -> Any:
    q, k, _, _, seqlens, block_table, indices, counts, dv = given[:9]
    return _forward(_latent_pairs(q, k, seqlens, block_table, indices, counts), q.shape[-1], dv)


def _latent_attention_backward(*given: Any, out_val: Any) -> Any:
    _, _, q, k, _, _, seqlens, indices, counts, _, _, dv = given[:12]
    return _backward(_latent_pairs(q, k, seqlens, None, indices, counts), q.shape[-1], dv)


def _sparse_attention(*given: Any, out_val: Any) -> Any:
    q, k, v, _, indices, counts = given[:6]
    return _forward(_latent_pairs(q, k, None, None, indices, counts), q.shape[-1], v.shape[-1])


def _sparse_attention_backward(*given: Any, out_val: Any) -> Any:
    q, k, v, _, indices, counts = given[4:10]
    return _backward(_latent_pairs(q, k, None, None, indices, counts), q.shape[-1], v.shape[-1])


def _delta_rule(of_states: tuple[int, int], of_outs: int, *given: Any) -> Any:
    """Products of vectors of K and V, and of these with states, as of one token after another: so many with each state, without
    and with the prediction, and for each head of q."""
    q, k, v, *_, rule = given
    h = max(k.shape[-2], v.shape[-2])
    products = h * of_states["delta" in rule] + of_outs * max(q.shape[-2] - h, 0)
    return 2 * prod(q.shape[:-2]) * q.shape[-1] * v.shape[-1] * products


def _delta_rule_forward(*given: Any, out_val: Any) -> Any:
    return _delta_rule((2, 3), 1, *given[:9], given[10])


def _delta_rule_in_place(*given: Any, out_val: Any) -> Any:
    return _delta_rule((2, 3), 1, *given[4:14])


def _delta_rule_backward(*given: Any, out_val: Any) -> Any:
    return _delta_rule((5, 8), 2, *given[2:12])


def _index_scores(q: Tensor, k: Tensor, *given: Any, out_val: Any) -> Any:
    """Of q [b, sq, h, d] and k [b, sk, d], or pages."""
    _, _, seqlens, block_table = given[:4]
    b, sq, h, d = q.shape
    keys = _total(seqlens, b, k.shape[-2] * (1 if block_table is None else block_table.shape[1]))
    return 2 * sq * h * keys * d


def _index_scores_backward(_: Tensor, *given: Any, out_val: Any) -> Any:
    """Products again, and gradients of queries and keys."""
    return 3 * _index_scores(*given, out_val=None)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "scaled_dot_product_attention_with_lse": _attention,
    "scaled_dot_product_attention_backward": _attention_backward(6),
    "attention": _attention,
    "attention_with_lse": _attention,
    "attention_backward": _attention_backward(8),
    "latent_attention": _latent_attention,
    "latent_attention_backward": _latent_attention_backward,
    "sparse_attention": _sparse_attention,
    "sparse_attention_backward": _sparse_attention_backward,
    "delta_rule": _delta_rule_forward,
    "delta_rule_": _delta_rule_in_place,
    "delta_rule_backward": _delta_rule_backward,
    "index_scores": _index_scores,
    "index_topk": _index_scores,
    "index_scores_backward": _index_scores_backward,
}


def count(*names: str) -> None:
    """Lets FlopCounterMode count these of rapt's operators."""
    for name in names:
        flop_counter.register_flop_formula(getattr(torch.ops.rapt, name), get_raw=True)(_FORMULAS[name])
