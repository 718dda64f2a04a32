"""KV caches: rows appended to them, rotated or as they are, and attention over disjoint sets of keys merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rapt import _core
from rapt._arrays import Array, empty_like, shape_of
from rapt._attention import KvDtype
from rapt._scalars import truth

__all__ = ["append_kv", "merge_states", "rotary_append_kv"]


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
    """Writes new keys and values into a cache, behind those that it has; quantises them where the cache is.

    k_new, v_new    [b, hk, n, d], [b, hk, n, dv] of float32, bfloat16 or float16; with cu_seqlens [total, hk, d].
    k, v, ...       The cache, written in place, in the layout and of the types that rapt.attention reads.
    cache_seqlens   int32 or int64 [b]: keys of each sequence before the call. Adding to it is up to you.
    cu_seqlens      int32 or int64 [b + 1]: sequence i has the new rows cu_seqlens[i] to cu_seqlens[i + 1].
    k_scale, ...    Computed from each new row and written where they have an element for every row; inputs where they
                    broadcast over sequences (pages) or rows: where they have one, and the cache has more.

    k_tail          Where the last columns of k_new go, beside a quantised k.

    v may be columns of k (k[..., a:b]) if v_new is the same columns of k_new (k_new[..., a:b]). Where k has scales, a and b are where
    groups begin and end, and v_scale (v_zero) is a view of the scales (zeros) of these.
    All other rows stay as they are. Of more new rows than a ring has, the last stay. Raises TypeError or ValueError,
    naming the argument, before anything is written: for wrong shapes and types, rows past the end of a cache or block
    table, entries that are no page, and two new rows for one place. docs/guide/cpp.md has the bounds of the rounding.
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
    """Rotates q and k_new, after an RMS norm where there are weights; appends k_new and v_new to a cache as rapt.append_kv does.

    q               [b, hq, n, d], with cu_seqlens [total, hq, d], of float32, bfloat16 or float16; or None.
    k_new, ...      As of rapt.append_kv. Without a cache (k is None): k_new, and cache_seqlens if positions follow from it.
    cos, sin        Tables [positions, r], or a row for each new row, [b or 1, n, r]; with cu_seqlens [1, total, r]. r is
                    rotary_dim, or half of it where both channels of a pair have one angle. Scalings are in them.
    positions       int32 or int64 [b or 1, n], with cu_seqlens [1, total]: rows of the tables. None: cache_seqlens[i] + t.
    q_norm, k_norm  [d]: q (k_new) is divided by its root mean square, norm_eps added to the mean of squares, and
                    multiplied by this; with norm_plus_one by 1 + this.
    interleaved     Pairs are channels 2i and 2i + 1, as in GPT-J. False: i and i + rotary_dim / 2, as in GPT-NeoX and Llama.
    rotary_dim      Channels that are rotated, from rotary_offset on. None: as many as cos has columns.
    q_out, k_out    Written and returned instead of new arrays. q_out may be q, and k_out k_new. k_out: without a cache only.

    Returns (q_out, k_out), with None where there is no q, and for k_out with a cache. Arithmetic is float32; what goes out
    is rounded once. Raises TypeError or ValueError, naming the argument, before anything is written.
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
    """Attention over all keys from attention over parts of them: a shared prefix and the rest, say.

    outs            Results over disjoint sets of keys, [..., dv] each, of 2 to 4 dimensions.
    lses            Their lse, float32 [...], from attention(..., return_lse=True).
    out             Written and returned instead of a new array.
    return_lse      Returns (out, lse).

    A part whose lse is -inf (no keys) has no weight. A sink counts once: give it to one part only. Returns an array of
    outs[0]'s library and type.
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
    return_lse = truth("return_lse", return_lse)
    lse = empty_like("outs[0]", outs[0], shape[:-1], "float32") if return_lse else None
    _core.merge_states(outs, lses, out, lse)
    return (out, lse) if return_lse else out
