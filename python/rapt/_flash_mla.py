"""FlashMLA's functions on CPUs and GPUs, with its arguments, layouts and conventions.

They differ from rapt's functions: lse is +inf, not -inf, for a query without keys. A sink changes out, but not lse.
List entries past the end of the keys stand for no key, like -1. softmax_scale defaults to d**-0.5 of q's 576 columns,
which no model uses. Unlike FlashMLA, all head counts, page sizes and numbers of columns are supported, and float32 and
float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._fp8_rows import LATENT, check_fp8, columns_of, keys_and_values
from rapt._scalars import boolean, finite, integer

_SHARPNESS = 2.0**24


class FlashMLASchedMeta:
    """The result of get_mla_metadata. It is empty: rapt divides the work in each call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Returns a FlashMLASchedMeta for flash_mla_with_kvcache, and None. Ignores its arguments, which are FlashMLA's."""
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
    """Attention of a few queries per sequence to a cache of latents: to all keys, or to those in `indices`.

    q               [b, sq, hq, d] of bfloat16, float16 or float32.
    k_cache         [pages, page_size, hk, d] of one of these types; with indices hk is 1. Values are its first
                    head_dim_v columns. With is_fp8_kvcache uint8 or float8_e4m3fn [pages, page_size, hk, 656], read in
                    place.
    block_table     int32 [b, n]: the pages of each sequence. Ignored with indices, as in FlashMLA.
    cache_seqlens   int32 [b]: number of keys of each sequence. Ignored with indices.
    head_dim_v      Number of columns of values.
    tile_scheduler_metadata, num_splits
                    Ignored.
    softmax_scale   Default d**-0.5. DeepSeek's models use (128 + 64)**-0.5, with YaRN times a factor.
    causal          True: a sequence's last query is at its last key.
    is_fp8_kvcache  True: a token has 656 bytes: 512 latent columns of float8_e4m3fn; their scales, float32, one per 128
                    columns; 64 rotary columns of bfloat16. head_dim_v is 512. rapt.mla.append_fp8_rows writes such
                    caches.
    indices         int32 [b, sq, topk]: the keys of each query, page * page_size + offset; -1, or a row past the cache,
                    for none.
    attn_sink       float32 [hq], requires indices: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
    topk_length     int32 [b], requires indices: how many entries of each list count.
    extra_...       None: a second cache is not supported.

    Returns out [b, sq, hq, head_dim_v] of q's type, and lse float32 [b, hq, sq], the natural log: +inf for a query
    without keys. Raises TypeError or ValueError, which names the argument.
    """
    tensors = {"q": q, "k_cache": k_cache, "block_table": block_table, "cache_seqlens": cache_seqlens, "indices": indices}
    _check(tensors | {"attn_sink": attn_sink, "topk_length": topk_length})
    _check_given(q=q, k_cache=k_cache)
    _check_numbers("q", q)
    causal, is_fp8_kvcache = boolean("causal", causal), boolean("is_fp8_kvcache", is_fp8_kvcache)
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
            raise ValueError(f"k_cache: got shape {list(k_cache.shape)} with indices; wanted one KV head")
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
    """Attention of each query of one sequence to its own list of keys.

    q               [sq, hq, d] of bfloat16, float16 or float32.
    kv              [sk, 1, d] of one of these types. Values are its first d_v columns.
    indices         int32 [sq, 1, topk]: the keys of each query, for all its heads. A negative entry, or one past the
                    end, stands for no key. A key that is listed twice counts twice.
    sm_scale        The factor of the scores.
    d_v             Number of columns of values.
    attn_sink       float32 [hq]: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)). lse and max_logits ignore
                    it.
    topk_length     int32 [sq]: how many entries of each list count.
    indexer_topk    0: the lse of the first entries of a list is not supported.

    Returns out [sq, hq, d_v] of q's type; max_logits float32 [sq, hq], the largest score, -inf for a query without
    keys; and lse float32 [sq, hq], the natural log, +inf for a query without keys. rapt's kernels do not return a
    maximum, so max_logits is the lse of 2**24 times the scores, divided by 2**24, with an error of 2**-24 log(topk) and
    its rounding; for scores past 2e31 it is lse itself, which is as close. If you need neither, rapt.attention or
    rapt.mla.attention with `indices` take about half the time. Raises TypeError or ValueError, which names the
    argument.
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
        raise ValueError(f"kv: got shape {list(kv.shape)}; wanted [sk, 1, d], one KV head")
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
    _refusals.check_tensors(tensors, "an array by torch.from_dlpack()")
    _refusals.check_one_device(tensors)
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
        valid &= torch.arange(indices.shape[-1], device=indices.device) < lengths[..., None]
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
