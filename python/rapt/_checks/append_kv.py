"""Keys and values written to an i8 cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import Verdict, draw, numpy_types, wide
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        k_new, v_new = draw(9, dtype, (2, 2, 5, 32), (2, 2, 5, 32))
        k, v = (np.full((2, 2, 20, 32), 7, np.int8) for _ in "kv")
        k_scale, v_scale = (np.ones((2, 2, 20, 1), np.float32) for _ in "kv")
        rapt.append_kv(k_new, v_new, k, v, np.array([3, 15]), k_scale=k_scale, v_scale=v_scale)
        worst = 0.0
        for new, codes, scales in ((k_new, k, k_scale), (v_new, v, v_scale)):
            for i, first in enumerate((3, 15)):
                rows = slice(first, first + 5)
                off = np.abs(wide(codes[i, :, rows]) * scales[i, :, rows] - wide(new[i])) / scales[i, :, rows]
                others = np.delete(codes[i], np.arange(first, first + 5), axis=1)
                worst = max(worst, float(off.max()) / 0.51 if (others == 7).all() else np.inf)
        yield f"an i8 cache of {name}", worst
