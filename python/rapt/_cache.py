"""KV caches: rows appended to them, and attention over disjoint sets of keys merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rapt import _core
from rapt._arrays import Array, empty_like, shape_of
from rapt._attention import KvDtype
from rapt._scalars import truth

__all__ = ["append_kv", "merge_states"]


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
