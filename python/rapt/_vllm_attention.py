"""vLLM's attention backend for CPUs, by rapt: layers with a paged cache, encoder layers and cross attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

import rapt
from rapt._vllm_log import say_taken
from rapt._vllm_shards import Shares, attend, prepare

_CODES = {"fp8": "f8e4m3", "fp8_e4m3": "f8e4m3", "fp8_e5m2": "f8e5m2"}
"""Quantised types of vLLM's cache for CPUs, and kv_dtype for them."""
_CACHES = ("auto", "float16", "bfloat16", *_CODES)
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass
class Places:
    """Where new keys go: row rows[i] of page pages[i], in a form that append_kv takes. Each token counts as a sequence."""

    pages: Tensor
    rows: Tensor
    each: Tensor
    chosen: Tensor | None  # of the new tokens; None: all

    @classmethod
    def of(cls, slots: Tensor, page_size: int) -> Places:
        """`slots`: page * page_size + row of each token, negative for none."""
        chosen = None
        if slots.numel() and int(slots.min()) < 0:
            chosen = torch.nonzero(slots >= 0).flatten()
            slots = slots[chosen]
        pages = torch.div(slots, page_size, rounding_mode="floor")
        return cls(pages[:, None], slots - pages * page_size, torch.arange(slots.numel() + 1), chosen)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, **codes: Any) -> None:
        """key [n, hk, d] and value [n, hk, dv] into pages [pages, hk, page_size, d or dv]. `codes`: how these are quantised."""
        if self.chosen is not None:
            key, value = key[self.chosen], value[self.chosen]
        if key.shape[0]:
            rapt.append_kv(key, value, key_cache, value_cache, self.rows, block_table=self.pages, cu_seqlens=self.each, **codes)


@dataclass
class Metadata(CPUAttentionMetadata):
    """vLLM's, with what all layers of a step share."""

    places: Places | None = None
    shares: Shares | None = None  # with decode context parallelism


class Builder(CPUAttentionMetadataBuilder):
    """Makes no schedule and no cache for encoders, which rapt does not need."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        m = common_attn_metadata
        n = m.num_reqs
        dynamic = m.causal if isinstance(m.causal, Tensor) else None
        return Metadata(
            num_actual_tokens=m.num_actual_tokens,
            max_query_len=m.max_query_len,
            query_start_loc=m.query_start_loc[: n + 1],
            max_seq_len=m.max_seq_len,
            seq_lens=m.seq_lens[:n],
            block_table=m.block_table_tensor[:n],
            slot_mapping=m.slot_mapping,
            scheduler_metadata=None,
            causal=dynamic is None and not self.is_cross_attention and bool(m.causal),
            dynamic_causal=dynamic,
            shares=Shares.of(m, self.vllm_config.parallel_config),
        )


class Impl(CPUAttentionBackendImpl):
    """A layer's attention."""

    supports_dcp = True
    can_return_lse_for_decode = True  # vLLM asks this before it starts with decode context parallelism
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(
            *(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype),
            *(logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks),
        )
        if kv_cache_dtype not in _CACHES:
            raise ValueError(f"kv_cache_dtype: got {kv_cache_dtype!r}; wanted one of {', '.join(_CACHES)}")
        if self.dcp_world_size > 1:
            prepare(self)
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None
        self._scales: dict[float, Tensor] = {}
        say_taken("attention")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [tokens, hq, d], key and value [tokens, hk, d], kv_cache [pages, hk, page_size, 2 * d], output [tokens, hq, d]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got one; wanted None: on CPUs, attention's result is not quantised")
        if attn_metadata is None:  # vLLM warms up
            return output
        m, n = attn_metadata, attn_metadata.num_actual_tokens
        if n != query.shape[0]:
            query, output = query[:n], output[:n]
        if self.attn_type in _ENCODERS:
            assert key is not None and value is not None
            self.attend_new(query, key[:n], value[:n], m, out=output)
            return output
        keys, values = self._pages(kv_cache)
        codes = self._codes(layer)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            new = min(key.shape[0], m.slot_mapping.shape[0])  # both may be padded
            if m.places is None:
                m.places = Places.of(m.slot_mapping[:new], keys.shape[2])
            m.places.write(key[:new], value[:new], keys, values, **codes)
        cache = {"k": keys, "v": values, "block_table": m.block_table, **codes}
        if m.shares is not None:
            assert key is not None and value is not None
            attend(self, query, key[:n], value[:n], output, cache, m)
            return output
        if m.dynamic_causal is None:
            self.attend(query, m.causal, cu_seqlens_q=m.query_start_loc, cache_seqlens=m.seq_lens, out=output, **cache)
            return output
        starts = m.query_start_loc.tolist()
        for i, causal in enumerate(m.dynamic_causal.tolist()):  # some sequences are causal, some are not
            rows, one = slice(starts[i], starts[i + 1]), slice(i, i + 1)
            borders = m.query_start_loc[i : i + 2] - starts[i]
            cache["block_table"] = m.block_table[one]
            self.attend(query[rows], bool(causal), cu_seqlens_q=borders, cache_seqlens=m.seq_lens[one], out=output[rows], **cache)
        return output

    def attend_new(self, query: Tensor, key: Tensor, value: Tensor, m: Metadata, **wanted: Any) -> Any:
        """The new tokens' attention among themselves."""
        borders = m.query_start_loc
        return self.attend(query, m.causal, k=key, v=value, cu_seqlens_q=borders, cu_seqlens_k=borders, **wanted)

    def attend(self, query: Tensor, causal: bool, **given: Any) -> Any:
        """rapt.attention with what a layer has; `given` comes before that."""
        window = None
        if self.sliding_window > 0:
            window = (self.sliding_window - 1, 0 if causal else self.sliding_window - 1)
        layer = {
            "causal": causal,
            "align": "bottom_right",
            "window": window,
            "scale": self.scale,
            "softcap": self.logits_soft_cap or None,
            "alibi": self.alibi_slopes,
            "sinks": self.sinks,
        }
        return rapt.attention(query, **(layer | given))

    def _codes(self, layer: Any) -> dict[str, Any]:
        """How the cache is quantised: keyword arguments for rapt's functions."""
        if self.kv_cache_dtype not in _CODES:
            return {}
        scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        return {"kv_dtype": _CODES[self.kv_cache_dtype]} | {name: self._scale(x) for name, x in scales.items() if x != 1}

    def _scale(self, x: float) -> Tensor:
        """One scale for all elements of a cache, [1, hk, 1, 1]."""
        if x not in self._scales:
            self._scales[x] = torch.full((1, self.num_kv_heads, 1, 1), x)
        return self._scales[x]

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of vLLM's cache, [pages, hk, page_size, d] each: views."""
        if self._cache is None or self._cache[0] is not kv_cache:
            pages, heads, page_size, _ = kv_cache.shape
            rows = kv_cache.view(pages, heads, 2 * page_size, self.head_size)
            self._cache = kv_cache, rows[:, :, :page_size], rows[:, :, page_size:]
        return self._cache[1:]


class Backend(CPUAttentionBackend):
    """CPU_ATTN, by rapt."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # all of them

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
