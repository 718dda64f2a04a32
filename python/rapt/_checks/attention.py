"""Attention, and attention over an i8 cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import rapt
from rapt._check_formulas import BOUNDS, Verdict, draw, numpy_types, share, softmax_attention, wide
from rapt._info import Entry


def verdicts(entry: Entry) -> Iterator[Verdict]:
    sq, sk = (3, 200) if entry["phase"] == "decode" else (150, 200)
    for name, dtype in numpy_types(entry):
        q, k, v = draw(1, dtype, (2, 4, sq, 64), (2, 2, sk, 64), (2, 2, sk, 64))
        out, lse = rapt.attention(q, k, v, causal=True, align="bottom_right", return_lse=True, kernel=entry["name"])
        wanted, wanted_lse = softmax_attention(wide(q), wide(k), wide(v))
        yield f"attention of {name}", max(share(out, wanted, BOUNDS[name]), share(lse, wanted_lse, BOUNDS[name]))
        if "i8" in entry["dtypes"] and name != "f16":
            random = np.random.default_rng(2)
            codes = [random.integers(-127, 128, (2, 2, sk, 64), np.int8) for _ in "kv"]
            scales = [random.uniform(0.005, 0.02, (2, 2, sk, 1)).astype(np.float32) for _ in "kv"]
            out = rapt.attention(q, *codes, k_scale=scales[0], v_scale=scales[1], causal=True, align="bottom_right", kernel=entry["name"])
            wanted, _ = softmax_attention(wide(q), *(wide(c) * s for c, s in zip(codes, scales, strict=True)))
            yield f"attention of {name} over an i8 cache", share(out, wanted, BOUNDS[name])
