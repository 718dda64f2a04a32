"""Attention of one sequence as flash-attn's documentation has it, in float64 and with gradients."""

import torch

OUT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
GRADIENTS = {torch.float32: 5e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
# Products of bfloat16 sum weights that are bfloat16 (docs/contract.md).
LSE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 2**-7}
DTYPES = tuple(OUT)


def one(q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, sinks=None, first=0, kept=None, p=0.0):
    """out [sq, hq, dv], lse [hq, sq] and probabilities [hq, sq, sk] of q [sq, hq, d], k [sk, hk, d] and v [sk, hk, dv]. slopes,
    sinks: [hq]. No row sees a key before `first`. kept: what dropout of a share p leaves, [hq, sq, sk]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    x = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    sq, sk = x.shape[1:]
    key = torch.arange(sk)
    distance = key - (torch.arange(sq)[:, None] + sk - sq)
    if slopes is not None:
        x = x - slopes.double()[:, None, None] * distance.abs()
    seen = (key >= first).expand(sq, sk)
    if causal:
        seen = seen & (distance <= 0)
    if window[0] is not None and window[0] >= 0:
        seen = seen & (distance >= -window[0])
    if window[1] is not None and window[1] >= 0:
        seen = seen & (distance <= window[1])
    x = x.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        x = torch.cat((x, sinks.double()[:, None, None].expand(-1, sq, 1)), -1)
    empty = (x == -torch.inf).all(-1)
    # -inf throughout has no gradient.
    lse = torch.where(empty[..., None], 0.0, x).logsumexp(-1).masked_fill(empty, torch.inf)
    probs = (x[..., :sk] - lse[..., None]).exp().masked_fill(~seen, 0.0)
    weights = probs if kept is None else probs * kept / (1 - p)
    return torch.einsum("hij,jhd->ihd", weights, v), lse, probs


def batch(q, k, v, slopes=None, **given):
    """out [b, sq, hq, dv], lse [b, hq, sq] and probabilities [b, hq, sq, sk] of dense tensors, of slopes [hq] or [b, hq], and kept [b, hq, sq, sk]."""
    kept = given.pop("kept", None)
    made = [
        one(q[i], k[i], v[i], slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[i],
            kept=None if kept is None else kept[i], **given)
        for i in range(len(q))
    ]  # fmt: skip
    return tuple(torch.stack(parts) for parts in zip(*made))


def near(got, wanted, bound):
    """Of the largest element, or of 1. Infinities are in the same places."""
    got, wanted = got.detach().double(), wanted.detach().double()
    assert got.shape == wanted.shape and torch.equal(got.isinf(), wanted.isinf())
    finite = wanted.isfinite()
    off, largest = (got - wanted)[finite].abs(), wanted[finite].abs()
    if off.numel():
        assert off.max() <= bound * max(largest.max().item(), 1), f"off by {off.max()}"


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape).to(dtype).requires_grad_(grad)
