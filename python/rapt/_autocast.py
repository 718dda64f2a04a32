"""Functions that compute in the types of their inputs, inside autocast too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` with autocast off: for functions made of PyTorch's operators, of which autocast converts inputs
    (products of matrices) or refuses their types (torch.cat)."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):  # the block takes microseconds
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        return function(*args, **kwargs)

    return run
