"""Which calls rapt.torch leaves to PyTorch, and why."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from rapt import _core
from rapt._info import Entry

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
MAX_HEAD_DIM = 8192  # docs/contract.md
_MAX_SCALE = torch.finfo(torch.float32).max
_NUMBERS: Any = (float, int, np.floating, np.integer)


class FallbackWarning(UserWarning):
    """A call went to PyTorch's own function. The message states the reason."""

    __module__ = "rapt.torch"


warned: set[str] = set()


def warn(reason: str) -> bool:
    if reason not in warned:
        message = f"PyTorch's scaled_dot_product_attention runs instead of rapt's: {reason}"
        warnings.warn(message, FallbackWarning, stacklevel=3)
        warned.add(reason)  # not where the warning is an error: then it is one every time
    return True


# torch.compile warns when it traces. All that torch.compiler.assume_constant_result does, but for importing the compiler.
warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def misuse(q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any) -> str:
    """Which argument has a type or number that PyTorch must take or refuse, "" if none has."""
    for tensor in (q, k, v):
        if not isinstance(tensor, Tensor):
            return f"query, key or value of {type(tensor).__name__}"
    if mask is not None and not isinstance(mask, Tensor):
        return f"attn_mask of {type(mask).__name__}"
    if type(is_causal) is not bool or type(gqa) is not bool:
        return "is_causal or enable_gqa that is no bool"
    if not isinstance(dropout_p, _NUMBERS):
        return f"dropout_p of {type(dropout_p).__name__}"
    if scale is not None:
        if not isinstance(scale, _NUMBERS) or type(scale) is bool:
            return f"scale of {type(scale).__name__}"
        if not abs(float(scale)) <= _MAX_SCALE:
            return "a scale that is no finite float32"
    return ""


def refusal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """Why rapt cannot do this call, "" if it can."""
    reason = _context_refusal()
    if reason:
        return reason
    if not (q.is_cpu and k.is_cpu and v.is_cpu and (mask is None or mask.is_cpu)):
        reason = _device_refusal(q, k, v, mask)
        if reason:
            return reason
    return misfit(q, k, v, mask, gqa)


def _context_refusal() -> str:
    """Why rapt's kernels cannot run where this call is made, "" if they can."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "a transform of torch.func, or forward-mode gradients"
    return "" if torch._C._get_tracing_state() is None else "torch.jit.trace"


def graph_refusal(*tensors: Tensor | None) -> str:
    """Why PyTorch's dispatcher must not be given rapt's operator, "" if it may."""
    if _is_onnx_export():
        return "torch.onnx.export"
    for t in tensors:
        if t is None or type(t) is FakeTensor or type(t) is FunctionalTensor:
            continue
        if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"tensors of {type(t).__name__}, which need not know rapt's operator"
    return ""


def _is_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


# Asked when torch.compile traces.
_context_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def misfit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """Which types or shapes no kernel takes, "" if one takes them all."""
    dtype = q.dtype
    if dtype not in _DTYPES:
        return f"tensors of {dtype}"
    if k.dtype is not dtype or v.dtype is not dtype:
        return "query, key and value of different dtypes"
    if not (q.layout is k.layout is v.layout is torch.strided) or q.is_nested or k.is_nested or v.is_nested:
        return "tensors that are not dense"
    qs, ks, vs = q.shape, k.shape, v.shape
    if len(qs) < 2 or len(ks) < 2 or len(vs) < 2 or ks[-2] != vs[-2] or qs[-1] != ks[-1]:
        return "query, key and value whose shapes do not fit"
    if not 0 < qs[-1] <= MAX_HEAD_DIM or not 0 < vs[-1] <= MAX_HEAD_DIM:
        return f"head dimensions of 0, or above {MAX_HEAD_DIM}"
    if gqa and (len(qs) < 3 or len(ks) < 3 or len(vs) < 3 or ks[-3] != vs[-3] or ks[-3] == 0 or qs[-3] % ks[-3] != 0):
        return "enable_gqa with heads that do not divide"
    batch = batch_shape(qs, ks, vs, gqa)
    if batch is None:
        return "query, key and value whose shapes do not fit"
    if list(qs[:-2]) != batch and 0 in (*batch, qs[-2], ks[-2]):
        return "empty tensors that broadcast"  # which PyTorch does not do
    return "" if mask is None else _mask_misfit(mask, dtype, [*batch, qs[-2], ks[-2]])


def _device_refusal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    device = q.device
    if k.device != device or v.device != device or (mask is not None and mask.device != device):
        return "tensors on different devices"
    return _cuda_refusal() if device.type == "cuda" else "tensors that are not on the CPU or a CUDA device"


def preference(q: Tensor, v: Tensor) -> str:
    """Why a call that rapt could do is left to PyTorch, "" if it is not."""
    if not torch._C._get_flash_sdp_enabled():
        return "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"
    return _cuda_preference(q.dtype, q.shape[-1], v.shape[-1]) if q.is_cuda else ""


def dropout_refusal(q: Tensor, dropout_p: float) -> str:
    if not q.is_cpu:
        return "dropout on a GPU"
    return "" if 0 <= dropout_p <= 1 else "dropout_p that is no probability"


def cuda_takes(dtype: torch.dtype, d: int, dv: int) -> bool:
    """Whether the extension may run such a call on a GPU. It asks once: RAPT_KERNEL is not read again."""
    return not (_cuda_refusal() or _cuda_preference(dtype, d, dv))


@cache
def _cuda_entries() -> list[Entry]:
    """Asked for at the first tensor on a GPU, as it wakes the driver."""
    return [entry for entry in _core.entries() if entry["backend"] == "cuda"]


@cache
def cuda_runs(operation: str) -> bool:
    """Whether a GPU here can run an operation."""
    return any(entry["operation"] == operation and not entry["unusable"] for entry in _cuda_entries())


@cache
def cuda_prefills(operation: str, dtype: str, head_dim: int) -> bool:
    """Whether a GPU here can run an operation by an entry made for prompts."""
    return any(
        entry["operation"] == operation
        and entry["phase"] == "prefill"
        and not entry["unusable"]
        and dtype in entry["dtypes"]
        and head_dim <= entry["max_head_dim"]
        for entry in _cuda_entries()
    )


def cuda_differentiates(q: Tensor, v: Tensor, modifiers: dict[str, Any]) -> bool:
    """Whether dispatch has an entry of attention_backward for such a call on a GPU that is not naive. `modifiers`: words of a
    problem's text, each with None where the call has no such argument. Its rows and keys stand for all: no choice depends on them."""
    if q.dtype not in _DTYPES:
        return False
    words = [f"attention_backward device=cuda dtype={_DTYPES[q.dtype]} sq=1024 d={int(q.shape[-1])} dv={int(v.shape[-1])}"]
    return _has_gradients(" ".join(words + [word for word, given in modifiers.items() if given is not None]))


def learnt(t: Tensor | None) -> Tensor | None:
    """The tensor if a gradient of it is recorded."""
    return t if t is not None and t.requires_grad else None


def differentiates(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether gradients of such a call of scaled_dot_product_attention on a GPU, without dropout, are rapt's to compute: not with
    a mask, of which cuDNN takes less time."""
    return mask is None and cuda_differentiates(q, v, {})


def gradient_refusal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Why a call that rapt could do is PyTorch's for its gradients, "" if it is not."""
    if not q.is_cuda or not needs_grad(q, k, v, mask) or differentiates(q, v, mask):
        return ""
    with_mask = "" if mask is None else ", with an attn_mask"
    heads = f"heads of {q.shape[-1]} and {v.shape[-1]} columns{with_mask}"
    return f"gradients on a GPU of {q.dtype}, {heads}: rapt computes them slowly (and such calls fast under torch.no_grad())"


def cuda_decodes(dtype: torch.dtype, d: int, dv: int) -> bool:
    """Whether dispatch has an entry made for one row over many keys, of which values are columns, on a GPU."""
    problem = f"attention device=cuda dtype={_DTYPES[dtype]} hq=16 hk=1 sq=1 sk=4096 d={d} dv={dv} latent"
    return _phase_of(problem) in ("decode", "all")


def _has_gradients(problem: str) -> bool:
    """Not cached itself: torch.compile looks into what functools.cache wraps."""
    return _phase_of(problem) not in ("", "naive")


@cache
def _phase_of(problem: str) -> str:
    """The phase of the entry that dispatch chooses on a GPU, "" if it has none."""
    try:
        name = _core.explain_problem(problem, None, None).entry
    except ValueError:
        return ""
    return next((entry["phase"] for entry in _cuda_entries() if entry["name"] == name), "")


def _cuda_refusal() -> str:
    entries = _cuda_entries()
    if not entries:
        return f"tensors on a GPU: {_core.backends()[1]['missing']}"
    if all(entry["unusable"] for entry in entries):
        return f"tensors on a GPU, where rapt cannot run: {entries[-1]['unusable']}"
    return ""


def _cuda_preference(dtype: torch.dtype, d: int, dv: int) -> str:
    """Why PyTorch is faster for calls with these head dimensions, "" if it is not."""
    max_without_scores, tensor_cores = _cuda_head_dims(dtype)
    if dv > max_without_scores:
        return f"values of more than {max_without_scores} columns on a GPU"
    if tensor_cores is None:
        return ""
    for min_head_dim, max_head_dim, max_value_head_dim in tensor_cores:
        if d >= min_head_dim and dv >= min_head_dim and d <= max_head_dim and dv <= max_value_head_dim:
            return ""
    sizes = f" and heads of {d} and {dv} columns" if tensor_cores else ""
    return f"tensors of {dtype}{sizes} on a GPU, for which dispatch has no tensor-core kernel"


def _cuda_head_dims(dtype: torch.dtype) -> tuple[int, tuple[tuple[int, int, int], ...] | None]:
    """The largest head dimension of values without a matrix of scores in memory. And the smallest and largest head dimension,
    and the largest one of values, of each tensor-core kernel; None where the call needs none."""
    own = _DTYPES[dtype]
    attention = [e for e in _cuda_entries() if e["operation"] == "attention" and own in e["dtypes"]]
    chosen = [e for e in attention if not e["unusable"] and not e["opt_in"]]
    largest = max((e["max_value_head_dim"] for e in chosen if e["phase"] != "naive"), default=0)
    if own == "f32" or os.environ.get("RAPT_KERNEL"):
        return largest, None
    kernels = [e for e in chosen if e["arithmetic"] == own]
    return largest, tuple((e["min_head_dim"], e["max_head_dim"], e["max_value_head_dim"]) for e in kernels)


cuda_runs._dynamo_marked_constant = True  # type: ignore[attr-defined]
cuda_prefills._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]
_cuda_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_cuda_head_dims._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _mask_misfit(mask: Tensor, dtype: torch.dtype, scores: list[int]) -> str:
    if mask.dtype is not torch.bool and mask.dtype is not torch.float32 and mask.dtype is not dtype:
        return f"attn_mask of {mask.dtype} with query of {dtype}"
    if mask.layout is not torch.strided or mask.is_nested:
        return "attn_mask that is not dense"
    shape = mask.shape
    fits = all(size == 1 or size == wanted for size, wanted in zip(reversed(shape), reversed(scores)))
    if not fits or not 2 <= len(shape) <= len(scores):
        return "attn_mask whose shape does not fit"
    return ""


def batch_shape(qs: torch.Size, ks: torch.Size, vs: torch.Size, gqa: bool) -> list[int] | None:
    """All dimensions of the result but the last two; None where they do not broadcast."""
    if qs[:-2] == ks[:-2] == vs[:-2]:
        return list(qs[:-2])
    keep = 3 if gqa else 2
    try:
        batch = list(torch.broadcast_shapes(qs[:-keep], ks[:-keep], vs[:-keep]))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return [*batch, qs[-3]] if gqa else batch


def check_tensors(named: dict[str, Tensor | None], function: str, on_cpu: str = "") -> None:
    """Raises where one of a function's arguments is no tensor on the CPU, or has no derivative of its kind. `function` takes
    other arrays; `on_cpu` says why not on a GPU, "" where a GPU will do."""
    for name, x in named.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted a tensor, or {function}")
        if x.layout is not torch.strided or x.is_nested:
            raise TypeError(f"{name}: got a {'nested tensor' if x.is_nested else f'tensor of {x.layout}'}; wanted a dense one")
        if on_cpu and x.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {x.device}; wanted one on the cpu: {on_cpu}")
        if _is_transformed(x):
            raise NotImplementedError(
                f"{name}: got a tensor of forward mode or of a torch.func transform; wanted one of torch.autograd's backward"
            )


def check_one_device(named: dict[str, Tensor | None]) -> None:
    """Raises where a function's arguments, which check_tensors() has seen, are not all on the device of the first one."""
    given = [(name, x) for name, x in named.items() if x is not None]
    for name, x in given[1:]:
        first, like = given[0]
        if x.device != like.device:
            raise ValueError(f"{name}: got a tensor on {x.device}; wanted one on {like.device}, as {first} is")


def check_memory(named: dict[str, Tensor | None]) -> None:
    """Raises where a function that is no operator of PyTorch's is called on tensors of a trace."""
    for name, x in named.items():
        if isinstance(x, FakeTensor):
            raise TypeError(f"{name}: got a FakeTensor; wanted one with memory: of rapt.mla, attention alone is made of operators")


class renamed:
    """Calls of rapt's own functions in here refuse arguments under the names that the caller's function has for them."""

    def __init__(self, **names: str) -> None:
        self.names = names

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, (TypeError, ValueError)):
            name, colon, rest = str(error).partition(": ")
            if colon and name in self.names:
                raise type(error)(f"{self.names[name]}: {rest}") from None


def _is_transformed(x: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    if functorch.is_gradtrackingtensor(x) or functorch.is_batchedtensor(x):
        return True
    return has_tangent(x)


def has_tangent(x: Tensor) -> bool:
    """Whether a gradient of forward mode goes through it."""
    unpack: Any = forward_ad.unpack_dual
    return forward_ad._current_level >= 0 and unpack(x).tangent is not None


def is_batched(t: Tensor | None) -> bool:
    """Whether it is what a vmap, torch.func's or that of is_grads_batched, makes of a batch."""
    if t is None or torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(t) or functorch.is_legacy_batchedtensor(t)


def is_traced() -> bool:
    """Whether numbers cannot be looked at."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_eager(*tensors: Tensor | None) -> bool:
    """True where the kernel may be called without PyTorch's dispatcher: nobody traces, transforms or wraps, and no tensor
    is one that the dispatcher makes memory for (negated when it is read, or all zeros)."""
    if is_traced() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    for t in tensors:
        if t is None:
            continue
        if (type(t) is not Tensor and type(t) is not torch.nn.Parameter) or t.is_neg() or t._is_zerotensor():
            return False
    return True


def is_plain(x: Any) -> bool:
    """Whether check_tensors() and is_eager() are sure to let x pass, in code that is not traced: a tensor on the CPU."""
    functorch = torch._C._functorch
    if type(x) is not Tensor or not x.is_cpu or x.layout is not torch.strided or x.is_nested or x.is_neg() or x._is_zerotensor():
        return False
    return forward_ad._current_level < 0 and not functorch.is_gradtrackingtensor(x) and not functorch.is_batchedtensor(x)


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
