#!/usr/bin/env python3
"""rapt against torch.nn.functional.scaled_dot_product_attention, in one process, interleaved.

    bench/compare_torch.py --library build/release/librapt.so --set issue4 --threads 1,16 --pin auto --json table.json

Needs PyTorch 2.11 or newer. Prints Markdown. For every case both sides take samples in turn, A B A B ..., of at least
--sample-ms each, in two ways. With several threads both keep a pool that spins for a while after a call. "paused": before
each sample there is a pause in which the other pool falls asleep, and a call that is not timed, which wakes the own one.
"back to back": sides alternate from call to call with nothing in between. Ratios are time of torch over time of rapt:
above 1, rapt is faster. One is noisy, and left out of the means, where a side's quartiles are more than 20 % of its
median apart. Errors are taken over the whole output, against float64 on the same (already rounded) inputs.

--set decode is one token over long keys, four query heads to a key head. torch takes turns in two ways: enable_gqa, and
with the four heads folded by hand into query rows of one. Errors are taken over some heads.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from rapt_ctypes import EXECUTORS, Rapt
from torch_cases import DTYPES, GROUP, Case, DecodeCase, errors_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "python/rapt/bench"))  # the package itself may not be built
from timing import add_ratio, calls_per_sample, interleave, mean_of, seconds_of, statistics_of  # noqa: E402

SETS = {
    "paper": {"dtype": ["f32"], "lengths": [128, 512, 1024, 2048, 4096], "dims": [64, 128], "batch": [1], "heads": [8]},
    "issue4": {"dtype": ["f32", "bf16", "f16"], "lengths": [512, 1024, 4096], "dims": [64, 128], "batch": [1],
               "heads": [8]},
    "decode": {"dtype": ["bf16", "f16", "f32"], "lengths": [4096, 32768], "dims": [128], "batch": [1, 8],
               "heads": [32]},
}
LONGEST_CHECKED = 1024
WAYS = {"": "paused", "back_to_back_": "back to back"}  # by what their names in a row begin with
PROBE_ROUNDS = 3
PROBE_S = 0.004


def int_list(text):
    return [int(word) for word in text.split(",")]


def name_list(names):
    def parse(text):
        words = text.split(",")
        for word in words:
            if word not in names:
                raise argparse.ArgumentTypeError(f"{word}: wanted some of {','.join(names)}")
        return words
    return parse


def cpu_choice(text):
    return text if text in ("none", "auto") else int(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/release/librapt.so", help="default: %(default)s")
    parser.add_argument("--set", choices=SETS, default="paper",
                        help="types, lengths, head sizes, batches and heads, each of which its own option replaces")
    parser.add_argument("--dtype", type=name_list(DTYPES), help="for example f32,bf16,f16")
    parser.add_argument("--lengths", type=int_list, help="for example 512,1024,4096")
    parser.add_argument("--dims", type=int_list, help="for example 64,128")
    parser.add_argument("--masks", type=name_list(("full", "causal")), default=["full", "causal"], help="not of decode")
    parser.add_argument("--threads", type=int_list, default=[1], help="thread counts, for example 1,16")
    parser.add_argument("--heads", type=int_list, help="query heads, for all thread counts, or one for each of them")
    parser.add_argument("--batch", type=int_list, help="for example 1,8")
    parser.add_argument("--layout", choices=["bhsd", "bshd"], default="bhsd",
                        help="order of dimensions in memory; not of decode")
    parser.add_argument("--executor", choices=EXECUTORS, default="default", help="rapt's executor")
    parser.add_argument("--pin", type=cpu_choice, default="none", metavar="none|auto|CPU",
                        help="run the one-thread cases on this CPU; auto: the one on which rapt is fastest now")
    parser.add_argument("--seconds", type=float, default=0.6, help="time for the samples of a case, paused and again back to back (default: %(default)s)")
    parser.add_argument("--sample-ms", type=float, default=4.0, help="least time of a sample (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="least number of samples a side (default: %(default)s)")
    parser.add_argument("--errors", action="store_true", help=f"take errors above S={LONGEST_CHECKED} too")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    for name, value in SETS[options.set].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if len(options.heads) == 1:
        options.heads *= len(options.threads)
    if len(options.heads) != len(options.threads):
        parser.error("--heads: wanted one number, or one for each of --threads")
    if options.set == "decode" and any(heads % GROUP for heads in options.heads):
        parser.error(f"--heads: wanted multiples of {GROUP} for decode")
    if options.samples < 1 or min(options.threads) < 1:
        parser.error("--samples and --threads: wanted at least 1")
    if options.pin != "none":
        if not hasattr(os, "sched_setaffinity"):
            parser.error("--pin: this system cannot do that")
        if options.pin != "auto" and options.pin not in os.sched_getaffinity(0):
            parser.error(f"--pin {options.pin}: this process has only the CPUs {sorted(os.sched_getaffinity(0))}")
    if options.json and (options.json.is_dir() or not os.access(options.json.resolve().parent, os.W_OK)):
        parser.error(f"--json {options.json}: cannot be written")
    if not Path(options.library).exists():
        parser.error(f"--library {options.library}: no such library; build it first")
    return options


def cpu_name():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unnamed CPU"


def measure(calls, options):
    """Samples of `calls` paused and back to back, by WAYS."""
    budget = {"seconds": options.seconds, "samples": options.samples, "sample_s": options.sample_ms * 1e-3}
    return {way: interleave([calls], pause=way == "", **budget) for way in WAYS}


def timings(samples, peers):
    """What a row has of them: times of rapt and then of `peers`, for either way, and ratios of the peers' to rapt's."""
    row = {}
    for way, (ours, *theirs) in samples.items():
        for side, own in zip(("", *peers), (ours, *theirs)):
            row |= {f"{side}{way}{name}": value for name, value in statistics_of(own).items()}
        for side, own in zip(peers, theirs):
            add_ratio(row, f"vs_{side}{way}".rstrip("_"), own, ours)
    return row


def run_case(rapt, dtype, threads, heads, batch, s, d, causal, options):
    case = Case(rapt, dtype, heads, s, d, causal, batch, options.layout)
    entry, strands = rapt.chosen(case.args)
    times = timings(measure([case.run_rapt, case.run_torch], options), ["torch_"])
    errors = torch_errors = (None, None)
    if options.errors or s <= LONGEST_CHECKED:
        exact = case.exact()
        errors, torch_errors = errors_of(case.run_rapt(), exact), errors_of(case.run_torch(), exact)
    problem = f"dtype={dtype} b={batch} hq={heads} sq={s} d={d}" + " causal" * causal
    return {
        "name": f"{problem}/threads:{threads}", "entry": entry, "threads": threads, "strands": strands,
        "b": batch, "hq": heads, "hk": heads, "sq": s, "sk": s, "d": d, "dv": d, "causal": causal,
        "layout": options.layout, "dtype": dtype, "iterations": times["samples"], "real_time": times["median_ms"],
        "time_unit": "ms", "gflops": case.flops / times["median_ms"] / 1e6,
        "torch_gflops": case.flops / times["torch_median_ms"] / 1e6,
        "error": errors[0], "max_error": errors[1],
        "torch_error": torch_errors[0], "torch_max_error": torch_errors[1],
    } | times


def run_decode(rapt, dtype, threads, heads, batch, s, d, options):
    case = DecodeCase(rapt, dtype, heads, s, d, batch)
    entry, strands = rapt.chosen(case.args)
    sides = {"": case.run_rapt, "torch_": case.run_gqa, "folded_": case.run_folded}
    times = timings(measure(list(sides.values()), options), ["torch_", "folded_"])
    row = {
        "name": f"dtype={dtype} b={batch} hq={heads} hk={heads // GROUP} sq=1 sk={s} d={d}/threads:{threads}",
        "entry": entry, "threads": threads, "strands": strands, "b": batch, "hq": heads, "hk": heads // GROUP, "sq": 1,
        "sk": s, "d": d, "dv": d, "dtype": dtype, "iterations": times["samples"], "time_unit": "ms",
        "real_time": times["median_ms"], "bytes": case.bytes,
    } | times
    for side, run in sides.items():
        error, max_error = case.errors(run())
        row |= {f"{side}gbs": case.bytes / times[f"{side}median_ms"] / 1e6,
                f"{side}error": error, f"{side}max_error": max_error}
    return row


def fastest_cpu(rapt, dtype):
    """(the CPU of this process on which one thread of rapt is fastest, {CPU: median ms})."""
    case = Case(rapt, dtype, heads=1, s=512, d=64, causal=False, batch=1)
    samples = {cpu: [] for cpu in sorted(os.sched_getaffinity(0))}
    for _ in range(PROBE_ROUNDS):
        for cpu, own in samples.items():
            with on_cpu(cpu):
                own.append(seconds_of(case.run_rapt, calls_per_sample(case.run_rapt, PROBE_S)))
    medians = {cpu: statistics.median(own) * 1e3 for cpu, own in samples.items()}
    return min(medians, key=medians.get), medians


@contextlib.contextmanager
def on_cpu(cpu):
    """The calling thread, and threads that it starts, stay on `cpu`; None: where they are."""
    if cpu is None:
        yield
        return
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, mask)


def read_machine(library, options):
    """Has the libraries look at the machine now, without starting threads: they keep the number of CPUs they see first,
    and later the mask may be down to one."""
    torch.set_num_threads(1)
    everything = Rapt(library, 0, options.executor)
    for dtype in options.dtype:
        case = Case(everything, dtype, heads=1, s=64, d=64, causal=False, batch=1)
        everything.chosen(case.args)
        case.run_torch()
        case.exact()


def table_line(cells):
    return "| " + " | ".join(cells) + " |"


def print_table_head(titles):
    print(table_line(titles))
    print("|" + "---|" * len(titles), flush=True)


def ratio_cell(row, name):
    return f"**{row[name]:.2f}** / {row[f'{name}_best']:.2f}{' noisy' * (name in row['noisy'])}"


TITLES = ["S", "d", "mask", "entry"] + [
    f"{title}{way}" for way in WAYS.values()
    for title in ("rapt ms, median / best, ", "torch ms, median / best, ", "torch / rapt, median / bests, ")] + [
    "GFLOP/s rapt / torch", "relative error rapt / torch", "largest error rapt / torch"]


def print_row(row):
    def error(name):
        return "-" if row[name] is None else f"{row[name]:.1e}"

    print(table_line([
        str(row["sq"]), str(row["d"]), "causal" if row["causal"] else "full", row["entry"],
        *itertools.chain.from_iterable(
            [*(f"{row[side + way + 'median_ms']:.3f} / {row[side + way + 'best_ms']:.3f}" for side in ("", "torch_")),
             ratio_cell(row, f"vs_torch_{way}".rstrip("_"))] for way in WAYS),
        f"{row['gflops']:.0f} / {row['torch_gflops']:.0f}",
        f"{error('error')} / {error('torch_error')}", f"{error('max_error')} / {error('torch_max_error')}",
    ]), flush=True)


DECODE_TITLES = ["b", "sk", "d", "entry"] + [
    f"{side} ms, median / best (GB/s)" for side in ("rapt", "torch gqa", "torch folded")] + [
    f"{side} / rapt, median / bests, {way}" for way in WAYS.values() for side in ("gqa", "folded")] + [
    "relative error rapt / gqa / folded"]


def print_decode_row(row):
    print(table_line([
        str(row["b"]), str(row["sk"]), str(row["d"]), row["entry"],
        *(f"{row[side + 'median_ms']:.3f} / {row[side + 'best_ms']:.3f} ({row[side + 'gbs']:.1f})"
          for side in ("", "torch_", "folded_")),
        *(ratio_cell(row, f"vs_{side}_{way}".rstrip("_")) for way in WAYS for side in ("torch", "folded")),
        " / ".join(f"{row[side + 'error']:.1e}" for side in ("", "torch_", "folded_")),
    ]), flush=True)


def summarise(rows, peers):
    """mean_of() the ratios named by `peers`, per type, thread count and head size, and over all sizes."""
    groups = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["threads"]), {}).setdefault(row["d"], []).append(row)
    groups = {(*key, d): group for key, by_d in groups.items()
              for d, group in [*by_d.items(), *[("all", sum(by_d.values(), []))] * (len(by_d) > 1)]}
    return [{"dtype": dtype, "threads": threads, "d": d} | {peer: mean_of(group, peer) for peer in peers}
            for (dtype, threads, d), group in groups.items()]


def print_summary(summary, peers):
    print("\nTime of torch over time of rapt, rows that are not noisy:\n")
    print_table_head(["type", "threads", "d"] + [f"{title}: {what}" for title in peers.values()
                                                 for what in ("geomean / least", "rows (left out)")])

    def cells(mean):
        ratios = "-" if mean["geomean"] is None else f"**{mean['geomean']:.2f}** / {mean['least']:.2f}"
        return ratios, f"{mean['cases']} ({mean['left_out']})"

    for line in summary:
        own = itertools.chain.from_iterable(cells(line[peer]) for peer in peers)
        print(table_line([line["dtype"], str(line["threads"]), str(line["d"]), *own]))


def write_json(path, document):
    """All of the file or none of it."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    temporary.replace(path)


def main():
    options = parse_arguments()
    begin = time.perf_counter()
    library = str(Path(options.library).resolve())
    version = Rapt(library).version
    read_machine(library, options)
    cpu, probe = None, {}
    if options.pin == "auto":
        cpu, probe = fastest_cpu(Rapt(library, 1, options.executor),
                                 "bf16" if "bf16" in options.dtype else options.dtype[0])
    elif options.pin != "none":
        cpu = options.pin
    print(f"rapt {version} and torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}) on {cpu_name()},"
          f" {len(os.sched_getaffinity(0))} CPUs; layout {options.layout}.")
    if cpu is not None:
        probed = f", the fastest at {probe[cpu]:.3f} ms (slowest: {max(probe.values()):.3f})" if probe else ""
        print(f"One-thread cases on CPU {cpu}{probed}.")
    rows = []
    decode = options.set == "decode"
    sides = {"vs_torch_": "gqa", "vs_folded_": "folded"} if decode else {"vs_torch_": "torch"}
    peers = {f"{side}{way}".rstrip("_"): f"{title}, {WAYS[way]}" for way in WAYS for side, title in sides.items()}
    with torch.inference_mode():
        for (threads, heads), dtype in itertools.product(zip(options.threads, options.heads), options.dtype):
            with on_cpu(cpu if threads == 1 else None):
                torch.set_num_threads(threads)
                rapt = Rapt(library, threads, options.executor)
                print(f"\n{dtype}, {threads} thread{'s' * (threads > 1)}, {heads} heads:\n")
                if decode:
                    print_table_head(DECODE_TITLES)
                    for d, s, batch in itertools.product(options.dims, options.lengths, options.batch):
                        rows.append(run_decode(rapt, dtype, threads, heads, batch, s, d, options))
                        print_decode_row(rows[-1])
                    continue
                print_table_head(TITLES)
                for batch, d, s, mask in itertools.product(options.batch, options.dims, options.lengths, options.masks):
                    rows.append(run_case(rapt, dtype, threads, heads, batch, s, d, mask == "causal", options))
                    print_row(rows[-1])
    summary = summarise(rows, peers)
    print_summary(summary, peers)
    print(f"\nTook {time.perf_counter() - begin:.0f} s.")
    if options.json:
        write_json(options.json, {
            "context": {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "host_name": platform.node(), "cpu": cpu_name(), "num_cpus": os.cpu_count(),
                        "library_version": version, "torch_version": torch.__version__,
                        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
                        "executor": options.executor, "threads": options.threads, "heads": options.heads,
                        "pinned_cpu": cpu, "cpu_probe_ms": probe},
            "benchmarks": rows, "summary": summary})


if __name__ == "__main__":
    main()
