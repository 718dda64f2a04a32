"""`attention_backward`: the gradients of `attention`."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rapt import _core
from rapt._arrays import Array, empty_gradients
from rapt._attention import SIGNATURE, Differentiable, check_lists, forward_arguments, unexpected

__all__ = ["Gradients", "attention_backward"]

if TYPE_CHECKING:
    from typing import Unpack

Wanted: TypeAlias = Literal["q", "k", "v", "bias", "sinks", "alibi"]


class Gradients(NamedTuple):
    """Results of attention_backward: gradients with the shape, type and library of their inputs; None if not wanted."""

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
    dlse: Array | None = None,
    want: Collection[Wanted] = ("q", "k", "v"),
    threads: int | None = None,
    isa: str | None = None,
    **forward: Unpack[Differentiable],
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse), for out and lse of attention(q, k, v, ..., return_lse=True).

    Recomputes scores from q, k and lse block by block (Dao et al., 2022), without the S x S matrix and without copying
    an argument.

    dout            float32, bfloat16 or float16, of out's shape.
    q, k, v         As given to attention(): float32, bfloat16 or float16. Pages, rings and quantised caches have no
                    gradients. With indices, a row of k or v gets the sum over all tokens that list it, once per
                    listing, or 0 if no token lists it.
    out, lse        The results of attention().
    causal, ...     As given to attention().
    dlse            float32, of lse's shape: for losses that depend on lse, such as losses of merged results. Default 0.
    want            The gradients to compute, of "q", "k", "v", "bias", "sinks" and "alibi". Default: "q", "k" and "v".
                    The gradient of a bias is summed over the dimensions that broadcast.
    threads, isa    As for attention().

    PyTorch tensors may be on a GPU, as for attention(), but not with indices. Dropout is supported there.

    Returns Gradients(dq, dk, dv, dbias, dsinks, dalibi): C-contiguous arrays with the shapes and types of their inputs,
    PyTorch's for its tensors, otherwise NumPy's; None for gradients that are not wanted. Sums are float32, and every
    gradient is rounded once. Rows without keys, and keys past a length, have gradients of 0. Raises TypeError or
    ValueError, which names the argument. Releases the GIL.
    """
    for name in forward:
        if name not in _FORWARD:
            raise unexpected("attention_backward", name)
    get = forward.get
    check_lists(get("indices"), get("counts"))
    inputs = {"q": q, "k": k, "v": v, "bias": get("bias"), "sinks": get("sinks"), "alibi": get("alibi")}
    gradients = Gradients(**empty_gradients(want, inputs))
    _core.attention_backward(
        forward_arguments(q, k, v, **forward, out=out, threads=threads, isa=isa), (dout, lse, dlse, *gradients)
    )
    return gradients


def _with_forward(own: inspect.Signature) -> inspect.Signature:
    """The signature with the arguments of the forward by name, before those that it has by name itself."""
    positional = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]
    forward = [p for name, p in SIGNATURE.parameters.items() if name in _FORWARD]
    return own.replace(parameters=[*positional, *forward, *by_name])


_FORWARD = Differentiable.__optional_keys__
attention_backward.__signature__ = _with_forward(inspect.signature(attention_backward))  # type: ignore[attr-defined]
