"""`attention` and `explain`: results of the right library, shape and type around one call of the extension."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from rapt import _core


class Array(Protocol):
    """A NumPy array, a PyTorch tensor or anything else with __dlpack__, in the CPU's memory, with any strides."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


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
    block_table: Array | None = None,
    cache_seqlens: Array | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """softmax(scale * q k^T, masked) v, without the S x S matrix and without copying an argument.

    Shapes: b batch, hq query heads, hk key heads (a divisor of hq), sq and sk rows, d and dv head sizes.

    q, k, v         [b, hq, sq, d], [b, hk, sk, d], [b, hk, sk, dv] of float32, bfloat16 or float16. k and v agree.
    causal          Row i attends keys up to i + offset.
    align           Where query row 0 sits among the keys, if lengths differ and it matters: "top_left" (offset 0, as
                    PyTorch's is_causal), "bottom_right" (sk - sq, as a cache of keys wants it) or the offset.
    window          (left, right): row i attends keys i + offset - left to i + offset + right. None or -1: open.
    scale           d**-0.5 if not given.
    mask            bool, true = attend; up to [b, hq, sq, sk], broadcast over all but sk.
    bias            float32, added to the scores; shapes as for mask. -inf masks.
    softcap         c: scores become c * tanh(score / c), before bias and masks.
    alibi           float32 slopes [hq] or [b, hq].
    sinks           float32 [hq]: an extra logit in each head's denominator.
    cu_seqlens_q    int32 or int64 [b + 1], from 0 to total_q: q and the result are [total_q, hq, d], sequence n has
                    rows cu_seqlens_q[n] to cu_seqlens_q[n + 1].
    cu_seqlens_k    The same for k and v, [total_k, hk, d].
    cache_seqlens   int32 or int64 [b]: keys in use of each k[n], v[n]; rows past them are never read.
    block_table     Paged caches: NotImplementedError in this version.
    out             Written and returned instead of a new array; any of the three types. Shares no memory with inputs.
    return_lse      Returns (out, lse), lse float32 [b, hq, sq]: log of the sum of exp of a row's scores.
    threads         The most to use; all if not given, torch.get_num_threads() where an argument is PyTorch's.
    isa             The highest instruction set to use, one of rapt.info()["isas"].

    Returns a C-contiguous array of q's type: PyTorch's for its tensors, else NumPy's (bfloat16 by ml_dtypes). A row that
    attends no key is 0. Raises TypeError or ValueError, naming the argument, before anything is written.
    Releases the GIL. Has no backward: see rapt.torch.
    """
    call, out, lse = _prepare(locals())
    call.run()
    return (out, lse) if return_lse else out


_P = ParamSpec("_P")
_T = TypeVar("_T")
_SIGNATURE = inspect.signature(attention)


def _same_arguments(_: Callable[_P, Any]) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    def decorate(function: Callable[..., _T]) -> Callable[_P, _T]:
        function.__signature__ = _SIGNATURE.replace(return_annotation="Explanation")  # type: ignore[attr-defined]
        return function

    return decorate


@_same_arguments(attention)
def explain(*args: Any, **kwargs: Any) -> _core.Explanation:
    """What attention() would do with these arguments: the kernel, and why not the others. Computes nothing."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return _prepare(bound.arguments)[0].plan()


def _prepare(arguments: dict[str, Any]) -> tuple[_core.Call, Any, Any]:
    """The call, `out` and `lse` (or None) for the arguments of attention(), by name."""
    if arguments["block_table"] is not None:
        raise NotImplementedError("block_table: this version of rapt has no paged caches")
    tensors = _tensors(arguments)
    if tensors:
        torch = sys.modules["torch"]
        _core.adopt_torch(torch)
        _refuse_grad(torch, tensors)
        if arguments["threads"] is None:
            arguments["threads"] = torch.get_num_threads()
    empty = _empty_of_torch if "q" in tensors else _empty_of_numpy
    q, shape = arguments["q"], _shape("q", arguments["q"])
    if arguments["out"] is None:
        arguments["out"] = empty((*shape[:-1], *_shape("v", arguments["v"])[-1:]), q)
    arguments["lse"] = empty(shape[:-1], None) if arguments["return_lse"] else None
    return _core.Call(arguments), arguments["out"], arguments["lse"]


def _tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that are PyTorch's. Never imports it: where it has not been imported, there are none."""
    torch = sys.modules.get("torch")
    found = {}
    for name, value in arguments.items():
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name}: got a masked array; wanted a plain one, and `mask` for what is attended")
        if torch is not None and isinstance(value, torch.Tensor):
            found[name] = value
    return found


def _refuse_grad(torch: Any, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if name == "out" and tensor.requires_grad:
            raise ValueError("out: got a tensor that requires grad; wanted one that does not")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: got a tensor that requires grad; wanted one that does not, as attention() has no backward"
                " (use rapt.torch.scaled_dot_product_attention, torch.no_grad() or .detach())"
            )


def _shape(name: str, array: Any) -> tuple[int, ...]:
    shape = tuple(getattr(array, "shape", ()))
    if not shape:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name}: got {kind} without a shape; wanted an array of 3 or 4 dimensions")
    return shape


def _empty_of_torch(shape: tuple[int, ...], like: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=torch.float32 if like is None else like.dtype)


def _empty_of_numpy(shape: tuple[int, ...], like: Any) -> Any:
    if like is None:
        return np.empty(shape, np.float32)
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    name = str(getattr(like, "dtype", "float32")).rpartition(".")[2]  # "float32" of any library
    if name != "bfloat16":
        return np.empty(shape, name)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError("q: got dtype bfloat16; wanted the package ml_dtypes for the result, or `out`") from None
    return np.empty(shape, bfloat16)
