"""flash_attn_with_kvcache: rotary embedding, appending new keys and values to a cache, and attention to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._flash_attn import attend, used_rows
from rapt._flash_attn_calls import (
    Options,
    Passed,
    check,
    check_extras,
    check_modifiers,
    check_rows,
    check_without_gradients,
    options,
    returned,
    signature_of,
)
from rapt._scalars import boolean, integer

# How rapt's functions call the arguments, for flash-attn's names of them.
_NAMES = {"k_new": "k", "v_new": "v", "k": "k_cache", "v": "v_cache", "cu_seqlens": "cu_seqlens_k_new"}
_NAMES |= {"scale": "softmax_scale", "window": "window_size"}
_renamed = _refusals.renamed(**_NAMES)


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
    """Attention of new queries to a KV cache, after k and v have been appended to it.

    q               [b, sq, hq, d] of bfloat16, float16 or float32; with cu_seqlens_q [total_q, hq, d].
    k_cache, v_cache
                    [caches, room, hk, d], written in place; with block_table pages, [pages, page_size, hk, d].
    k, v            [b, n, hk, d], written after each sequence's keys; with cu_seqlens_k_new [total_new, hk, d].
    rotary_cos, rotary_sin
                    [positions, r / 2], r <= d: the first r columns of k are rotated, at positions cache_seqlens and on,
                    before they are written. The first r columns of q are rotated, too: row by row if causal or with a
                    window, otherwise all at position cache_seqlens.
    cache_seqlens   int, or int32 or int64 [b]: number of keys of each sequence before the call, padding included.
                    Default: the whole room. Required with k.
    cache_batch_idx
                    int32 or int64 [b]: the cache of each sequence. Default: the first b caches in order. With k, each
                    cache at most once.
    cache_leftpad   int32 or int64 [b]: how many keys at the beginning are padding, which no row attends to.
    block_table     int32 or int64 [b, n]: key j of sequence i is row j % page_size of page block_table[i, j //
                    page_size].
    softmax_scale, causal, window_size, softcap, alibi_slopes
                    As for flash_attn_func; sk is the number of a sequence's keys, new ones included.
    rotary_interleaved
                    True: columns 0 and 1, 2 and 3, ... are rotated together. False: 0 and r / 2, 1 and r / 2 + 1, ...
    num_splits      Ignored on the CPU.
    return_softmax_lse
                    True: returns (out, softmax_lse).
    page_table      flash-attn 3's name of block_table.
    cu_seqlens_q, cu_seqlens_k_new
                    int32 or int64 [b + 1]: rows of each sequence, if their numbers differ (flash-attn 3).
    rotary_seqlens  [b]: the first position to rotate at, in place of cache_seqlens (flash-attn 3).
    s_aux, flash_attn_3
                    As for flash_attn_func.

    Returns out [b, sq, hq, dv] ([total_q, hq, dv]) of q's type, and softmax_lse float32 [b, hq, sq] ([hq, total_q]).
    There are no gradients. Raises TypeError, ValueError or NotImplementedError, which names the argument, before
    anything is written, except for wrong values in cu_seqlens_q and in tables that only the attention needs.
    """
    check_extras(flash_attn_3)
    integer("num_splits", num_splits)
    given = options(softmax_scale, causal, window_size, softcap)
    rotary_interleaved = boolean("rotary_interleaved", rotary_interleaved)
    return_softmax_lse = boolean("return_softmax_lse", return_softmax_lse)
    if page_table is not None:
        if block_table is not None:
            raise ValueError("page_table: got a tensor with block_table; wanted one of them: they are two names")
        block_table = page_table
    usual: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "block_table": block_table}
    usual["cache_seqlens"] = cache_seqlens
    rare: dict[str, Any] = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    rare |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens}
    rare |= {"alibi_slopes": alibi_slopes, "s_aux": s_aux, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    plain = _check(usual, rare)
    batch = q.shape[0] if cu_seqlens_q is None else max(cu_seqlens_q.shape[0] - 1, 0)
    table = "block_table"
    if cache_batch_idx is not None:
        block_table, table = cache_batch_idx[:, None], "cache_batch_idx"  # a cache is a page
    elif block_table is None and k_cache.shape[0] != batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, Tensor):
        length = integer("cache_seqlens", cache_seqlens)
        if not 0 <= length < 2**63:
            raise ValueError(f"cache_seqlens: got {length}; wanted 0 or more, in 64 bits")
        cache_seqlens = torch.full((batch,), length, dtype=torch.int64, device=q.device)
    if plain:
        return _attend_now(q, k_cache, v_cache, k, v, cache_seqlens, block_table, given, return_softmax_lse)
    lengths = cache_seqlens
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            begin = cache_seqlens if rotary_seqlens is None else rotary_seqlens
            each = given.causal or given.window != (-1, -1)
            q = _rotated(q, begin, cu_seqlens_q, each, rotary_cos, rotary_sin, rotary_interleaved)
            k = _rotated(k, begin, cu_seqlens_k_new, True, rotary_cos, rotary_sin, rotary_interleaved)
        with _refusals.renamed(block_table=table):
            new = (k, v, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_k_new)
            (_append_now if _refusals.is_eager(*new) else _append_operator)(*new)
        lengths = lengths + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    with _refusals.renamed(k="k_cache", v="v_cache", block_table=table):
        out, lse, _ = attend(
            (q, k_cache, v_cache, alibi_slopes, s_aux, cu_seqlens_q, None, lengths, block_table, cache_leftpad),
            *given,
            with_lse=return_softmax_lse,
        )
    return out if lse is None else (out, returned(lse))


_passed = Passed()


def _check(usual: dict[str, Any], rare: dict[str, Any]) -> bool:
    """Raises where arguments are wrong, or do not fit each other. True of tensors that are known to be plain."""
    signature = signature_of(usual.values(), rare.values())
    if signature in _passed:
        return True
    begun = usual["cache_seqlens"] is not None
    tensors = usual | rare
    if not isinstance(tensors["cache_seqlens"], Tensor):
        del tensors["cache_seqlens"]
    _check_shapes(tensors)
    _check_pairs(tensors, begun)
    borders = tensors["cu_seqlens_q"]
    _check_batch(tensors["q"].shape[0] if borders is None else max(borders.shape[0] - 1, 0), tensors)
    return _passed.add(signature)


def _check_shapes(x: dict[str, Tensor | None]) -> None:
    """Raises where an argument is no tensor of its dimensions, or requires grad."""
    caches = "[caches, room, hk, d]" if x["block_table"] is None else "[pages, page_size, hk, d]"
    rows = "[b, sq, hq, d]" if x["cu_seqlens_q"] is None else "[total_q, hq, d]"
    shapes = {"q": rows, "k_cache": caches, "v_cache": caches}
    new = "[b, n, hk, d]" if x["cu_seqlens_k_new"] is None else "[total_new, hk, d]"
    others = {"k": new, "v": new, "cu_seqlens_q": "[b + 1]", "cu_seqlens_k_new": "[b + 1]", "block_table": "[b, n]"}
    others |= {"rotary_cos": "[positions, r / 2]"}
    check(x, shapes | {name: shape for name, shape in others.items() if x[name] is not None})
    check_without_gradients("flash_attn_with_kvcache has no backward", **x)


def _check_pairs(x: dict[str, Tensor | None], begun: bool) -> None:
    """Raises where an argument is given without another that it needs, or with one that excludes it. begun:
    cache_seqlens is given."""
    for name, other in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if x[name] is None and x[other] is not None:
            raise ValueError(f"{name}: got None with {other}; wanted both, or neither")
    for name, other in (("rotary_cos", "k"), ("cu_seqlens_k_new", "k"), ("rotary_seqlens", "rotary_cos")):
        if x[name] is not None and x[other] is None:
            raise ValueError(f"{name}: got a tensor without {other}; wanted both, or neither")
    if x["k"] is not None and not begun:
        raise ValueError("cache_seqlens: got None with k; wanted how many keys each sequence has before it")
    if x["cache_batch_idx"] is not None and x["block_table"] is not None:
        raise ValueError("cache_batch_idx: got a tensor with block_table; wanted one of them, as a table says as much")


def _check_batch(batch: int, x: dict[str, Any]) -> None:
    """Raises where sizes and types do not fit those of q's sequences."""
    q, k_cache, v_cache, k, v = (x[name] for name in ("q", "k_cache", "v_cache", "k", "v"))
    check_rows(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    check_modifiers(x["alibi_slopes"], x["s_aux"], batch, q.shape[-2])
    for name, cache in (("k", k_cache), ("v", v_cache)):
        new = x[name]
        if new is not None and new.dtype != q.dtype:
            raise TypeError(f"{name}: got {new.dtype}; wanted q's {q.dtype}")
        if new is not None and new.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name}: got shape {list(new.shape)}; wanted heads as of {name}_cache")
    if k is not None and (k.shape[:-2] != v.shape[:-2] or (k.dim() == 4 and k.shape[0] != batch)):
        got = f"shape {list(k.shape)}, and v {list(v.shape)}"
        raise ValueError(f"k: got {got}; wanted as many rows, of {batch} sequences")
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens"):
        given = x.get(name)
        if given is not None and (tuple(given.shape) != (batch,) or given.dtype not in (torch.int32, torch.int64)):
            raise ValueError(f"{name}: got {given.dtype} {list(given.shape)}; wanted int32 or int64 [{batch}]")
    for name, size in (("block_table", batch), ("cu_seqlens_q", batch + 1), ("cu_seqlens_k_new", batch + 1)):
        if x[name] is None:
            continue
        if x[name].dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got {x[name].dtype}; wanted torch.int32 or torch.int64")
        if x[name].shape[0] != size:
            raise ValueError(f"{name}: got shape {list(x[name].shape)}; wanted {size} in its first dimension")
    if x["block_table"] is None and x["cache_batch_idx"] is None and k_cache.shape[0] < batch:
        raise ValueError(f"k_cache: got shape {list(k_cache.shape)}; wanted {batch} caches or more, as q has sequences")
    cos, sin = x["rotary_cos"], x["rotary_sin"]
    if cos is not None:
        if not 0 < 2 * cos.shape[1] <= q.shape[-1]:
            raise ValueError(f"rotary_cos: got shape {list(cos.shape)}; wanted [positions, 1 to {q.shape[-1] // 2}]")
        if sin.shape != cos.shape:
            raise ValueError(f"rotary_sin: got shape {list(sin.shape)}; wanted rotary_cos's {list(cos.shape)}")


def _rotated(
    x: Tensor, begin: Tensor, borders: Tensor | None, each: bool, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """x [b, n, h, d] or ragged [total, h, d], rotated at positions begin, begin + 1 and so on; all at `begin` if not
    `each`."""
    columns = 2 * cos.shape[1]
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


def _append_now(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _append_now(k, v, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens)
    if cu_seqlens is None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    else:
        rows = used_rows(k, cu_seqlens)
        k, v = k[:rows], v[:rows]
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    _append_rows(k, v, keys, values, cache_seqlens, block_table, cu_seqlens)


def _append_rows(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Of tensors with heads before rows."""
    if block_table is None or not _share_pages(keys, values):
        with _renamed:
            rapt.append_kv(k, v, keys, values, cache_seqlens, block_table=block_table, cu_seqlens=cu_seqlens)
        return
    for name, new, cache in (("k", k, keys), ("v", v, values)):  # a cache whose values are its keys is written once
        with _refusals.renamed(**_NAMES | {"k_new": name, "v_new": name, "k": name + "_cache", "v": name + "_cache"}):
            rapt.append_kv(new, new, cache, cache, cache_seqlens, block_table=block_table, cu_seqlens=cu_seqlens)


def _attend_now(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: Tensor,
    block_table: Tensor | None,
    given: Options,
    with_lse: bool,
) -> Any:
    """What is left of a call whose arguments are known to be right and plain: few steps, as they cost more than the
    kernels of a small call."""
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if k is not None and v is not None:
        _append_rows(k.transpose(1, 2), v.transpose(1, 2), keys, values, lengths, block_table)
        lengths = lengths + k.shape[1]
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    with _renamed:
        made = rapt.attention(
            *(q.transpose(1, 2), keys, values),
            causal=given.causal,
            align="bottom_right",
            window=given.window,
            scale=given.scale,
            softcap=given.softcap or None,
            cache_seqlens=lengths,
            block_table=block_table,
            out=out.transpose(1, 2),
            return_lse=with_lse,
        )
    return (out, returned(made[1])) if with_lse else out


def _share_pages(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether pages of keys and of values lie in one pool, where the numbers of a table keep them apart: the tensors
    overlap, one some pages behind the other."""
    if k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr():
        return False
    behind, page = abs(int(v_cache.storage_offset()) - int(k_cache.storage_offset())), k_cache.stride(0)
    return k_cache.stride() == v_cache.stride() and page > 0 and 0 < behind < page * k_cache.shape[0] and behind % page == 0


_append_operator = torch.library.custom_op("rapt::flash_append_kv", _append_now, mutates_args=("k_cache", "v_cache"))
