"""flash-linear-attention's functions with rapt's delta rule, for models that call them.

Arguments, layouts, defaults and results are flash-linear-attention's: q and k [B, T, H, K], v [B, T, HV, V], g [B, T,
HV, K] for KDA and [B, T, HV] for Gated DeltaNet, beta [B, T, HV], float32 states [N, HV, K, V]. With cu_seqlens B is 1.
A bfloat16 initial state is read as it is. chunk_* and fused_recurrent_* run the same kernel, on the CPU or, without
gradients, on a GPU. Arguments that say how a GPU divides the work (chunk_size, disable_recompute, ...) are ignored.
Calls that flash-linear-attention refuses for other reasons than limits of its GPU kernels are errors here, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt._autocast import without_autocast
from rapt._delta_rule_torch import delta_rule

# Keywords that would change a result, with what they may be. Others are ignored, as flash-linear-attention does: models
# pass on whatever they were given.
_REFUSED = {"head_first": False, "return_intermediate_states": False, "transpose_state_layout": False}


def _check_keywords(keywords: dict[str, Any], state_v_first: bool) -> None:
    for name, without in _REFUSED.items():
        value = keywords.get(name, without)
        if value is not None and value != without:
            raise ValueError(f"{name}: got {value!r}; wanted {without}: rapt has no such thing")
    if state_v_first and "transpose_state_layout" in keywords:
        raise ValueError("transpose_state_layout: got one with state_v_first; wanted state_v_first alone")


def _refuse_context(keywords: dict[str, Any]) -> None:
    if keywords.get("cp_context") is not None:
        wanted = "None, or a chunk_ function: flash-linear-attention has it in these"
        raise ValueError(f"cp_context: got one; wanted {wanted}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, of_channels: bool) -> None:
    """What rapt.delta_rule takes and flash-linear-attention does not: other numbers of heads, for KDA other decays."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {list(x.shape)}; wanted 4 dimensions, tokens before heads")
    if q.shape != k.shape:
        raise ValueError(f"q: got shape {list(q.shape)}; wanted k's {list(k.shape)}")
    if q.shape[2] == 0 or v.shape[2] % q.shape[2] != 0:
        raise ValueError(f"v: got shape {list(v.shape)}; wanted a multiple of q's {q.shape[2]} heads")
    if not of_channels:
        return
    wanted = [*q.shape[:2], v.shape[2]]
    for name, gate, shape in (("g", g, [*wanted, q.shape[3]]), ("beta", beta, wanted)):
        if gate is None or list(gate.shape) != shape:
            got = "None" if gate is None else f"shape {list(gate.shape)}"
            raise ValueError(f"{name}: got {got}; wanted shape {shape}")


def _check_gates(sigmoid: bool, double: bool, gate: bool, safe: bool, lower_bound: float | None) -> None:
    if double and not sigmoid:
        wanted = "both, or beta doubled before the call"
        raise ValueError(f"allow_neg_eigval: got True without use_beta_sigmoid_in_kernel; wanted {wanted}")
    if not (gate and safe):
        return
    if lower_bound is None:
        wanted = "a number from -5 to below 0"
        raise ValueError(f"lower_bound: got None with safe_gate and use_gate_in_kernel; wanted {wanted}")
    if not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound: got {lower_bound} with safe_gate; wanted -5 to below 0, or no safe_gate")


def _gated_delta(**arguments: Any) -> tuple[Tensor, Tensor | None]:
    """All of them: each hands on its arguments, locals()."""
    context = arguments["keywords"].get("cp_context")
    if getattr(context, "group", context) is not None:
        return _over_ranks(context, arguments), None
    result = delta_rule(**_converted(**arguments))
    return result if arguments["output_final_state"] else (result, None)


def _converted(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    keywords: dict[str, Any],
    of_channels: bool = False,
) -> dict[str, Any]:
    """Arguments of rapt.torch.delta_rule. of_channels: g is KDA's."""
    _check_keywords(keywords, state_v_first)
    _check_shapes(q, k, v, g, beta, of_channels)
    _check_gates(use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel, safe_gate, lower_bound)
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"q: got shape {list(q.shape)} with cu_seqlens; wanted a batch of 1")
    if use_gate_in_kernel:
        if A_log is None and lower_bound is None:
            raise ValueError("A_log: got None with use_gate_in_kernel; wanted a tensor, or a lower_bound")
        if dt_bias is not None:
            dt_bias = dt_bias.float()
            if g is not None and g.ndim == 4:
                dt_bias = dt_bias.reshape(g.shape[2], g.shape[3])
        A_log = None if A_log is None else A_log.float().reshape(-1)
    else:
        A_log = dt_bias = lower_bound = None
    if initial_state is not None and initial_state.dtype != torch.bfloat16:
        initial_state = initial_state.float()
    return dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        return_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm_qk=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_double=allow_neg_eigval,
        gate=use_gate_in_kernel,
        a_log=A_log,
        dt_bias=dt_bias,
        gate_lower_bound=lower_bound,
        state_v_first=state_v_first,
    )


@without_autocast
def _over_ranks(context: Any, arguments: dict[str, Any]) -> Tensor:
    """With flash-linear-attention's context of a rank: the offsets of the sequences in this rank's tokens, and the
    number of earlier ranks on which the first of them lies."""
    from rapt import _distributed_delta_rule as distributed
    from rapt._distributed_check import agree, ranks_of

    if not hasattr(context, "group"):
        raise ValueError("cp_context: got one without group; wanted the result of build_cp_context()")
    ranks = ranks_of(context.group, "delta_rule")
    try:
        for name in ("cu_seqlens", "pre_num_ranks"):
            if getattr(context, name, None) is None:
                raise ValueError(f"cp_context: got one without {name}; wanted the result of build_cp_context()")
        given = _converted(**arguments) | {"rule": "gated_delta", "cu_seqlens": None}
        for argument, name in (("initial_state", "initial_state"), ("output_final_state", "return_state")):
            if given[name] is not None and given[name] is not False:
                raise ValueError(f"{argument}: got one with cp_context; wanted none: a rank has some of the sequences")
        rank_tokens = distributed.RankTokens(context.pre_num_ranks > 0, context.cu_seqlens.cpu())
    except Exception as refused:  # of any kind, or the other ranks would wait
        agree(ranks, None, refused)
        raise
    out: Tensor = distributed.call(ranks, given, rank_tokens)
    return out


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.kda.chunk_kda: Kimi Delta Attention.

    q, k, v         [B, T, H, K], [B, T, H, K] and [B, T, HV, V] of float32, bfloat16 or float16.
    g, beta         Log decay [B, T, HV, K]; [B, T, HV].
    initial_state   float32 or bfloat16 [N, HV, K, V], N sequences. Default 0.
    cu_seqlens      int32 or int64 [N + 1], with B = 1: ragged sequences.
    dt_bias         Flat, [HV * K].
    cp_context      Of fla.ops.cp.build_cp_context(): the tokens are this rank's part of the packed sequences of a
                    process group, as for rapt.distributed.delta_rule. Its offsets count, and cu_seqlens is ignored.
                    chunk_* functions only.

    Other arguments are flash-linear-attention's. Returns (out, state): out [B, T, HV, V] of q's type, and the final
    state, float32, or None. Gradients are those of rapt.torch.delta_rule. Raises TypeError or ValueError, which names
    the argument.
    """
    return _gated_delta(**locals(), of_channels=True)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.kda.fused_recurrent_kda. See chunk_kda."""
    _refuse_context(keywords)
    return _gated_delta(**locals(), of_channels=True)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule: Gated DeltaNet. See chunk_kda.

    g is [B, T, HV] and dt_bias [HV].
    """
    return _gated_delta(**locals())


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule. See chunk_kda.

    g is [B, T, HV]; gk is a decay for each channel of K. Decays for channels of V (gv) are an error.
    """
    _refuse_context(keywords)
    if gv is not None:
        raise ValueError("gv: got a tensor; wanted None: rapt has no decay for each channel of V")
    if gk is not None and use_gate_in_kernel:
        raise ValueError("gk: got a tensor with use_gate_in_kernel; wanted None: the gate is of g alone")
    if gk is not None:
        g = gk if g is None else g.float()[..., None] + gk
    given = dict(locals())
    del given["gk"], given["gv"]
    return _gated_delta(**given)
