"""attn_implementation="rapt_flash": attention over sequences without padding, as transformers asks flash attention.

Padding is taken out of batches, packed sequences are kept apart by their borders, and continuous batching's caches are
read in their pages. Masks of other patterns, and calls that only PyTorch's operators compute, are left to "rapt".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from rapt import _flash_attn, _model_attention, _model_keywords, _model_masks, _refusals
from rapt._codes import Codes, OnlyForRapt
from rapt._flash_attn_cache import flash_attn_with_kvcache
from rapt._flash_attn_module import index_first_axis, index_put_first_axis, unpad_input
from rapt._model_lazy import LazyTensor, materialized

# Keywords that say how a call's tokens are laid out. Attention does not depend on them otherwise.
_LAYOUT = frozenset(
    {"block_table", "cu_seq_lens_k", "cu_seq_lens_q", "k_cache", "read_index", "v_cache", "write_index"}
)

calls = 0  # of rapt's kernels


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    modified: bool  # by arguments that only "rapt" knows


def forward(
    otherwise: Callable[..., tuple[Tensor, None]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [b, hq, n, d] with keys and values of hk heads, as [b, n, hq, dv]; what this module does not compute
    is otherwise(), with the same arguments and a whole mask."""
    global calls
    others = {name: x for name, x in kwargs.items() if name not in _LAYOUT and name != "cache"}
    _model_keywords.check(others, attention_mask)
    key, value = _update_cache(module, key, value, kwargs)
    layout = {name: kwargs.pop(name, None) for name in _LAYOUT}
    if (attention_mask is not None and attention_mask.dim() < 3) or any(x is not None for x in layout.values()):
        key, value = materialized(key), materialized(value)
    if attention_mask is None and layout["cu_seq_lens_q"] is None and layout["block_table"] is None:
        attention_mask = _model_masks.borders_of_positions(kwargs.get("position_ids"), query.shape[2], key.shape[2])
    sinks = sinks if s_aux is None else s_aux
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not causal and sliding_window is not None and sliding_window == _model_masks.window_of(getattr(module, "config", None)):
        # Masks of both sides show distances of up to the config's window. Layers hand over one more (ModernBERT), as one
        # that counts the row itself, or forget to (T5Gemma).
        sliding_window += 1
    modified = position_bias is not None or indices is not None or (sinks is not None and sinks.dim() > 1)
    scale = None if scaling is None else float(scaling)
    call = _Call(query, key, value, attention_mask, causal, sliding_window, scale, softcap, sinks, dropout, modified)
    out = _attend(call, layout)
    if out is not None:
        calls += 1
        return out, None
    whole = _model_masks.whole_mask(attention_mask, query.shape[2], key.shape[2], causal, sliding_window)
    return otherwise(
        *(module, query, key, value, whole, dropout, scaling),
        is_causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=sinks,
        position_bias=position_bias,
        indices=indices,
        **kwargs,
    )


def over_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: LazyTensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    modified: bool,
) -> Tensor | None:
    """[b, n, hq, dv] under a lazy_mask(), without making it; None where that is not to be had, or where somebody read the mask,
    who may have written to it."""
    global calls
    if mask.made is not None:
        return None
    pattern, given = mask.source
    # transformers' masks of both directions show keys up to the window away, rapt's windows count the row itself.
    window = pattern.window if pattern.causal or pattern.window is None else pattern.window + 1
    scale = None if scaling is None else float(scaling)
    modified |= sinks is not None and sinks.dim() > 1
    out = _attend(_Call(query, key, value, given, pattern.causal, window, scale, softcap, sinks, dropout, modified), {})
    calls += out is not None
    return out


def _update_cache(module: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The keys and values of continuous batching's cache that a call reads. Layers of 5.24 call update()."""
    cache = kwargs.pop("cache", None)
    if cache is None:
        return key, value
    if not isinstance(cache, PagedAttentionCache):
        raise TypeError(f"cache: got {type(cache).__name__}; wanted the PagedAttentionCache of continuous batching")
    updated: tuple[Tensor, Tensor] = cache.update(key, value, module.layer_idx, kwargs)
    return updated


def _attend(call: _Call, kwargs: dict[str, Any]) -> Tensor | None:
    """[b, n, hq, dv]; None where "rapt" is to compute it by whole_mask()."""
    n, m = call.query.shape[2], call.key.shape[2]
    borders, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if kwargs.get("block_table") is not None:
        _check_layout("block_table", call)
        return _over_pages(call, *(kwargs[name] for name in ("block_table", "cu_seq_lens_k", "k_cache", "v_cache")))
    if borders is not None:
        if call.mask is not None and call.mask.dim() > 2 and torch.compiler.is_compiling():
            return None  # transformers has made it of position_ids
        _check_layout("cu_seq_lens_q", call)
        if keys is None and n != m:
            raise ValueError(f"cu_seq_lens_k: got None for {n} queries and {m} keys; wanted the borders of keys")
        return _packed_attention(call, borders, borders if keys is None else keys)
    given = call.mask
    if given is None and (call.causal or call.window is None or call.window >= m):
        return None
    if isinstance(call.key, Codes) and given is not None and given.dim() == 2 and call.causal and not call.modified:
        return _each_sequence(call, given) if call.dropout == 0 and _model_masks.is_whole(given.bool()) else None
    if isinstance(call.key, OnlyForRapt):
        return None
    gqa = call.query.shape[1] != call.key.shape[1]
    if call.modified or _refusals.refusal(call.query, call.key, call.value, None, gqa):
        return None
    if given is not None and given.dim() > 2:
        return None
    by_rapt = _flash_attn.differentiates(call.query, call.value, None, call.sinks, call.softcap, call.dropout)
    if not by_rapt and _refusals.needs_grad(call.query, call.key, call.value, call.sinks):
        return None
    if given is None:
        return _attention(call, (_rows_first(call.query), _rows_first(call.key), _rows_first(call.value)))
    if given.dim() == 1:
        return _packed_attention(call, given, given)
    if given.shape[1] != m:
        return None
    given = given.bool()
    if call.causal or call.window is not None:
        return _without_padding(call, given) if n == m or (call.causal and n < m) else None
    return _over_shown_keys(call, given)


def _check_layout(name: str, call: _Call) -> None:
    """Refuses what sequences without a mask cannot have."""
    if call.mask is not None and call.mask.dim() > 1:
        raise ValueError(f"{name}: got it with a mask of {call.mask.dim()} dimensions; wanted no attention_mask")
    if call.modified:
        raise NotImplementedError(f'{name}: got it with position_bias, indices or sinks of rows; wanted "rapt"')


def _window_size(call: _Call) -> tuple[int, int]:
    """To the left and to the right; transformers counts the row itself."""
    side = -1 if call.window is None else call.window - 1
    return side, -1 if call.causal else side


def _attention(
    call: _Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    borders: Tensor | None = None,
    key_borders: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    inputs = (*tensors, None, call.sinks, borders, key_borders, lengths, None, None)
    options = (call.scale, call.causal, _window_size(call), call.softcap or 0.0, call.dropout)
    return _flash_attn.attend(inputs, *options)[0]


def _rows_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """[b * n, h, d] for [b, h, n, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def _packed_attention(call: _Call, borders: Tensor, key_borders: Tensor) -> Tensor:
    out = _attention(call, (_tokens(call.query), _tokens(call.key), _tokens(call.value)), borders, key_borders)
    return out.view(call.query.shape[0], -1, *out.shape[1:])


def _borders_and_tokens(shown: Tensor) -> tuple[Tensor, Tensor]:
    """Borders int32 [b + 1] of the tokens that are shown, and where these are in [b * m]."""
    _, where, borders, _, _ = unpad_input(shown, shown)
    return borders, where


def _without_padding(call: _Call, shown: Tensor) -> Tensor:
    """Rows of padding are 0."""
    rows = shown[:, shown.shape[1] - call.query.shape[2] :]
    key_borders, keys = _borders_and_tokens(shown)
    borders, where = (key_borders, keys) if rows.shape == shown.shape else _borders_and_tokens(rows)
    query = index_first_axis(_tokens(call.query), where)
    key, value = (index_first_axis(_tokens(x), keys) for x in (call.key, call.value))
    part = _attention(call, (query, key, value), borders, key_borders)
    return index_put_first_axis(part, where, rows.numel()).view(*rows.shape, *part.shape[1:])


def _each_sequence(call: _Call, shown: Tensor) -> Tensor:
    """The same over codes, which stay where they are: sequence by sequence, whose tokens are neighbours."""
    (b, hq, n, d), m = call.query.shape, shown.shape[1]
    key: Any = call.key
    value: Any = call.value
    scale, left = d**-0.5 if call.scale is None else call.scale, -1 if call.window is None else call.window - 1
    out = call.query.new_zeros((b, n, hq, value.shape[-1]))
    for i, places in enumerate(shown):
        tokens = places.nonzero()
        if len(tokens) == 0:
            continue
        begin, end = int(tokens[0]), int(tokens[-1]) + 1
        first, last = max(begin - (m - n), 0), end - (m - n)
        if first < last:
            k, v = (x.narrow(0, i, 1).narrow(2, begin, end - begin) for x in (key, value))
            rows = call.query[i : i + 1, :, first:last]
            out[i, first:last] = _model_attention.forward(rows, k, v, None, None, call.sinks, True, left, call.softcap, scale)[0]
    return out


def _over_shown_keys(call: _Call, shown: Tensor) -> Tensor:
    """All rows over the keys that are shown: keys of another text than the rows' have padding of their own."""
    if bool((shown.int().diff(dim=1) <= 0).all()):  # padding is behind the keys
        tensors = (_rows_first(call.query), _rows_first(call.key), _rows_first(call.value))
        return _attention(call, tensors, lengths=shown.sum(1).int())
    borders, where = _borders_and_tokens(shown)
    b, _, n, _ = call.query.shape
    rows = torch.arange(b + 1, dtype=torch.int32) * n
    key, value = (index_first_axis(_tokens(x), where) for x in (call.key, call.value))
    out = _attention(call, (_tokens(call.query), key, value), rows, borders)
    return out.view(b, n, *out.shape[1:])


def _over_pages(call: _Call, table: Tensor, key_borders: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One new token of each sequence, which is written to its page [pages, page, hk, d] before they are read."""
    query, key, value = (x[0].transpose(0, 1)[:, None] for x in (call.query, call.key, call.value))
    out: Tensor = flash_attn_with_kvcache(
        *(query, keys, values, key, value),
        cache_seqlens=key_borders.diff() - 1,
        block_table=table,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=_window_size(call),
        softcap=call.softcap or 0.0,
        s_aux=call.sinks,
    )
    return out[:, 0][None]
