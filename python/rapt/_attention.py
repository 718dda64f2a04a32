"""`attention` and `explain`: their arguments. The extension validates and computes."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar

import numpy as np

from rapt import _core
from rapt._arrays import Array
from rapt._scalars import boolean

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
    """Scaled dot-product attention, softmax(scale * q k^T, masked) v, without the S x S matrix and without copying an
    argument.

    Source: Vaswani et al., 2017; computed block by block as in FlashAttention (Dao et al., 2022). Symbols: b batch, hq
    query heads, hk KV heads (a divisor of hq; query head h reads KV head h // (hq // hk)), sq query rows, sk key rows,
    d head dimension of queries and keys, dv head dimension of values.

    q, k, v         [b, hq, sq, d], [b, hk, sk, d] and [b, hk, sk, dv] of float32, bfloat16 or float16. k and v have one
                    type; q may have another. q may also be float8_e4m3fn. k and v may also be int8, float8_e4m3fn,
                    float8_e5m2 or, with kv_dtype, uint8.
    causal          True: row i attends to keys up to i + offset.
    align           Where query row 0 sits among the keys: "top_left" (offset 0, PyTorch's is_causal), "bottom_right"
                    (sk - sq, for KV caches), or the offset as an int. Required for causal, window and alibi if query
                    and key lengths differ.
    window          (left, right): row i attends to keys i + offset - left to i + offset + right. None or -1 leaves a
                    side open.
    scale           Default d**-0.5. Any finite number.
    mask            bool, True = attend; broadcasts to [b, hq, sq, sk].
    bias            float32, bfloat16 or float16, added to the scores; broadcasts to [b, hq, sq, sk]. -inf masks.
    softcap         c: scores become c * tanh(score / c), before bias and masks. 1e-30 to 1e30.
    alibi           Slopes [hq] or [b, hq], of the same types as bias: the score loses slope * |i + offset - j|.
    sinks           [hq], of the same types as bias: one extra logit per head in the softmax's denominator; -inf = none.
    cu_seqlens_q    int32 or int64 [b + 1], from 0 to total_q: q and the result are [total_q, hq, d], and sequence n has
                    the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1].
    cu_seqlens_k    The same for k and v, [total_k, hk, d].
    cache_seqlens   int32 or int64 [b]: number of keys of each sequence in k and v. Rows past it are never read. No
                    thread may change lengths, cu_seqlens or tables during the call.
    block_table     int32 or int64 [b, n], requires cache_seqlens: k and v are pages, [pages, hk, page_size, d], and key
                    j of sequence i is row j % page_size of page block_table[i, j // page_size].
    ring            True, requires cache_seqlens: key j is in row j % sk, so a ring holds a sequence's last sk keys.
                    Takes no mask and no bias. A query row that sees an overwritten key is an error: a window needs
                    window[0] + query rows <= sk.
    indices         int32 or int64 [b, sq, n]: the keys that each query token attends to, in all heads. k and v may be
                    [1, hk, sk, d]: one pool of rows for all sequences, such as flattened pages of one KV head, in which
                    an index is page * page_size + offset. A negative index stands for no key. A key that is listed
                    twice counts twice. An index of sk or more is an error. The list alone determines the keys: causal,
                    align, window, mask, bias, alibi and dropout_p are errors.
    counts          int32 or int64 [b, sq], requires indices: the first counts[i, t] of the n indices count. Default n.
    q_scale         float32, with float8_e4m3fn queries: [b, hq, sq, 1], with cu_seqlens_q [total_q, hq, 1]; batch
                    (total_q) and rows may be 1. An element of q counts as element * q_scale; without scales as it is.
    k_scale, v_scale, k_zero, v_zero
                    float32 scales and zeros of quantised k and v: the shape of k (v) with the number of groups in place
                    of d (dv); batch (pages) and rows may be 1. An element counts as (element - zero) * scale. int8 and
                    "i4x2" need scales; 8-bit floats without scales count as they are.
    k_tail          With a quantised k, the last columns of the keys, not quantised: float32, bfloat16 or float16, k's
                    shape with any size in place of d. q has as many columns as k and k_tail together.
    kv_dtype        The contents of k and v of uint8: "i4x2" (two signed 4-bit integers per byte, the first in the lower
                    half; d / 2 bytes per row), or the bytes of "i8", "f8e4m3" or "f8e5m2".
    dropout_p       The share of weights that are dropped at random after the softmax, 0 to 1; the others are divided by
                    1 - dropout_p. The share is rounded to a multiple of 2**-16, which changes the mean over seeds by a
                    relative error of up to 2**-17 / (1 - dropout_p). lse ignores dropout.
    seed, offset    0 to 2**64 - 1. The dropout mask depends only on dropout_p, seed, offset and the weight's position.
                    Required: seed, if dropout_p is not 0. Give every call its own pair. Offsets below 2**32 keep all
                    pairs apart; (0, 2**32) and (2**32, 0) give the same mask. See dropout_mask.
    out             Written and returned instead of a new array: float32, bfloat16 or float16. Shares no memory with
                    inputs.
    return_lse      True: returns (out, lse). lse is float32 [b, hq, sq], with cu_seqlens_q [total_q, hq]: the natural
                    log of the sum of exp of a row's final scores.
    threads         The largest number of threads. Default: all. If an argument is a PyTorch tensor, these are PyTorch's
                    threads, at most torch.get_num_threads(); otherwise oneTBB's.
    isa             The highest instruction set to use, one of rapt.info()["isas"].
    kernel          The name of the entry that computes the call, one of rapt.info()["entries"]: for comparisons, and
                    for entries that rapt does not choose itself. ValueError if this entry cannot compute the call.
                    Default: the environment's RAPT_KERNEL, or the best entry.

    PyTorch tensors may be on a GPU, if rapt has its GPU backend. All tensors of a call, lengths included, are then on
    one GPU, and the work is queued on PyTorch's current stream. On a GPU, causal, window and alibi need `align`
    whenever lengths are given, and indices and dropout are not supported.

    Returns a C-contiguous array of q's type, or bfloat16 for float8_e4m3fn queries: a PyTorch tensor if q is one,
    otherwise NumPy's (bfloat16 from ml_dtypes). A row without keys is 0, with an lse of -inf. Raises TypeError or
    ValueError, which names the argument, before anything is written. Releases the GIL. Records no gradients: use
    attention_backward or rapt.torch.
    """
    check_lists(indices, counts)
    if return_lse is not False and return_lse is not True:
        return_lse = boolean("return_lse", return_lse)
    return _core.attention(
        *(q, k, v, causal, align, window, scale, mask, bias, softcap, alibi, sinks),
        *(cu_seqlens_q, cu_seqlens_k, cache_seqlens, indices, counts),
        *(block_table, ring, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype),
        *(q_scale, dropout_p, seed, offset, out, return_lse, threads, isa, kernel),
    )


class Differentiable(TypedDict, total=False):
    """The keyword arguments of attention() that attention_backward() also takes."""

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
    """Raises the errors that the extension would word as C++."""
    if counts is not None and indices is None:
        raise ValueError("counts: got an array without indices; wanted both: they count the entries of lists")


def unexpected(function: str, name: str) -> TypeError:
    """The error for a keyword that attention() does not have, with similar names that it has."""
    near = sorted(difflib.get_close_matches(name, SIGNATURE.parameters))
    meant = f". Did you mean {' or '.join(near)}?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def dropout_mask(b: int, hq: int, sq: int, sk: int, p: float, seed: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """The dropout mask of attention(..., dropout_p=p, seed=seed, offset=offset).

    b, hq, sq, sk   Sizes of the mask. sq and sk may be smaller than the call's; hq is the call's.
    p               0 to 1, the share of dropped weights.
    seed, offset    As for attention().

    Returns bool [b, hq, sq, sk], True = kept. Rows and keys count within their sequence, also in ragged batches. Raises
    TypeError or ValueError, which names the argument.
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
    """What attention() would do with these arguments: the chosen kernel, and why not the others. Computes nothing.

    Takes the arguments of attention(). Returns an Explanation; print it for a readable description. Raises as
    attention() does.
    """
    for name in kwargs:
        if name not in SIGNATURE.parameters:
            raise unexpected("explain", name)
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    check_lists(bound.arguments["indices"], bound.arguments["counts"])
    boolean("return_lse", bound.arguments["return_lse"])
    return _core.explain(*bound.arguments.values())


def explain_problem(problem: str, *, threads: int | None = None, isa: str | None = None) -> _core.Explanation:
    """What rapt would run for a problem given as text, for any operation. Computes nothing.

    problem         The operation and its words, as in logs: "attention dtype=bf16 hq=8 sq=512 d=64 causal".
                    docs/guide/cli.md lists the words.
    threads, isa    As for attention().

    Returns an Explanation. Raises ValueError, which names the wrong word.
    """
    return _core.explain_problem(problem, threads, isa)
