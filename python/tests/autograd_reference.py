"""Attention and the delta rule in float64 of PyTorch's plain operators, whose gradients are the wanted ones."""

import torch
from torch.nn import functional

UNITS = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    offset=0,
    window=(-1, -1),
    scale=None,
    mask=None,
    bias=None,
    softcap=None,
    alibi=None,
    sinks=None,
    lengths=None,
    dropped=None,
    dropout_p=0.0,
):
    """out and lse of docs/contract.md for [b, h, s, d]; row i sits at key i + offset."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    x = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if bias is not None:
        x = x + bias
    distance = torch.arange(k.shape[2]) - (torch.arange(q.shape[2])[:, None] + offset)
    if alibi is not None:
        x = x - alibi[..., None, None] * distance.abs()
    attended = torch.ones(x.shape, dtype=torch.bool)
    if causal:
        attended &= distance <= 0
    if window[0] >= 0:
        attended &= distance >= -window[0]
    if window[1] >= 0:
        attended &= distance <= window[1]
    if mask is not None:
        attended &= mask
    if lengths is not None:
        attended &= torch.arange(k.shape[2]) < torch.as_tensor(lengths)[:, None, None, None]
    x = x.masked_fill(~attended, -torch.inf)
    if sinks is not None:
        rows = sinks if sinks.dim() > 1 else sinks[:, None, None]
        x = torch.cat([x, rows.expand(*x.shape[:-1], 1)], -1)
    top = x.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).min) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    p = torch.exp(x - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    lse = (total.masked_fill(empty, 1).log() + top).masked_fill(empty, -torch.inf)[..., 0]
    weights = p[..., : k.shape[2]] / total.masked_fill(empty, 1)
    if dropped is not None:
        weights = weights.masked_fill(dropped, 0) / (1 - dropout_p)
    return weights @ v, lse


def doubled(tensors):
    """The same numbers in float64, to differentiate."""
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def relative_error(got, wanted):
    """Frobenius error of float32, relative."""
    got, wanted = got.detach().double(), wanted.detach()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


def delta_rule(
    q, k, v, g=None, beta=None, *, rule="gated_delta", scale=None, initial_state=None, l2norm_qk=False, beta_sigmoid=False,
    beta_double=False, gate=False, a_log=None, dt_bias=None, gate_lower_bound=None, state_v_first=False, cu_seqlens=None
):  # fmt: skip
    """The recurrence as it is written, in double, for autograd: (out, state)."""
    q, k, v, g, beta, initial_state, a_log, dt_bias = (
        None if x is None else x.double() for x in (q, k, v, g, beta, initial_state, a_log, dt_bias)
    )
    if cu_seqlens is not None:
        flat = q.ndim == 3
        rows = [x if x is None or x.ndim == 1 else x[None] if flat else x for x in (q, k, v, g, beta)]
        more = {name: x for name, x in locals().items() if name in delta_rule.__kwdefaults__}
        del more["cu_seqlens"], more["initial_state"]
        parts = [
            delta_rule(
                *(x if x is None or x.ndim == 1 else x[:, a:b] for x in rows),
                **more,
                initial_state=None if initial_state is None else initial_state[i : i + 1],
            )
            for i, (a, b) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))
        ]
        out = torch.cat([out for out, _ in parts], 1)
        return out[0] if flat else out, torch.cat([state for _, state in parts])
    if l2norm_qk:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    (b, tokens, hq, d), hk, (hv, dv) = q.shape, k.shape[2], v.shape[2:]
    h = max(hk, hv)
    k, v = k.repeat_interleave(h // hk, 2), v.repeat_interleave(h // hv, 2)
    if g is not None:
        g = g.expand(b, tokens, h) if g.ndim == 1 else g
        if gate:
            z = g if dt_bias is None else g + dt_bias
            a = torch.ones(h).double() if a_log is None else a_log.exp()
            a = a[:, None] if g.ndim == 4 else a
            g = -a * functional.softplus(z) if gate_lower_bound is None else gate_lower_bound * torch.sigmoid(a * z)
        g = g[..., None] if g.ndim == 3 else g
    if beta is not None:
        beta = (beta.sigmoid() if beta_sigmoid else beta) * (2 if beta_double else 1)
    state = torch.zeros(b, h, d, dv).double() if initial_state is None else initial_state
    state = state.mT if state_v_first and initial_state is not None else state
    outs = [torch.zeros(b, 0, max(hq, h), dv).double()]
    for t in range(tokens):
        u = v[:, t]
        if g is not None:
            state = state * g[:, t, ..., None].exp()
        if rule.endswith("delta"):
            u = u - (state * k[:, t, ..., None]).sum(-2)
            u = u if beta is None else u * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * u[..., None, :]
        read = state.repeat_interleave(max(hq // h, 1), 1)
        query = q[:, t].repeat_interleave(max(h // hq, 1), 1)
        outs.append((d**-0.5 if scale is None else scale) * (read * query[..., None]).sum(-2)[:, None])
    return torch.cat(outs, 1), state.mT if state_v_first else state


def ratio(got, wanted):
    """flash-linear-attention's metric."""
    assert got.shape == wanted.shape and torch.isfinite(got).all()
    got, wanted = got.detach().double(), wanted.detach().double()
    return ((got - wanted).square().mean().sqrt() / (wanted.square().mean().sqrt() + 1e-8)).item()
