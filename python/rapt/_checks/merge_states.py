"""Partial results of attention put together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import BOUNDS, Verdict, draw, numpy_types, share, wide
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        outs = draw(10, dtype, *((2, 4, 30, 48),) * 3)
        lses = draw(11, np.float32, *((2, 4, 30),) * 3)
        weights = np.exp(wide(lses))
        wanted = (weights[..., None] * wide(outs)).sum(0) / weights.sum(0)[..., None]
        yield f"merged states of {name}", share(rapt.merge_states(outs, lses), wanted, BOUNDS[name])
