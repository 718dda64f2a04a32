"""Timing in turns, and what is made of the samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

PAUSE_S = 0.01  # idle threads of OpenMP and oneTBB have stopped spinning by then
NOISY = 0.2

Call = Callable[[], object]
Clock = Callable[..., float]


def seconds_of(call: Call, count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def cuda_seconds_of(call: Call, count: int = 1) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / count


CLOCKS: dict[str, Clock] = {"cpu": seconds_of, "cuda": cuda_seconds_of}


def calls_per_sample(call: Call, min_seconds: float, clock: Clock = seconds_of) -> int:
    seconds = clock(call)
    if seconds < 10 * min_seconds:  # the first call also pays for starting threads and touching memory
        seconds = min(seconds, clock(call))
    return max(1, math.ceil(min_seconds / seconds))


def interleave(
    inputs: Sequence[Sequence[Call]], *, pause: bool, seconds: float, samples: int, sample_s: float, clock: Clock = seconds_of
) -> list[list[float]]:
    """Samples in seconds per call, a list for each side. `inputs` has for each input a call of every side.

    Rounds take the inputs in turn, until `seconds` are over and there are at least `samples`. With `pause` a sample is one
    side's calls alone, after a pause (none on a GPU) and a call that is not counted. Without, sides alternate from call to
    call, with nothing in between. Either way it lasts `sample_s` or more.
    """
    counts = [calls_per_sample(call, sample_s, clock) for call in inputs[0]]
    found: list[list[float]] = [[] for _ in counts]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < max(samples, len(inputs)):
        calls = inputs[len(found[0]) % len(inputs)]
        if pause:
            for call, count, own in zip(calls, counts, found):
                time.sleep(PAUSE_S if clock is seconds_of else 0)
                call()
                own.append(clock(call, count))
        else:
            sums = [0.0] * len(calls)
            for _ in range(max(counts)):
                for i, call in enumerate(calls):
                    sums[i] += clock(call)
            for own, total in zip(found, sums):
                own.append(total / max(counts))
    return found


def spread_of(samples: list[float]) -> float:
    """The distance between the quartiles over the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def statistics_of(samples: list[float]) -> dict[str, Any]:
    times = {"median_ms": statistics.median(samples) * 1e3, "best_ms": min(samples) * 1e3}
    return times | {"spread": spread_of(samples), "samples": len(samples)}


def add_ratio(row: dict[str, Any], name: str, theirs: list[float], ours: list[float]) -> None:
    """Their time over ours: row[name] is the median over pairs of neighbours, row[name_best] that of the best samples.
    Where the spread of either passes NOISY, row["noisy"] gets the name."""
    row[name] = statistics.median(a / b for a, b in zip(theirs, ours))
    row[f"{name}_best"] = min(theirs) / min(ours)
    noisy = row.setdefault("noisy", [])
    if max(spread_of(theirs), spread_of(ours)) > NOISY:
        noisy.append(name)


def mean_of(rows: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    """Geometric mean, least and most of row[name]. Noisy rows are only counted; if all are, there is no mean (None)."""
    every = list(rows)
    ratios = [row[name] for row in every if name not in row["noisy"]]
    mean = {"cases": len(ratios), "left_out": len(every) - len(ratios)}
    return mean | {
        "geomean": statistics.geometric_mean(ratios) if ratios else None,
        "least": min(ratios, default=None),
        "most": max(ratios, default=None),
    }


def mean_text(mean: dict[str, Any]) -> str:
    left_out = f"; {mean['left_out']} left out as noisy" if mean["left_out"] else ""
    if mean["geomean"] is None:
        return f"no mean{left_out}"
    rows = f"{mean['cases']} row{'s' * (mean['cases'] != 1)}"
    return f"geometric mean {mean['geomean']:.2f}, {mean['least']:.2f} to {mean['most']:.2f} ({rows}{left_out})"
