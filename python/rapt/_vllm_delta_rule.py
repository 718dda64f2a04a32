"""vLLM's operators of the gated delta rule for CPUs (Qwen3-Next, Qwen3.5), by rapt."""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops as ops
from torch import Tensor
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

import rapt
from rapt._vllm_log import say_left, say_taken

_chunk = ops.chunk_gated_delta_rule_cpu
_recurrent = ops.fused_sigmoid_gating_delta_rule_update_cpu
_STATES = (torch.float32, torch.bfloat16)


def _taken(pool: Tensor, **values: tuple[Any, Any]) -> bool:
    """Whether rapt computes a call, by its states and by arguments (given, wanted). Says so in the log."""
    reason = f"states are of {pool.dtype}; wanted float32 or bfloat16" if pool.dtype not in _STATES else ""
    for name, (given, wanted) in values.items():
        if given != wanted:
            reason = f"{name} is {given}; wanted {wanted}"
    if reason:
        say_left("the gated delta rule", reason)
    else:
        say_taken("the gated delta rule")
    return not reason


def chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Prefill: query, key [1, tokens, hk, K], value [1, tokens, hv, V], g, beta [1, tokens, hv]. Updates the states of
    initial_state [slots, hv, K, V] that are listed. Returns [1, tokens, hv, V] and initial_state."""
    given = (query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first)
    if not _taken(initial_state, head_first=(head_first, False), output_final_state=(output_final_state, True)):
        result: tuple[Tensor, Tensor] = _chunk(*given, use_qk_l2norm_in_kernel, initial_state_indices, eps)
        return result
    out = rapt.delta_rule(
        *(query, key, value, g, beta),
        initial_state=initial_state,
        final_state=initial_state,
        state_slots=initial_state_indices,
        cu_seqlens=cu_seqlens,
        l2norm_qk=use_qk_l2norm_in_kernel,
    )
    return out, initial_state


def recurrent(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Decoding: one token of each sequence, q, k [1, tokens, hk, K], v [1, tokens, hv, V], gates a and b [tokens, hv] before
    softplus and sigmoid. Updates the states that are listed. Returns [tokens, 1, hv, V]."""
    tokens = q.shape[0] * q.shape[1]
    single = cu_seqlens.shape[0] - 1 == tokens
    values = {"softplus_beta": (softplus_beta, 1.0), "tokens of a sequence being one": (single, True)}
    if not _taken(initial_state_source, **values):
        given = (A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens)
        result: Tensor = _recurrent(*given, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold)
        return result
    out: Tensor = rapt.delta_rule(
        *(x.reshape(tokens, 1, *x.shape[2:]) for x in (q, k, v)),
        *(x.reshape(tokens, 1, x.shape[-1]) for x in (a, b)),
        initial_state=initial_state_source,
        final_state=initial_state_source,
        state_slots=initial_state_indices,
        l2norm_qk=use_qk_l2norm_in_kernel,
        beta_sigmoid=True,
        gate=True,
        a_log=A_log.float(),
        dt_bias=dt_bias.float(),
    )
    return out


class Backend(GDNAttentionBackend):
    """GDN_ATTN as it is. vLLM imports it where a model has such layers, and then the operators are rapt's."""


ops.chunk_gated_delta_rule_cpu = chunk
ops.fused_sigmoid_gating_delta_rule_update_cpu = recurrent
