"""rapt's kernels under PyTorch's own operators on the CPU, for callers that know no other name: C++, the fused path of
nn.MultiheadAttention and nn.TransformerEncoderLayer, code that imported F.scaled_dot_product_attention before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapt import _core, _refusals, _sdpa

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_MULTIHEAD = "_native_multi_head_attention"


class Override:
    """From when it is made until close()."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            for name, ours in ((_FLASH, _flash), (_FLASH + "_backward", _flash_backward), (_MULTIHEAD, _multihead)):
                theirs = torch.library.get_kernel(f"aten::{name}", "CPU")
                self._library.impl(name, _with(ours, theirs), "CPU", with_keyset=True)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._library._destroy()


def _with(ours: Callable[..., Any], theirs: Any) -> Callable[..., Any]:
    """`ours`, and `theirs` for what it says no to."""

    def run(keyset: Any, *arguments: Any, **options: Any) -> Any:
        result = ours(*arguments, **options)
        return theirs.call_boxed(keyset, *arguments, **options) if result is NotImplemented else result

    return run


def _misfit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    reason = "dropout in PyTorch's operator" if dropout_p != 0 else ""
    if q.dim() != 4 or q.shape[-1] != v.shape[-1]:
        reason = reason or "queries and values of different head dimensions in PyTorch's operator"
    reason = reason or _refusals.misfit(q, k, v, mask, q.shape[-3] != k.shape[-3])
    return bool(reason) and _refusals.warn(reason)


def _heads_inside(q: Tensor, *last: int, dtype: torch.dtype) -> Tensor:
    """[b, h, s, last] as PyTorch's kernels lay out most of what they make."""
    b, h, s = q.shape[:3]
    return q.new_empty((b, s, h, *last), dtype=dtype).transpose(1, 2)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if _misfit(query, key, value, attn_mask, dropout_p):
        return NotImplemented
    out, lse = torch.empty_like(query), _heads_inside(query, dtype=torch.float32)
    _core.sdpa(query, key, value, attn_mask, is_causal, scale, out, lse, 0.0, None)
    # PyTorch's lse of a row without keys is 0: of -inf its backward, which may run outside the switch, would make NaN.
    return out, lse.masked_fill_(lse == -torch.inf, 0)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if _misfit(query, key, value, attn_mask, dropout_p):
        return NotImplemented
    memory = [_heads_inside(t, t.shape[-1], dtype=t.dtype) for t in (query, key, value)]
    options = (attn_mask, out, logsumexp, None, is_causal, scale, True, 0.0, (True, True, True, False))
    _sdpa.gradients(grad_out, None, query, key, value, *options, into=memory)
    return tuple(memory)


def _multihead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    if need_weights or query is not key or key is not value:
        what = "weights" if need_weights else "queries, keys and values that are not one tensor"
        _refusals.warn(f"_native_multi_head_attention with {what}")
        return NotImplemented
    if query.dim() != 3 or embed_dim % num_head or (mask is not None and mask_type not in (0, 1, 2)):
        return NotImplemented  # which has an error for it
    heads = functional.linear(query, qkv_weight, qkv_bias).view(*query.shape[:2], 3, num_head, embed_dim // num_head)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    if mask is not None:
        mask = mask.logical_not()  # true hides a key; a float mask is read as boolean, too
        mask = mask[:, None, None] if mask_type == 1 else mask
    if _misfit(q, k, v, mask, 0.0):
        return NotImplemented
    out = _heads_inside(q, q.shape[-1], dtype=q.dtype)
    _core.sdpa(q, k, v, mask, False, None, out, None, 0.0, None)
    return functional.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), None
