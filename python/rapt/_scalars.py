"""Numbers, flags and alignments for PyTorch's operators: what rapt.attention takes, refused in its words, and not in a schema's."""

from __future__ import annotations

import operator
from typing import Any, Literal, TypeAlias

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)

Alignment: TypeAlias = Literal["top_left", "bottom_right"] | int | None


def boolean(name: str, x: Any) -> bool:
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    raise TypeError(f"{name}: got {x!r}; wanted True or False")


def real(name: str, x: Any) -> float | None:
    """None is not given."""
    if x is None:
        return None
    try:
        if not isinstance(x, (bool, str, bytes, bytearray, memoryview)):  # float() reads text
            return float(x)
    except OverflowError:
        raise ValueError(f"{name}: got {x!r}; wanted a number that a float holds") from None
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name}: got {x!r}; wanted a number")


def finite(name: str, x: Any) -> float | None:
    """real(), of what is finite as a float32 too."""
    number = real(name, x)
    if number is not None and not abs(number) <= _LARGEST:
        raise ValueError(f"{name}: got {x}; wanted a finite number")
    return number


def integer(name: str, x: Any) -> int:
    try:
        if not isinstance(x, (bool, np.bool_)):
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{name}: got {x!r}; wanted an int")


def alignment(align: Any) -> tuple[str | None, int]:
    """None, "top_left", "bottom_right" or, with an offset, "offset"; and the offset."""
    wanted = 'None, "top_left", "bottom_right" or an int offset'
    if align is None:
        return None, 0
    if isinstance(align, str):
        if align in ("top_left", "bottom_right"):
            return align, 0
        raise ValueError(f"align: got {align!r}; wanted {wanted}")
    if isinstance(align, int) and not isinstance(align, bool):
        return "offset", align
    try:
        if not isinstance(align, bool):
            return "offset", operator.index(align)
    except TypeError:
        pass
    raise TypeError(f"align: got {align!r}; wanted {wanted}")


def given_alignment(align: str | None, offset: int) -> Any:
    """The argument `align` of rapt's functions that alignment() was made of."""
    return offset if align == "offset" else align
