"""transformers' cache of keys and values, written in place: memory with room for more tokens in place of torch.cat."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, cache_utils

from rapt._attention import KvDtype
from rapt._codes import KV_DTYPES, Codes, Rows, parts_of, write
from rapt._model_cache_fork import ForkedLayer
from rapt._model_cache_place import LayerMemory, addresses_of, first_row, may_append, may_write

_Layer: Any = cache_utils.CacheLayerMixin
_Full: Any = cache_utils.DynamicLayer
_Window: Any = cache_utils.DynamicSlidingWindowLayer
_Indexed: Any = cache_utils.DynamicIndexedLayer
_Hybrid: Any = cache_utils.LinearAttentionAndFullAttentionLayer
_HybridWindow: Any = cache_utils.LinearAttentionAndSlidingWindowAttentionLayer
_PARTS = ("keys", "values")


class Cache(DynamicCache):
    """A cache for `past_key_values` that appends in place. DynamicCache copies all keys and values for every token.

    config          The model's config. Layers with sliding windows then keep their window only, and the cache also
                    keeps the states of linear attention. None: every layer keeps all keys and values.
    max_length      The largest number of tokens, if known. Memory doubles when it is full, up to max_length, and beyond
                    it only if there are more tokens. On CPUs, room that is not written yet is address space only.
    kv_dtype        "i8", "i4x2" or an 8-bit float, as for rapt.attention: keys and values are quantised as they are
                    written, and rapt's attention reads the codes. Each row has a float32 scale; with "i4x2" every 32
                    columns have one if 32 divides d. Other attention implementations, gradients and compiled code raise
                    ValueError.

    generate() makes such a cache itself for models with rapt's attention, without kv_dtype. DynamicCache's methods
    work: crop(), reorder_cache(), batch_repeat_interleave(), batch_select_indices(), reset(). Copies (copy.deepcopy)
    and files (torch.save) contain the tokens without spare room. The results of update(), and the layers' keys and
    values, are views that are valid until the next call: clone what you keep. If gradients are recorded, and in
    compiled code, layers concatenate as DynamicCache's do.

    Raises TypeError for a config that is no config, and ValueError for a max_length that is no number of tokens and for
    a kv_dtype that is unknown or unsupported by a layer.
    """

    def __init__(
        self, config: PreTrainedConfig | None = None, max_length: int | None = None, kv_dtype: KvDtype | None = None
    ) -> None:
        if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length: got {max_length!r}; wanted None or a number of tokens, 1 or more")
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: got {type(config).__name__}; wanted None or a model's config")
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype: got {kv_dtype!r}; wanted None, {', '.join(map(repr, KV_DTYPES))}")
        super().__init__(config=config)
        write_in_place(self, config, max_length, kv_dtype)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """DynamicCache's. Raises ValueError, which names past_key_values, for a cache of another model or batch."""
        if layer_idx >= len(self.layers) and self.layer_class_to_replicate is None:
            raise ValueError(
                f"past_key_values: got a cache of {len(self.layers)} layers in layer {layer_idx}; wanted one of this model's config"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def fork(self, n: int = 1) -> Cache:
        """A cache of n sequences for each of this cache's, which begin with its tokens and share the memory of their
        keys and values.

        Forks read the shared memory and do not write it: this cache moves to its own memory when it appends or crops
        next. Layers with sliding windows or indexers, and states of linear attention, are copied. Forks need rapt's
        attention, eager calls without gradients, and no dropout. If attention refuses a fork, some layers already have
        the new tokens: fork again. Raises ValueError for n below 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n: got {n!r}; wanted a number of sequences, 1 or more")
        forked = copy.copy(self)
        forked.layers = [_forked(layer, n) for layer in self.layers]
        return forked

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' keys, values and scales, without room for later tokens."""
        held = (getattr(layer, name, None) for layer in self.layers for name in _PARTS)
        return sum(rows.nbytes for rows in held if rows is not None)


def write_in_place(
    cache: DynamicCache, config: PreTrainedConfig | None = None, max_length: int | None = None, kv_dtype: KvDtype | None = None
) -> None:
    """Makes those layers of a cache append in place that concatenate."""
    text: Any = None if config is None else config.get_text_config(decoder=True)
    latent = tuple(getattr(text, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    options = {"max_length": max_length, "kv_dtype": kv_dtype, "latent": latent if all(isinstance(n, int) for n in latent) else ()}
    for i, layer in enumerate(cache.layers):
        if (cls := _IN_PLACE.get(type(layer))) is not None:
            cache.layers[i] = _made(cls, layer.__dict__, options)
        elif kv_dtype is not None and isinstance(layer, _Layer):
            raise ValueError(f"kv_dtype: got {kv_dtype!r} and a config with a {type(layer).__name__}; wanted None for it")
    if cache.layer_class_to_replicate is _Full:
        replicate: Any = partial(_made, _InPlaceFull, None, options)
        cache.layer_class_to_replicate = replicate


def _made(cls: Any, state: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """A layer of a class, with the state of another one, or of a new one."""
    layer = cls() if state is None else cls.__new__(cls)
    layer.__dict__ |= (state or {}) | options | ({"max_length": None} if issubclass(cls, _InPlaceWindow) else {})
    return layer


def prepare(cache: Any, config: PreTrainedConfig, max_length: int | None) -> None:
    """The same for a cache that generate() has made."""
    cache = getattr(cache, "self_attention_cache", cache)  # the other one of an encoder's keys does not grow
    if type(cache) is DynamicCache and not cache.offloading:
        write_in_place(cache, config, max_length)


class _InPlace(_Layer):
    """What the layers below have in common. Attributes of a layer (keys, values) are views of memory of the same name."""

    max_length: int | None = None
    kv_dtype: KvDtype | None = None
    latent: tuple[int, ...] = ()
    """Columns of latents, and of their rotary parts, in models with latent attention."""
    memory: dict[str, Rows]
    spare: dict[str, Rows]
    keys: Any
    values: Any
    layer_memory: LayerMemory | None = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        for name, x in zip(_PARTS, args if self.kv_dtype is not None else ()):
            if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise TypeError(f"{name}: got {x.dtype}; wanted float32, bfloat16 or float16 for a Cache with kv_dtype")
        super().lazy_initialization(*args, **kwargs)
        if args and self.kv_dtype is not None:  # without args it is linear attention's
            self.keys, self.values = Codes.empty(self.kv_dtype, args[0], 0), self.new_rows("values", args[1], 0)

    def may_append(self, key_states: Tensor) -> bool:
        """Whether memory may be written; else layers concatenate, unless they are quantised."""
        if may_append(key_states):
            return True
        if self.kv_dtype is not None:
            raise ValueError(
                f'past_key_values: got a Cache with kv_dtype="{self.kv_dtype}" where gradients are recorded, or in compiled or '
                "traced code; wanted eager calls under torch.no_grad(), or a Cache without kv_dtype"
            )
        return False

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """New rows behind those of keys and values."""
        known = self.layer_memory
        if known is not None and known.keys is self.keys and known.values is self.values and known.fits(key_states, value_states):
            known.append(key_states, value_states)
            self.keys, self.values = known.keys, known.values
            return
        if self.kv_dtype is None:
            self.keys, self.values = self.append_to("keys", key_states), self.append_to("values", value_states)
        else:
            self.append_codes(key_states, value_states)
        self.layer_memory = LayerMemory.of(self.__dict__.get("memory", {}), self.keys, self.values)

    def append_rotated(self, query: Tensor, key_states: Tensor, value_states: Tensor, options: tuple[Any, ...]) -> Any:
        """update() of keys before their norm and rotation, in one call. None if LayerMemory.append_rotated() writes nothing."""
        layer_memory = self.layer_memory
        if layer_memory is None or layer_memory.keys is not self.keys or layer_memory.values is not self.values:
            if (memory := self.__dict__.get("memory")) is None:
                return None
            layer_memory = self.layer_memory = LayerMemory.of(memory, self.keys, self.values)
        if layer_memory is None or not layer_memory.append_rotated(query, key_states, value_states, options):
            return None
        self.keys, self.values = layer_memory.keys, layer_memory.values
        return self.keys, self.values

    def append_codes(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, new = self.keys.shape[-2], key_states.shape[-2]
        start = self.first_row("keys", self.keys)
        if start != self.first_row("values", self.values):
            start = None
        for name, states in (("keys", key_states), ("values", value_states)):
            kept = getattr(self, name)
            _check_like(name, states, kept)
            first = self.make_room(name, kept, start, rows + new, partial(self.new_rows, name, states))
        memory: Any = self.memory
        before = torch.full((key_states.shape[0],), first + rows, device=key_states.device)
        write(key_states.resolve_neg(), value_states.resolve_neg(), memory["keys"], memory["values"], before)
        self.keys, self.values = (memory[name].narrow(-2, first, rows + new) for name in ("keys", "values"))

    def append_to(self, name: str, new: Tensor) -> Tensor:
        """The attribute's rows, and the new ones behind them, as a view."""
        kept = getattr(self, name)
        dtype = new.dtype if kept.dtype is new.dtype else torch.promote_types(kept.dtype, new.dtype)
        if kept.dim() == 1:  # of an empty layer
            kept = new.narrow(-2, 0, 0)
        _check_like(name, new, kept)
        if new.shape[-1] == 0:
            self.__dict__.get("memory", {}).pop(name, None)
            return torch.cat([kept, new], -2)
        rows, total = kept.shape[-2], kept.shape[-2] + new.shape[-2]
        start = self.first_row(name, kept) if kept.dtype is dtype else None
        if start is not None:
            begin, end = addresses_of(parts_of(self.memory[name])[0])
            if begin <= new.data_ptr() < end:
                new = new.clone()  # rows of the cache itself, which may be written before they are read
        start = self.make_room(name, kept, start, total, partial(self.new_memory, name, new, dtype))
        memory: Any = self.memory[name]
        memory.narrow(-2, start + rows, total - rows).copy_(new)
        view: Tensor = memory.narrow(-2, start, total)
        return view

    def new_memory(self, name: str, like: Tensor, dtype: torch.dtype, room: int) -> Tensor:
        """Latents and rotary parts are columns of the same rows, as rapt's attention reads them."""
        *batch, _, d = like.shape
        if self.is_latent(name, like):
            if name == "keys":
                rows = like.new_empty((*batch, room, sum(self.latent)), dtype=dtype)
                self.tail = rows[..., d:]
                return rows[..., :d]
            tail: Tensor | None = self.__dict__.pop("tail", None)
            if tail is not None and tail.shape == (*batch, room, d) and tail.dtype is dtype and tail.device == like.device:
                return tail
        return like.new_empty((*batch, room, d), dtype=dtype)

    def new_rows(self, name: str, like: Tensor, room: int) -> Rows:
        """Memory of a quantised layer. Rotary parts of latents stay as they are."""
        assert self.kv_dtype is not None
        if name == "values" and self.is_latent(name, like):
            return like.new_empty((*like.shape[:-2], room, like.shape[-1]))
        return Codes.empty(self.kv_dtype, like, room)

    def is_latent(self, name: str, like: Tensor) -> bool:
        """Whether these are latents (keys), or the rotary parts of some (values)."""
        return bool(self.latent) and name in _PARTS and like.shape[1] == 1 and like.shape[-1] == self.latent[_PARTS.index(name)]

    def make_room(self, name: str, kept: Rows, start: int | None, total: int, empty: Callable[[int], Rows]) -> int:
        """Where in its memory an attribute begins, with room for so many rows: its rows move where there is none."""
        memory = self.memory[name] if start is not None else None
        if start is not None and memory is not None and start + total <= memory.shape[-2]:
            return start
        # Memory of a prompt that was far longer than the window is given back.
        if start is None or memory is None or start < total or memory.shape[-2] > 4 * total:
            if "memory" not in self.__dict__:
                self.memory, self.spare = {}, {}
            memory = self.memory[name] = empty(self.room_for(total))
            self.spare.pop(name, None)
        # Otherwise a window has come to the end of its memory, and goes back to the beginning.
        for to, rows in zip(parts_of(memory.narrow(-2, 0, kept.shape[-2])), parts_of(kept)):
            to.copy_(rows)
        return 0

    def room_for(self, total: int) -> int:
        return 2 * total if self.max_length is None or self.max_length < total else min(self.max_length, 2 * total)

    def first_row(self, name: str, kept: Rows) -> int | None:
        """Where in its memory an attribute begins; None if it is no view of it, or if the memory may not be written."""
        memory = self.__dict__.get("memory", {}).get(name)
        return None if memory is None else first_row(memory, kept)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams change places by one copy, between two memories: beam search has two caches, here as with DynamicCache."""
        names = self.__dict__.get("memory", {})
        starts: dict[str, Any] = {name: self.first_row(name, getattr(self, name)) for name in names}
        if not starts or None in starts.values() or not may_append(parts_of(self.keys)[0]) or beam_idx.numel() != self.keys.shape[0]:
            super().reorder_cache(beam_idx)
            return
        for name, start in starts.items():
            kept, memory = getattr(self, name), self.memory[name]
            to = self.spare.get(name)
            if to is None or not may_write(to):
                to = memory.of(*map(torch.empty_like, parts_of(memory))) if isinstance(memory, Codes) else self.new_memory(
                    name, memory, memory.dtype, memory.shape[-2]
                )
            self.memory[name], self.spare[name] = to, memory
            to = to.narrow(-2, start, kept.shape[-2])
            for rows, place in zip(parts_of(kept), parts_of(to)):
                torch.index_select(rows, 0, beam_idx.to(rows.device), out=place)
            setattr(self, name, to)

    def reset(self) -> None:
        self.memory, self.spare, self.layer_memory = {}, {}, None
        super().reset()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files: without room, and without memory that two layers would write to."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("memory", "spare", "layer_memory", "tail")}
        for name in ("keys", "values", "indexer_keys"):
            if isinstance(rows := state.get(name), Rows):
                state[name] = rows.clone(memory_format=torch.contiguous_format)
        return state


def _check_like(name: str, states: Tensor, kept: Rows) -> None:
    """Raises where new rows are no continuation of those that a layer has."""
    (*batch, _, d), (*new_batch, _, new_d) = kept.shape, states.shape
    if batch != new_batch or d != new_d or states.device != kept.device:
        had, wanted = (", ".join(map(str, [*sizes, "n", last])) for sizes, last in ((batch, d), (new_batch, new_d)))
        raise ValueError(
            f"past_key_values: got a cache with {name} of [{had}] on {kept.device}; wanted this model's and batch's, [{wanted}] "
            f"on {states.device}"
        )


class _InPlaceFull(_InPlace, _Full):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.may_append(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.append(key_states, value_states)
        return self.keys, self.values


def _forked(layer: Any, n: int) -> Any:
    """A layer of n sequences for each of another layer's, which share its rows if it has all of them."""
    if type(layer) is ForkedLayer:
        batch, parts, like = layer.batch, [*layer.parts, *layer.own_rows()], layer.own
    elif type(layer) is _InPlaceFull and layer.get_seq_length() > 0:
        batch, parts, like = layer.keys.shape[0], [(layer.keys, layer.values)], layer
    else:
        made = copy.deepcopy(layer)
        held = next((x for x in (getattr(made, "keys", None), *_states_of(made)) if x is not None and x.numel() > 0), None)
        if held is not None:
            made.reorder_cache(torch.arange(held.shape[0]).repeat_interleave(n))
        return made
    like.memory, like.spare, like.layer_memory = {}, {}, None  # nobody writes there any more
    options = {name: getattr(like, name) for name in ("kv_dtype", "latent")} | {"max_length": None}
    return ForkedLayer(n * batch, parts, _made(_InPlaceFull, None, options))


def _states_of(layer: Any) -> list[Tensor]:
    """Of linear attention."""
    return [x for name in ("conv_states", "recurrent_states") for x in getattr(layer, name, {}).values()]


class _InPlaceWindow(_InPlace, _Window):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A prompt may be far longer than the window: memory is made for what comes after it.
        if not self.may_append(key_states) or (self.kv_dtype is None and (not self.is_initialized or self.keys.numel() == 0)):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.append(key_states, value_states)
        return self.shown(key_states.shape[-2])

    def append_rotated(self, query: Tensor, key_states: Tensor, value_states: Tensor, options: tuple[Any, ...]) -> Any:
        appended = super().append_rotated(query, key_states, value_states, options)
        return None if appended is None else self.shown(key_states.shape[-2])

    def shown(self, new: int) -> Any:
        """Keys and values that the rows that came last may see. The window of the next rows stays."""
        past = self.sliding_window - 1
        self.cumulative_length += new
        keys, values = self.keys, self.values
        if self.record_past:
            return keys[:, :, -past - new :], values[:, :, -past - new :]
        if self.layer_memory is not None and 0 < past < self.layer_memory.rows:
            self.layer_memory.keep(past)
            self.keys, self.values = self.layer_memory.keys, self.layer_memory.values
        else:
            self.keys, self.values = keys[:, :, -past:], values[:, :, -past:]
        return keys, values

    def room_for(self, total: int) -> int:
        return total if self.keys.shape[-2] == 0 else 2 * total


class _InPlaceIndexed(_InPlaceFull, _Indexed):
    reorder_cache = _Indexed.reorder_cache  # which has more to reorder

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not may_append(indexer_key_states):
            keys: Tensor = super().update_indexer(indexer_key_states)
            return keys
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        self.indexer_keys = self.append_to("indexer_keys", indexer_key_states)
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
