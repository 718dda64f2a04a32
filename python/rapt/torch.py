"""PyTorch's scaled_dot_product_attention by rapt's kernels, on the CPU and, if rapt was built with CUDA, on GPUs.

    import rapt.torch
    rapt.torch.enable()                 # torch.nn.functional.scaled_dot_product_attention is rapt's from here on
    with rapt.torch.enabled(): ...      # or only in here
    rapt.torch.scaled_dot_product_attention(q, k, v, is_causal=True)    # or by name

Signature, shapes, memory layout of the result (that of PyTorch's CPU), autocast and errors are PyTorch's. So is a row that
attends no key: 0. With is_causal and a scale of 0 or less, PyTorch's CPU kernels give NaN; rapt's give the softmax.
`attn_mask` and `is_causal` may be given together, which PyTorch takes for some shapes only. A row that a float mask moves
by the same huge number throughout (the least float, where others write -inf) keeps the softmax of its scores; in PyTorch
rounding makes that their mean.

What rapt cannot do is handed to PyTorch's function with a `FallbackWarning`, once for each reason: dropout, tensors on
devices that this rapt has no kernels for, float64, nested and sparse tensors, DTensor and other classes with a
__torch_dispatch__, a scale that is no finite float32, torch.func's transforms and forward-mode gradients, torch.jit.trace,
torch.onnx.export, torch.nn.attention.sdpa_kernel without FLASH_ATTENTION (which is what rapt's kernels count as), and
arguments that PyTorch refuses. To forbid it: `warnings.simplefilter("error", rapt.torch.FallbackWarning)`.
torch.jit.script compiles PyTorch's function without a warning.

Modes and subclasses of torch.overrides see PyTorch's own function, as without rapt, and what they leave to it is rapt's.
CausalBias is taken. In torch.profiler a call is the event "rapt::scaled_dot_product_attention".

On a GPU the work is queued on PyTorch's current stream, as PyTorch's own. PyTorch keeps what it does better there: values of
more than 576 columns, and bfloat16 and float16 unless rapt's dispatch has a tensor-core kernel for them or RAPT_KERNEL names
an entry. `torch.ops.rapt.scaled_dot_product_attention` takes those too, and raises ValueError for what no kernel can do.

Gradients are PyTorch's for now: the backward computes the attention again with PyTorch's function and differentiates that.
Calls run on PyTorch's own threads, torch.get_num_threads() of them; rapt.info()["pools"] says whether it could be so.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad, profiler
from torch.backends import mha
from torch.compiler import is_dynamo_compiling
from torch.jit import _builtins
from torch.nn import functional
from torch.overrides import TorchFunctionMode, has_torch_function_variadic

from rapt import _core
from rapt._info import Entry

__all__ = ["FallbackWarning", "disable", "enable", "enabled", "scaled_dot_product_attention"]

_functional: Any = functional
_pytorch: Any = functional.scaled_dot_product_attention
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 8192
_MAX_CUDA_VALUE_SIZE = 576  # attention_simt's; past it is the entry with the S x S matrix
_MAX_TENSOR_CORE_SIZE = 256  # attention_wgmma's, of 16-bit types
_MAX_SCALE = torch.finfo(torch.float32).max
_NUMBERS: Any = (float, int, np.floating, np.integer)


class FallbackWarning(UserWarning):
    """A call went to PyTorch's own scaled_dot_product_attention."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention; see the module for what differs."""
    result: Tensor
    if not is_dynamo_compiling():
        done = _core.eager_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if done is not NotImplemented:
            result = done
            return result
    if has_torch_function_variadic(query, key, value, attn_mask):
        result = _overridden(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return result
    eager = _is_eager(query, key, value, attn_mask)
    reason = _misuse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not reason:
        kind = "cuda" if query.is_cuda else "cpu"
        if torch.is_autocast_enabled(kind):
            query, key, value, attn_mask = _autocast(kind, query, key, value, attn_mask)
        reason = "dropout" if dropout_p != 0 else _refusal(query, key, value, attn_mask, enable_gqa)
        reason = reason or _preference(query, value)
        if reason and attn_mask is not None:
            attn_mask, is_causal = _merged(query, key, attn_mask, is_causal)
        if not eager and not reason:
            reason = _graph_refusal(query, key, value, attn_mask)
    if reason:
        _warn(reason)
        result = _pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result
    run: Callable[..., Any] = _operator
    if eager:
        run = _Function.apply if _needs_grad(query, key, value, attn_mask) else _forward
        if profiler._is_profiler_enabled:
            run = _recorded(run)
    result = run(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return result


# torch.jit.script compiles PyTorch's function in its place.
_builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def enable() -> None:
    """Makes torch.nn.functional.scaled_dot_product_attention rapt's, in all threads, until disable().

    Who imported that name before keeps PyTorch's, which meanwhile misreads a CausalBias: that looks for its function under
    this name. nn.TransformerEncoderLayer and nn.MultiheadAttention leave out their fused inference path, which calls no such
    function (torch.backends.mha.set_fastpath_enabled); rows of padding are then computed, not 0.
    """
    with _lock:
        _switch.on = True
        _switch.apply()


def disable() -> None:
    """Undoes enable(), however often that was called. While a block of enabled() is open, the function stays rapt's."""
    with _lock:
        _switch.on = False
        _switch.apply()


@contextmanager
def enabled() -> Iterator[None]:
    """enable() for a with block. Blocks nest and overlap, in one thread or several: the last to end undoes it."""
    with _lock:
        _switch.blocks += 1
        _switch.apply()
    try:
        yield
    finally:
        with _lock:
            _switch.blocks -= 1
            _switch.apply()


class _Switch:
    on = False
    blocks = 0
    before: tuple[Any, bool] | None = None  # what was replaced: the function, and whether the fused path may be taken

    def apply(self) -> None:
        wanted = self.on or self.blocks > 0
        if wanted and self.before is None:
            self.before = _functional.scaled_dot_product_attention, mha.get_fastpath_enabled()
            _functional.scaled_dot_product_attention = scaled_dot_product_attention
            mha.set_fastpath_enabled(False)
        elif not wanted and self.before is not None:
            _functional.scaled_dot_product_attention, fast = self.before
            mha.set_fastpath_enabled(fast)
            self.before = None


_switch = _Switch()
_lock = threading.Lock()


def _overridden(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Any:
    """A call that modes and subclasses of torch.overrides may take. They see PyTorch's function, as without rapt; what
    they leave to it comes back to rapt's."""
    bias = sys.modules.get("torch.nn.attention.bias")  # slow to import; without it there is no CausalBias
    if bias is not None and isinstance(attn_mask, bias.CausalBias):
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        lower_right = attn_mask.variant is bias.CausalVariant.LOWER_RIGHT and attn_mask.seq_len_q != attn_mask.seq_len_kv
        is_causal, attn_mask = not lower_right, attn_mask._materialize(query.device) if lower_right else None
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    reason = ""
    if torch.compiler.is_dynamo_compiling():
        reason = "modes or subclasses of torch.overrides under torch.compile"
    elif not isinstance(query, Tensor):  # torch.fx.Proxy
        reason = f"query of {type(query).__name__}"
    else:
        with torch._C.DisableTorchFunction():
            reason = "tensors that are not dense" if query.is_nested else ""
    if reason:
        _warn(reason)
    with nullcontext() if reason else _below_modes(_Innermost()):
        return _pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class _Innermost(TorchFunctionMode):
    """Gives rapt's function the calls of PyTorch's that no other mode and no subclass has taken."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _pytorch:
            return func(*args, **(kwargs or {}))
        return NotImplemented if types else scaled_dot_product_attention(*args, **(kwargs or {}))


@contextmanager
def _below_modes(mode: TorchFunctionMode) -> Iterator[None]:
    above = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    for each in (mode, *reversed(above)):
        _push_on_torch_function_stack(each)
    try:
        yield
    finally:
        for _ in range(_len_torch_function_stack()):
            _pop_torch_function_stack()
        for each in reversed(above):
            _push_on_torch_function_stack(each)


_warned: set[str] = set()


def _warn(reason: str) -> bool:
    if reason not in _warned:
        message = f"PyTorch's scaled_dot_product_attention runs instead of rapt's: {reason}"
        warnings.warn(message, FallbackWarning, stacklevel=3)
        _warned.add(reason)  # not where the warning is an error: then it is one every time
    return True


# torch.compile warns when it traces. All that torch.compiler.assume_constant_result does, but for importing the compiler.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _autocast(kind: str, *tensors: Tensor | None) -> list[Any]:
    dtype = torch.get_autocast_dtype(kind)
    return [
        t
        if t is None or not t.is_floating_point() or t.dtype is torch.float64 or t.device.type != kind
        else t.to(dtype)
        for t in tensors
    ]


def _misuse(q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any) -> str:
    """What type or number is for PyTorch to take or to refuse, "" if none is."""
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


def _refusal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """Why rapt cannot do this call, "" if it can."""
    reason = _surroundings()
    if reason:
        return reason
    if not (q.is_cpu and k.is_cpu and v.is_cpu and (mask is None or mask.is_cpu)):
        reason = _device_refusal(q, k, v, mask)
        if reason:
            return reason
    return _misfit(q, k, v, mask, gqa)


def _surroundings() -> str:
    """What this call is a part of that rapt's kernels cannot be a part of, "" if nothing."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "a transform of torch.func, or forward-mode gradients"
    return "" if torch._C._get_tracing_state() is None else "torch.jit.trace"


def _graph_refusal(*tensors: Tensor | None) -> str:
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
_surroundings._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _misfit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """Which types or shapes no kernel takes, "" if there is one for them."""
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
    if not 0 < qs[-1] <= _MAX_HEAD_SIZE or not 0 < vs[-1] <= _MAX_HEAD_SIZE:
        return f"head sizes of 0, or above {_MAX_HEAD_SIZE}"
    if gqa and (len(qs) < 3 or len(ks) < 3 or len(vs) < 3 or ks[-3] != vs[-3] or ks[-3] == 0 or qs[-3] % ks[-3] != 0):
        return "enable_gqa with heads that do not divide"
    batch = _batch_shape(qs, ks, vs, gqa)
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


def _preference(q: Tensor, v: Tensor) -> str:
    """Why a call that rapt could do is left to PyTorch, "" if it is not."""
    if not torch._C._get_flash_sdp_enabled():
        return "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"
    return _cuda_preference_of(q.dtype, q.shape[-1], v.shape[-1]) if q.is_cuda else ""


def _cuda_preference_of(dtype: torch.dtype, d: int, dv: int) -> str:
    if dv > _MAX_CUDA_VALUE_SIZE:
        return f"values of more than {_MAX_CUDA_VALUE_SIZE} columns on a GPU"
    if dtype is torch.float32:
        return ""
    if d > _MAX_TENSOR_CORE_SIZE or dv > _MAX_TENSOR_CORE_SIZE:
        return _cuda_preference(dtype, True)
    return _cuda_preference(dtype, False)


@cache
def _cuda_takes(dtype: torch.dtype, d: int, dv: int) -> bool:
    """Whether the extension may run such a call on a GPU without asking here again. RAPT_KERNEL is read once."""
    return not (_cuda_refusal() or _cuda_preference_of(dtype, d, dv))


@cache
def _cuda_entries() -> list[Entry]:
    """Asked for at the first tensor on a GPU, as it wakes the driver."""
    return [entry for entry in _core.entries() if entry["backend"] == "cuda"]


def _cuda_refusal() -> str:
    entries = _cuda_entries()
    if not entries:
        return "tensors on a GPU, and rapt was built without CUDA"
    if all(entry["unusable"] for entry in entries):
        return f"tensors on a GPU, where rapt cannot run: {entries[-1]['unusable']}"
    return ""


def _cuda_preference(dtype: torch.dtype, wide: bool) -> str:
    own = "bf16" if dtype is torch.bfloat16 else "f16"
    chosen = [entry for entry in _cuda_entries() if not entry["unusable"] and not entry["opt_in"]]
    if os.environ.get("RAPT_KERNEL") or (not wide and any(entry["arithmetic"] == own for entry in chosen)):
        return ""
    heads = f" and heads of more than {_MAX_TENSOR_CORE_SIZE} columns" if wide else ""
    return f"tensors of {dtype}{heads} on a GPU, for which dispatch has no tensor-core kernel"


_cuda_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_cuda_preference._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


def _batch_shape(qs: torch.Size, ks: torch.Size, vs: torch.Size, gqa: bool) -> list[int] | None:
    """All dimensions of the result but the last two; None where they do not broadcast."""
    if qs[:-2] == ks[:-2] == vs[:-2]:
        return list(qs[:-2])
    keep = 3 if gqa else 2
    try:
        batch = list(torch.broadcast_shapes(qs[:-keep], ks[:-keep], vs[:-keep]))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return [*batch, qs[-3]] if gqa else batch


def _is_eager(*tensors: Tensor | None) -> bool:
    """True where the kernel may be called without PyTorch's dispatcher: nobody traces, transforms or wraps, and no tensor
    is one that the dispatcher makes memory for (negated when it is read, or all zeros)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(
        t is None
        or ((type(t) is Tensor or type(t) is torch.nn.Parameter) and not t.is_neg() and not t._is_zerotensor())
        for t in tensors
    )


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _recorded(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recorded(*inputs: Any) -> Tensor:
        with torch._C._profiler._RecordFunctionFast("rapt::scaled_dot_product_attention", inputs[:3]):
            return run(*inputs)

    return recorded


def _result(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, batch: list[int], gqa: bool) -> Tensor:
    """Memory for the result, laid out as by PyTorch on CPUs, on GPUs too: like the query where its fused kernel would run."""
    shape = (*batch, q.shape[-2], v.shape[-1])
    fused = q.shape == shape and q.dim() == k.dim() == v.dim() == 4 and (mask is None or mask.dim() != 3)
    fused = fused and q.shape[0] == k.shape[0] == v.shape[0] and (gqa or q.shape[1] == k.shape[1] == v.shape[1])
    if fused and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and k.shape[-2] > 0:
        return torch.empty_like(q, requires_grad=False)
    return q.new_empty(shape)


def _fold(t: Tensor, batch: list[int]) -> Tensor:
    """[..., h, rows, columns] with its dimensions before the heads broadcast and made one; a view where that can be."""
    while t.dim() < len(batch) + 2:
        t = t.unsqueeze(0)
    return t.expand(*batch[:-1], *t.shape[-3:]).reshape(math.prod(batch[:-1]), *t.shape[-3:])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """The kernel, on tensors that _refusal() let through."""
    batch = _batch_shape(q.shape, k.shape, v.shape, gqa)
    assert batch is not None
    out = to = _result(q, k, v, mask, batch, gqa)
    if len(batch) > 2:
        q, k, v, to = (_fold(t, batch) for t in (q, k, v, out))
        if mask is not None and mask.dim() > 3:
            shared = all(size == 1 for size in mask.shape[:-3])
            mask = mask.reshape(mask.shape[-3:]) if shared else _fold(mask, batch)
    _core.sdpa(q, k, v, mask, is_causal, scale, to)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> None:
    misfit = _misfit(q, k, v, mask, gqa)
    if misfit:
        raise ValueError(
            f"rapt::scaled_dot_product_attention: got {misfit}; wanted what"
            " torch.nn.functional.scaled_dot_product_attention takes, of float32, bfloat16 or float16"
        )


@torch.library.custom_op("rapt::scaled_dot_product_attention", mutates_args=(), device_types=("cpu", "cuda"))
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    _check(query, key, value, attn_mask, enable_gqa)
    return _forward(query, key, value, attn_mask, is_causal, scale, enable_gqa)


@_operator.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    _check(query, key, value, attn_mask, enable_gqa)
    batch = _batch_shape(query.shape, key.shape, value.shape, enable_gqa)
    assert batch is not None
    return _result(query, key, value, attn_mask, batch, enable_gqa)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, attn_mask, ctx.is_causal, ctx.scale, ctx.enable_gqa = inputs
    ctx.save_for_backward(query, key, value, attn_mask)


def _merged(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> tuple[Tensor, bool]:
    """attn_mask and is_causal as the one mask that they are together, which PyTorch takes for some shapes only."""
    if not is_causal or mask.dim() < 2 or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return mask, is_causal
    rows, keys = q.shape[-2], k.shape[-2]
    if mask.shape[-2] not in (1, rows) or mask.shape[-1] not in (1, keys):
        return mask, is_causal
    above = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).triu(1)
    return mask & ~above if mask.dtype is torch.bool else mask.masked_fill(above, -torch.inf), False


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *saved, attn_mask = ctx.saved_tensors
    if ctx.needs_input_grad[3]:
        saved.append(attn_mask)
    is_causal = ctx.is_causal
    again = torch.is_grad_enabled()  # create_graph: PyTorch's backward may have one of its own, or says that it has none
    with torch.enable_grad():
        # Aliases of their own: query, key and value may be one tensor.
        inputs = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in saved]
        query, key, value, mask = *inputs[:3], inputs[3] if len(inputs) > 3 else attn_mask
        if mask is not None:
            mask, is_causal = _merged(query, key, mask, is_causal)
            if mask.is_cuda and mask.is_floating_point():
                mask = mask.to(query.dtype)  # PyTorch's CUDA kernels take no other
        out = _pytorch(query, key, value, mask, 0.0, is_causal, scale=ctx.scale, enable_gqa=ctx.enable_gqa)
    # Of no keys, PyTorch's result does not depend on the mask.
    grads = torch.autograd.grad(out, inputs, grad, create_graph=again, allow_unused=True)
    return (*grads[:3], grads[3] if len(grads) > 3 else None, None, None, None)


_operator.register_autograd(_backward, setup_context=_setup_context)


class _Function(torch.autograd.Function):
    """_operator with gradients for eager calls, in a third of its time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)
