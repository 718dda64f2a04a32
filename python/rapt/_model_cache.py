"""transformers' cache of keys and values, written in place: memory with room for more tokens in place of torch.cat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from transformers import DynamicCache, PreTrainedConfig, cache_utils

_Layer: Any = cache_utils.CacheLayerMixin
_Full: Any = cache_utils.DynamicLayer
_Window: Any = cache_utils.DynamicSlidingWindowLayer
_Indexed: Any = cache_utils.DynamicIndexedLayer
_Hybrid: Any = cache_utils.LinearAttentionAndFullAttentionLayer
_HybridWindow: Any = cache_utils.LinearAttentionAndSlidingWindowAttentionLayer


class Cache(DynamicCache):
    """A cache for `past_key_values` that appends to its memory, where DynamicCache copies all it has for every token.

    config      The model's config: layers with sliding windows then keep their window only, and the states of linear
                attention are kept too. None: every layer keeps all keys and values.
    max_length  The most tokens that the cache will have, if that is known. Memory grows to twice what is needed, and not
                past max_length unless there are more tokens. On CPUs, room that is not written yet is address space only.

    generate() makes such a cache by itself for models with rapt's attention. DynamicCache's methods work: crop(),
    reorder_cache(), batch_repeat_interleave(), batch_select_indices(), reset(). Copies (copy.deepcopy) and files
    (torch.save) have the tokens and no room. What update() returns, and the layers' keys and values, are views that hold
    until the next call: clone what you keep. Where gradients are recorded, and in compiled code, layers concatenate as
    DynamicCache's do. Raises TypeError for a config that is none, ValueError for a max_length that is no number of tokens.
    """

    def __init__(self, config: PreTrainedConfig | None = None, max_length: int | None = None) -> None:
        if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length: got {max_length!r}; wanted None or a number of tokens, 1 or more")
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: got {type(config).__name__}; wanted None or a model's config")
        super().__init__(config=config)
        write_in_place(self, max_length)


def write_in_place(cache: DynamicCache, max_length: int | None = None) -> None:
    """Makes those layers of a cache append in place that concatenate."""
    for i, layer in enumerate(cache.layers):
        if (cls := _IN_PLACE.get(type(layer))) is not None:
            cache.layers[i] = cls.__new__(cls)
            cache.layers[i].__dict__ = layer.__dict__ | {"max_length": None if issubclass(cls, _InPlaceWindow) else max_length}
    if cache.layer_class_to_replicate is _Full:
        cache.layer_class_to_replicate = _InPlaceFull


def prepare(cache: Any, max_length: int | None) -> None:
    """The same for a cache that generate() has made."""
    cache = getattr(cache, "self_attention_cache", cache)  # the other one of an encoder's keys does not grow
    if type(cache) is DynamicCache and not cache.offloading:
        write_in_place(cache, max_length)


class _InPlace(_Layer):
    """What the layers below have in common. Attributes of a layer (keys, values) are views of memory of the same name."""

    max_length: int | None = None
    memory: dict[str, Tensor]
    spare: dict[str, Tensor]
    keys: Any

    def append(self, name: str, new: Tensor) -> Tensor:
        """The attribute's rows, and the new ones behind them, as a view."""
        if "memory" not in self.__dict__:
            self.memory, self.spare = {}, {}
        kept = getattr(self, name)
        dtype = new.dtype if kept.dtype is new.dtype else torch.promote_types(kept.dtype, new.dtype)
        if kept.dim() == 1:  # of an empty layer
            kept = new.narrow(-2, 0, 0)
        if kept.shape[:-2] != new.shape[:-2] or not kept.shape[-1] == new.shape[-1] > 0 or kept.device != new.device:
            self.memory.pop(name, None)
            return torch.cat([kept, new], -2)  # which refuses most of these
        rows, total = kept.shape[-2], kept.shape[-2] + new.shape[-2]
        start = self.first_row(name, kept) if kept.dtype is dtype else None
        if start is not None and 0 <= new.data_ptr() - self.memory[name].data_ptr() < self.memory[name].nbytes:
            new = new.clone()  # rows of the cache itself, which may be written before they are read
        if start is None or start + total > self.memory[name].shape[-2]:
            if start is None or start < total:
                room = 2 * total if self.max_length is None or self.max_length < total else min(self.max_length, 2 * total)
                self.memory[name] = new.new_empty((*new.shape[:-2], room, new.shape[-1]), dtype=dtype)
                self.spare.pop(name, None)
            # Otherwise a window has come to the end of its memory, and goes back to the beginning.
            start = 0
            self.memory[name].narrow(-2, 0, rows).copy_(kept)
        memory = self.memory[name]
        memory.narrow(-2, start + rows, total - rows).copy_(new)
        return memory.narrow(-2, start, total)

    def first_row(self, name: str, kept: Tensor) -> int | None:
        """Where in its memory an attribute begins; None if it is no view of it, or if the memory may not be written."""
        memory = self.memory.get(name)
        if memory is None or kept.stride() != memory.stride() or kept.dtype != memory.dtype or kept.device != memory.device:
            return None
        if memory.is_inference() and not torch.is_inference_mode_enabled():
            return None
        first, rest = divmod(kept.data_ptr() - memory.data_ptr(), memory.stride(-2) * memory.element_size())
        inside = rest == 0 and 0 <= first and first + kept.shape[-2] <= memory.shape[-2]
        alike = kept.shape[:-2] == memory.shape[:-2] and kept.shape[-1] == memory.shape[-1]
        return first if inside and alike else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams change places by one copy, between two memories: beam search has two caches, here as with DynamicCache."""
        names = self.__dict__.get("memory", {})
        starts: dict[str, Any] = {name: self.first_row(name, getattr(self, name)) for name in names}
        if not starts or None in starts.values() or not _appends(self.keys) or beam_idx.numel() != self.keys.shape[0]:
            super().reorder_cache(beam_idx)
            return
        for name, start in starts.items():
            kept = getattr(self, name)
            to = self.spare.get(name)
            if to is None or (to.is_inference() and not torch.is_inference_mode_enabled()):
                to = torch.empty_like(self.memory[name])
            self.memory[name], self.spare[name] = to, self.memory[name]
            to = to.narrow(-2, start, kept.shape[-2])
            setattr(self, name, torch.index_select(kept, 0, beam_idx.to(kept.device), out=to))

    def reset(self) -> None:
        self.memory, self.spare = {}, {}
        super().reset()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files: without room, and without memory that two layers would write to."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("memory", "spare")}
        for name in ("keys", "values", "indexer_keys"):
            if isinstance(tensor := state.get(name), Tensor):
                state[name] = tensor.clone(memory_format=torch.contiguous_format)
        return state


def _appends(new: Tensor) -> bool:
    """Whether memory may be written. Gradients need what was there before, and traces see no addresses."""
    if torch.is_grad_enabled() or is_dynamo_compiling() or type(new) is not Tensor:
        return False
    return torch._C._get_tracing_state() is None and not torch._C._functorch.is_functorch_wrapped_tensor(new)


class _InPlaceFull(_InPlace, _Full):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _appends(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self.append("keys", key_states), self.append("values", value_states)
        return self.keys, self.values


class _InPlaceWindow(_InPlace, _Window):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A prompt may be far longer than the window: memory is made for what comes after it.
        if not _appends(key_states) or not self.is_initialized or self.keys.numel() == 0:
            return super().update(key_states, value_states, *args, **kwargs)
        new, past = key_states.shape[-2], self.sliding_window - 1
        self.cumulative_length += new
        keys, values = self.append("keys", key_states), self.append("values", value_states)
        if self.record_past:
            self.keys, self.values = keys, values
            return keys[:, :, -past - new :], values[:, :, -past - new :]
        self.keys, self.values = keys[:, :, -past:], values[:, :, -past:]
        return keys, values


class _InPlaceIndexed(_InPlaceFull, _Indexed):
    reorder_cache = _Indexed.reorder_cache  # which has more to reorder

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not _appends(indexer_key_states):
            keys: Tensor = super().update_indexer(indexer_key_states)
            return keys
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        self.indexer_keys = self.append("indexer_keys", indexer_key_states)
        return self.indexer_keys


class _InPlaceHybrid(_InPlaceFull, _Hybrid):
    reorder_cache = _Hybrid.reorder_cache


class _InPlaceHybridWindow(_InPlaceWindow, _HybridWindow):
    reorder_cache = _HybridWindow.reorder_cache


_IN_PLACE: dict[Any, Any] = {
    _Full: _InPlaceFull,
    _Window: _InPlaceWindow,
    _Indexed: _InPlaceIndexed,
    _Hybrid: _InPlaceHybrid,
    _HybridWindow: _InPlaceHybridWindow,
}
