#!/usr/bin/env python3
"""rapt against torch.nn.functional.scaled_dot_product_attention, in one process, interleaved.

    bench/compare_torch.py --library build/librapt.so --threads 16 --json table.json

Needs PyTorch 2.11 or newer. For every case both sides take samples in turn, A B A B ..., of at least --sample-ms each.
Both keep a pool of threads that spins for a while after a call; so before each sample there is a pause in which the
other pool falls asleep, and a call that is not timed, which wakes the own one. The ratio is the median over the pairs
of neighbouring samples, time of torch over time of rapt: above 1, rapt is faster. Errors are relative Frobenius norms
against float64 on the same inputs, over rows spread over every head.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from rapt_ctypes import EXECUTORS, Rapt

CHECKED_ROWS = 64
PAUSE_S = 0.01


def int_list(text):
    return [int(word) for word in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/librapt.so", help="the built library (default: %(default)s)")
    parser.add_argument("--threads", type=int_list, default=[1], help="thread counts, for example 1,16")
    parser.add_argument("--executor", choices=EXECUTORS, default="default", help="rapt's executor")
    parser.add_argument("--lengths", type=int_list, default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--dims", type=int_list, default=[64, 128])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layout", choices=["bhsd", "bshd"], default="bhsd", help="order of dimensions in memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each case (default: %(default)s)")
    parser.add_argument("--sample-ms", type=float, default=4.0, help="least time of a sample (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="least number of samples a side (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def cpu_name():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unnamed CPU"


def make_tensor(shape, layout, generator):
    b, h, s, d = shape
    if layout == "bhsd":
        return torch.randn(b, h, s, d, generator=generator)
    return torch.randn(b, s, h, d, generator=generator).transpose(1, 2)


def relative_error(out, q, k, v, causal):
    """|out - exact| / |exact| over CHECKED_ROWS rows of every head."""
    s = q.shape[2]
    rows = torch.linspace(0, s - 1, min(s, CHECKED_ROWS)).long()
    scores = q[:, :, rows].double() @ k.double().transpose(-1, -2) / q.shape[3] ** 0.5
    if causal:
        scores.masked_fill_(torch.arange(s) > rows[:, None], float("-inf"))
    exact = torch.softmax(scores, -1) @ v.double()
    return float((out[:, :, rows].double() - exact).norm() / exact.norm())


def seconds_of(call, count):
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def calls_per_sample(call, least_seconds):
    call()
    return max(1, round(least_seconds / max(seconds_of(call, 1), 1e-7)))


def interleave(calls, options):
    """Samples in seconds per call, one list for each of `calls`."""
    counts = [calls_per_sample(call, options.sample_ms * 1e-3) for call in calls]
    samples = [[] for _ in calls]
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(samples[0]) < options.pairs:
        for call, count, own in zip(calls, counts, samples):
            time.sleep(PAUSE_S)
            call()
            own.append(seconds_of(call, count))
    return samples


def run_case(rapt, threads, s, d, causal, options):
    generator = torch.Generator().manual_seed(s * 1000 + d)
    shape = (options.batch, options.heads, s, d)
    q, k, v = (make_tensor(shape, options.layout, generator) for _ in range(3))
    out = torch.empty_like(q)
    args = rapt.attention_args(q, k, v, out, causal)
    entry, strands = rapt.chosen(args)
    rapt.attention(args)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    ours, theirs = interleave(
        [lambda: rapt.attention(args), lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)], options)
    pairs = s * (s + 1) // 2 if causal else s * s
    flops = 4 * pairs * d * options.heads * options.batch
    median, torch_median = statistics.median(ours), statistics.median(theirs)
    return {
        "name": f"b={options.batch} hq={options.heads} sq={s} d={d}" + " causal" * causal + f"/threads:{threads}",
        "entry": entry, "threads": threads, "strands": strands, "b": options.batch, "hq": options.heads,
        "hk": options.heads, "sq": s, "sk": s, "d": d, "dv": d, "causal": causal, "layout": options.layout,
        "dtype": "f32", "iterations": len(ours), "real_time": median * 1e3, "time_unit": "ms",
        "median_ms": median * 1e3, "best_ms": min(ours) * 1e3, "gflops": flops / median / 1e9,
        "torch_median_ms": torch_median * 1e3, "torch_best_ms": min(theirs) * 1e3,
        "torch_gflops": flops / torch_median / 1e9,
        "vs_torch": statistics.median(b / a for a, b in zip(ours, theirs)), "vs_torch_best": min(theirs) / min(ours),
        "error": relative_error(out, q, k, v, causal), "torch_error": relative_error(expected, q, k, v, causal),
    }


def print_row(row):
    print(f"{row['threads']:>7} {row['sq']:>6} {row['d']:>4} {'causal' if row['causal'] else 'full':<6}"
          f" {row['median_ms']:>9.3f} {row['best_ms']:>9.3f} {row['gflops']:>8.1f}"
          f" {row['torch_median_ms']:>9.3f} {row['torch_best_ms']:>9.3f} {row['torch_gflops']:>8.1f}"
          f" {row['vs_torch']:>6.2f} {row['vs_torch_best']:>6.2f} {row['error']:>9.1e} {row['torch_error']:>9.1e}",
          flush=True)


def write_json(path, document):
    """All of the file or none of it."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    temporary.replace(path)


def main():
    options = parse_arguments()
    if options.json and (options.json.is_dir() or not os.access(options.json.resolve().parent, os.W_OK)):
        sys.exit(f"compare_torch: {options.json}: cannot be written")
    if not Path(options.library).exists():
        sys.exit(f"compare_torch: {options.library}: no such library; build it or give --library")
    library = str(Path(options.library).resolve())
    version = Rapt(library).version
    print(f"rapt {version} and torch {torch.__version__} on {cpu_name()}, {os.cpu_count()} CPUs; fp32,"
          f" {options.heads} heads, layout {options.layout}")
    print("                                       rapt                          torch              torch/rapt"
          "   error against float64")
    print("threads      S    d mask      median      best   GFLOP/s    median      best   GFLOP/s  median  best"
          "     rapt     torch")
    rows = []
    with torch.inference_mode():
        for threads in options.threads:
            torch.set_num_threads(threads)
            rapt = Rapt(library, threads, options.executor)
            for d in options.dims:
                for s in options.lengths:
                    for causal in (False, True):
                        rows.append(run_case(rapt, threads, s, d, causal, options))
                        print_row(rows[-1])
    ratios = [row["vs_torch"] for row in rows]
    print(f"torch/rapt: least {min(ratios):.2f}, median {statistics.median(ratios):.2f}, most {max(ratios):.2f}")
    if options.json:
        write_json(options.json, {
            "context": {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "host_name": platform.node(), "cpu": cpu_name(), "num_cpus": os.cpu_count(),
                        "library_version": version, "torch_version": torch.__version__,
                        "executor": options.executor, "threads": options.threads},
            "benchmarks": rows})


if __name__ == "__main__":
    main()
