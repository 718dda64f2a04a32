"""What this build of rapt is and what the machine offers it."""

from __future__ import annotations

import platform
import sys
from typing import TypedDict

from rapt import _core

__all__ = ["info"]


class Entry(TypedDict):
    """One kernel of this build, for one instruction set."""

    name: str
    """A label, the same in logs, benchmarks and `rapt info`; the fields below say what the kernel is."""
    backend: str
    operation: str
    """ "attention", "delta_rule", ..."""
    phase: str
    """Which calls it is for: "prefill" (many query rows), "decode" (a few rows over many keys), "naive" (three steps with
    the matrix of scores in memory; of other operations the formulas as they are written), "all"."""
    arithmetic: str
    """What it multiplies in: "f32", "bf16"; "f16x3" is fp16 by three products of bf16 components."""
    isa: str
    """ "avx2", "amx"; of GPUs "cuda" where any will do, else "sm90a"."""
    dtypes: list[str]
    """Types that it takes: of q, k and v, of a cache, or of the first tensors of an operation without them."""
    min_head_size: int
    max_head_size: int
    """Of d and dv."""
    max_value_head_size: int
    """Of dv alone."""
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
    guards: str
    """Those that watch calls now (rapt.guards, or the environment's RAPT_GUARDS): "nan,shadow=16"; "" for none."""
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
    """Version, CPU, threads and whose they are, instruction sets and kernels. Raises ValueError for a wrong RAPT_GUARDS, as every
    call does, outside of blocks of rapt.guards."""
    return {
        "version": _core.version(),
        "cpu": _cpu_name(),
        "threads": _core.concurrency(),
        "pools": {"numpy": _core.pool(False)} | ({"torch": _core.pool(True)} if "torch" in sys.modules else {}),
        "guards": _core.guards(),
        "isas": _core.isas(),
        "entries": _core.entries(),
    }
