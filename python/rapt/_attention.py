"""`attention` and `explain`: what their arguments mean. The extension does the rest."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar

import numpy as np

from rapt import _core
from rapt._arrays import Array
from rapt._scalars import truth

__all__ = ["attention", "dropout_mask", "explain", "explain_problem"]

KvDtype: TypeAlias = Literal["i4x2", "i8", "f8e4m3", "f8e5m2"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    align: Literal["top_left", "bottom_right"] | int | None = None,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    cache_seqlens: Array | None = None,
    indices: Array | None = None,
    counts: Array | None = None,
    block_table: Array | None = None,
    ring: bool = False,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    k_zero: Array | None = None,
    v_zero: Array | None = None,
    k_tail: Array | None = None,
    kv_dtype: KvDtype | None = None,
    q_scale: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    out: Array | None = None,
    return_lse: bool = False,
    threads: int | None = None,
    isa: str | None = None,
    kernel: str | None = None,
) -> Any:
    """softmax(scale * q k^T, masked) v, without the S x S matrix and without copying an argument.

    Shapes: b batch, hq query heads, hk key heads (a divisor of hq), sq and sk rows, d and dv head sizes.

    q, k, v         [b, hq, sq, d], [b, hk, sk, d], [b, hk, sk, dv] of float32, bfloat16 or float16. q may also be
                    float8_e4m3fn. k and v are of one type, which may also be int8, float8_e4m3fn, float8_e5m2 or, with kv_dtype,
                    uint8.
    causal          Row i attends keys up to i + offset.
    align           Where query row 0 sits among the keys, if lengths differ and it matters: "top_left" (offset 0, as
                    PyTorch's is_causal), "bottom_right" (sk - sq, as a cache of keys wants it) or the offset.
    window          (left, right): row i attends keys i + offset - left to i + offset + right. None or -1: open.
    scale           d**-0.5 if not given.
    mask            bool, true = attend; broadcasts to [b, hq, sq, sk].
    bias            float32, bfloat16 or float16, added to the scores; shapes as for mask. -inf masks.
    softcap         c: scores become c * tanh(score / c), before bias and masks.
    alibi           Slopes [hq] or [b, hq], of the same types as bias.
    sinks           [hq], of the same types: an extra logit in each head's denominator.
    cu_seqlens_q    int32 or int64 [b + 1], from 0 to total_q: q and the result are [total_q, hq, d], sequence n has
                    rows cu_seqlens_q[n] to cu_seqlens_q[n + 1].
    cu_seqlens_k    The same for k and v, [total_k, hk, d].
    cache_seqlens   int32 or int64 [b]: keys in use of each k[n], v[n]; rows past them are never read. No thread may
                    change lengths, cu_seqlens or tables while the call runs.
    block_table     int32 or int64 [b, n], with cache_seqlens: k and v are pages, [pages, hk, page_size, d], and key j
                    of sequence i is row j % page_size of page block_table[i, j // page_size].
    ring            True, with cache_seqlens: key j lies in row j % sk, so that of any number of keys the last sk are
                    there. Takes no mask and no bias, and no query rows that see overwritten keys: a window needs
                    window[0] + query rows <= sk.
    indices         int32 or int64 [b, sq, n]: the keys that each query token attends to, the same for all heads. k and v
                    may be [1, hk, sk, d] then: one pool of rows for all sequences, such as pages of one key head, flattened, where
                    an index is page * page_size + offset. Negative indices stand for no key, and nothing is read for them; a key
                    counts as often as it is listed; indices of sk or more are refused. Takes no causal, align, window,
                    mask, bias, alibi or dropout_p: which keys a token may see is up to its list.
    counts          int32 or int64 [b, sq], with indices: how many of the n count, from the first on. n if not given.
    q_scale         float32, of float8_e4m3fn queries: [b, hq, sq, 1], with cu_seqlens_q [total_q, hq, 1], where batch (total_q) and
                    rows may be 1. An element of q counts as element * q_scale; without scales as it is.
    k_scale, ...    float32 scales, and zeros, of quantised k and v: k's (v's) shape with groups for d (dv), where batch
                    (pages) and rows may be 1. An element counts as (element - zero) * scale. int8 and "i4x2" need
                    scales; 8-bit floats may do without.
    k_tail          The last columns of keys beside a quantised k: float32, bfloat16 or float16, k's shape with any size for d. q has
                    as many columns as k and k_tail.
    kv_dtype        What k and v of uint8 hold: "i4x2" (two signed 4-bit integers to a byte, the first in the lower half:
                    d / 2 bytes to a row), or the bytes of "i8", "f8e4m3" or "f8e5m2".
    dropout_p       The share of weights that is dropped at random after the softmax, 0 to 1; the others are divided by
                    1 - dropout_p. The share is rounded to a multiple of 2**-16, by which the mean over seeds is off by
                    up to 2**-17 / (1 - dropout_p) of it. lse is that without dropout.
    seed, offset    0 to 2**64 - 1: they and its place alone decide about a weight, the same every time. A seed is needed
                    where dropout_p is not 0; give every call a pair of its own. Offsets below 2**32 keep all pairs apart;
                    (0, 2**32) and (2**32, 0) give the same mask. See dropout_mask.
    out             Written and returned instead of a new array; any of the three types. Shares no memory with inputs.
    return_lse      Returns (out, lse), lse float32 [b, hq, sq], with cu_seqlens_q [total_q, hq]: log of the sum of exp of a row's
                    scores.
    threads         The most to use; all if not given. Where an argument is PyTorch's they are PyTorch's own threads, up
                    to torch.get_num_threads(); else oneTBB's.
    isa             The highest instruction set to use, one of rapt.info()["isas"].
    kernel          The entry that computes the call, one of rapt.info()["entries"] by name, or it is refused: for those that
                    rapt does not choose by itself, and to compare. Entries of other operations are refused. If not given, the
                    environment's RAPT_KERNEL, or the best.

    PyTorch's tensors may lie on a GPU, if rapt was built with CUDA: all of a call on one, lengths too. The work is queued
    on PyTorch's current stream; causal, window and alibi need `align` wherever lengths are given; k and v may not be
    gathered, and there is no dropout.

    Returns a C-contiguous array of q's type, bfloat16 for float8_e4m3fn: PyTorch's for its tensors, else NumPy's (bfloat16 by
    ml_dtypes). A row that attends no key is 0. Raises TypeError or ValueError, naming the argument, before anything is written.
    Releases the GIL. Has no backward: see rapt.torch.
    """
    check_lists(indices, counts)
    if return_lse is not False and return_lse is not True:
        return_lse = truth("return_lse", return_lse)
    return _core.attention(
        *(q, k, v, causal, align, window, scale, mask, bias, softcap, alibi, sinks),
        *(cu_seqlens_q, cu_seqlens_k, cache_seqlens, indices, counts),
        *(block_table, ring, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype),
        *(q_scale, dropout_p, seed, offset, out, return_lse, threads, isa, kernel),
    )


class Differentiable(TypedDict, total=False):
    """Those of attention()'s arguments by name that attention_backward() takes as the forward's."""

    causal: bool
    align: Literal["top_left", "bottom_right"] | int | None
    window: Sequence[int | None] | None
    scale: float | None
    mask: Array | None
    bias: Array | None
    softcap: float | None
    alibi: Array | None
    sinks: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    cache_seqlens: Array | None
    indices: Array | None
    counts: Array | None
    dropout_p: float
    seed: int | None
    offset: int


def check_lists(indices: Any, counts: Any) -> None:
    """What the extension would refuse in the words of C++."""
    if counts is not None and indices is None:
        raise ValueError("counts: got an array without indices; wanted both: they count the entries of lists")


def dropout_mask(b: int, hq: int, sq: int, sk: int, p: float, seed: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """The mask that attention(..., dropout_p=p, seed=seed, offset=offset) applies: bool [b, hq, sq, sk], true = kept.

    Rows and keys count within their sequence, also in ragged batches. sq and sk may be smaller than the call's, hq is the
    call's. Raises TypeError or ValueError.
    """
    sizes = {"b": b, "hq": hq, "sq": sq, "sk": sk}
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name}: got {size!r}; wanted an int")
        if not 0 <= operator.index(size) <= 2**48:
            raise ValueError(f"{name}: got {size!r}; wanted 0 to 2**48")
    mask = np.empty([operator.index(size) for size in sizes.values()], bool)
    _core.dropout_mask(p, seed, offset, mask)
    return mask


_P = ParamSpec("_P")
_T = TypeVar("_T")
SIGNATURE = inspect.signature(attention)
_DEFAULTS = {name: p.default for name, p in SIGNATURE.parameters.items() if p.default is not p.empty}


def forward_arguments(q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, ...]:
    """All arguments of attention() in its order, as the extension takes them, from those that are given."""
    return (q, k, v, *(_DEFAULTS | given).values())


def _same_arguments(_: Callable[_P, Any]) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    def decorate(function: Callable[..., _T]) -> Callable[_P, _T]:
        function.__signature__ = SIGNATURE.replace(return_annotation="Explanation")  # type: ignore[attr-defined]
        return function

    return decorate


@_same_arguments(attention)
def explain(*args: Any, **kwargs: Any) -> _core.Explanation:
    """What attention() would do with these arguments: the kernel, and why not the others. Computes nothing."""
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    check_lists(bound.arguments["indices"], bound.arguments["counts"])
    truth("return_lse", bound.arguments["return_lse"])
    return _core.explain(*bound.arguments.values())


def explain_problem(problem: str, *, threads: int | None = None, isa: str | None = None) -> _core.Explanation:
    """What would run for a problem of any operation, given as text, gradients among them. Computes nothing.

    problem         The operation and its words, as in logs: "attention dtype=bf16 hq=8 sq=512 d=64 causal".
                    docs/guide/cli.md has them all.
    threads, isa    As for attention().

    Raises ValueError, naming the word.
    """
    return _core.explain_problem(problem, threads, isa)
