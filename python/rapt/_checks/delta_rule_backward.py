"""Gradients of the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

import rapt
from rapt._check_formulas import BOUNDS, Verdict, draw, numpy_types, recurrence, slopes
from rapt._checks.delta_rule import delta_inputs
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        inputs = delta_inputs(dtype, 60)
        (dout,) = draw(5, dtype, (2, 60, 4, 32))
        found = rapt.delta_rule_backward(*inputs, dout=dout)
        gradients = [found.dq, found.dk, found.dv, found.dg, found.dbeta]
        yield f"gradients of the delta rule of {name}", slopes(recurrence, inputs, dout, gradients, BOUNDS[name])
