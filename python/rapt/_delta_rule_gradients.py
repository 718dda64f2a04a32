"""Gradients of the delta rule, in PyTorch's arithmetic: rapt has no kernel for them yet.

The recurrence is differentiated by hand, token by token over all heads at once, and what comes before it (gate, norms, heads
that serve several) by autograd. Right for training, but a token takes a dozen calls of PyTorch: many times a kernel's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK = 64  # tokens whose states are kept at once; of the others, those at each beginning


class Options(NamedTuple):
    """What is no tensor."""

    rule: str
    scale: float
    l2norm_qk: bool
    beta_sigmoid: bool
    beta_double: bool
    gate: bool
    gate_lower_bound: float | None
    state_v_first: bool


def _autograd_within_operators() -> Any:
    """The dispatcher leaves autograd out below an operator, which this runs in."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _prepared(tensors: Sequence[Tensor | None], o: Options) -> list[Tensor | None]:
    """q [b, t, h, r, K] (head i of h is read by r query heads), k [b, t, h, K], v [b, t, h, V], g [b, t, h, K or 1] or None,
    beta [b, t, h] or None, and the state [b, h, K, V] or None: in the type of sums, and before the recurrence."""
    q, k, v, g, beta, state, a_log, dt_bias = tensors
    assert q is not None and k is not None and v is not None
    sums = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(sums), k.to(sums), v.to(sums)
    hq, hk, hv = q.shape[2], k.shape[2], v.shape[2]
    h = max(hk, hv)
    if o.l2norm_qk:
        q, k = _normalised(q), _normalised(k)
    k, v = k.repeat_interleave(h // max(hk, 1), 2), v.repeat_interleave(h // max(hv, 1), 2)
    q = q.repeat_interleave(max(h // max(hq, 1), 1), 2)
    q = q.reshape(*q.shape[:2], h, max(hq // max(h, 1), 1), q.shape[3])
    if g is not None:
        g = g.to(sums)
        if g.ndim == 1:
            g = g.expand(*q.shape[:2], h)
        if o.gate:
            z = g if dt_bias is None else g + dt_bias.to(sums)
            a = torch.ones(h, dtype=sums) if a_log is None else a_log.to(sums).exp()
            a = a if g.ndim == 3 else a[:, None]
            g = -a * functional.softplus(z) if o.gate_lower_bound is None else o.gate_lower_bound * torch.sigmoid(a * z)
        g = g if g.ndim == 4 else g[..., None]
    if beta is not None:
        beta = beta.to(sums)
        beta = beta.sigmoid() if o.beta_sigmoid else beta
        beta = beta * 2 if o.beta_double else beta
    if state is not None:
        state = state.to(sums)
        state = state.transpose(-1, -2) if o.state_v_first else state
    return [q, k, v, g, beta, state]


def _decayed(state: Tensor, g: Tensor | None, t: int) -> Tensor:
    return state if g is None else state * g[:, t, ..., None].exp()


def _written(k: Tensor, v: Tensor, beta: Tensor | None, decayed: Tensor, delta: bool, t: int) -> tuple[Tensor, Tensor]:
    """The error e of the prediction, and u, which is written."""
    e = v[:, t]
    if delta:
        e = e - torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
    return e, e if beta is None else beta[:, t, :, None] * e


def recurrence_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    scale: float,
    delta: bool,
    dout: Tensor,
    dstate: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of q, k, v, g, beta and state, as _prepared() gives them, by those of out [b, t, h, r, V] and of the last state.

    With G the gradient of the state after a token, the decayed state S~, e = v - S~^T k and u = beta e:

        G += scale q dout^T;  dq = scale S dout;  du = G^T k;  dbeta = du . e;  de = beta du;  dv = de
        dk = G u - S~ de;  G~ = G - k de^T;  dg = rowsum(G~ S~);  G = diag(exp(g)) G~
    """
    first = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if state is None else state
    tokens = k.shape[1]

    def after(s: Tensor, t: int) -> Tensor:
        decayed = _decayed(s, g, t)
        _, u = _written(k, v, beta, decayed, delta, t)
        return torch.addcmul(decayed, k[:, t, ..., None], u[:, :, None])

    starts, s = [], first
    for t in range(tokens):
        if t % _CHUNK == 0:
            starts.append(s)
        s = after(s, t)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dg = None if g is None else torch.zeros_like(g)
    dbeta = None if beta is None else torch.zeros_like(beta)
    G = torch.zeros_like(first) if dstate is None else dstate.clone()
    for begin in reversed(range(0, tokens, _CHUNK)):
        end = min(begin + _CHUNK, tokens)
        states = [starts[begin // _CHUNK]]
        for t in range(begin, end):
            states.append(after(states[-1], t))
        for t in reversed(range(begin, end)):
            decayed = _decayed(states[t - begin], g, t)
            e, u = _written(k, v, beta, decayed, delta, t)
            G = G + scale * torch.einsum("bhrk,bhrv->bhkv", q[:, t], dout[:, t])
            dq[:, t] = scale * torch.einsum("bhkv,bhrv->bhrk", states[t - begin + 1], dout[:, t])
            du = torch.einsum("bhkv,bhk->bhv", G, k[:, t])
            de = du
            if beta is not None and dbeta is not None:
                dbeta[:, t], de = (du * e).sum(-1), beta[:, t, :, None] * du
            dv[:, t] = de
            dk[:, t] = torch.einsum("bhkv,bhv->bhk", G, u)
            if delta:
                dk[:, t] -= torch.einsum("bhkv,bhv->bhk", decayed, de)
                G = G - k[:, t, ..., None] * de[:, :, None]
            if g is not None and dg is not None:
                of_channels = (G * decayed).sum(-1)
                dg[:, t] = of_channels if g.shape[-1] > 1 else of_channels.sum(-1, keepdim=True)
                G = G * g[:, t, ..., None].exp()
    return [dq, dk, dv, dg, dbeta, None if state is None else G]


def _of_batch(
    tensors: Sequence[Tensor | None], options: Options, dout: Tensor | None, dstate: Tensor | None
) -> list[Tensor | None]:
    """gradients() of a dense batch."""
    with torch.enable_grad(), _autograd_within_operators():
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        prepared = _prepared(leaves, options)
    q, k, v, g, beta, state = [None if x is None else x.detach() for x in prepared]
    assert q is not None and k is not None and v is not None
    if dout is None:
        dout = v.new_zeros(*q.shape[:4], v.shape[-1])
    else:
        dout = dout.to(v.dtype).reshape(*q.shape[:4], v.shape[-1])
    if dstate is not None:
        dstate = dstate.to(v.dtype)
        dstate = dstate.transpose(-1, -2) if options.state_v_first else dstate
    delta = options.rule in ("delta", "gated_delta")
    made = recurrence_gradients(q, k, v, g, beta, state, options.scale, delta, dout, dstate)
    pairs = [(x, dx) for x, dx in zip(prepared, made) if x is not None]
    given = [x for x in leaves if x is not None]
    with _autograd_within_operators():
        grads = iter(torch.autograd.grad([x for x, _ in pairs], given, [dx for _, dx in pairs], allow_unused=True))
    return [None if x is None else next(grads) for x in leaves]


def gradients(
    tensors: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    options: Options,
    dout: Tensor | None,
    dstate: Tensor | None,
) -> list[Tensor | None]:
    """Of q, k, v, g, beta, initial_state, a_log and dt_bias, in their types; None for those that are not given. Ragged ones
    are [total, h, ..] or [1, total, h, ..]."""
    if cu_seqlens is None:
        return _of_batch(tensors, options, dout, dstate)
    q = tensors[0]
    assert q is not None
    flat, rows = q.ndim == 3, list(tensors[:5])
    if flat:
        rows = [x if x is None or x.ndim == 1 else x[None] for x in rows]
        dout = None if dout is None else dout[None]
    total: list[Any] = [None if x is None else torch.zeros_like(x) for x in (*rows, *tensors[5:])]
    borders = cu_seqlens.tolist()
    per_token = [x is not None and x.ndim > 1 for x in rows]
    for i, (begin, end) in enumerate(zip(borders, borders[1:])):
        cut: list[Any] = [x[:, begin:end] if mine and x is not None else x for x, mine in zip(rows, per_token)]
        state, *gate = tensors[5:]
        cut += [None if state is None else state[i : i + 1], *gate]
        made = _of_batch(
            cut, options, None if dout is None else dout[:, begin:end], None if dstate is None else dstate[i : i + 1]
        )
        for n, dx in enumerate(made):
            if dx is None:
                continue
            if n < 5 and per_token[n]:
                total[n][:, begin:end] = dx
            elif n == 5:
                total[n][i : i + 1] = dx
            else:
                total[n] += dx
    return [x[0] if flat and n < 5 and per_token[n] else x for n, x in enumerate(total)]


def wanted_gradients(made: Sequence[Tensor | None], tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """Those that are wanted; zeros where the result does not depend on an input."""
    found = []
    for dx, x, want in zip(made, tensors, wanted):
        if want and x is not None:
            found.append(torch.zeros_like(x) if dx is None else dx.contiguous())
    return found
