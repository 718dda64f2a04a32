"""rapt beside PyTorch's scaled_dot_product_attention: speed, errors against float64, memory.

    python -m rapt.bench --set quick
    python -m rapt.bench --set full --dtype fp32,bf16 --threads 1,2 --json bench.json --svg bench.svg

Both sides, and PyTorch's plain three steps ("math"), are called by the same function signature on the same tensors in one
process with the same number of threads. Samples alternate between the sides and between seeds. With more than one thread
there is a pause before each sample, and a call that is not counted: threads of either library spin for a while after their
work and would disturb the other. A sample is the mean over enough calls to last --sample-ms. A time is the median of the
samples, ± half the distance between their quartiles; a ratio the median over pairs of neighbours, which what slows both
down leaves alone, and after it that of the two best samples.

A fallback of rapt to PyTorch is an error here. Errors are those of up to 256 query rows of every head, the worst seed's;
max_err is the largest |out - exact|, rel_err |out - exact| / |exact| in the Frobenius norm. Memory is the growth of the
process's resident peak during one call in a process of its own, result included, to within some 0.3 MB a thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    import torch
    from torch import Tensor
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("rapt.bench compares with PyTorch, which is not installed: pip install torch")

import rapt
import rapt.torch
from rapt import _chart

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAUSE_S = 0.01
CHECKED_ROWS = 256
MAX_MATH_BYTES = 1 << 30
SIDES = ("rapt", "torch", "math")
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
    attention: Any = rapt.torch.scaled_dot_product_attention if side == "rapt" else _pytorch
    out: Tensor = attention(*tensors, is_causal=case.causal, enable_gqa=case.hq != case.hk)
    return out


@contextmanager
def backend_of(side: str) -> Iterator[None]:
    if side == "math":
        with sdpa_kernel(SDPBackend.MATH):
            yield
    else:
        yield


def seconds_of(call: Callable[[], object], count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def calls_per_sample(call: Callable[[], object], least_s: float) -> int:
    seconds = seconds_of(call)
    if seconds < 10 * least_s:  # the first call also pays for starting threads and touching memory
        seconds = min(seconds, seconds_of(call))
    return max(1, math.ceil(least_s / seconds))


def sample(case: Case, sides: list[str], inputs: list[list[Tensor]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per call, alternating between sides, and between seeds from round to round."""
    samples: dict[str, list[float]] = {side: [] for side in sides}
    counts = {}
    for side in sides:
        with backend_of(side):
            counts[side] = calls_per_sample(lambda side=side: run_side(side, case, inputs[0]), options.sample_ms * 1e-3)  # type: ignore[misc]
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(samples[sides[0]]) < max(options.samples, len(inputs)):
        tensors = inputs[len(samples[sides[0]]) % len(inputs)]
        for side in sides:
            with backend_of(side):
                if torch.get_num_threads() > 1:
                    time.sleep(PAUSE_S)
                run_side(side, case, tensors)
                samples[side].append(seconds_of(lambda side=side: run_side(side, case, tensors), counts[side]))  # type: ignore[misc]
    return samples


def errors(case: Case, sides: list[str], inputs: list[list[Tensor]]) -> dict[str, tuple[float, float]]:
    """(max_err, rel_err) of each side, the worst of all inputs."""
    worst = dict.fromkeys(sides, (0.0, 0.0))
    rows = torch.linspace(0, case.sq - 1, min(case.sq, CHECKED_ROWS)).long()
    for q, k, v in inputs:
        outs = {}
        for side in sides:
            with backend_of(side):
                outs[side] = run_side(side, case, [q, k, v])[:, :, rows].double()
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
        with torch.inference_mode(), backend_of(side):
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
        samples = sample(case, sides, inputs, options)
        found = errors(case, sides, inputs)
        entry = rapt.explain(*inputs[0], causal=case.causal).entry
    used = dict.fromkeys(sides) if options.no_memory else memory(case, sides, dtype, threads)
    row: dict[str, Any] = {"dtype": dtype, "threads": threads, **asdict(case), "entry": entry}
    for side in sides:
        quartiles = statistics.quantiles(samples[side], n=4)
        median = statistics.median(samples[side])
        row[side] = {
            "median_ms": median * 1e3,
            "best_ms": min(samples[side]) * 1e3,
            "spread": (quartiles[2] - quartiles[0]) / median,
            "samples": len(samples[side]),
            "tokens_per_s": case.b * case.sq / median,
            "max_err": found[side][0],
            "rel_err": found[side][1],
            "peak_bytes": used[side],
        }
        if side != "rapt":
            pairs = zip(samples[side], samples["rapt"])
            row[f"vs_{side}"] = statistics.median(theirs / ours for theirs, ours in pairs)
            row[f"vs_{side}_best"] = min(samples[side]) / min(samples["rapt"])
    return row


HEAD = ["problem", "rapt ms", "torch ms", "math ms", "torch/rapt, best", "math/rapt, best", "rapt tokens/s", "torch tokens/s"]
HEAD += ["max_err rapt / torch", "rel_err rapt / torch", "peak MB rapt / torch / math"]


def cells_of(row: dict[str, Any]) -> list[str]:
    def timed(side: str) -> str:
        return f"{row[side]['median_ms']:.3f} ±{row[side]['spread'] * 50:.0f}%" if side in row else "-"

    def ratio(side: str) -> str:
        return f"{row[f'vs_{side}']:.2f} / {row[f'vs_{side}_best']:.2f}" if side in row else "-"

    def both(field: str) -> str:
        return " / ".join(f"{row[side][field]:.1e}" for side in ("rapt", "torch"))

    peaks = [row[side]["peak_bytes"] if side in row else None for side in SIDES]
    return [
        row["name"],
        *(timed(side) for side in SIDES),
        *(ratio(side) for side in SIDES[1:]),
        *(f"{row[side]['tokens_per_s']:,.0f}" for side in ("rapt", "torch")),
        both("max_err"),
        both("rel_err"),
        " / ".join("-" if peak is None else f"{peak / 1e6:.1f}" for peak in peaks),
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [cells_of(row) for row in rows]
    measured = [i for i in range(len(HEAD)) if any(line[i].strip("-/ ") for line in cells)]
    table = [[line[i] for i in measured] for line in [HEAD, *cells]]
    widths = [max(len(line[i]) for line in table) for i in range(len(measured))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["threads"]), []).append(row["vs_torch"])
    return [
        {"dtype": dtype, "threads": threads, "cases": len(ratios)}
        | {"geomean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
        for (dtype, threads), ratios in groups.items()
    ]


def context_of(options: argparse.Namespace) -> dict[str, Any]:
    info = rapt.info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": info["cpu"],
        "system": platform.platform(),
        "rapt": info["version"],
        "isas": info["isas"],
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "set": options.set,
        "seeds": options.seeds,
    }


class Progress:
    """A bar on a terminal (tqdm's where that is installed), nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.bar = total, 0, None
        self.shown = sys.stderr.isatty()
        if self.shown:
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=total, unit="case", leave=False)
            except ImportError:
                pass

    def begin(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_description(text)
        elif self.shown:
            filled = 30 * self.done // self.total
            sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}  {text}")
            sys.stderr.flush()

    def step(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            sys.stderr.write("\r\x1b[K")


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    def dtypes(text: str) -> list[str]:
        for word in text.split(","):
            if word not in DTYPES:
                raise argparse.ArgumentTypeError(f"{word}: wanted some of {','.join(DTYPES)}")
        return text.split(",")

    def counts(text: str) -> list[int]:
        if not all(word.isdigit() and int(word) > 0 for word in text.split(",")):
            raise argparse.ArgumentTypeError(f"{text}: wanted numbers from 1, for example 1,2")
        return [int(word) for word in text.split(",")]

    def count(text: str) -> int:
        return counts(text)[0]

    def output(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: cannot be written")
        return path

    parser = argparse.ArgumentParser("python -m rapt.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="quick", help="shapes: a few, the table of lengths, real models'")
    parser.add_argument("--dtype", type=dtypes, default=["fp32"], help="fp32, bf16, fp16, or several: fp32,bf16")
    parser.add_argument("--threads", type=counts, help="numbers of threads, for example 1,2 (default: PyTorch's)")
    parser.add_argument("--seeds", type=count, default=3, help="different inputs of each shape (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.9, help="time for the samples of a shape (default: %(default)s)")
    parser.add_argument("--samples", type=count, default=5, help="least number of samples of a side (default: %(default)s)")
    parser.add_argument("--sample-ms", type=float, default=4.0, help="least time of a sample (default: %(default)s)")
    parser.add_argument("--no-math", action="store_true", help="leave out PyTorch's math backend")
    parser.add_argument("--no-memory", action="store_true", help="leave out the measurement of memory")
    parser.add_argument("--json", type=output, help="also write everything to this file")
    parser.add_argument("--svg", type=output, help="also draw a chart into this file")
    options = parser.parse_args(words)
    options.threads = options.threads or [torch.get_num_threads()]
    return options


def main(words: list[str] | None = None) -> None:
    options = parse_arguments(words)
    warnings.simplefilter("error", rapt.torch.FallbackWarning)
    cases, context = SETS[options.set](), context_of(options)
    print(f"rapt {context['rapt']} and torch {context['torch']} ({context['torch_cpu_capability']}) on {context['cpu']}")
    if context["load_average"] > 0.5:
        print(f"The machine is at work already (load average {context['load_average']}): times will scatter.")
    progress = Progress(len(options.threads) * len(options.dtype) * len(cases))
    rows = []
    before = torch.get_num_threads()
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for dtype in options.dtype:
                for case in cases:
                    progress.begin(f"{dtype}, {threads} threads, {case.name}")
                    rows.append(run_case(case, dtype, threads, options))
                    progress.step()
    finally:
        torch.set_num_threads(before)
        progress.close()
    summary = summary_of(rows)
    if options.json:
        document = {"context": context, "rows": rows, "summary": summary}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.svg:
        options.svg.write_text(_chart.svg(context, rows), encoding="utf-8")
    for line in summary:
        group = [row for row in rows if (row["dtype"], row["threads"]) == (line["dtype"], line["threads"])]
        print(f"\n{line['dtype']}, {line['threads']} thread{'s' * (line['threads'] > 1)}:\n")
        print_table(group)
        print(f"\ntorch / rapt: geometric mean {line['geomean']:.2f}, {line['least']:.2f} to {line['most']:.2f}")


if __name__ == "__main__":
    main()
