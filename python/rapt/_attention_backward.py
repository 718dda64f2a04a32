"""`attention_backward`: the gradients of `attention`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rapt import _core
from rapt._arrays import Array, empty_gradients
from rapt._attention import check_lists, forward_arguments

Wanted: TypeAlias = Literal["q", "k", "v", "bias", "sinks", "alibi"]


class Gradients(NamedTuple):
    """Each of the shape, type and library of what it is the gradient of; None if it was not wanted."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None
    dalibi: Any = None


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
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
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    dlse: Array | None = None,
    want: Collection[Wanted] = ("q", "k", "v"),
    threads: int | None = None,
    isa: str | None = None,
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse), for out and lse of attention(q, k, v, ..., return_lse=True).

    Scores are computed again from q, k and lse, block by block: there is no S x S matrix, and no argument is copied.

    dout            float32, bfloat16 or float16, of out's shape.
    q, k, v         As given to attention(); float32, bfloat16 or float16. Caches in pages, rings and quantised ones have no
                    gradients. With indices, a row of k or v has the sum over all tokens that list it, as often as they do, and 0
                    if none does.
    out, lse        As attention() gave them.
    causal, ...     As given to attention().
    dlse            float32, of lse's shape: for losses that depend on lse, such as those of merged results.
    want            Which gradients to compute, of "q", "k", "v", "bias", "sinks" and "alibi". Where bias broadcasts, its
                    gradients are summed.
    threads, isa    As for attention().

    Returns Gradients(dq, dk, dv, dbias, dsinks, dalibi): C-contiguous arrays of the shapes and types of what they are the
    gradients of, PyTorch's for its tensors, else NumPy's; None for those that are not wanted. Sums are float32, and every
    gradient is rounded once. Rows that attend no key, and keys past a length, have gradients of 0. Raises TypeError or
    ValueError, naming the argument. Releases the GIL.
    """
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "alibi": alibi}
    check_lists(indices, counts)
    gradients = Gradients(**empty_gradients(want, inputs))
    _core.attention_backward(
        forward_arguments(
            *(q, k, v),
            causal=causal,
            align=align,
            window=window,
            scale=scale,
            mask=mask,
            bias=bias,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            cache_seqlens=cache_seqlens,
            indices=indices,
            counts=counts,
            dropout_p=dropout_p,
            seed=seed,
            offset=offset,
            out=out,
            threads=threads,
            isa=isa,
        ),
        (dout, lse, dlse, *gradients),
    )
    return gradients
