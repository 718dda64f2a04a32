#!/usr/bin/env python3
"""Writes docs/performance.md, its charts in docs/images, the figures in README.md, and docs/report, from the data in
bench/results.

    bench/report.py            writes them
    bench/report.py --check    changes nothing; exit code 1 and a diff if one of them is not what the data say

Needs Python 3.8 and nothing else. New measurements show up once their files are in bench/results: of every kind the newest
day's count (pages/data.py). bench/measure.py makes them.
"""

import argparse
import difflib
import sys
from pathlib import Path

from pages import performance, three_steps
from pages.data import RESULTS, Data

ROOT = Path(__file__).resolve().parents[1]


def outputs(results):
    """{path below the repository's root: text}; None is for a file of docs/report that should not be there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = {**performance.files(Data(results), readme), **three_steps.files(results)}
    there = (str(path.relative_to(ROOT)) for path in (ROOT / three_steps.FOLDER).glob("*"))
    return {**{name: None for name in there if name not in files}, **files}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the data, a folder for each day (default: %(default)s)")
    parser.add_argument("--into", type=Path, default=ROOT, help="write below this folder (default: %(default)s)")
    options = parser.parse_args()
    stale = False
    for name, text in outputs(options.results).items():
        path = options.into / name
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if old == text:
            continue
        stale = True
        if options.check:
            lines = [(side or "").splitlines(True) for side in (old, text)]
            sys.stdout.writelines(list(difflib.unified_diff(*lines, name, "bench/report.py"))[:40])
        elif text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        sys.exit("these are not what bench/report.py makes of bench/results: run bench/report.py")


main()
