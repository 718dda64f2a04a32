"""vLLM's decode context parallelism (DCP) for CPUs: the ranks of a group share the keys of each sequence.

All ranks of a group have the same KV heads and other query heads. Each rank attends with the group's query heads to its
share of the keys. The ranks exchange these partial results, and each one merges those of its own heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

import rapt

if TYPE_CHECKING:
    from rapt._vllm_attention import Impl, Metadata

_MARK = "rapt_shares"


@dataclass
class Shares:
    """The number of each sequence's keys in this rank's cache, int32 [sequences]."""

    past: Tensor  # before the step
    present: Tensor  # with the step's tokens
    is_first: bool  # no sequence has keys of earlier steps, on any rank
    all_to_all: bool  # vLLM's dcp_comm_backend

    @classmethod
    def of(cls, m: Any, config: Any) -> Shares | None:
        """`m`: vLLM's CommonAttentionMetadata. `config`: its ParallelConfig. None without DCP."""
        if config.decode_context_parallel_size == 1:
            return None
        if isinstance(m.causal, Tensor):
            raise NotImplementedError("decode_context_parallel_size: wanted 1, because some sequences are causal and some are not")
        group, n = get_dcp_group(), m.num_reqs
        split = group.world_size, group.rank_in_group, config.cp_kv_cache_interleave_size
        present = m.seq_lens[:n]
        past = present - m.query_start_loc[: n + 1].diff()
        before, after = (get_dcp_local_seq_lens(lengths, *split) for lengths in (past, present))
        return cls(before, after, not past.any(), config.dcp_comm_backend == "a2a")


def prepare(layer: Impl) -> None:
    """Makes vLLM compute slots for a layer with DCP. Raises ValueError if the layer cannot run with it: windows and ALiBi
    count distances between keys, but neighbouring rows of a rank's cache are several keys apart."""
    size = get_current_vllm_config().parallel_config.decode_context_parallel_size
    has = {
        "a sliding window": layer.sliding_window > 0,
        "ALiBi": layer.alibi_slopes is not None,
        f"attention of the type {layer.attn_type}": layer.attn_type != AttentionType.DECODER,
        f"{layer.num_kv_heads} KV heads on a rank": layer.num_kv_heads != 1,  # query heads of other ranks would read others
        "another layer's cache": layer.kv_sharing_target_layer_name is not None,
    }
    for what, here in has.items():
        if here:
            raise ValueError(f"decode_context_parallel_size: got {size}; wanted 1, because a layer has {what}")
    from vllm.v1.worker.block_table import BlockTable

    theirs = BlockTable.compute_slot_mapping
    if not hasattr(theirs, _MARK):
        BlockTable.compute_slot_mapping = _with_shares(theirs)


def _with_shares(theirs: Callable[..., None]) -> Callable[..., None]:
    """vLLM's function without Triton, which the wheel for CPUs does not have, refuses DCP."""

    @functools.wraps(theirs)
    def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
        if self.dcp_world_size == 1 or self.slot_mapping_mode.name == "NONE":
            theirs(self, num_reqs, query_start_loc, positions)
            return
        split = self.dcp_world_size, self.dcp_rank, self.cp_kv_cache_interleave_size
        borders, out = query_start_loc[: num_reqs + 1], self.slot_mapping.gpu
        n = int(borders[-1])
        out[:n] = slots(positions[:n], borders, self.block_table.gpu, self.block_size, *split)
        out[n:] = -1

    setattr(compute_slot_mapping, _MARK, True)
    return compute_slot_mapping


def slots(positions: Tensor, borders: Tensor, table: Tensor, page_size: int, size: int, rank: int, interleave: int) -> Tensor:
    """Where each new token's key goes in a rank's cache, page * page_size + row, or -1 for another rank's key.

    Rank 0 has the first `interleave` keys of a sequence, rank 1 the next ones, and so on around."""
    sequences = torch.repeat_interleave(borders.diff())
    key = torch.div(positions, size * interleave, rounding_mode="floor") * interleave + positions % interleave
    page = torch.div(key, page_size, rounding_mode="floor")
    found = table[sequences, page].long() * page_size + key % page_size
    return torch.where(torch.div(positions, interleave, rounding_mode="floor") % size == rank, found, -1)


def attend(layer: Impl, query: Tensor, key: Tensor, value: Tensor, out: Tensor, cache: dict[str, Any], m: Metadata) -> None:
    """query, out [tokens, hq, d]; key, value [tokens, hk, d]: the step's tokens, which are in the cache already."""
    shares = m.shares
    assert shares is not None
    # Sinks are added once, by the call over the new tokens. A single new token is one more key of the cache.
    together = m.max_query_len > 1 or layer.sinks is not None
    if together and shares.is_first:
        layer.attend_new(query, key, value, m, out=out)
        return
    group = get_dcp_group()
    queries = group.all_gather(query.contiguous(), 1)
    lengths = {"cu_seqlens_q": m.query_start_loc, "cache_seqlens": shares.past if together else shares.present}
    partial, lse = layer.attend(queries, False, sinks=None, out=_like(queries), return_lse=True, **lengths, **cache)
    parts = _exchange(partial, lse, group, shares.all_to_all)
    outs, lses = list(parts[..., :-1]), list(parts[..., -1])
    if together:
        own, own_lse = layer.attend_new(query, key, value, m, out=_like(query), return_lse=True)
        outs, lses = [*outs, own], [*lses, own_lse]
    rapt.merge_states(outs, lses, out=out)


def _like(query: Tensor) -> Tensor:
    return torch.empty(query.shape, dtype=torch.float32)


def _exchange(partial: Tensor, lse: Tensor, group: Any, all_to_all: bool) -> Tensor:
    """partial [tokens, ranks * hq, d] and lse [tokens, ranks * hq] of this rank: what all ranks have for its heads,
    [ranks, tokens, hq, d + 1], with the lse in the last column."""
    tokens, heads, d = partial.shape
    ranks = group.world_size
    made = torch.cat([partial, lse[..., None]], -1).view(tokens, ranks, heads // ranks, d + 1)
    if not all_to_all:  # vLLM's all-gather uses shared memory between processes of one machine
        received: Tensor = group.all_gather(made[None], 0)
        return received[:, :, group.rank_in_group]
    sent = made.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.device_group)
    return received
