"""What is asked of every array, and results in the library of the argument they are like."""

from __future__ import annotations

import sys
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

KvDtype: TypeAlias = Literal["i4x2", "i8", "f8e4m3", "f8e5m2"]


class Array(Protocol):
    """A NumPy array, a PyTorch tensor or anything else with __dlpack__, with any strides >= 0. In the CPU's memory, but
    for PyTorch's; torch.from_dlpack() makes a tensor of another library's array on a GPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    shape = tuple(getattr(array, "shape", ()))
    if not shape:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name}: got {kind} without a shape; wanted an array")
    return shape


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
