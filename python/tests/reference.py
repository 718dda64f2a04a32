"""Attention in float64 by the textbook, and inputs for it."""

from __future__ import annotations

from typing import Any

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    softcap: float | None = None,
    alibi: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of docs/contract.md for [b, h, s, d]; row i sits at key i + offset."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    x = np.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        x = softcap * np.tanh(x / softcap)
    if bias is not None:
        x = x + bias
    distance = np.arange(k.shape[2]) - (np.arange(q.shape[2])[:, None] + offset)
    if alibi is not None:
        x = x - np.asarray(alibi, np.float64)[..., None, None] * np.abs(distance)
    attended = np.ones(x.shape, bool)
    if causal:
        attended &= distance <= 0
    if window[0] >= 0:
        attended &= distance >= -window[0]
    if window[1] >= 0:
        attended &= distance <= window[1]
    if mask is not None:
        attended &= mask
    if lengths is not None:
        attended &= np.arange(k.shape[2]) < np.asarray(lengths)[:, None, None, None]
    x = np.where(attended, x, -np.inf)
    if sinks is not None:
        logits = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*x.shape[:-1], 1))
        x = np.concatenate([x, logits], -1)
    with np.errstate(divide="ignore"):
        top = x.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        p = np.exp(x - top)
        total = p.sum(-1, keepdims=True)
        lse = (np.log(total) + top)[..., 0]
    weights = p[..., : k.shape[2]] / np.where(total == 0, 1, total)
    return weights @ v, lse


def inputs(b: int, hq: int, hk: int, sq: int, sk: int, d: int, dv: int | None = None, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv or d))
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def assert_close(got: Any, wanted: np.ndarray, eps: float = 2.0**-24) -> None:
    """To within a few roundings of the type whose unit roundoff is eps."""
    got = np.asarray(got, np.float64)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=32 * eps * max(1.0, float(np.abs(wanted).max(initial=0))))
