"""Tensors that are made when something reads them: rapt's attention takes what they would be made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


class LazyTensor(Tensor):
    """Shape, type and device of a tensor that make() gives. Any operator gets that tensor, which is then made once."""

    source: Any
    """What rapt's attention takes in place of the tensor."""
    make: Callable[[], Tensor]
    made: Tensor | None

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, source: Any, make: Callable[[], Tensor]) -> LazyTensor:
        wrapper: Any = Tensor
        self: LazyTensor = wrapper._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
        self.source, self.make, self.made = source, make, None
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def tensor(self) -> Tensor:
        if self.made is None:
            self.made = self.make()
        return self.made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.tensor().clone()

    def tolist(self) -> Any:
        return self.tensor().tolist()

    def numpy(self, **options: Any) -> Any:
        return self.tensor().numpy(**options)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = _pytree.tree_map_only(cls, cls.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def materialized(x: Any) -> Any:
    """x, or the tensor that a LazyTensor makes."""
    return x.tensor() if isinstance(x, LazyTensor) else x
