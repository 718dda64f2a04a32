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
_speculative = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu
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
    initial_state [slots, hv, K, V] that are listed. Returns [1, tokens, hv, V] and initial_state.

    rapt adds 1e-6 to the squared length of a row of q or k, as the models do; vLLM's kernel adds `eps`."""
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


def _gated(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, pool: Tensor, l2norm: bool, **batch: Any
) -> Tensor:
    out: Tensor = rapt.delta_rule(
        *(q, k, v, a, b),
        initial_state=pool,
        final_state=pool,
        l2norm_qk=l2norm,
        beta_sigmoid=True,
        gate=True,
        a_log=A_log.float(),
        dt_bias=dt_bias.float(),
        **batch,
    )
    return out


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
    """Decoding: q, k [1, tokens, hk, K], v [1, tokens, hv, V], a and b [tokens, hv] before softplus and sigmoid. Updates the states
    that are listed. Returns [tokens, 1, hv, V]."""
    gates = (A_log, dt_bias, q, k, v)
    if not _taken(initial_state_source, softplus_beta=(softplus_beta, 1.0)):
        given = (*gates, a, b, initial_state_source, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel)
        result: Tensor = _recurrent(*given, softplus_beta, softplus_threshold)
        return result
    batch = {"state_slots": initial_state_indices, "cu_seqlens": cu_seqlens}
    return _gated(*gates, a[None], b[None], initial_state_source, use_qk_l2norm_in_kernel, **batch).transpose(0, 1)


def speculative(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Drafts: q, k [tokens, hk, K], v [tokens, hv, V]. Sequence i starts from the state in slot
    spec_state_indices[i, num_accepted_tokens[i] - 1]; the state after its token j goes to slot spec_state_indices[i, j].
    Returns [tokens, hv, V]."""
    gates = (A_log, dt_bias, q, k, v, a, b, initial_state_source)
    if not _taken(initial_state_source, softplus_beta=(softplus_beta, 1.0)):
        given = (*gates, spec_state_indices, num_accepted_tokens, cu_seqlens, use_qk_l2norm_in_kernel)
        result: Tensor = _speculative(*given, softplus_beta, softplus_threshold)
        return result
    batch = {"state_slots": spec_state_indices, "accepted": num_accepted_tokens, "cu_seqlens": cu_seqlens}
    return _gated(*gates, use_qk_l2norm_in_kernel, **batch)


class Backend(GDNAttentionBackend):
    """GDN_ATTN as it is. vLLM imports it where a model has such layers, and then the operators are rapt's."""


ops.chunk_gated_delta_rule_cpu = chunk
ops.fused_sigmoid_gating_delta_rule_update_cpu = recurrent
ops.fused_sigmoid_gating_delta_rule_update_spec_cpu = speculative
