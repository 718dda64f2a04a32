"""KV caches: appending rows, with or without rotary embedding, and merging attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rapt import _core
from rapt._arrays import Array, empty_like, shape_of
from rapt._attention import SIGNATURE, KvDtype
from rapt._scalars import boolean

__all__ = ["append_kv", "merge_states", "rotary_append_kv"]

_DEFAULTS: dict[str, Any] = {name: SIGNATURE.parameters[name].default for name in _core.cache_arguments()}


def cache_arguments(**given: Any) -> tuple[Any, ...]:
    """The cache arguments of the extension's functions, in order: those of attention() that are given, and the defaults of the
    others. append_kv and rotary_append_kv take them last."""
    return tuple((_DEFAULTS | given).values())


def append_kv(
    k_new: Array,
    v_new: Array,
    k: Array,
    v: Array,
    cache_seqlens: Array,
    *,
    block_table: Array | None = None,
    ring: bool = False,
    cu_seqlens: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    k_zero: Array | None = None,
    v_zero: Array | None = None,
    k_tail: Array | None = None,
    kv_dtype: KvDtype | None = None,
) -> None:
    """Writes new keys and values to a KV cache, after each sequence's keys, and quantises them if the cache is
    quantised.

    Symbols: b sequences, hk KV heads, n new rows per sequence, d and dv head dimension of keys and of values.

    k_new, v_new    [b, hk, n, d] and [b, hk, n, dv] of float32, bfloat16 or float16; with cu_seqlens [total, hk, d] and
                    [total, hk, dv].
    k, v            The cache, written in place, with the layouts and types that rapt.attention reads.
    cache_seqlens   int32 or int64 [b]: number of keys of each sequence before the call. The caller updates it.
    block_table     int32 or int64 [b, m]: k and v are pages, as for rapt.attention.
    ring            True: k and v are rings, as for rapt.attention.
    cu_seqlens      int32 or int64 [b + 1]: sequence i has the new rows cu_seqlens[i] to cu_seqlens[i + 1].
    k_scale, v_scale, k_zero, v_zero
                    float32, as for rapt.attention. Scales and zeros with an element for every row are computed from
                    each new row and written. Scales and zeros that broadcast over sequences (pages) or rows are inputs.
    k_tail          With a quantised k, as for rapt.attention: receives the last columns of k_new.
    kv_dtype        The contents of k and v of uint8, as for rapt.attention.

    v may be a range of k's columns, k[..., a:b], if v_new is the same range of k_new's columns, k_new[..., a:b]. If k
    has scales, a and b are group boundaries, and v_scale (v_zero) is a view of the scales (zeros) of these groups.

    All other rows keep their contents. If a sequence has more new rows than a ring has rows, the last ones are kept.
    Raises TypeError or ValueError, which names the argument, before anything is written: also for rows past the end of
    a cache or block table, for table entries that are no page, and for two new rows with the same place.
    include/rapt/append_kv.hpp in the source states the bounds of rounding.
    """
    _core.append_kv(
        *(k_new, v_new, k, v, cache_seqlens, cu_seqlens, block_table, ring, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype)
    )


def rotary_append_kv(
    q: Array | None,
    k_new: Array,
    v_new: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    cache_seqlens: Array | None = None,
    *,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    norm_eps: float = 1e-6,
    norm_plus_one: bool = False,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    q_out: Array | None = None,
    k_out: Array | None = None,
    block_table: Array | None = None,
    ring: bool = False,
    cu_seqlens: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    k_zero: Array | None = None,
    v_zero: Array | None = None,
    k_tail: Array | None = None,
    kv_dtype: KvDtype | None = None,
) -> tuple[Any, Any]:
    """Rotates q and k_new (RoPE), after an RMS norm if norm weights are given, and appends k_new and v_new to a KV
    cache.

    Sources: Su et al., RoFormer, 2021; Zhang and Sennrich, RMSNorm, 2019. Symbols: b sequences, hq query heads, hk KV
    heads, n new rows per sequence, d head dimension.

    q               [b, hq, n, d], with cu_seqlens [total, hq, d], of float32, bfloat16 or float16; or None.
    k_new, v_new, k, v, cache_seqlens
                    As for rapt.append_kv. Without a cache (k is None), give only k_new and, if positions follow from
                    it, cache_seqlens.
    cos, sin        Tables [positions, r], or one row for each new row: [b or 1, n, r], with cu_seqlens [1, total, r].
                    float32, bfloat16 or float16. r is rotary_dim, or half of it if both channels of a pair have one
                    angle. They include any scaling of the embedding.
    positions       int32 or int64 [b or 1, n], with cu_seqlens [1, total]: rows of the tables. Default:
                    cache_seqlens[i] + t for new row t of sequence i.
    q_norm, k_norm  [d], float32, bfloat16 or float16: weights of an RMS norm. q (k_new) is divided by sqrt(mean of
                    squares + norm_eps) and multiplied by the weights.
    norm_eps        0 or more, default 1e-6.
    norm_plus_one   True: norms multiply by 1 + weight.
    interleaved     True: pairs are channels 2i and 2i + 1, as in GPT-J. False: i and i + rotary_dim / 2, as in GPT-NeoX
                    and Llama.
    rotary_dim      Number of rotated channels, even, at least 2. Default: the number of columns of cos.
    rotary_offset   The first rotated channel, default 0.
    q_out, k_out    Written and returned instead of new arrays. q_out may be q, and k_out may be k_new. k_out is for
                    calls without a cache.
    block_table, ring, cu_seqlens, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype
                    As for rapt.append_kv. They need a cache, except cu_seqlens.

    Returns (q_out, k_out): None for q_out without q, and for k_out with a cache. Arithmetic is float32; results are
    rounded once. Raises TypeError or ValueError, which names the argument, before anything is written.
    include/rapt/rotary_append_kv.hpp in the source states formulas and bounds.
    """
    if q is not None and q_out is None:
        q_out = empty_like("q", q, shape_of("q", q))
    if k is None and k_out is None:
        k_out = empty_like("k_new", k_new, shape_of("k_new", k_new))
    _core.rotary_append_kv(
        *(q, k_new, v_new, k, v, cache_seqlens, cu_seqlens, cos, sin, positions, q_norm, k_norm, norm_eps, norm_plus_one),
        *(interleaved, rotary_dim, rotary_offset, q_out, k_out),
        *(block_table, ring, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype),
    )
    return q_out, k_out


def merge_states(
    outs: Sequence[Array], lses: Sequence[Array], *, out: Array | None = None, return_lse: bool = False
) -> Any:
    """Merges attention over disjoint sets of keys, such as a shared prefix and the rest, into attention over all of
    them.

    outs            Results of attention over disjoint sets of keys: [..., dv] each, with 2 to 4 dimensions, of float32,
                    bfloat16 or float16. At least one.
    lses            Their lse, float32 [...], from attention(..., return_lse=True).
    out             Written and returned instead of a new array.
    return_lse      True: returns (out, lse), with the lse over all keys, float32 [...].

    A partial result with an lse of -inf (no keys) has no weight. Give a sink to one partial result only. Returns an
    array of the library and type of outs[0]. Raises TypeError or ValueError, which names the argument, before anything
    is written.
    """
    outs, lses = list(outs), list(lses)
    if not outs:
        raise ValueError("outs: got no arrays; wanted one or more")
    shape = shape_of("outs[0]", outs[0])
    for i, part in enumerate(lses):
        if (got := shape_of(f"lses[{i}]", part)) != shape[:-1]:
            wanted = f"outs[0]'s without its last dimension, {list(shape[:-1])}"
            raise ValueError(f"lses[{i}]: got shape {list(got)}; wanted {wanted}")
    if out is None:
        out = empty_like("outs[0]", outs[0], shape)
    return_lse = boolean("return_lse", return_lse)
    lse = empty_like("outs[0]", outs[0], shape[:-1], "float32") if return_lse else None
    _core.merge_states(outs, lses, out, lse)
    return (out, lse) if return_lse else out
