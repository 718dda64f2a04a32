"""flash_attn_with_kvcache: new keys and values appended to a cache in place, rotary embedding, and attention over the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._flash_attn import attend, used_rows
from rapt._flash_attn_calls import check, check_extras, check_rows, check_without_gradients, options, returned
from rapt._scalars import integer, truth

_NAMES = {"k_new": "k", "v_new": "v", "k": "k_cache", "v": "v_cache", "cu_seqlens": "cu_seqlens_k_new"}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Tensor | None = None,
    s_aux: Tensor | None = None,
    **flash_attn_3: Any,
) -> Any:
    """Attention of new queries to a cache, after k and v have been written to it.

    q               [b, sq, hq, d] of bfloat16, float16 or float32; with cu_seqlens_q [total_q, hq, d].
    k_cache, v_cache
                    [caches, room, hk, d], written in place; with block_table pages, [pages, page_size, hk, d].
    k, v            [b, n, hk, d], written behind the keys that each sequence has; with cu_seqlens_k_new [total_new, hk, d].
    rotary_cos, rotary_sin
                    [positions, r / 2], r <= d: the first r columns of k are rotated, at positions cache_seqlens and on, before they are
                    written. So are those of q: row by row if causal or with a window, else all at position cache_seqlens.
    cache_seqlens   int, or int32 or int64 [b]: keys of each sequence before the call, padding included. All of the room if not
                    given, which k needs.
    cache_batch_idx int32 or int64 [b]: which cache is whose; the first b in their order if not given. With k, each once.
    cache_leftpad   int32 or int64 [b]: how many keys at the beginning are padding, which no row sees.
    block_table     int32 or int64 [b, n]: key j of sequence i is row j % page_size of page block_table[i, j // page_size].
    softmax_scale, causal, window_size, softcap, alibi_slopes
                    As of flash_attn_func; sk is the keys of a sequence with the new ones.
    rotary_interleaved
                    Columns 0 and 1, 2 and 3, ... are rotated together; if not, 0 and r / 2, 1 and r / 2 + 1, ...
    num_splits      Without effect on the CPU.
    return_softmax_lse
                    Returns (out, softmax_lse).
    page_table      block_table, by flash-attn 3's name.
    cu_seqlens_q, cu_seqlens_k_new
                    int32 or int64 [b + 1]: rows of each sequence, if they have not the same number (flash-attn 3).
    rotary_seqlens  [b]: positions to rotate at in place of cache_seqlens (flash-attn 3).
    s_aux, flash_attn_3
                    As of flash_attn_func.

    Returns out [b, sq, hq, dv] ([total_q, hq, dv]) of q's type, and softmax_lse float32 [b, hq, sq] ([hq, total_q]). There are no
    gradients. Raises TypeError, ValueError or NotImplementedError, naming the argument, before anything is written; but table entries
    that only the attention needs are looked at after that.
    """
    check_extras(flash_attn_3)
    integer("num_splits", num_splits)
    if page_table is not None:
        if block_table is not None:
            raise ValueError("page_table: got a tensor with block_table; wanted one of them: they are two names")
        block_table = page_table
    given = options(softmax_scale, causal, window_size, softcap)
    rotary_interleaved = truth("rotary_interleaved", rotary_interleaved)
    return_softmax_lse = truth("return_softmax_lse", return_softmax_lse)
    lengths = cache_seqlens if isinstance(cache_seqlens, Tensor) or cache_seqlens is None else None
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    tensors |= {"cache_seqlens": lengths, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    tensors |= {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
    tensors |= {"rotary_seqlens": rotary_seqlens, "alibi_slopes": alibi_slopes, "s_aux": s_aux}
    caches = "[caches, room, hk, d]" if block_table is None else "[pages, page_size, hk, d]"
    shapes = {"q": "[b, sq, hq, d]" if cu_seqlens_q is None else "[total_q, hq, d]", "k_cache": caches, "v_cache": caches}
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: got None with {'v' if k is None else 'k'}; wanted both, or none")
    if k is not None:
        new = "[b, n, hk, d]" if cu_seqlens_k_new is None else "[total_new, hk, d]"
        shapes |= {"k": new, "v": new}
    for name in ("cu_seqlens_q", "cu_seqlens_k_new"):
        if tensors[name] is not None:
            shapes[name] = "[b + 1]"
    if block_table is not None:
        shapes["block_table"] = "[b, n]"
    check(tensors, shapes)
    check_without_gradients("flash_attn_with_kvcache has no backward", **tensors)
    check_rows(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens"):
        x = tensors[name]
        if x is not None and (tuple(x.shape) != (batch,) or x.dtype not in (torch.int32, torch.int64)):
            raise ValueError(f"{name}: got {x.dtype} {list(x.shape)}; wanted int32 or int64 [{batch}]")
    if block_table is not None and block_table.shape[0] != batch:
        raise ValueError(f"block_table: got shape {list(block_table.shape)}; wanted [{batch}, n]")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx: got a tensor with block_table; wanted one of them: a table says which pages are whose")
        block_table = cache_batch_idx[:, None]  # a cache is a page
    elif block_table is None and k_cache.shape[0] != batch:
        if k_cache.shape[0] < batch:
            raise ValueError(f"k_cache: got shape {list(k_cache.shape)}; wanted {batch} caches or more, as q has sequences")
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: got None with k; wanted where k begins")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), integer("cache_seqlens", cache_seqlens), dtype=torch.int32, device=q.device)
    lengths = cache_seqlens
    if rotary_cos is not None or rotary_sin is not None:
        if k is None:
            raise ValueError(f"rotary_{'sin' if rotary_cos is None else 'cos'}: got a tensor without k; wanted k and v, or None")
        begin = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        each = given.causal or given.window != (-1, -1)
        rotary = (rotary_cos, rotary_sin, rotary_interleaved)
        q, k = _rotated(q, begin, cu_seqlens_q, each, *rotary), _rotated(k, begin, cu_seqlens_k_new, True, *rotary)
    elif rotary_seqlens is not None:
        raise ValueError("rotary_seqlens: got a tensor without rotary_cos; wanted both, or None")
    if k is not None and v is not None:
        _append(k, v, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_k_new)
        lengths = lengths + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    elif cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: got a tensor without k; wanted both, or None")
    names = {"k": "k_cache", "v": "v_cache"} | ({} if cache_batch_idx is None else {"block_table": "cache_batch_idx"})
    with _refusals.renamed(**names):
        out, lse, _ = attend(
            (q, k_cache, v_cache, alibi_slopes, s_aux, cu_seqlens_q, None, lengths, block_table, cache_leftpad),
            *given,
            with_lse=return_softmax_lse,
        )
    return out if lse is None else (out, returned(lse))


def _rotated(
    x: Tensor, begin: Tensor, borders: Tensor | None, each: bool, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> Tensor:
    """x [b, n, h, d] or ragged [total, h, d], rotated at positions begin, begin + 1 and so on; all at `begin` if not `each`."""
    if cos is None or sin is None:
        name, other = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{name}: got None with {other}; wanted both, or none")
    columns = 2 * cos.shape[-1]
    if cos.dim() != 2 or not 0 < columns <= x.shape[-1]:
        raise ValueError(f"rotary_cos: got shape {list(cos.shape)}; wanted [positions, 1 to {x.shape[-1] // 2}]")
    if sin.shape != cos.shape:
        raise ValueError(f"rotary_sin: got shape {list(sin.shape)}; wanted rotary_cos's {list(cos.shape)}")
    row = torch.arange(x.shape[0 if borders is not None else 1], device=x.device)
    if borders is None:
        place = begin[:, None] + (row if each else torch.zeros_like(row))
    else:
        sequence = torch.searchsorted(borders[1:].long(), row, right=True).clamp(max=begin.shape[0] - 1)
        place = begin[sequence] + ((row - borders[sequence]) if each else 0)
    if not torch.compiler.is_compiling() and place.numel() > 0:
        first, last = (int(p) for p in place.aminmax())
        if first < 0 or last >= cos.shape[0]:
            raise ValueError(f"rotary_cos: got {cos.shape[0]} positions; wanted those of {first} to {last}")
    c, s = (table[place].float().unsqueeze(-2) for table in (cos, sin))
    turned, rest = x[..., :columns].float(), x[..., columns:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    inputs = (k, v, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens)
    (_append_now if _refusals.is_eager(*inputs) else _append_operator)(*inputs)


def _append_now(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    if cu_seqlens is None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    else:
        rows = used_rows(k, cu_seqlens)
        k, v = k[:rows], v[:rows]
    cache = (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    with torch.no_grad(), _refusals.renamed(**_NAMES):
        rapt.append_kv(k, v, *cache, cache_seqlens, block_table=block_table, cu_seqlens=cu_seqlens)


_append_operator = torch.library.custom_op("rapt::flash_append_kv", _append_now, mutates_args=("k_cache", "v_cache"))
