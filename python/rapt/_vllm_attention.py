"""vLLM's attention backend for CPUs, by rapt: layers with a paged cache, encoder layers and cross attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

import rapt
from rapt._refusals import MAX_HEAD_SIZE
from rapt._vllm_log import say_left, say_taken

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """key [n, hk, d] and value [n, hk, dv] into pages [pages, hk, page_size, d or dv]."""
        if self.chosen is not None:
            key, value = key[self.chosen], value[self.chosen]
        if key.shape[0]:
            rapt.append_kv(key, value, key_cache, value_cache, self.rows, block_table=self.pages, cu_seqlens=self.each)


@dataclass
class Metadata(CPUAttentionMetadata):
    """vLLM's, with what all layers of a step share."""

    places: Places | None = None


class Builder(CPUAttentionMetadataBuilder):
    """Makes no schedule and no cache for encoders, which rapt does not need, unless a layer is left to vLLM."""

    _all_taken: bool | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        if self._all_taken is None:
            layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names).values()
            self._all_taken = all(isinstance(layer.impl, Impl) and not layer.impl.left for layer in layers)
        if not self._all_taken:
            theirs = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return Metadata(**{field.name: getattr(theirs, field.name) for field in fields(theirs)})
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
        )


class Impl(CPUAttentionBackendImpl):
    """A layer's attention. `left` is why vLLM's own computes it; "" if rapt does."""

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
        self.left = _refusal(head_size, kv_cache_dtype)
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None
        if self.left:
            _check_left(head_size, self.left)
            say_left("attention", self.left)
        else:
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
        if attn_metadata is None or output_scale is not None or output_block_scale is not None or self.left:
            return self._leave(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        m, n = attn_metadata, attn_metadata.num_actual_tokens
        if n != query.shape[0]:
            query, output = query[:n], output[:n]
        if self.attn_type in _ENCODERS:
            assert key is not None and value is not None
            self._attend(query, key[:n], value[:n], output, m.causal, m.query_start_loc, cu_seqlens_k=m.query_start_loc)
            return output
        keys, values = self._pages(kv_cache)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            new = min(key.shape[0], m.slot_mapping.shape[0])  # both may be padded
            if m.places is None:
                m.places = Places.of(m.slot_mapping[:new], keys.shape[2])
            m.places.write(key[:new], value[:new], keys, values)
        if m.dynamic_causal is None:
            self._attend(
                query, keys, values, output, m.causal, m.query_start_loc, cache_seqlens=m.seq_lens, block_table=m.block_table
            )
            return output
        starts = m.query_start_loc.tolist()
        for i, causal in enumerate(m.dynamic_causal.tolist()):  # some sequences are causal, some are not
            rows, one = slice(starts[i], starts[i + 1]), slice(i, i + 1)
            borders = m.query_start_loc[i : i + 2] - starts[i]
            lengths = {"cache_seqlens": m.seq_lens[one], "block_table": m.block_table[one]}
            self._attend(query[rows], keys, values, output[rows], bool(causal), borders, **lengths)
        return output

    def _leave(self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Any, *rest: Any) -> Tensor:
        if attn_metadata is not None and key is not None and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)  # does nothing for encoders
        result: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest)
        return result

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool, borders: Tensor, **keys: Any) -> None:
        window = None
        if self.sliding_window > 0:
            window = (self.sliding_window - 1, 0 if causal else self.sliding_window - 1)
        rapt.attention(
            *(q, k, v),
            causal=causal,
            align="bottom_right",
            window=window,
            scale=self.scale,
            softcap=self.logits_soft_cap or None,
            alibi=self.alibi_slopes,
            sinks=self.sinks,
            cu_seqlens_q=borders,
            out=out,
            **keys,
        )

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of vLLM's cache, [pages, hk, page_size, d] each: views."""
        if self._cache is None or self._cache[0] is not kv_cache:
            pages, heads, page_size, _ = kv_cache.shape
            rows = kv_cache.view(pages, heads, 2 * page_size, self.head_size)
            self._cache = kv_cache, rows[:, :, :page_size], rows[:, :, page_size:]
        return self._cache[1:]


def _refusal(head_size: int, kv_cache_dtype: str) -> str:
    """Why rapt does not take a layer; "" if it does. Asked once, before there is a cache: two layouts cannot share one."""
    dtype = get_current_vllm_config().model_config.dtype
    if dtype not in _DTYPES:
        return f"the model is of {dtype}; wanted float32, bfloat16 or float16"
    if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        return f"the cache is of {kv_cache_dtype}; wanted the model's type, {dtype}"
    if head_size > MAX_HEAD_SIZE:
        return f"heads have {head_size} elements; wanted at most {MAX_HEAD_SIZE}"
    return ""


def _check_left(head_size: int, reason: str) -> None:
    """Raises where vLLM's own backend cannot do what rapt's Backend promises of it."""
    sizes, block_size = CPUAttentionBackend.get_supported_head_sizes(), get_current_vllm_config().cache_config.block_size
    if head_size not in sizes:
        raise ValueError(f"head_size: got {head_size}; wanted one of {sizes}, which vLLM's own kernels take: {reason}")
    if block_size and block_size % 32:
        raise ValueError(f"block_size: got {block_size}; wanted a multiple of 32, which vLLM's own kernels take: {reason}")


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
