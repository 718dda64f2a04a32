#!/usr/bin/env python3
"""What Nsight Compute counts in rapt's CUDA entries, as a Markdown table.

    bench/profile_cuda.py
    bench/profile_cuda.py --entries prefill --set my_problems.txt --csv ncu.csv

Needs a GPU, PyTorch, rapt's Python package built with CUDA, `ncu` and leave to read the GPU's counters. For every entry
an ncu runs a process that makes every call once, each on a stream of its own, by which kernels are told apart; calls that
--seconds are too short for are left out, and named. Clocks are left as they are, caches emptied before each pass: times
are for reading the shares beside them, not for comparing (`python -m rapt.bench --device cuda` is). Kernels that take
less than 2 % of their call are left out.

Shares are of the peak: `tensor` and `warps` (occupancy as it was) while an SM had work, `SM` and `DRAM` over the whole
time. `spills` are bytes of local memory loaded and stored, `shared` bytes per block, dynamic + static.
"""

import argparse
import csv
import dataclasses
import datetime
import glob
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rapt
import torch
from rapt.bench import sets

METRICS = {"tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
           "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
           "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
           "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
           "registers": "launch__registers_per_thread",
           "local_loads": "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
           "local_stores": "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
           "dynamic": "launch__shared_mem_per_block_dynamic",
           "static": "launch__shared_mem_per_block_static",
           "time": "gpu__time_duration.sum",
           "clock": "sm__cycles_elapsed.avg.per_second"}
NAIVE_MAX_LENGTH = 4096
FEW = 0.02  # the share of a call's time below which a kernel is left out
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
NO_PERMISSION = """ncu may not read this GPU's performance counters (ERR_NVGPUCTRPERM): run as root, in a container with
the capability SYS_ADMIN, or have the driver's module loaded with NVreg_RestrictProfilingToAdminUsers=0"""


class Failure(Exception):
    """Told to the user as it is."""


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=lambda text: text.split(","), default=[""],
                        help="parts of their names, for example prefill,simt")
    parser.add_argument("--set", default="cuda", help=f"{', '.join(sets.NAMES)}, or a file; types are the entry's own")
    parser.add_argument("--seconds", type=float, default=180, help="begin no call after that; default: %(default)s")
    parser.add_argument("--ncu", help="the program; default: the one on PATH, else in the usual places")
    parser.add_argument("--csv", type=Path, help="keep what ncu wrote in this file")
    parser.add_argument("--commit", help="what the table is to say was measured; default: git's word")
    # For the process within ncu: where its report goes, and the time at which no more calls are begun.
    parser.add_argument("--drive", nargs=2, metavar=("REPORT", "TIME"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.words = sys.argv[1:] if words is None else words
    try:
        options.cases = sets.read(options.set)[0]
    except ValueError as error:
        parser.error(str(error))
    return options


def planned(entry, options):
    """The calls to make of an entry, one of rapt.info()'s, in the type that it multiplies in."""
    phase, dtype = entry["phase"], entry["arithmetic"]
    for case in options.cases:
        case = dataclasses.replace(case, dtype=dtype)
        if phase == "naive":  # which takes a hundred times longer
            case = dataclasses.replace(case, b=1, hq=min(case.hq, 4), hk=min(case.hk, 4))
        if phase != "naive" or case.sk <= NAIVE_MAX_LENGTH:
            yield case


def drive(options):
    """Makes the calls of the entry that the environment's RAPT_KERNEL names, and reports what was made."""
    entry, file, deadline = os.environ["RAPT_KERNEL"], Path(options.drive[0]), float(options.drive[1])
    report = {"calls": [], "left_out": [], "gpu": torch.cuda.get_device_name()}
    [facts] = [each for each in rapt.info()["entries"] if each["name"] == entry]
    for case in planned(facts, options):
        call = dataclasses.asdict(case) | {"entry": entry}
        if time.time() > deadline:
            report["left_out"].append(call | {"reason": "no time was left"})
            continue
        q, k, v = case.tensors(0, "cuda")
        try:
            rapt.explain(q, k, v, causal=case.causal)
        except (TypeError, ValueError) as error:  # the entry does not take it
            report["left_out"].append(call | {"reason": str(error)})
            continue
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            rapt.attention(q, k, v, causal=case.causal)
        torch.cuda.synchronize()
        report["calls"].append(call)
    file.write_text(json.dumps(report))


def factor(unit):
    """What numbers in ncu's `unit` are multiplied by to be bytes, seconds and hertz."""
    above, _, below = unit.partition("/")
    prefixed = [re.fullmatch("([numKMGT])(byte|second|s|hz)", part) for part in (above, below)]
    powers = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    up, down = (powers[match[1]] if match else 1.0 for match in prefixed)
    return up / down


def parse_csv(text):
    """The launches in what `ncu --csv` printed, in order: [{"kernel", "stream", "metrics": {name: number or None}}]."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return []
    launches = {}
    for row in csv.DictReader(lines[header:]):
        if not row.get("Metric Value"):  # something else among the lines
            continue
        launch = launches.setdefault((row["Process ID"], row["ID"]),
                                     {"kernel": row["Kernel Name"], "stream": row["Stream"], "metrics": {}})
        try:
            number = float(row["Metric Value"].replace(",", "")) * factor(row["Metric Unit"])
        except ValueError:  # "n/a"
            number = None
        launch["metrics"][row["Metric Name"]] = number
    return list(launches.values())


def attribute(launches, calls):
    """[(call, its launches)]: a run of launches on one stream is one call's."""
    runs = [list(run) for _, run in itertools.groupby(launches, key=lambda launch: launch["stream"])]
    if len(runs) != len(calls):
        raise Failure(f"{len(calls)} calls were made, but ncu lists kernels of {len(runs)}: use --csv to look at them")
    return list(zip(calls, runs))


def cell(number, form):
    return "-" if number is None else form.format(number)


def table(attributed):
    """Lines of Markdown."""
    titles = ["entry", "kernel", "type", "b x h", "S", "d", "mask", "ms", "tensor %", "SM %", "DRAM %", "warps %",
              "registers", "spills", "shared", "GHz"]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for call, launches in attributed:
        numbers = [{key: launch["metrics"].get(name) for key, name in METRICS.items()} for launch in launches]
        total = sum(n["time"] or 0 for n in numbers)
        for launch, n in zip(launches, numbers):
            if n["time"] is not None and n["time"] < FEW * total:
                continue
            local = None if None in (n["local_loads"], n["local_stores"]) else n["local_loads"] + n["local_stores"]
            ms, ghz = (None if n[key] is None else n[key] * to for key, to in (("time", 1e3), ("clock", 1e-9)))
            cells = [call["entry"], launch["kernel"], call["dtype"], f"{call['b']} x {call['hq']}", call["sq"], call["d"],
                     "causal" if call["causal"] else "full", cell(ms, "{:.3f}"),
                     *(cell(n[key], "{:.1f}") for key in ("tensor", "sm", "dram", "warps")),
                     cell(n["registers"], "{:.0f}"), cell(local, "{:.0f}"),
                     cell(n["dynamic"], "{:.0f}") + " + " + cell(n["static"], "{:.0f}"), cell(ghz, "{:.2f}")]
            yield f"| {' | '.join(map(str, cells))} |"


def output_of(*command):
    """The first line that a command prints; "" if it is not there or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (run.stdout.splitlines() or [""])[0].strip()


def header(report, ncu, options):
    here = str(Path(__file__).parent)
    commit = options.commit or output_of("git", "-C", here, "describe", "--always", "--dirty") or "unknown"
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"Version (\S+)", version)
    return (f"{report['gpu']}, driver {driver}, Nsight Compute {version[1] if version else '?'}, "
            f"commit {commit}, {datetime.date.today()}")


def find_ncu(named):
    found = shutil.which(named or "ncu")
    if not found and not named:
        found = max((path for place in PLACES for path in glob.glob(place)), default=None)
    if not found:
        raise Failure(f"no {named or 'ncu'}: Nsight Compute is not installed, or --ncu has to say where it is")
    return found


def check(report, log, output, status):
    """Raises Failure for what went wrong."""
    if "ERR_NVGPUCTRPERM" in log + output:
        raise Failure(NO_PERMISSION)
    errors = [line for line in (log + output).splitlines() if line.startswith("==ERROR==")]
    if errors:
        raise Failure("ncu failed:\n" + "\n".join(errors))
    if status != 0 or not report:
        raise Failure(f"the calls failed (exit code {status}):\n{output[-2000:]}")


def profile(ncu, entry, deadline, options):
    """(the driver's report, what ncu wrote)."""
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder) / "ncu.csv", Path(folder) / "report.json"
        command = [ncu, "--csv", "--print-units", "base", "--print-kernel-base", "function", "--clock-control", "none",
                   "--kernel-name-base", "demangled", "--kernel-name", "regex:.*rapt.*", "--metrics",
                   ",".join(METRICS.values()), "--log-file", str(log), sys.executable, str(Path(__file__).resolve()),
                   *options.words, "--drive", str(file), str(deadline)]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=os.environ | {"LC_ALL": "C", "RAPT_KERNEL": entry}, start_new_session=True)
        try:
            output, _ = run.communicate(timeout=max(0, deadline - time.time()) + 60)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # ncu and what it runs
            output, _ = run.communicate()
            raise Failure(f"ncu was not done a minute after the last call should have begun:\n{output[-2000:]}") from None
        text = log.read_text() if log.exists() else ""
        if options.csv:
            with options.csv.open("a") as kept:
                kept.write(text)
        report = json.loads(file.read_text()) if file.exists() else None
        check(report, text, output, run.returncode)
        return report, text


def show(attributed, left_out, unusable):
    print("\n".join(table(attributed)))
    reasons = itertools.groupby(left_out, key=lambda case: (case["entry"], case["reason"]))
    lines = [f"- {entry}, {len(list(cases))} calls: {reason}" for (entry, reason), cases in reasons]
    lines += [f"- {entry['name']}: {entry['unusable']}" for entry in unusable]
    if lines:
        print("\nLeft out:\n\n" + "\n".join(lines))


def main(words=None):
    options = parse_arguments(words)
    if options.drive:
        drive(options)
        return
    try:
        ncu = find_ncu(options.ncu)
        wanted = [e for e in rapt.info()["entries"] if e["backend"] == "cuda" and any(o in e["name"] for o in options.entries)]
        usable, unusable = ([e for e in wanted if bool(e["unusable"]) == no] for no in (False, True))
        if not usable:
            reasons = {e["unusable"] for e in unusable} or {"none of that name in this build"}
            raise Failure(f"no CUDA entry can run: {'; '.join(reasons)}")
        deadline = time.time() + options.seconds
        if options.csv:
            options.csv.write_text("")
        attributed, left_out = [], []
        for entry in usable:
            report, text = profile(ncu, entry["name"], deadline, options)
            attributed += attribute(parse_csv(text), report["calls"])
            left_out += report["left_out"]
        print(header(report, ncu, options) + "\n")
        show(attributed, left_out, unusable)
    except Failure as failure:
        sys.exit(f"profile_cuda.py: {failure}")


if __name__ == "__main__":
    main()
