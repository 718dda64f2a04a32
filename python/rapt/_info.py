"""This build of rapt and the machine it runs on."""

from __future__ import annotations

import platform
import sys
from typing import TypedDict

from rapt import _core

__all__ = ["info"]


class Entry(TypedDict):
    """One kernel of this build, for one instruction set or kind of GPU."""

    name: str
    """A label, the same in logs, benchmarks and `rapt info`; the fields below describe the kernel."""
    backend: str
    """ "cpu" or "cuda"."""
    operation: str
    """ "attention", "delta_rule", ..."""
    phase: str
    """The calls that it is for: "prefill" (many query rows; delta_rule: prompts), "decode" (few rows over many keys; delta_rule:
    one token per sequence), "naive" (three steps with the matrix of scores in memory; for other operations the formulas as
    written), or "all"."""
    arithmetic: str
    """The type of its products: "f32", "bf16"; "f16x3" is fp16 by three products of bf16 components."""
    isa: str
    """ "avx2", "amx"; GPUs: "cuda" for any GPU, otherwise "sm90a"."""
    dtypes: list[str]
    """Types that it takes for q, k and v, for a cache, or for the first tensors of operations without them."""
    min_head_dim: int
    """The smallest head dimension, of d and dv."""
    max_head_dim: int
    """The largest head dimension, of d and dv."""
    max_value_head_dim: int
    """The largest dv."""
    unusable: str
    """Empty, or why this machine cannot run it."""
    opt_in: str
    """Empty, or why it runs only if the environment's RAPT_KERNEL or RAPT_ISA forces it."""


class Backend(TypedDict):
    """The code for one kind of device."""

    name: str
    """ "cpu", "cuda"."""
    library: str
    """The file it was loaded from: for GPUs `librapt_cuda.so.<version>`. "" for the extension itself, and where there is none."""
    version: str
    """The library's version, "" if unknown."""
    missing: str
    """Empty, or why the library is not there or was refused, and how to get it."""


class Info(TypedDict):
    """The result of info()."""
    version: str
    cpu: str
    threads: int
    """The largest number of threads of a call without PyTorch tensors; with them, torch.get_num_threads()."""
    pools: dict[str, str]
    """The threads of a call on the CPU. "torch", if PyTorch is imported: for calls with a PyTorch tensor; "numpy": for all
    others. Values are "tbb", PyTorch's OpenMP runtime, such as "openmp (libgomp.so.1)", or "serial" in a forked child."""
    guards: str
    """The guards that check calls now (rapt.guards, or the environment's RAPT_GUARDS): "nan,shadow=16"; "" for none."""
    isas: list[str]
    """Instruction sets that are built in and usable on this machine, best first."""
    backends: list[Backend]
    """Whether rapt found its GPU backend, and where."""
    entries: list[Entry]
    """Every kernel, in dispatch order."""


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
    """This build of rapt and this machine: version, CPU, threads, instruction sets, guards and kernels.

    Returns an Info, a dict. Raises ValueError for a wrong RAPT_GUARDS outside of rapt.guards blocks, as every call
    does.
    """
    return {
        "version": _core.version(),
        "cpu": _cpu_name(),
        "threads": _core.concurrency(),
        "pools": {"numpy": _core.pool(False)} | ({"torch": _core.pool(True)} if "torch" in sys.modules else {}),
        "guards": _core.guards(),
        "isas": _core.isas(),
        "backends": _core.backends(),
        "entries": _core.entries(),
    }
