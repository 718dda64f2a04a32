"""Attention alone: rapt, PyTorch's scaled_dot_product_attention, and other ways that PyTorch has."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import rapt
import rapt.torch
from rapt._chart import title_of
from rapt.bench.report import Progress, ratio_text, time_text
from rapt.bench.sets import Case
from rapt.bench.timing import CLOCKS, add_ratio, interleave, statistics_of

CHECKED_ROWS = 256
MAX_MATH_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
BACKENDS = {  # which PyTorch chooses from on CUDA
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SIDES = ("rapt", "torch", "folded", *BACKENDS, "math")
PEER = "torch"
RATIOS = {"paused": "vs_torch", "back_to_back": "vs_torch_back_to_back", "its_fastest_way": "vs_fastest"}
_pytorch: Any = functional.scaled_dot_product_attention


def run_side(side: str, case: Case, tensors: list[Tensor]) -> Tensor:
    options: Any = {"is_causal": case.causal, "enable_gqa": case.hq != case.hk}
    q, k, v = tensors
    if side == "math":  # what SDPBackend.MATH chooses, without the switch, which would be timed
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, **options)[0]  # type: ignore[no-any-return]
    if side == "folded":  # query heads that share keys, as rows of one
        return _pytorch(q.reshape(case.b, case.hk, -1, case.d), k, v).reshape(case.b, case.hq, 1, case.dv)  # type: ignore[no-any-return]
    if side in BACKENDS:
        with sdpa_kernel(BACKENDS[side]):
            return _pytorch(q, k, v, **options)  # type: ignore[no-any-return]
    attention: Any = rapt.torch.scaled_dot_product_attention if side == "rapt" else _pytorch
    out: Tensor = attention(q, k, v, **options)
    return out


def sides_of(case: Case, tensors: list[Tensor], with_math: bool) -> list[str]:
    """Those that take the problem on this device."""

    def takes(side: str) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's reasons why a backend does not
                run_side(side, case, tensors)
        except RuntimeError:
            return False
        return True

    device = tensors[0].device.type
    sides = ["rapt", "torch"] + ["folded"] * (case.hq != case.hk and case.sq == 1 and not case.causal)
    sides += [side for side in BACKENDS if device == "cuda" and takes(side)]
    return sides + ["math"] * (with_math and case.score_bytes <= MAX_MATH_BYTES[device])


def samples_of(
    case: Case, sides: list[str], inputs: list[list[Tensor]], options: argparse.Namespace, pause: bool
) -> dict[str, list[float]]:
    calls = [[partial(run_side, side, case, tensors) for side in sides] for tensors in inputs]
    budget = {"seconds": options.seconds, "samples": options.samples, "sample_s": options.sample_ms * 1e-3}
    return dict(zip(sides, interleave(calls, pause=pause, clock=CLOCKS[options.device], **budget)))


def errors(case: Case, sides: list[str], inputs: list[list[Tensor]]) -> dict[str, tuple[float, float]]:
    """(max_err, rel_err) of each side, the worst of all inputs."""
    worst = dict.fromkeys(sides, (0.0, 0.0))
    device = inputs[0][0].device
    rows = torch.linspace(0, case.sq - 1, min(case.sq, CHECKED_ROWS)).long().to(device)
    for q, k, v in inputs:
        outs = {side: run_side(side, case, [q, k, v])[:, :, rows].double() for side in sides}
        exact = torch.empty_like(outs["rapt"])
        for i in range(case.b):
            for h in range(case.hq):
                keys, values = (t[i, h // (case.hq // case.hk)].double() for t in (k, v))
                scores = q[i, h, rows].double() @ keys.T / math.sqrt(case.d)
                if case.causal:
                    scores.masked_fill_(torch.arange(case.sk, device=device) > rows[:, None], -math.inf)
                exact[i, h] = torch.softmax(scores, -1) @ values
        for side, out in outs.items():
            found = float((out - exact).abs().max()), float((out - exact).norm() / exact.norm())
            worst[side] = max(worst[side][0], found[0]), max(worst[side][1], found[1])
    return worst


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)


@contextmanager
def peak_growth(device: str = "cpu") -> Iterator[list[int | None]]:
    """Its only element becomes the number of bytes by which the peak grew inside: of resident memory, None where systems do not
    tell; on "cuda" of the GPU memory that tensors take, with all work done before and inside."""
    found: list[int | None] = [None]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found[0] = torch.cuda.max_memory_allocated() - held
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        before = _status_bytes("VmHWM")
    except OSError:
        yield found
        return
    yield found
    found[0] = _status_bytes("VmHWM") - before


def memory_of_call(side: str, case: Case, threads: int) -> int | None:
    """Bytes by which the peak of resident memory grows in a call. Runs in a process that has made no call yet."""
    torch.set_num_threads(threads)
    small = replace(case, b=1, hq=threads, hk=threads, sq=16, sk=16)
    with torch.inference_mode():
        run_side("torch" if side == "folded" else side, small, small.tensors(0))  # starts the threads
        tensors = case.tensors(0)
        with peak_growth() as found:
            run_side(side, case, tensors)
    return found[0]


def memory(case: Case, sides: list[str], threads: int) -> dict[str, int | None]:
    # Forks of a process that has imported torch and started no thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return dict(zip(sides, pool.starmap(memory_of_call, [(side, case, threads) for side in sides], chunksize=1)))


def run_case(case: Case, threads: int | None, options: argparse.Namespace) -> dict[str, Any]:
    inputs = [case.tensors(seed, options.device) for seed in range(options.seeds)]
    with torch.inference_mode():
        sides = sides_of(case, inputs[0], not options.no_math)
        paused = samples_of(case, sides, inputs, options, pause=True)
        # On a GPU no threads of one side are in the other's way.
        pair = ["rapt", "torch"] if threads else []
        back_to_back = samples_of(case, pair, inputs, options, pause=False) if pair else {}
        found = errors(case, sides, inputs)
        uneven = case.causal and case.sq != case.sk
        plan = rapt.explain(*inputs[0], causal=case.causal, align="top_left" if uneven else None)
    used = memory(case, sides, threads) if threads and not options.no_memory else dict.fromkeys(sides)
    row: dict[str, Any] = {"threads": threads, **asdict(case), "problem": plan.problem, "entry": plan.entry}
    for side in sides:
        row[side] = statistics_of(paused[side])
        row[side] |= {"max_err": found[side][0], "rel_err": found[side][1], "peak_bytes": used[side]}
        row[side] |= {"gflops": case.flops / row[side]["median_ms"] / 1e6, "gbs": case.bytes / row[side]["median_ms"] / 1e6}
        if side in back_to_back:
            row[side]["back_to_back"] = statistics_of(back_to_back[side])
        if side != "rapt":
            add_ratio(row, f"vs_{side}", paused[side], paused["rapt"])
    row["fastest"] = min(sides[1:], key=lambda side: row[side]["median_ms"])
    add_ratio(row, "vs_fastest", paused[row["fastest"]], paused["rapt"])
    if back_to_back:
        add_ratio(row, "vs_torch_back_to_back", back_to_back["torch"], back_to_back["rapt"])
    return row


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with Progress(len(options.threads) * len(options.cases)) as progress:
        for threads in options.threads:
            if threads:
                torch.set_num_threads(threads)
            for case in options.cases:
                progress.begin(f"{title_of(case.dtype, threads)}, {case.name}")
                rows.append(run_case(case, threads, options))
    return rows


HEAD = ["problem", *(f"{side} ms" for side in SIDES), "torch/rapt, best", "fastest/rapt, best (which)"]
HEAD += ["back to back: rapt ms", "torch ms", "torch/rapt, best"]
HEAD += [f"{what} rapt / torch" for what in ("GFLOP/s", "GB/s", "max_err", "rel_err")] + ["peak MB rapt / torch / math"]


def cells_of(row: dict[str, Any]) -> list[str]:
    def both(field: str, form: str) -> str:
        return " / ".join(format(row[side][field], form) for side in ("rapt", "torch"))

    peaks = [row[side]["peak_bytes"] if side in row else None for side in ("rapt", "torch", "math")]
    alternating = "back_to_back" in row["rapt"]
    return [
        row["name"],
        *(time_text(row[side]) if side in row else "-" for side in SIDES),
        ratio_text(row, "vs_torch"),
        f"{ratio_text(row, 'vs_fastest')} ({row['fastest']})",
        *(time_text(row[side]["back_to_back"]) if alternating else "-" for side in ("rapt", "torch")),
        ratio_text(row, "vs_torch_back_to_back") if alternating else "-",
        both("gflops", ",.1f"),
        both("gbs", ",.1f"),
        both("max_err", ".1e"),
        both("rel_err", ".1e"),
        " / ".join("-" if peak is None else f"{peak / 1e6:.1f}" for peak in peaks),
    ]
