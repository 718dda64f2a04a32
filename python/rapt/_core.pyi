"""The extension module. Use what `rapt` and `rapt.torch` make of it."""

from collections.abc import Sequence
from typing import Any

from rapt._info import Entry

class Explanation:
    """What a call would do; `str()` of it is a page for people."""

    @property
    def entry(self) -> str:
        """The kernel that would run: "attention_forward.f32.avx2.q24k128"."""
    @property
    def backend(self) -> str:
        """ "cpu" or "cuda"."""
    @property
    def problem(self) -> str:
        """The call as one line of text, as the `rapt` command takes it."""
    @property
    def threads(self) -> int:
        """Threads the call would be spread over."""
    @property
    def executor(self) -> str:
        """Whose threads those are, of a call on the CPU: "tbb", "openmp (libgomp.so.1)", "serial"."""
    @property
    def work_items(self) -> int:
        """Parts that the threads take in turn."""
    @property
    def workspace_bytes(self) -> int:
        """Memory the call needs beside its tensors."""
    @property
    def candidates(self) -> list[tuple[str, str]]:
        """Every kernel, best first, and why it was passed over ("": chosen, or it would do but comes later)."""

class Call:
    """One attention call: the arguments of `rapt.attention` by name, with `lse`, `stream` and `torch` (True: on
    PyTorch's threads)."""

    def __init__(self, arguments: dict[str, Any], /) -> None: ...
    def run(self) -> None: ...
    def plan(self) -> Explanation: ...

def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    threads: int,
    out: Any,
    stream: int,
    /,
) -> None:
    """PyTorch's scaled_dot_product_attention into `out`; the caller has checked shapes and dtypes. `stream` is a
    cudaStream_t, for tensors on a GPU."""

def append_kv(arguments: dict[str, Any], /) -> list[str]:
    """The arguments of `rapt.append_kv` by name; returns which were written."""

def merge_states(outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any, /) -> None: ...
def adopt_torch(torch: Any, /) -> None:
    """Reads PyTorch's tensors by their own methods from now on, which is faster than DLPack."""

def version() -> str: ...
def isas() -> list[str]: ...
def entries() -> list[Entry]: ...
def concurrency() -> int: ...
def pool(torch: bool, /) -> str:
    """Name of the executor of calls with PyTorch's tensors, or of those without."""
