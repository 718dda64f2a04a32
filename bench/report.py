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

from pages import performance
from pages.data import Data

ROOT = Path(__file__).resolve().parents[1]


def outputs():
    """{path: text} of all that is written."""
    files = performance.files(Data(), (ROOT / "README.md").read_text(encoding="utf-8"))
    return {ROOT / name: text for name, text in files.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    stale = False
    for path, text in outputs().items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        stale = True
        if options.check:
            name = str(path.relative_to(ROOT))
            sys.stdout.writelines(list(difflib.unified_diff(old.splitlines(True), text.splitlines(True), name, "bench/report.py"))[:40])
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        sys.exit("these are not what bench/report.py makes of bench/results: run bench/report.py")


main()
