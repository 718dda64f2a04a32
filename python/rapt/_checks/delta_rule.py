"""The gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import rapt
from rapt._check_formulas import Arrays, BOUNDS, Verdict, draw, numpy_types, recurrence, share, wide
from rapt._info import Entry


def delta_inputs(dtype: Any, t: int) -> Arrays:
    q, k, v, g, beta = draw(4, np.float32, *((2, t, 4, 32),) * 3, *((2, t, 4),) * 2)
    k /= np.linalg.norm(k, axis=3, keepdims=True)
    return [x.astype(dtype) for x in (q, k, v, -np.abs(g) / 8, 1 / (1 + np.exp(-beta)))]


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        inputs = delta_inputs(dtype, 1 if entry["phase"] == "decode" else 150)
        wanted = recurrence(*(wide(x) for x in inputs))
        yield f"the delta rule of {name}", share(rapt.delta_rule(*inputs), wanted, BOUNDS[name])
