"""flash-linear-attention's functions by rapt's delta rule, for models that call them.

Arguments, layouts, defaults and results are flash-linear-attention's: q and k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] of
KDA and [B, T, HV] of Gated DeltaNet, beta [B, T, HV], float32 states [N, HV, K, V]; with cu_seqlens B is 1. An initial state
is read as it is if bfloat16. chunk_* and fused_recurrent_* are one kernel here. What only says how a GPU is to go about it
(chunk_size, safe_gate, ...) is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt._delta_rule_torch import delta_rule

# Keywords that would change a result, with what they may be. Others are ignored, as flash-linear-attention does: models pass
# on whatever they were given.
_REFUSED = {"head_first": False, "return_intermediate_states": False, "cp_context": None, "transpose_state_layout": False}


def _check(keywords: dict[str, Any]) -> None:
    for name, without in _REFUSED.items():
        value = keywords.get(name, without)
        if value is not None and value != without:
            raise ValueError(f"{name}: got {value!r}; wanted {without}: rapt has no such thing")


def _gated_delta(
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
) -> tuple[Tensor, Tensor | None]:
    """All of them: each hands on its arguments, locals()."""
    _check(keywords)
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
    result = delta_rule(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        return_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm_qk=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_double=use_beta_sigmoid_in_kernel and allow_neg_eigval,
        gate=use_gate_in_kernel,
        a_log=A_log,
        dt_bias=dt_bias,
        gate_lower_bound=lower_bound,
        state_v_first=state_v_first,
    )
    return result if output_final_state else (result, None)


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
    """fla.ops.kda.chunk_kda on the CPU: (out [B, T, HV, V] of q's type, state or None). Gradients as rapt.torch.delta_rule has
    them. dt_bias is flat, [HV * K]. Raises TypeError or ValueError, naming the argument."""
    return _gated_delta(**locals())


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
    """fla.ops.kda.fused_recurrent_kda on the CPU; see chunk_kda."""
    return _gated_delta(**locals())


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
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule on the CPU: g is [B, T, HV], dt_bias [HV]; see chunk_kda."""
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
    """fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule on the CPU; see chunk_kda. gk is a decay for each channel of
    K; decays for channels of V (gv) are refused."""
    if gv is not None:
        raise ValueError("gv: got a tensor; wanted None: rapt has no decay for each channel of V")
    if gk is not None:
        g = gk if g is None else g.float()[..., None] + gk
    given = dict(locals())
    del given["gk"], given["gv"]
    return _gated_delta(**given)
