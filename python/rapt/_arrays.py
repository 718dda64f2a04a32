"""What is asked of every array, and results in the library of the argument they are like."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np


class Array(Protocol):
    """A NumPy array, a PyTorch tensor or anything else with __dlpack__, with any strides >= 0. In the CPU's memory, but
    for PyTorch's; torch.from_dlpack() makes a tensor of another library's array on a GPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name}: got {kind} without a shape; wanted an array")
    if not tuple(shape):
        raise ValueError(f"{name}: got shape []; wanted one dimension or more")
    return tuple(shape)


def empty_like(name: str, like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """A new array of `like`'s library: PyTorch's for its tensors, else NumPy's. Of its type, or of `dtype`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else like.dtype, device=like.device)
    if dtype is None:
        if isinstance(like, np.ndarray):
            return np.empty(shape, like.dtype)
        dtype = str(getattr(like, "dtype", "float32")).rpartition(".")[2]  # "float32" of any library
    if dtype != "bfloat16":
        return np.empty(shape, dtype)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(f"{name}: got dtype bfloat16; wanted the package ml_dtypes for the result, or `out`") from None
    return np.empty(shape, bfloat16)


def empty_gradients(want: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """New arrays for the gradients of the inputs that `want` names: "dq" of "q"."""
    wanted = f"one or more of {', '.join(map(repr, inputs))}"
    if not isinstance(want, Iterable):
        raise TypeError(f"want: got {want!r}; wanted {wanted}")
    names = (want,) if isinstance(want, str) else tuple(want)
    if not names or not all(isinstance(name, str) and name in inputs for name in names):
        raise ValueError(f"want: got {want!r}; wanted {wanted}")
    for name in names:
        if inputs[name] is None:
            given = ", ".join(repr(n) for n, x in inputs.items() if x is not None)
            raise ValueError(f"want: got {name!r}, and no {name}; wanted gradients of what is given: {given}")
    return {"d" + name: empty_like(name, inputs[name], shape_of(name, inputs[name])) for name in names}
