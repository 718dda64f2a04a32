#!/usr/bin/env python3
"""Counts the bytes that attention moves between caches, fused and in three steps, on valgrind's model of two caches.

    bench/simulate_cache.py --rapt build/release/rapt

For machines that hide the processor's counters, which are most virtual ones. The calls that `rapt roofline` would time run under
callgrind, on one thread, and each miss counts as a line of 64 bytes. The model has an L1 and one more cache, no prefetching, and no
writes back. Its counts do not depend on what else the machine does, and its times mean nothing. Minutes. Needs Python 3.8 and valgrind.
Writes bench/results/<date>/simulated-cache.json.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import PRIVATE, fields_of, write

HEADS, LINE = 2, 64
EVENTS = ("D1mr", "D1mw", "DLmr", "DLmw")  # misses of L1 and of the last level, by reads and writes
PROBLEMS = [(128, 64), (256, 64), (512, 64), (1024, 64), (512, 128)]
# Functions of tools/roofline.cpp and bench/timing.cpp: those that take samples, and what calls the timed code.
TIMED = "run_timed_calls"
SIDES = {"fused": "Run::time_problem<", "three steps": "Run::time_steps("}


def count_of(text):
    return int(text.replace(",", ""))


def misses(annotated):
    """{side: (calls, misses by event)} of callgrind_annotate's tree: the callers of a function, "<", stand above it, "*"."""
    sides, calls, sums = {}, 0, [0] * len(EVENTS)
    for line in annotated.splitlines():
        found = re.match(r" *" + r" +".join([r"([\d,.]+)(?: \( *[\d.]+%\))?"] * len(EVENTS)) + r" +([<*]) +(.*)", line)
        if not found:
            calls, sums = 0, [0] * len(EVENTS)
            continue
        *events, mark, name = found.groups()
        if mark == "<" and TIMED in name:
            times = re.search(r"\(([\d,]+)x\)", name)
            calls += count_of(times[1])
            sums = [total + count_of(event.replace(".", "0")) for total, event in zip(sums, events)]
        elif mark == "*":
            for side, function in SIDES.items():
                if function in name and calls:
                    sides[side] = calls, sums
            calls, sums = 0, [0] * len(EVENTS)
    if set(sides) != set(SIDES):
        sys.exit(f"callgrind_annotate shows no calls of {', '.join(set(SIDES) - set(sides))}")
    return sides


def simulate(rapt, s, d, cache, folder):
    """Rows of one problem."""
    profile, figures = folder / "callgrind.out", folder / "roofline.json"
    problem = f"b=1 hq={HEADS} sq={s} d={d}"
    subprocess.run(["valgrind", "-q", "--tool=callgrind", "--cache-sim=yes", f"--D1={cache['D1']}", f"--LL={cache['LL']}",
                    f"--toggle-collect=*{TIMED}*", f"--callgrind-out-file={profile}", rapt, "roofline", "--problem", problem,
                    "--min-time", "0.001", "--json", str(figures)], check=True, stdout=subprocess.DEVNULL)
    tree = subprocess.run(["callgrind_annotate", "--inclusive=yes", "--tree=caller", "--threshold=100", f"--show={','.join(EVENTS)}",
                           str(profile)], check=True, stdout=subprocess.PIPE, text=True).stdout
    dots = {dot["step"]: dot for dot in json.loads(figures.read_text())["dots"]}
    rows = []
    for side, (calls, sums) in misses(tree).items():
        whole = calls / (3 if side == "three steps" else 1)  # each step is a call
        d1, last = (LINE * (sums[i] + sums[i + 1]) / whole for i in (0, 2))
        rows.append({"s": s, "d": d, "heads": HEADS, "step": side, "entry": dots[side]["entry"], "flops": dots[side]["flops"],
                     "formula_bytes": dots[side]["bytes"], "d1_bytes": d1, "last_level_bytes": last})
    return rows


def main():
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rapt", default=str(root / "build/release/rapt"), help="the rapt command (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=root / "bench/results", help="folder of the days' folders (default: %(default)s)")
    parser.add_argument("--d1", default="32768,8,64", help="bytes, ways and line of L1 (default: %(default)s)")
    parser.add_argument("--last-level", default="1048576,16,64", help="of the other cache (default: %(default)s)")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        parser.error("valgrind is not installed")
    cache = {"D1": options.d1, "LL": options.last_level}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for s, d in PROBLEMS:
            print(f"S = {s}, d = {d}", flush=True)
            rows += simulate(options.rapt, s, d, cache, Path(folder))
    valgrind = subprocess.run(["valgrind", "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    context = {**fields_of(options.rapt), "valgrind": valgrind, "d1": options.d1, "last_level": options.last_level}
    context = {key: value for key, value in context.items() if key not in PRIVATE}
    path = options.out / datetime.datetime.now(datetime.timezone.utc).date().isoformat() / "simulated-cache.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, {"context": context, "rows": rows})
    print(path)


if __name__ == "__main__":
    main()
