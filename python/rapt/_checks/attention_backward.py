"""Gradients of attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import BOUNDS, Verdict, draw, numpy_types, slopes, softmax_attention, wide
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        q, k, v, dout = draw(3, dtype, (1, 4, 150, 64), (1, 2, 200, 64), (1, 2, 200, 64), (1, 4, 150, 64))
        out, lse = softmax_attention(wide(q), wide(k), wide(v))
        gradients = rapt.attention_backward(
            dout, q, k, v, out.astype(dtype), lse.astype(np.float32), causal=True, align="bottom_right"
        )
        error = slopes(lambda *x: softmax_attention(*x)[0], [q, k, v], dout, [gradients.dq, gradients.dk, gradients.dv], BOUNDS[name])
        yield f"gradients of attention of {name}", error
