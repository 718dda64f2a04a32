"""Scores of an indexer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import BOUNDS, Verdict, draw, numpy_types, share, wide
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        q, k = draw(6, dtype, (1, 70, 8, 64), (1, 200, 64))
        (w,) = draw(7, np.float32, (1, 70, 8))
        scores = rapt.dsa.index_scores(q, k, w, causal=False)
        wanted = np.einsum("bih,bihj->bij", wide(w), np.maximum(np.einsum("bihd,bjd->bihj", wide(q), wide(k)), 0)) / 8
        yield f"index scores of {name}", share(scores, wanted, BOUNDS["f32"])  # exact products, and results of f32
