"""Queries and keys normalised and rotated, and the keys in a cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import BOUNDS, Verdict, draw, numpy_types, share, wide
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        q, k_new, v_new, weight = draw(12, dtype, (2, 4, 5, 32), (2, 2, 5, 32), (2, 2, 5, 32), (32,))
        k, v = (np.zeros((2, 2, 20, 32), dtype) for _ in "kv")
        angles = np.arange(20)[:, None] * 100.0 ** -np.linspace(0, 1, 16)
        cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
        before = np.array([3, 15])
        out, _ = rapt.rotary_append_kv(q, k_new, v_new, k, v, before, cos=cos, sin=sin, rotary_dim=32, q_norm=weight)
        at = (before[:, None] + np.arange(5))[:, None]
        normed = wide(q) / np.sqrt((wide(q) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(weight)
        worst = 0.0
        for got, x in ((out, normed), (np.stack([k[0, :, 3:8], k[1, :, 15:20]]), wide(k_new))):
            x1, x2, c, s = x[..., :16], x[..., 16:], wide(cos)[at], wide(sin)[at]
            worst = max(worst, share(got, np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], -1), BOUNDS[name]))
        yield f"rotated queries and keys of {name}", worst
