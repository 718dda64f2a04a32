"""rapt.torch.indexer_loss: what the indexer of DeepSeek Sparse Attention is trained with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt import _refusals
from rapt._autocast import without_autocast
from rapt._autograd import no_second_derivatives
from rapt._scalars import finite

# Probabilities of heads, or columns of listed keys, that the loss has at a time; at least those of one token.
_CHUNK = 1 << 22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _teacher(q: Tensor, k: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """The sum over heads of attention's probabilities, [tokens, keys], divided by what each token's come to; 0 where it sees no key.

    q is [hq, tokens, d], k [hk, keys, d], or [hk, tokens, keys, d] of keys of their own, and seen [tokens, keys].
    """
    hq, tokens, d = q.shape
    if k.ndim == 3:
        products = q.float().reshape(len(k), -1, d) @ k.float().mT
    else:
        products = (q.float().reshape(len(k), -1, tokens, d).transpose(1, 2) @ k.float().mT).transpose(1, 2)
    x = (scale * products).reshape(hq, tokens, -1).masked_fill(~seen, -torch.inf)
    lse = x.logsumexp(2)
    p = x - lse[..., None]
    if sinks is not None:
        # Of each head the share that its sink leaves, relative to the largest: sinks far above all scores would leave nothing.
        shares = torch.nn.functional.logsigmoid(lse - sinks.float()[:, None])
        p += (shares - shares.amax(0).masked_fill_((shares == -torch.inf).all(0), 0.0))[..., None]
    p = p.exp_().masked_fill_(~seen, 0.0).sum(0)
    return p / p.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


class _Gradient(torch.autograd.Function):
    """The gradient of the scores where it is recorded itself (create_graph), as a function of them."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, scores: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    backward = staticmethod(no_second_derivatives("indexer_loss"))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        empty_scores: Tensor,
        q: Tensor,
        k: Tensor,
        indices: Tensor | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """The gradient is made along with the loss, from what both have in common. `empty_scores` is no element of them, which
        is enough to say later what the gradient depends on: the scores themselves need not be kept."""
        b, sq, sk = scores.shape
        dscores = torch.zeros_like(scores) if ctx.needs_input_grad[0] else None
        elements_of_token = q.shape[1] * sk
        if indices is not None:  # each token has a copy of its keys
            elements_of_token = indices.shape[2] * max(q.shape[1], k.shape[1] * k.shape[3])
        step = max(_CHUNK // max(elements_of_token, 1), 1)
        loss = torch.zeros((), dtype=torch.float64, device="cpu")
        for n in range(b):
            rows = k[n if k.shape[0] > 1 else 0]
            for first in range(0, sq, step):
                tokens = slice(first, min(first + step, sq))
                chunk = scores[n, tokens].float()
                if indices is None:
                    seen, keys = chunk != -torch.inf, rows  # NaN is seen
                else:
                    listed = indices[n, tokens].long()
                    seen, listed = listed >= 0, listed.clamp_min(0)
                    chunk = chunk.gather(1, listed).masked_fill(~seen, -torch.inf)
                    seen, keys = chunk != -torch.inf, rows[:, listed].masked_fill(~seen[:, :, None], 0.0)
                p = _teacher(q[n, :, tokens], keys, seen, scale, sinks)
                seen = seen & (p != 0).any(1, keepdim=True)  # where sinks are inf, attention gives its keys nothing
                log_i = chunk.log_softmax(1).masked_fill(~seen, 0.0)
                loss += (torch.special.xlogy(p, p) - p * log_i).sum(dtype=torch.float64)
                if dscores is None:
                    continue
                difference = (log_i.exp() - p).masked_fill(~seen, 0.0).to(scores.dtype)
                if indices is None:
                    dscores[n, tokens] = difference
                else:
                    dscores[n, tokens].scatter_add_(1, listed, difference)
        ctx.save_for_backward(dscores, empty_scores)
        return loss.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dscores, empty_scores = ctx.saved_tensors
        if dscores is not None:
            dscores = dscores * dloss
            if torch.is_grad_enabled():
                dscores = _Gradient.apply(dscores, empty_scores)  # type: ignore[no-untyped-call]
        return (dscores, *[None] * 6)


@without_autocast
def indexer_loss(
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    indices: Tensor | None = None,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The training loss of a DSA indexer: the sum over tokens of KL(p || softmax(scores)), for attention's
    probabilities p.

    Source: DeepSeek-V3.2-Exp, 2025. p, the teacher, is the sum over heads of attention's probabilities for a token's
    keys, divided by its total. It is a constant: only `scores` has a gradient, softmax(scores) - p. Symbols: b batch,
    sq query tokens, sk keys, hq query heads, hk KV heads, d head dimension.

    scores          float32 [b, sq, sk] from index_scores; -inf for keys that a token does not see. With bfloat16 or
                    float16 scores the gradient is rounded to their type.
    q, k            Attention's queries and keys, [b, hq, sq, d] and [b or 1, hk, sk, d], of float32, bfloat16 or
                    float16.
    indices         int32 or int64 [b, sq, n]: the selected keys of each token, -1 for none. p and the softmax cover
                    these keys; a key that is listed twice counts twice. Default: all keys that the token sees, as in
                    the indexer's warm-up.
    scale           Attention's. Default d**-0.5.
    sinks           Attention's, [hq]. Default: none.

    Returns a float32 scalar; divide it by the number of tokens for the mean. A token without keys contributes nothing;
    a NaN among the scores that a token sees makes the loss NaN. Probabilities are float32, also under autocast, and
    held for a few tokens at a time. The function consists of PyTorch operations and runs in eager mode. There are no
    second derivatives. Raises TypeError or ValueError, which names the argument.
    """
    named = {"scores": scores, "q": q, "k": k, "indices": indices, "sinks": sinks}
    _refusals.check_tensors(named, "an array by torch.from_dlpack()", "the indexer has no GPU kernels yet")
    for name, x, ndim in (("scores", scores, 3), ("q", q, 4), ("k", k, 4), ("sinks", sinks, 1)):
        if x is None and name == "sinks":
            continue
        if x is None:
            raise TypeError(f"{name}: got None; wanted a tensor")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: got {x.dtype}; wanted torch.float32, torch.bfloat16 or torch.float16")
        if x.ndim != ndim:
            raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {ndim} dimensions")
    b, sq, sk = scores.shape
    if q.shape[0] != b or q.shape[2] != sq or q.shape[1] == 0 or q.shape[3] == 0:
        raise ValueError(f"q: got shape {list(q.shape)}; wanted [{b}, hq, {sq}, d], for the scores' {b} sequences of {sq} tokens")
    if k.shape[0] not in (1, b) or k.shape[1] == 0 or q.shape[1] % k.shape[1] or k.shape[2] != sk or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: got shape {list(k.shape)}; wanted [{b} or 1, hk, {sk}, {q.shape[3]}], hk a divisor of {q.shape[1]}")
    if sinks is not None and len(sinks) != q.shape[1]:
        raise ValueError(f"sinks: got shape {list(sinks.shape)}; wanted q's heads hq = {q.shape[1]}")
    if indices is not None:
        if indices.dtype not in (torch.int32, torch.int64) or indices.ndim != 3 or indices.shape[:2] != scores.shape[:2]:
            raise ValueError(f"indices: got {indices.dtype} {list(indices.shape)}; wanted int32 or int64 [{b}, {sq}, n]")
        if indices.numel() and int(indices.max()) >= sk:
            raise ValueError(f"indices: got {int(indices.max())}; wanted less than sk = {sk}")
    factor = finite("scale", scale)
    given = (scores, scores[:0].clone(), q, k, indices, q.shape[3] ** -0.5 if factor is None else factor, sinks)
    loss: Tensor = _Loss.apply(*given)  # type: ignore[no-untyped-call]
    return loss
