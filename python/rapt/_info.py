"""What this build of rapt is and what the machine offers it."""

from __future__ import annotations

import platform
import sys
from typing import TypedDict

from rapt import _core


class Entry(TypedDict):
    """One kernel of this build, for one instruction set."""

    name: str
    backend: str
    unusable: str
    """Empty, or why this machine cannot run it."""
    opt_in: str
    """Empty, or why it runs only where the environment's RAPT_KERNEL or RAPT_ISA forces it."""


class Info(TypedDict):
    version: str
    cpu: str
    threads: int
    """The most threads a call on arrays other than PyTorch's uses; with those, torch.get_num_threads()."""
    pools: dict[str, str]
    """Whose threads a call on the CPU runs on: with "torch", if that is imported, one that has a tensor of PyTorch's, and
    with "numpy" any other. "tbb", or the OpenMP runtime that PyTorch computes on, "openmp (libgomp.so.1)"; "serial" in a
    forked child."""
    isas: list[str]
    """Instruction sets that are built in and usable here, best first."""
    entries: list[Entry]
    """Every kernel, in the order in which they are considered."""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def info() -> Info:
    """Version, CPU, threads and whose they are, instruction sets and kernels."""
    return {
        "version": _core.version(),
        "cpu": _cpu_name(),
        "threads": _core.concurrency(),
        "pools": {"numpy": _core.pool(False)} | ({"torch": _core.pool(True)} if "torch" in sys.modules else {}),
        "isas": _core.isas(),
        "entries": _core.entries(),
    }
