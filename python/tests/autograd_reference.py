"""Attention in float64 of PyTorch's plain operators, whose gradients are the wanted ones."""

import torch

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
        x = torch.cat([x, sinks[:, None, None].expand(*x.shape[:-1], 1)], -1)
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
