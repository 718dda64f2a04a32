"""The largest scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import Verdict, draw
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    (scores,) = draw(8, np.float32, (20, 3000))
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, :100]
    yield "the largest of f32", 0.0 if (rapt.dsa.select_topk(scores, 100) == wanted).all() else np.inf
