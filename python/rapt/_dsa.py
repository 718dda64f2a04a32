"""`rapt.dsa`: the scores of sparse attention's indexer, and the selection of the largest."""

from __future__ import annotations

import operator
from typing import Any

from rapt import _core
from rapt._arrays import Array, empty_like, shape_of
from rapt._scalars import Alignment

_INPUTS = "q k w align relu causal scale k_scale seqlens block_table key_begin key_end threads isa".split()
_MAX_N = 2**31 - 1


def _inputs(given: dict[str, Any]) -> tuple[Any, ...]:
    """What scores and selection are given alike, in the order of the extension."""
    return tuple(given[name] for name in _INPUTS)


def index_scores(
    q: Array,
    k: Array,
    w: Array,
    *,
    align: Alignment = None,
    relu: bool = True,
    causal: bool = True,
    scale: float | None = None,
    k_scale: Array | None = None,
    seqlens: Array | None = None,
    block_table: Array | None = None,
    key_begin: Array | None = None,
    key_end: Array | None = None,
    out: Array | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """Index scores: scores[b, i, j] = scale * k_scale[b, j] * sum over h of w[b, i, h] * relu(q[b, i, h] . k[b, j]).

    The score is -inf if query i does not see key j. Source: DeepSeek-V3.2-Exp, 2025. Symbols: b batch, sq queries, h
    index heads, sk keys, which all index heads share, d head dimension.

    q               [b, sq, h, d] of float32, bfloat16 or float16.
    k               [b, sk, d] of float32, bfloat16, float16, int8, float8_e4m3fn or float8_e5m2.
    w               float32 [b, sq, h]: the weights of each query's index heads. They include any factors of the model
                    other than d**-0.5.
    align           Where query 0 sits among the keys: "top_left" (at key 0), "bottom_right" (the last query at the last
                    key, for KV caches), or the offset as an int. Required for causal if query and key lengths differ.
    relu            False: no ReLU before the weights.
    causal          True: query i sees keys up to i + offset.
    scale           Default d**-0.5.
    k_scale         float32 [b, sk] ([pages, page_size]): one scale per key of a quantised k; required for int8. It
                    multiplies the sum, after the ReLU, so only with positive scales does k count as code * scale.
    seqlens         int32 or int64 [b]: number of keys of each sequence. Keys past it are hidden and never read.
    block_table     int32 or int64 [b, m], requires seqlens: k is pages, [pages, page_size, d], and key j of sequence n
                    is row j % page_size of page block_table[n, j // page_size]. sk is m * page_size.
    key_begin       int32 or int64 [b, sq]: the first key that a query sees.
    key_end         int32 or int64 [b, sq]: the end of the keys that a query sees, exclusive.
    out             float32 [b, sq, sk], written and returned instead of a new array. Shares no memory with inputs.
    threads, isa    As for rapt.attention.

    All arrays are on the CPU, or PyTorch tensors on one GPU, whose values of seqlens and block_table are not validated.

    Returns float32 [b, sq, sk], C-contiguous: a PyTorch tensor if q is one, otherwise NumPy's. Products and sums are
    float32. The bits do not depend on threads or other queries. AMX, which multiplies bfloat16 q with bfloat16 or
    quantised k, treats denormals as 0. Raises TypeError or ValueError, which names the argument, before anything is
    written. Releases the GIL. Records no gradients: use rapt.torch.index_scores.
    """
    made = empty_like("q", q, scores_shape(q, k, block_table), "float32") if out is None else out
    _core.index_scores(_inputs(locals()), made, None)
    return made


def index_topk(
    q: Array,
    k: Array,
    w: Array,
    n: int,
    *,
    align: Alignment = None,
    relu: bool = True,
    causal: bool = True,
    scale: float | None = None,
    k_scale: Array | None = None,
    seqlens: Array | None = None,
    block_table: Array | None = None,
    key_begin: Array | None = None,
    key_end: Array | None = None,
    out: Array | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """The n keys with the largest index scores of each query: select_topk(index_scores(q, k, w, ...), n), with the same
    indices but without the matrix of scores.

    The call keeps a few times n scores, or about a thousand, per query that it works on; on a GPU the scores of as many
    queries as fit 256 MiB.

    n               int, 1 or more: number of keys per query.
    out             int32 [b, sq, n], written and returned instead of a new array. Shares no memory with inputs.
    q, k, w, ...    As for index_scores().

    Returns int32 [b, sq, n], best first; -1 if a query sees fewer than n keys with a score above -inf. Raises as
    index_scores() does.
    """
    shape = (*queries_shape(q), count_of(n))
    made = _indices("q", q, shape, out)
    _core.index_scores(_inputs(locals()), None, made)
    return made


def select_topk(scores: Array, n: int, *, out: Array | None = None, threads: int | None = None, isa: str | None = None) -> Any:
    """The positions of the n largest scores of each row, largest first.

    scores          float32 [..., sk], of 1 to 4 dimensions and any strides.
    n               int, 1 or more; may exceed sk.
    out             int32 [..., n], written and returned instead of a new array. Shares no memory with scores.
    threads, isa    As for rapt.attention.

    The selection is exact and the same for any number of threads: of equal scores the lower position first, -0 equals
    0, and NaN counts as the largest. -inf is never selected. If fewer than n scores are above -inf, the other entries
    of the row are -1.

    Returns int32 [..., n]: a PyTorch tensor on the same device if scores is one, otherwise NumPy's. Raises TypeError or
    ValueError, which names the argument, before anything is written. Releases the GIL.
    """
    shape = (*shape_of("scores", scores)[:-1], count_of(n))
    made = _indices("scores", scores, shape, out)
    _core.select_topk(scores, made, threads, isa)
    return made


def count_of(n: Any) -> int:
    """How many keys are wanted."""
    try:
        count = operator.index(n)
        if isinstance(n, bool):
            raise TypeError
    except TypeError:
        raise TypeError(f"n: got {n!r}; wanted an int") from None
    if not 1 <= count <= _MAX_N:
        raise ValueError(f"n: got {count}; wanted 1 to 2**31 - 1")
    return count


def queries_shape(q: Any) -> tuple[int, int]:
    """[b, sq]."""
    shape = shape_of("q", q)
    if len(shape) != 4:
        raise ValueError(f"q: got shape {list(shape)}; wanted [b, sq, h, d]")
    return shape[0], shape[1]


def scores_shape(q: Any, k: Any, block_table: Any) -> tuple[int, int, int]:
    """[b, sq, sk]."""
    b, sq = queries_shape(q)
    keys = shape_of("k", k)
    if len(keys) != 3:
        raise ValueError(f"k: got shape {list(keys)}; wanted {'[b, sk, d]' if block_table is None else '[pages, page_size, d]'}")
    if block_table is None:
        return b, sq, keys[1]
    table = shape_of("block_table", block_table)
    if len(table) != 2:
        raise ValueError(f"block_table: got shape {list(table)}; wanted [b, m]")
    return b, sq, table[1] * keys[1]


def _indices(name: str, like: Any, shape: tuple[int, ...], out: Any) -> Any:
    if out is None:
        return empty_like(name, like, shape, "int32")
    if (got := shape_of("out", out)) != shape:
        raise ValueError(f"out: got shape {list(got)}; wanted {list(shape)}")
    return out
