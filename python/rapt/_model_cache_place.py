"""The next rows of a layer of a cache, where little has to be looked at: a step of generation makes two of these for every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rapt import _core, _refusals
from rapt._cache import cache_arguments
from rapt._codes import Codes, Rows, arrays_of, parts_of, write

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_CODES = cache_arguments()


@dataclass(slots=True, eq=False)
class LayerMemory:
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
    device: torch.device
    before: Any
    """Of each sequence: rows in memory before the new ones. On a GPU zeros: there views begin with the new rows, since it would take a
    kernel to write other numbers."""
    inference: bool
    """Whether the memory was made in inference mode, and may be written there alone."""
    addresses: list[tuple[int, int]]
    """Where each part of the memory begins and ends."""
    append_arguments: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    """Of the extension's functions that append, for the whole memory: k, v, cache_seqlens and cu_seqlens, and those of
    cache_arguments(). None for latents in codes."""
    views: tuple[Callable[[int, int], Any], ...]
    """Of the memory of keys and of values, from a row on, so many rows."""

    @classmethod
    def of(cls, memory: dict[str, Rows], keys: Rows, values: Rows) -> LayerMemory | None:
        """None where the memory is of types that differ, or on devices that do, or that the extension does not write."""
        k, v = memory.get("keys"), memory.get("values")
        if k is None or v is None or k.dtype is not v.dtype or k.dtype not in _DTYPES:
            return None
        if k.device != v.device or not (k.is_cpu or (k.device.type == "cuda" and _refusals.cuda_runs("append_kv"))):
            return None
        (b, h, room, d), (_, _, v_room, dv) = k.shape, v.shape
        start = first_row(k, keys)
        if start is None or start != first_row(v, values) or room != v_room or b * h == 0:
            return None
        parts = (*parts_of(k), *parts_of(v))
        before: Any = np.empty(b, np.int64) if k.is_cpu else torch.zeros(b, dtype=torch.int32, device=k.device)
        return cls(
            *(keys, values, k, v, start, keys.shape[2], room, k.dtype, (b, h, d, dv), k.device, before),
            inference=any(x.is_inference() for x in parts),
            addresses=[addresses_of(x) for x in parts],
            append_arguments=_append_arguments(k, v, before),
            views=(_views_of(k), _views_of(v)),
        )

    def fits(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether these are more rows of the same kind, for which there is room."""
        b, h, d, dv = self.heads
        k, v = key_states.shape, value_states.shape
        n = k[-2]
        if self.start + self.rows + n > self.room or k != (b, h, n, d) or v != (b, h, n, dv) or n == 0:
            return False
        if key_states.dtype is not self.dtype or value_states.dtype is not self.dtype or type(value_states) is not Tensor:
            return False
        if key_states.device != self.device or value_states.device != self.device or key_states.is_neg() or value_states.is_neg():
            return False
        if self.inference and not torch.is_inference_mode_enabled():
            return False
        k_place, v_place = key_states.data_ptr(), value_states.data_ptr()
        for begin, end in self.addresses:
            if begin <= k_place < end or begin <= v_place < end:  # rows of the cache itself, which would be read as they are written
                return False
        return True

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        n = key_states.shape[2]
        if self.append_arguments is None:
            keys, values = self.memory_for(n)
            write(key_states, value_states, keys, values, self.before)
        else:
            rows, coding = self.arguments_for(n)
            _core.append_kv(key_states, value_states, *rows, *coding)
        self.set_rows(self.start, self.rows + n)

    def append_rotated(self, query: Tensor, key_states: Tensor, value_states: Tensor, options: tuple[Any, ...]) -> bool:
        """The same for keys before their norm and rotation, and for a query. options are those arguments of
        rapt.rotary_append_kv that begin with cos and end with q_out. False if nothing is written, because rapt refuses
        such tensors, or there is no room."""
        n = key_states.shape[2]
        if self.append_arguments is None or self.start + self.rows + n > self.room or n == 0:
            return False
        if self.inference and not torch.is_inference_mode_enabled():
            return False
        if key_states.dtype is not self.dtype or value_states.dtype is not self.dtype or type(value_states) is not Tensor:
            return False
        rows, coding = self.arguments_for(n)
        try:
            _core.rotary_append_kv(query, key_states, value_states, *rows, *options, None, *coding)
        except (TypeError, ValueError):
            return False
        self.set_rows(self.start, self.rows + n)
        return True

    def memory_for(self, n: int) -> tuple[Rows, Rows]:
        """The memory that n new rows go to, behind as many as `before` says."""
        end = self.start + self.rows
        if self.device.type == "cpu":
            self.before.fill(end)
            return self.key_memory, self.value_memory
        keys, values = self.views
        return keys(end, n), values(end, n)

    def arguments_for(self, n: int) -> Any:
        """append_arguments for n new rows."""
        keys, values = self.memory_for(n)
        return self.append_arguments if keys is self.key_memory else _append_arguments(keys, values, self.before)

    def keep(self, rows: int) -> None:
        """The last rows only."""
        self.set_rows(self.start + self.rows - rows, rows)

    def set_rows(self, start: int, rows: int) -> None:
        """Makes keys and values of so many rows of the memory."""
        self.start, self.rows = start, rows
        keys, values = self.views
        self.keys, self.values = keys(start, rows), values(start, rows)


def _append_arguments(keys: Rows, values: Rows, before: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    if type(keys) is not type(values):
        return None
    k, v, coding = arrays_of(keys, values)
    return (k, v, before, None), cache_arguments(**coding) if coding else _NO_CODES


def _views_of(memory: Rows) -> Callable[[int, int], Any]:
    if isinstance(memory, Codes):
        codes, scale = _views_of(memory.codes), _views_of(memory.scale)
        return lambda start, rows: memory.of(codes(start, rows), scale(start, rows))
    (b, h, _, d), strides, first, view = memory.shape, memory.stride(), memory.storage_offset(), memory.as_strided
    step = strides[2]

    def rows_from(start: int, rows: int) -> Tensor:  # as_strided() takes half the time of narrow(), and less without an offset
        return view((b, h, rows, d), strides, first + start * step) if start else view((b, h, rows, d), strides)

    return rows_from


def addresses_of(memory: Tensor) -> tuple[int, int]:
    """Where the storage of a layer's memory begins and ends."""
    storage = memory.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def may_write(memory: Rows) -> bool:
    return not parts_of(memory)[0].is_inference() or torch.is_inference_mode_enabled()


def first_row(memory: Rows, kept: Rows) -> int | None:
    """The row of the memory where others begin; None if they are no view of it, or if it may not be written."""
    if type(memory) is not type(kept) or not may_write(memory):
        return None
    found = {_first_row(whole, rows) for whole, rows in zip(parts_of(memory), parts_of(kept))}
    return found.pop() if len(found) == 1 else None


def _first_row(memory: Tensor, kept: Tensor) -> int | None:
    if kept.stride() != memory.stride() or kept.dtype != memory.dtype or kept.device != memory.device:
        return None
    first, rest = divmod(kept.data_ptr() - memory.data_ptr(), memory.stride(-2) * memory.element_size())
    inside = rest == 0 and 0 <= first and first + kept.shape[-2] <= memory.shape[-2]
    alike = kept.shape[:-2] == memory.shape[:-2] and kept.shape[-1] == memory.shape[-1]
    return first if inside and alike else None


def may_append(new: Tensor) -> bool:
    """Whether memory may be written. Gradients need what was there before, and traces see no addresses."""
    if torch.is_grad_enabled() or is_dynamo_compiling() or type(new) is not Tensor:
        return False
    return torch._C._get_tracing_state() is None and not torch._C._functorch.is_functorch_wrapped_tensor(new)
