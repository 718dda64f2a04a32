"""vLLM's multi-head latent attention (MLA) for CPUs, by rapt: decoding over latents, and prefill over what they expand to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

import rapt
from rapt._vllm_attention import Places
from rapt._vllm_log import say_taken


class Impl(CPUMLAImpl):
    """A layer's cache and its attention for tokens that are decoded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):  # vLLM would write numbers as codes
            raise ValueError(f"kv_cache_dtype: got {self.kv_cache_dtype!r}; wanted auto for multi-head latent attention on CPUs")
        say_taken("multi-head latent attention")

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """q [tokens, h, rank + rope], one token of each sequence; the cache [pages, page_size, rank + rope].
        Returns [tokens, h, rank]."""
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        decode, rows = attn_metadata.decode, kv_c_and_k_pe_cache[:, None]
        out = q.new_empty((q.shape[0], q.shape[1], 1, self.kv_lora_rank))
        rapt.attention(
            *(q[:, :, None], rows, rows[..., : self.kv_lora_rank]),
            scale=self.scale,
            cache_seqlens=decode.seq_lens,
            block_table=decode.block_table,
            out=out,
        )
        return out[:, :, 0], None

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor
    ) -> None:
        """Rows of latents [tokens, rank] and rotary parts [tokens, 1, rope] into the cache."""
        if kv_cache.numel() == 0:
            return
        slots, rows = slot_mapping.flatten()[: kv_c_normed.shape[0]], kv_cache[:, None]
        latent = kv_c_normed[: slots.shape[0], None], k_pe.view(k_pe.shape[0], 1, -1)[: slots.shape[0]]
        Places.of(slots, kv_cache.shape[1]).write(*latent, rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :])


class Backend(CPUMLABackend):
    """CPU_MLA, by rapt."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # all of them

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl


class PrefillBackend(CPUSDPAMLAPrefillBackend):
    """Attention of new tokens among themselves, and to chunks of what is cached."""

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """q, k [tokens, h, nope + rope], v [tokens, h, dv]. Returns [tokens, h, dv], and lse [h, tokens] if wanted."""
        if output_scale is not None:
            return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        borders = self._prefill_metadata.query_start_loc
        made, lse = self._attend(q, k, v, borders, borders, True, None if return_softmax_lse else out)
        return (made, lse) if return_softmax_lse else made

    def run_prefill_context_chunk(self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Any:
        return self._attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, False, out)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, borders_q: Tensor, borders_k: Tensor, causal: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        made, lse = rapt.attention(
            *(q, k, v),
            causal=causal,
            align="top_left",
            scale=self.scale,
            cu_seqlens_q=borders_q,
            cu_seqlens_k=borders_k,
            out=out,
            return_lse=True,
        )
        return made, lse.T.contiguous()
