"""`python -m rapt check`: compares every kernel of this machine with formulas in float64.

Each kernel runs in its own process, forced by RAPT_KERNEL. If one crashes, the command reports it and checks the
others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

import rapt
from rapt import _checks
from rapt._check_formulas import Verdict
from rapt._info import Entry

Verdicts = Callable[[Entry], Iterator[Verdict]]

TIMEOUT_S = 300
"""For one kernel."""

CHECKS: dict[str, Verdicts] = {
    name: import_module(f"{_checks.__name__}.{name}").verdicts for _, name, _ in iter_modules(_checks.__path__)
}


def check_entry(name: str) -> None:
    """Prints the verdicts of one kernel as JSON."""
    (entry,) = (entry for entry in rapt.info()["entries"] if entry["name"] == name)
    print(json.dumps(list(CHECKS[entry["operation"]](entry))))


def run_child(entry: Entry) -> subprocess.CompletedProcess[str]:
    """Checks one entry in its own process."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RAPT_ISA", "RAPT_GUARDS")}
    environment["RAPT_KERNEL"] = entry["name"]
    code = f"from rapt import _check; _check.check_entry({entry['name']!r})"
    command = [sys.executable, "-c", code]
    try:  # -c looks for modules in the folder where it runs first
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=Path(rapt.__file__).parents[1])
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no result after {TIMEOUT_S} s")


def run() -> int:
    """Prints a line for each kernel with a wrong result or none, then a summary. Returns 0 if every result is right."""
    usable = [entry for entry in rapt.info()["entries"] if entry["backend"] == "cpu" and not entry["unusable"]]
    kernels = [entry for entry in usable if entry["operation"] in CHECKS]
    for operation in sorted({entry["operation"] for entry in usable} - CHECKS.keys()):
        print(f"{operation}: not checked: there is no formula for it here")
    checked = problems = 0
    worst = 0.0
    failures = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        children = list(pool.map(run_child, kernels))
    for entry, child in zip(kernels, children, strict=True):
        if child.returncode != 0:
            failures.append(f"{entry['name']}: exit code {child.returncode}: {(child.stderr.strip().splitlines() or [''])[-1]}")
            continue
        verdicts = json.loads(child.stdout)
        if not verdicts:
            print(f"{entry['name']}: not checked: it takes {', '.join(entry['dtypes'])}, and there is no ml_dtypes here")
            continue
        checked, problems = checked + 1, problems + len(verdicts)
        worst = max(worst, *(error for _, error in verdicts))
        failures += [f"{entry['name']}: {problem}: the error is {error:.3g} of what is allowed" for problem, error in verdicts if not error <= 1]
    print("\n".join(failures), end="\n" if failures else "")
    what = f"rapt {rapt.__version__}: {checked} kernels, {problems} problems, largest error {worst:.2f} of what is allowed"
    if find_spec("ml_dtypes") is None:
        what += "; bf16 and 8-bit floats were not checked, which needs ml_dtypes"
    print(f"{'FAILED' if failures or not checked else 'OK'}: {what}")
    return 1 if failures or not checked else 0
