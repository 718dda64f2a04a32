"""The next rows of a layer of a cache, where little has to be looked at: a step of generation makes two of these for every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapt._codes import Codes, Rows, parts_of, write

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, eq=False)
class Place:
    """Where the keys and values of a layer lie in their memory.

    Good for as long as the layer has the very views that this made: nobody has cropped, reordered or replaced them, so that types,
    strides and addresses are known. One call of the extension then writes keys and values.
    """

    keys: Rows
    values: Rows
    key_memory: Rows
    value_memory: Rows
    start: int
    """The row of memory where they begin."""
    rows: int
    room: int
    dtype: torch.dtype
    heads: tuple[int, ...]
    """b, h, d and dv."""
    before: Any
    """Of each sequence: rows in memory before the new ones."""
    inference: bool
    """Whether the memory was made in inference mode, and may be written there alone."""
    addresses: list[tuple[int, int]]
    """Where each part of the memory begins and ends."""

    @classmethod
    def of(cls, memory: dict[str, Rows], keys: Rows, values: Rows) -> Place | None:
        """None where the memory is not on the CPU, or of types that differ or that the extension does not write."""
        k, v = memory.get("keys"), memory.get("values")
        if k is None or v is None or k.dtype is not v.dtype or k.dtype not in _DTYPES or not (k.is_cpu and v.is_cpu):
            return None
        (b, h, room, d), (_, _, v_room, dv) = k.shape, v.shape
        start = _first(k, keys)
        if start is None or start != _first(v, values) or room != v_room or b * h == 0:
            return None
        parts = (*parts_of(k), *parts_of(v))
        return cls(
            *(keys, values, k, v, start, keys.shape[2], room, k.dtype, (b, h, d, dv), np.empty(b, np.int64)),
            inference=any(x.is_inference() for x in parts),
            addresses=[(x.data_ptr(), x.data_ptr() + x.nbytes) for x in parts],
        )

    def takes(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether these are more rows of the same kind, for which there is room."""
        b, h, d, dv = self.heads
        k, v = key_states.shape, value_states.shape
        n = k[-2]
        if self.start + self.rows + n > self.room or k != (b, h, n, d) or v != (b, h, n, dv) or n == 0:
            return False
        if key_states.dtype is not self.dtype or value_states.dtype is not self.dtype or type(value_states) is not Tensor:
            return False
        if not key_states.is_cpu or not value_states.is_cpu or key_states.is_neg() or value_states.is_neg():
            return False
        if self.inference and not torch.is_inference_mode_enabled():
            return False
        k_place, v_place = key_states.data_ptr(), value_states.data_ptr()
        for begin, end in self.addresses:
            if begin <= k_place < end or begin <= v_place < end:  # rows of the cache itself, which would be read as they are written
                return False
        return True

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        self.before.fill(self.start + self.rows)
        write(key_states, value_states, self.key_memory, self.value_memory, self.before)
        self.rows += key_states.shape[2]
        self.keys, self.values = self.view(self.key_memory), self.view(self.value_memory)

    def keep(self, rows: int) -> None:
        """The last rows only."""
        self.start += self.rows - rows
        self.rows = rows
        self.keys, self.values = self.view(self.key_memory), self.view(self.value_memory)

    def view(self, memory: Any) -> Any:
        if isinstance(memory, Codes):
            return memory.of(self.view(memory.codes), self.view(memory.scale))
        b, h, _, d = memory.shape
        strides = memory.stride()
        return memory.as_strided((b, h, self.rows, d), strides, self.start * strides[2])  # in half the time of narrow()


def _first(memory: Rows, rows: Rows) -> int | None:
    """The row of the memory where others begin; None if they lie elsewhere."""
    of_rows, whole = parts_of(rows)[0], parts_of(memory)[0]
    first, rest = divmod(of_rows.data_ptr() - whole.data_ptr(), whole.stride(2) * whole.element_size())
    return first if rest == 0 and 0 <= first and of_rows.stride() == whole.stride() and first + rows.shape[2] <= memory.shape[2] else None
