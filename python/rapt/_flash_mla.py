"""FlashMLA's functions on the CPU: its arguments, layouts and conventions, by rapt's kernels.

They differ from rapt's own in this: lse is +inf, not -inf, where a query has no key; a sink changes out, but not lse; entries of a
list past the end of the keys stand for no key, as -1 does; and softmax_scale is d**-0.5 of q's 576 columns if not given, which no
model means. Head counts, page sizes, and numbers of columns may be any, and types float32 and float16 as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._fp8_rows import LATENT, check_fp8, columns_of, keys_and_values
from rapt._scalars import finite, integer, truth

_SHARPNESS = 2.0**24


class FlashMLASchedMeta:
    """What get_mla_metadata returns. Work is divided anew in each call here, so that there is nothing in it."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Takes anything, as FlashMLA's does, and returns what flash_mla_with_kvcache takes."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries of each sequence to a cache of latents, all keys of it or those in `indices`.

    q               [b, sq, hq, d] of bfloat16, float16 or float32.
    k_cache         [pages, page_size, hk, d] of one of these types; with indices hk is 1. Values are its first head_dim_v columns.
                    With is_fp8_kvcache uint8 or float8_e4m3fn [pages, page_size, hk, 656], read as it is.
    block_table     int32 [b, pages of a sequence]. With indices, which say where keys lie, it is not looked at, as in FlashMLA.
    cache_seqlens   int32 [b]: likewise.
    tile_scheduler_metadata, num_splits
                    What get_mla_metadata gave, or anything: not used.
    softmax_scale   d**-0.5 if not given. DeepSeek's models mean (128 + 64)**-0.5, times a factor with YaRN.
    causal          The last query of a sequence is at its last key.
    is_fp8_kvcache  A token has 656 bytes: 512 latent columns of float8_e4m3fn; their scales, float32, one for 128 columns; 64 rotary
                    columns of bfloat16. head_dim_v is 512. rapt.mla.append_fp8_rows writes such caches.
    indices         int32 [b, sq, topk]: page * page_size + offset of the keys of each query; -1, or a row past the cache, for none.
    attn_sink       float32 [hq], with indices: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
    topk_length     int32 [b], with indices: how many entries of each list count.
    extra_...       None: a second cache is refused.

    Returns out [b, sq, hq, head_dim_v] of q's type, and lse float32 [b, hq, sq], natural: +inf where there is no key.
    """
    tensors = {"q": q, "k_cache": k_cache, "block_table": block_table, "cache_seqlens": cache_seqlens, "indices": indices}
    _check(tensors | {"attn_sink": attn_sink, "topk_length": topk_length})
    _check_given(q=q, k_cache=k_cache)
    _check_numbers("q", q)
    causal, is_fp8_kvcache = truth("causal", causal), truth("is_fp8_kvcache", is_fp8_kvcache)
    head_dim_v, softmax_scale = integer("head_dim_v", head_dim_v), finite("softmax_scale", softmax_scale)
    if is_fp8_kvcache:
        check_fp8("k_cache", k_cache)
    else:
        _check_numbers("k_cache", k_cache)
    for name, x in (
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("extra_topk_length", extra_topk_length),
    ):
        _want_none(name, x, "a second cache is not supported")
    _check_dims("q", q, "[b, sq, hq, d]")
    _check_dims("k_cache", k_cache, "[pages, page_size, hk, d]")
    if not is_fp8_kvcache:
        _check_value_columns("head_dim_v", head_dim_v, k_cache)
    elif head_dim_v != LATENT:
        raise ValueError(f"head_dim_v: got {head_dim_v}; wanted {LATENT}, the latent columns of a row of bytes")
    _check_columns(q, "k_cache", k_cache)
    names = {"k": "k_cache", "v": "k_cache"}
    if indices is not None:
        if causal:
            raise ValueError("causal: got True with indices; wanted False: a list says which keys a query sees")
        if k_cache.shape[2] != 1:
            raise ValueError(f"k_cache: got shape {list(k_cache.shape)} with indices; wanted one key head")
        if indices.shape[:2] != q.shape[:2] or indices.dim() != 3:
            raise ValueError(f"indices: got shape {list(indices.shape)}; wanted [{q.shape[0]}, {q.shape[1]}, topk]")
        if topk_length is not None:
            if tuple(topk_length.shape) != (q.shape[0],):
                raise ValueError(f"topk_length: got shape {list(topk_length.shape)}; wanted [{q.shape[0]}]")
            topk_length = topk_length[:, None]
        lists = _lists(indices, topk_length, k_cache.shape[0] * k_cache.shape[1])
        try:
            rows = k_cache.view(-1, k_cache.shape[3])
        except RuntimeError:
            raise ValueError("k_cache: got pages that do not lie end to end with indices; wanted rows that do") from None
        return _listed(q, rows, lists, softmax_scale, head_dim_v, attn_sink, names)
    for name, x in (("attn_sink", attn_sink), ("topk_length", topk_length)):
        _want_none(name, x, "it belongs to indices")
    if block_table is None or cache_seqlens is None:
        name = "block_table" if block_table is None else "cache_seqlens"
        raise ValueError(f"{name}: got None without indices; wanted a tensor")
    k, v, coding = keys_and_values(k_cache.transpose(1, 2), head_dim_v, "k_cache")
    out = q.new_empty((*q.shape[:3], head_dim_v))
    with _refusals.renamed(**names):
        _, lse = rapt.attention(
            *(q.transpose(1, 2), k, v),
            causal=causal,
            align="bottom_right",
            scale=softmax_scale,
            block_table=block_table,
            cache_seqlens=cache_seqlens,
            out=out.transpose(1, 2),
            return_lse=True,
            **coding,
        )
    return out, _without_keys_above(lse)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query of one text to its own list of keys.

    q               [sq, hq, d] of bfloat16, float16 or float32.
    kv              [sk, 1, d] of one of these types. Values are its first d_v columns.
    indices         int32 [sq, 1, topk]: the keys of each query, of all its heads; below 0 or past the end, none. A key that is listed
                    twice counts twice.
    sm_scale        What scores are multiplied by.
    attn_sink       float32 [hq]: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); lse and max_logits are as without it.
    topk_length     int32 [sq]: how many entries of each list count.
    indexer_topk    0: the lse of a list's beginning is not supported.

    Returns out [sq, hq, d_v] of q's type; max_logits float32 [sq, hq], the largest score, -inf where there is no key; and lse float32
    [sq, hq], natural, +inf there. rapt's kernels keep no such maximum. It is lse of 2**24 times the scores, divided by that, which is
    off by 2**-24 log(topk) and its rounding; of scores past 2e31 it is lse itself, which is as near. Where you need none, rapt.attention or rapt.mla.attention with `indices` take about half
    the time.
    """
    _check({"q": q, "kv": kv, "indices": indices, "attn_sink": attn_sink, "topk_length": topk_length})
    _check_given(q=q, kv=kv, indices=indices)
    d_v, factor = integer("d_v", d_v), finite("sm_scale", sm_scale)
    if factor is None:
        raise TypeError("sm_scale: got None; wanted a number")
    _check_numbers("q", q)
    _check_numbers("kv", kv)
    if indexer_topk != 0:
        raise ValueError(f"indexer_topk: got {indexer_topk}; wanted 0: an lse of a list's beginning is not supported")
    _check_dims("q", q, "[sq, hq, d]")
    _check_dims("kv", kv, "[sk, 1, d]")
    _check_value_columns("d_v", d_v, kv)
    if kv.shape[1] != 1:
        raise ValueError(f"kv: got shape {list(kv.shape)}; wanted [sk, 1, d], one key head")
    if indices.dim() != 3 or indices.shape[:2] != (q.shape[0], 1):
        raise ValueError(f"indices: got shape {list(indices.shape)}; wanted [{q.shape[0]}, 1, topk]")
    if topk_length is not None and tuple(topk_length.shape) != (q.shape[0],):
        raise ValueError(f"topk_length: got shape {list(topk_length.shape)}; wanted [{q.shape[0]}]")
    _check_columns(q, "kv", kv)
    lists, names = _lists(indices[:, 0], topk_length, kv.shape[0]), {"k": "kv", "v": "kv"}
    out, lse = _listed(q[None], kv[:, 0], lists[None], factor, d_v, attn_sink, names)
    # Scores times a large number: their lse is the largest, but for log(topk) at most.
    sharper, sharp_factor = q[None], factor * _SHARPNESS
    if abs(sharp_factor) > torch.finfo(torch.float32).max:
        sharper, sharp_factor = sharper.float() * _SHARPNESS, factor
    _, sharp = _listed(sharper, kv[:, 0], lists[None], sharp_factor, 1, None, names)
    largest = torch.where(sharp.isfinite(), sharp / _SHARPNESS, lse)  # past float32 log(topk) is less than a score's rounding
    largest = largest.masked_fill_(lse == torch.inf, -torch.inf)
    return out[0], largest[0].T.contiguous(), lse[0].T.contiguous()


def _check(tensors: dict[str, Tensor | None]) -> None:
    _refusals.check_tensors(tensors, "an array by torch.from_dlpack()", "FlashMLA itself runs on GPUs")
    _refusals.check_memory(tensors)
    for name, x in tensors.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires grad; wanted torch.no_grad(), or rapt.mla.attention")


def _check_given(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is None:
            raise TypeError(f"{name}: got None; wanted a tensor")


def _check_numbers(name: str, rows: Tensor) -> None:
    if rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{name}: got {rows.dtype}; wanted torch.bfloat16, torch.float16 or torch.float32")


def _want_none(name: str, x: Tensor | None, why: str) -> None:
    if x is not None:
        raise ValueError(f"{name}: got a tensor; wanted None: {why}")


def _check_dims(name: str, x: Tensor, wanted: str) -> None:
    if x.dim() != wanted.count(",") + 1:
        raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {wanted}")


def _check_value_columns(name: str, count: int, keys: Tensor) -> None:
    if not 0 < count <= keys.shape[-1]:
        raise ValueError(f"{name}: got {count}; wanted 1 to {keys.shape[-1]}, columns of a key")


def _check_columns(q: Tensor, name: str, rows: Tensor) -> None:
    if q.shape[-1] != columns_of(rows):
        raise ValueError(f"q: got shape {list(q.shape)}; wanted {columns_of(rows)} columns, as {name} has")


def _lists(indices: Tensor, lengths: Tensor | None, keys: int) -> Tensor:
    """With -1 for all that is no key."""
    valid = (indices >= 0) & (indices < keys)
    if lengths is not None:
        valid &= torch.arange(indices.shape[-1], device="cpu") < lengths[..., None]
    return torch.where(valid, indices, -1)


def _listed(
    q: Tensor, rows: Tensor, lists: Tensor, scale: float | None, dv: int, sinks: Tensor | None, names: dict[str, str]
) -> tuple[Tensor, Tensor]:
    """out [b, sq, hq, dv] and lse [b, hq, sq] of lists [b, sq, topk] of rows. `names`: what the caller calls k and v."""
    k, v, coding = keys_and_values(rows[None, None], dv, names["k"])
    out = q.new_empty((*q.shape[:3], dv), dtype=None if sinks is None else torch.float32)
    with _refusals.renamed(**names):
        _, lse = rapt.attention(
            *(q.transpose(1, 2), k, v), scale=scale, indices=lists, out=out.transpose(1, 2), return_lse=True, **coding
        )
    if sinks is not None:
        if tuple(sinks.shape) != (q.shape[2],):
            raise ValueError(f"attn_sink: got shape {list(sinks.shape)}; wanted [{q.shape[2]}]")
        kept = torch.sigmoid(lse.transpose(1, 2) - sinks.float()).masked_fill((lse == -torch.inf).transpose(1, 2), 0)
        out = (out * kept[..., None]).to(q.dtype)
    return out, _without_keys_above(lse)


def _without_keys_above(lse: Tensor) -> Tensor:
    return lse.masked_fill_(lse == -torch.inf, torch.inf)
