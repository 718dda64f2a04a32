"""The extension module. Use what `rapt` and `rapt.torch` make of it."""

from collections.abc import Callable, Sequence
from typing import Any

from rapt._info import Entry

class Explanation:
    """What a call would do; `str()` of it is a page for people."""

    @property
    def entry(self) -> str:
        """The kernel that would run: "attention_prefill.f32.avx2.q24k128"."""
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

def attention(*arguments: Any) -> Any:
    """`rapt.attention`: all its arguments, in its order."""

def attention_backward(forward: tuple[Any, ...], gradients: tuple[Any, ...], /) -> None:
    """Gradients of attention(*forward), whose `out` is the result that it had. `gradients` are dout, lse, dlse or None,
    and the arrays to write, or None: dq, dk, dv, dbias, dsinks, dalibi."""

def delta_rule(inputs: tuple[Any, ...], results: tuple[Any, ...], /) -> None:
    """`rapt.delta_rule` into `out` and, if it is not None, `final_state`: what it and its gradients are
    given alike, in the order of _delta_rule.py's _INPUTS, and out, final_state, state_slots and accepted."""

def delta_rule_backward(inputs: tuple[Any, ...], gradients: tuple[Any, ...], /) -> None:
    """Gradients of delta_rule(inputs, ..). `gradients` are dout, dfinal_state or None, and the arrays to write, or None: dq, dk,
    dv, dg, dbeta, dinitial_state, da_log, ddt_bias."""

def index_scores(inputs: tuple[Any, ...], scores: Any, indices: Any, /) -> None:
    """`rapt.dsa.index_scores` into `scores`, or `rapt.dsa.index_topk` into `indices`; the other is None. `inputs` in the order of
    _dsa.py's _INPUTS."""

def select_topk(scores: Any, out: Any, threads: int | None, isa: str | None, /) -> None:
    """`rapt.dsa.select_topk` into `out`."""

def explain(*arguments: Any) -> Explanation:
    """`rapt.explain`: all its arguments, in its order."""

def parse_problem(problem: str, /) -> str:
    """A problem's text, of any operation, as rapt writes it. Raises ValueError that names the word."""

def explain_problem(problem: str, threads: int | None, isa: str | None, /) -> Explanation:
    """What would run for a problem's text, of any operation. Raises ValueError that names the word."""

def dropout_mask(p: Any, seed: Any, offset: Any, mask: Any, /) -> None:
    """`rapt.dropout_mask` into `mask`."""

def append_kv(*arguments: Any) -> None:
    """`rapt.append_kv`: all its arguments, those of the cache last, in the order of cache.hpp."""

def merge_states(outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any, /) -> None: ...
def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    out: Any,
    lse: Any,
    dropout_p: float,
    seed: int | None,
    /,
) -> None:
    """PyTorch's scaled_dot_product_attention into `out`, and lse into `lse` if that is not None; the caller has checked
    shapes and dtypes."""

def eager_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    /,
) -> Any:
    """PyTorch's scaled_dot_product_attention where nobody but the kernel has a part in it: no mode, transform, tracer,
    autocast, profiler or dropout, and plain tensors that rapt has a kernel for. Else NotImplemented, and nothing done."""

def eager_sdpa_gradients(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    out: Any,
    lse: Any,
    seed: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    wanted: list[bool],
    /,
) -> Any:
    """Its gradients on the CPU of plain tensors of four dimensions, with nothing left to sum: those of query, key, value and
    attn_mask, None for those that are not wanted. Else NotImplemented, and nothing done."""

def dispatched_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = ...,
    seed: Any = ...,
) -> Any:
    """The operator rapt::scaled_dot_product_attention below autograd, of plain tensors without dropout. Else NotImplemented, and
    nothing done."""

def dispatched_sdpa_with_lse(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = ...,
    seed: Any = ...,
) -> Any:
    """The same of rapt::scaled_dot_product_attention_with_lse."""

def dispatched_sdpa_gradients(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    out: Any,
    lse: Any,
    seed: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    wanted: list[bool],
    /,
) -> Any:
    """The same of rapt::scaled_dot_product_attention_backward."""

def dispatched(function: str, otherwise: Callable[..., Any], /) -> Callable[..., Any]:
    """A kernel for PyTorch's dispatcher: what this module's `function` returns, or otherwise(*inputs) if that is NotImplemented."""

def dispatched_above_autograd(function: str, otherwise: Callable[..., Any], plain: int, /) -> Callable[..., Any]:
    """The same for a key of autograd, called with keyset: otherwise(keyset, *inputs) also where the raw keyset is not `plain`, and
    where a gradient is to be recorded."""

def eager_attention(
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    position_bias: Any,
    sinks: Any,
    causal: bool,
    sliding_window: Any,
    softcap: Any,
    scaling: Any,
    dropout: Any,
    /,
) -> Any:
    """The same of `rapt.transformers`: [b, h, n, d] to [b, n, h, dv], rows and keys ending together."""

def read_torch_by_table(wanted: bool, /) -> None:
    """Whether PyTorch's tensors are read through its table of C functions, where it has one (2.10 and newer), or by
    their attributes. For tests."""

def version() -> str: ...
def isas() -> list[str]: ...
def entries() -> list[Entry]: ...
def set_guards(words: str | None, /) -> None:
    """The guards of calls from now on, "nan,shadow=16,tolerance=0.5,determinism"; None: the environment's."""

def guards() -> str:
    """The words of the guards that watch now; "" for none."""
def concurrency() -> int: ...
def pool(torch: bool, /) -> str:
    """Name of the executor of calls with PyTorch's tensors, or of those without."""
