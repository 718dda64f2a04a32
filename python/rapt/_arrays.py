"""What is asked of every array, and results in the library of the argument they are like."""

from __future__ import annotations

import sys
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from rapt import _core

KvDtype: TypeAlias = Literal["i4x2", "i8", "f8e4m3", "f8e5m2"]


class Array(Protocol):
    """A NumPy array, a PyTorch tensor or anything else with __dlpack__, with any strides >= 0. In the CPU's memory, but
    for PyTorch's; torch.from_dlpack() makes a tensor of another library's array on a GPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def tensors_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that are PyTorch's, ready to be read. Never imports it: where it has not been imported, there are none."""
    torch = sys.modules.get("torch")
    found = {}
    for name, value in arguments.items():
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name}: got a masked array; wanted a plain one, and `mask` for what is attended")
        if torch is not None and isinstance(value, torch.Tensor):
            found[name] = value
    if torch is not None and found:
        _core.adopt_torch(torch)
        _refuse_grad(torch, found)
    return found


def _refuse_grad(torch: Any, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if name == "out" and tensor.requires_grad:
            raise ValueError("out: got a tensor that requires grad; wanted one that does not")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: got a tensor that requires grad; wanted one that does not, as rapt's own functions have no"
                " backward (use rapt.torch.scaled_dot_product_attention, torch.no_grad() or .detach())"
            )


def stream_of(tensor: Any) -> int:
    """The cudaStream_t that PyTorch queues work on `tensor`'s GPU on; 0 for tensors in the CPU's memory and None."""
    if tensor is None or not tensor.is_cuda:
        return 0
    stream: int = sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    return stream


def mark_written(tensors: dict[str, Any], *names: str) -> None:
    """Tells autograd that those of the tensors were changed in place: what it had saved of them is stale."""
    for name in names:
        if name in tensors and not tensors[name].is_inference():  # which autograd does not follow
            sys.modules["torch"].autograd.graph.increment_version(tensors[name])


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
