"""Attention alone: rapt, PyTorch's scaled_dot_product_attention, and its plain three steps."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import rapt
import rapt.torch
from rapt.bench.report import DTYPES, Progress, ratio_text, time_text
from rapt.bench.timing import add_ratio, interleave, statistics_of

CHECKED_ROWS = 256
MAX_MATH_BYTES = 1 << 30
SIDES = ("rapt", "torch", "math")
PEER = "torch"
RATIOS = {"paused": "vs_torch", "back_to_back": "vs_torch_back_to_back"}
_pytorch: Any = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """One problem. Causal ones have as many queries as keys."""

    name: str
    b: int
    hq: int
    hk: int
    sq: int
    sk: int
    d: int
    causal: bool

    def tensors(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((self.hq, self.sq), (self.hk, self.sk), (self.hk, self.sk))
        return [torch.randn(self.b, h, s, self.d, generator=generator).to(dtype) for h, s in shapes]

    @property
    def score_bytes(self) -> int:
        return self.b * self.hq * self.sq * self.sk * 4


def _square(s: int, d: int, causal: bool) -> Case:
    return Case(f"S={s} d={d} {'causal' if causal else 'full'}", 1, 8, 8, s, s, d, causal)


def _squares(lengths: Iterable[int], dims: Iterable[int]) -> list[Case]:
    return [_square(s, d, causal) for d in dims for s in lengths for causal in (False, True)]


MODELS = [
    Case("Tiny: 4 heads of 32 x 32", 1, 4, 4, 32, 32, 32, False),
    Case("BERT: 8 texts of 128", 8, 12, 12, 128, 128, 64, False),
    Case("GPT-2: 1024 causal", 1, 12, 12, 1024, 1024, 64, True),
    Case("Llama: 2048 causal, GQA 4, d=128", 1, 32, 8, 2048, 2048, 128, True),
    Case("ViT-B/16: 197 tokens", 1, 12, 12, 197, 197, 64, False),
    Case("ViT-L/14: 257 tokens", 1, 16, 16, 257, 257, 64, False),
    Case("ViT-H/14: 257 tokens, d=80", 1, 16, 16, 257, 257, 80, False),
    Case("SigLIP: 729 tokens, d=72", 1, 16, 16, 729, 729, 72, False),
    Case("Diffusion: 1024 pixels, d=40", 2, 8, 8, 1024, 1024, 40, False),
    Case("Diffusion: 1024 pixels to 77 words", 2, 8, 8, 1024, 77, 40, False),
    Case("Whisper: 1500 frames", 1, 12, 12, 1500, 1500, 64, False),
    Case("Phi: 512 causal, d=96", 1, 32, 32, 512, 512, 96, True),
    Case("Gemma: 512 causal, d=256", 1, 8, 4, 512, 512, 256, True),
    Case("MiniLM: 16 texts of 128, d=32", 16, 12, 12, 128, 128, 32, False),
    Case("Decode: 1 row, 512 keys, MHA", 1, 32, 32, 1, 512, 128, False),
    Case("Decode: 1 row, 4096 keys, GQA 4", 1, 32, 8, 1, 4096, 128, False),
    Case("Decode: 8 rows, 2048 keys, GQA 4", 8, 32, 8, 1, 2048, 128, False),
]
SETS: dict[str, Callable[[], list[Case]]] = {
    "quick": lambda: _squares((128, 512, 1024), (64,)),
    "full": lambda: _squares((128, 512, 1024, 2048, 4096), (64, 128)),
    "models": lambda: MODELS,
}


def run_side(side: str, case: Case, tensors: list[Tensor]) -> Tensor:
    options: Any = {"is_causal": case.causal, "enable_gqa": case.hq != case.hk}
    if side == "math":  # what SDPBackend.MATH chooses, without the switch, which would be timed
        return torch.ops.aten._scaled_dot_product_attention_math(*tensors, **options)[0]  # type: ignore[no-any-return]
    attention: Any = rapt.torch.scaled_dot_product_attention if side == "rapt" else _pytorch
    out: Tensor = attention(*tensors, **options)
    return out


def samples_of(
    case: Case, sides: list[str], inputs: list[list[Tensor]], options: argparse.Namespace, pause: bool
) -> dict[str, list[float]]:
    calls = [[partial(run_side, side, case, tensors) for side in sides] for tensors in inputs]
    budget = {"seconds": options.seconds, "samples": options.samples, "sample_s": options.sample_ms * 1e-3}
    return dict(zip(sides, interleave(calls, pause=pause, **budget)))


def errors(case: Case, sides: list[str], inputs: list[list[Tensor]]) -> dict[str, tuple[float, float]]:
    """(max_err, rel_err) of each side, the worst of all inputs."""
    worst = dict.fromkeys(sides, (0.0, 0.0))
    rows = torch.linspace(0, case.sq - 1, min(case.sq, CHECKED_ROWS)).long()
    for q, k, v in inputs:
        outs = {side: run_side(side, case, [q, k, v])[:, :, rows].double() for side in sides}
        exact = torch.empty_like(outs["rapt"])
        for i in range(case.b):
            for h in range(case.hq):
                keys, values = (t[i, h // (case.hq // case.hk)].double() for t in (k, v))
                scores = q[i, h, rows].double() @ keys.T / math.sqrt(case.d)
                if case.causal:
                    scores.masked_fill_(torch.arange(case.sk) > rows[:, None], -math.inf)
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


def memory_of_call(side: str, case: Case, dtype: str, threads: int) -> int | None:
    """Bytes by which the peak of resident memory grows in a call. Runs in a process that has made no call yet."""
    torch.set_num_threads(threads)
    small = Case("", 1, threads, threads, 16, 16, case.d, case.causal)
    try:
        with torch.inference_mode():
            run_side(side, small, small.tensors(DTYPES[dtype], 0))  # starts the threads
            tensors = case.tensors(DTYPES[dtype], 0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
            before = _status_bytes("VmHWM")
            run_side(side, case, tensors)
            return _status_bytes("VmHWM") - before
    except OSError:
        return None


def memory(case: Case, sides: list[str], dtype: str, threads: int) -> dict[str, int | None]:
    # Forks of a process that has imported torch and started no thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return dict(zip(sides, pool.starmap(memory_of_call, [(side, case, dtype, threads) for side in sides], chunksize=1)))


def run_case(case: Case, dtype: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    sides = [s for s in SIDES if s != "math" or (not options.no_math and case.score_bytes <= MAX_MATH_BYTES)]
    inputs = [case.tensors(DTYPES[dtype], seed) for seed in range(options.seeds)]
    with torch.inference_mode():
        paused = samples_of(case, sides, inputs, options, pause=True)
        back_to_back = samples_of(case, ["rapt", "torch"], inputs, options, pause=False)
        found = errors(case, sides, inputs)
        entry = rapt.explain(*inputs[0], causal=case.causal).entry
    used = dict.fromkeys(sides) if options.no_memory else memory(case, sides, dtype, threads)
    row: dict[str, Any] = {"dtype": dtype, "threads": threads, **asdict(case), "entry": entry}
    for side in sides:
        row[side] = statistics_of(paused[side])
        row[side] |= {"max_err": found[side][0], "rel_err": found[side][1], "peak_bytes": used[side]}
        row[side]["tokens_per_s"] = case.b * case.sq / row[side]["median_ms"] * 1e3
        if side in back_to_back:
            row[side]["back_to_back"] = statistics_of(back_to_back[side])
        if side != "rapt":
            add_ratio(row, f"vs_{side}", paused[side], paused["rapt"])
    add_ratio(row, "vs_torch_back_to_back", back_to_back["torch"], back_to_back["rapt"])
    return row


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = SETS[options.set]()
    rows = []
    with Progress(len(options.threads) * len(options.dtype) * len(cases)) as progress:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for dtype in options.dtype:
                for case in cases:
                    progress.begin(f"{dtype}, {threads} threads, {case.name}")
                    rows.append(run_case(case, dtype, threads, options))
                    progress.step()
    return rows


HEAD = ["problem", "paused: rapt ms", "torch ms", "math ms", "torch/rapt, best", "math/rapt, best"]
HEAD += ["back to back: rapt ms", "torch ms", "torch/rapt, best", "rapt tokens/s", "torch tokens/s"]
HEAD += ["max_err rapt / torch", "rel_err rapt / torch", "peak MB rapt / torch / math"]


def cells_of(row: dict[str, Any]) -> list[str]:
    def both(field: str) -> str:
        return " / ".join(f"{row[side][field]:.1e}" for side in ("rapt", "torch"))

    peaks = [row[side]["peak_bytes"] if side in row else None for side in SIDES]
    return [
        row["name"],
        *(time_text(row[side]) if side in row else "-" for side in SIDES),
        *(ratio_text(row, f"vs_{side}") if side in row else "-" for side in SIDES[1:]),
        *(time_text(row[side]["back_to_back"]) for side in ("rapt", "torch")),
        ratio_text(row, "vs_torch_back_to_back"),
        *(f"{row[side]['tokens_per_s']:,.0f}" for side in ("rapt", "torch")),
        both("max_err"),
        both("rel_err"),
        " / ".join("-" if peak is None else f"{peak / 1e6:.1f}" for peak in peaks),
    ]
