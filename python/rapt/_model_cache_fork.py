"""The layer of a cache that shares its first tokens with other caches and among its own sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from rapt._codes import Rows
from rapt._model_cache_place import may_append
from rapt._model_fork import SharedRows, select

_Full: Any = cache_utils.DynamicLayer


class ForkedLayer(_Full):  # type: ignore[misc]
    """Parts [g, h, any, d] of keys and values, which nobody writes any more, and a layer of one's own for what comes behind them."""

    def __init__(self, batch: int, parts: list[tuple[Rows, Rows]], own: Any) -> None:
        super().__init__()
        self.batch, self.parts, self.own = batch, parts, own
        self.dtype, self.device, self.is_initialized = parts[0][0].dtype, parts[0][0].device, True

    def _rows(self, i: int) -> SharedRows | None:
        parts = [part[i] for part in (*self.parts, *self.own_rows())]
        return SharedRows(self.batch, tuple(parts)) if parts else None

    def own_rows(self) -> list[tuple[Rows, Rows]]:
        return [(self.own.keys, self.own.values)] if self.own.get_seq_length() > 0 else []

    # transformers' layers set them, too.
    keys = property(lambda self: self._rows(0), lambda self, _: None)
    values = property(lambda self: self._rows(1), lambda self, _: None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not may_append(key_states):
            raise ValueError(
                "past_key_values: got a fork of a rapt.transformers.Cache where gradients are recorded, or in compiled or traced code; "
                "wanted eager calls under torch.no_grad(), or copy.deepcopy() of the cache"
            )
        if self.get_seq_length() == 0:  # after reset()
            self.batch = key_states.shape[0]
        if key_states.shape[0] != self.batch:
            raise ValueError(f"keys: got {key_states.shape[0]} sequences; wanted {self.batch}, as the fork has")
        for name, new, i in (("keys", key_states, 0), ("values", value_states, 1)):
            held = self.parts[0][i] if self.parts else new
            if (new.shape[1], new.shape[3], new.dtype) != (held.shape[1], held.shape[3], held.dtype):
                raise ValueError(
                    f"{name}: got {new.shape[1]} heads of {new.shape[3]} columns in {new.dtype}; "
                    f"wanted {held.shape[1]} of {held.shape[3]} in {held.dtype}, as the fork has"
                )
        self.own.update(key_states, value_states, *args, **kwargs)
        return self.keys, self.values

    def append_rotated(self, *arguments: Any) -> Any:
        return None if self.own.append_rotated(*arguments) is None else (self.keys, self.values)

    def get_seq_length(self) -> int:
        return sum(part.shape[-2] for part, _ in self.parts) + int(self.own.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: got {tokens_to_remove}; wanted 0 or less, the number of tokens to remove as -n")
        left = min(-tokens_to_remove, self.get_seq_length())
        own = min(left, self.own.get_seq_length())
        if own > 0:
            self.own.crop(-own)
        left -= own
        while left > 0:
            *rest, last = self.parts
            kept = max(last[0].shape[-2] - left, 0)
            left -= last[0].shape[-2] - kept
            self.parts = rest + ([(last[0].narrow(-2, 0, kept), last[1].narrow(-2, 0, kept))] if kept > 0 else [])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        index = beam_idx.cpu()
        self.parts = [(select(k, index, self.batch), select(v, index, self.batch)) for k, v in self.parts]
        if self.own.get_seq_length() > 0:
            self.own.reorder_cache(beam_idx)
        self.batch = len(index)

    def batch_select_indices(self, indices: Tensor) -> None:
        index = torch.arange(self.batch)[indices.cpu()]  # also of a mask
        self.parts = [(select(k, index, self.batch), select(v, index, self.batch)) for k, v in self.parts]
        self.own.batch_select_indices(indices)
        self.batch = len(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.own.batch_repeat_interleave(repeats)
        self.batch *= repeats

    def offload(self) -> None:
        raise NotImplementedError("past_key_values: got a fork of a rapt.transformers.Cache to offload; wanted copy.deepcopy() of the cache")

    prefetch = offload

    def reset(self) -> None:
        self.parts = []
        self.own.reset()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files: the parts without the memory around them."""
        state = self.__dict__.copy()
        state["parts"] = [tuple(x.clone(memory_format=torch.contiguous_format) for x in part) for part in self.parts]
        return state
