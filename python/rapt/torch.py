"""PyTorch's scaled_dot_product_attention with rapt's kernels, on the CPU and, if rapt has its GPU backend, on GPUs.

    import rapt.torch
    rapt.torch.enable()                 # torch.nn.functional.scaled_dot_product_attention is now rapt's
    with rapt.torch.enabled(): ...      # or only in this block
    rapt.torch.enable(aten=True)        # and PyTorch's operators below it, for C++ and fused modules
    rapt.torch.scaled_dot_product_attention(q, k, v, is_causal=True)    # or by name

Signature, shapes, memory layout of the result (that of PyTorch's CPU), autocast and errors are PyTorch's. A row that
attends to no key is 0, as in PyTorch. Three things differ:

- With is_causal and a scale of 0 or less, PyTorch's CPU kernels give NaN. rapt gives the softmax.
- rapt takes `attn_mask` and `is_causal` together for all shapes, PyTorch for some only.
- If a float mask adds the same huge number to a whole row (the lowest float in place of -inf), rapt gives the softmax
  of the row's scores. In PyTorch rounding makes it their mean.

Dropout uses rapt's own mask. Each call draws a seed from PyTorch's default generator: torch.manual_seed gives the same
mask again, but not PyTorch's mask.

A call that rapt cannot compute goes to PyTorch's function, with a `FallbackWarning` once per reason: dropout on GPUs;
tensors on devices without kernels in this build; float64; nested and sparse tensors; DTensor and other classes with a
__torch_dispatch__; a scale that is no finite float32; torch.func's transforms and forward-mode gradients;
torch.jit.trace; torch.onnx.export; torch.nn.attention.sdpa_kernel without FLASH_ATTENTION (rapt's kernels count as this
backend); and arguments that PyTorch refuses. torch.jit.script compiles PyTorch's function without a warning. To make
fallbacks errors:

    warnings.simplefilter("error", rapt.torch.FallbackWarning)

torch.distributed.tensor.experimental.context_parallel works on CPUs in a block around which rapt is enabled. It spreads
the sequence over ranks with rapt.distributed, and takes no masks and no dropout.

`__torch_function__` of modes and subclasses receives PyTorch's original function. If it calls that function, the call
runs on rapt. rapt takes CausalBias. In torch.profiler a call is the event "rapt::scaled_dot_product_attention".

On a GPU, the work is queued on PyTorch's current stream. PyTorch keeps the calls that it computes faster: values of
more than 576 columns; bfloat16 and float16 unless rapt's dispatch has a tensor-core kernel for them or RAPT_KERNEL
names an entry; and calls whose gradients are recorded, where dispatch has only its naive kernel of attention_backward.
`torch.ops.rapt.scaled_dot_product_attention` takes these calls too, and raises ValueError for calls without a kernel.

rapt's gradients, also those of float masks, have no second derivatives: for those, use
torch.nn.attention.sdpa_kernel(SDPBackend.MATH). CPU calls run on PyTorch's own threads, torch.get_num_threads() of
them, if rapt finds PyTorch's OpenMP runtime; rapt.info()["pools"] says whether it does.

More functions, without a fallback. Their gradients are for CPU tensors. delta_rule is rapt.delta_rule with gradients
and torch.compile. chunk_kda, fused_recurrent_kda, chunk_gated_delta_rule and fused_recurrent_gated_delta_rule have
flash-linear-attention's arguments: models that import them from here run on CPUs, too. index_scores, index_topk and
select_topk are the indexer of DeepSeek Sparse Attention (rapt.dsa), with gradients of the scores. sparse_attention is
rapt.attention over selected keys, with gradients. indexer_loss trains the indexer, for CPU tensors alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rapt._requirements import require

require("rapt.torch", "torch")

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.autograd import profiler
from torch.backends import mha
from torch.compiler import is_dynamo_compiling
from torch.jit import _builtins
from torch.nn import functional
from torch.overrides import TorchFunctionMode, has_torch_function_variadic

from rapt import _aten, _context_parallel, _core, _refusals, _sdpa, _sdpa_autograd, _seed
from rapt._delta_rule_torch import delta_rule
from rapt._dsa_loss import indexer_loss
from rapt._dsa_torch import index_scores, index_topk, select_topk
from rapt._fla import chunk_gated_delta_rule, chunk_kda, fused_recurrent_gated_delta_rule, fused_recurrent_kda
from rapt._refusals import FallbackWarning
from rapt._sparse_torch import sparse_attention

__all__ = [
    "FallbackWarning",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "delta_rule",
    "disable",
    "enable",
    "enabled",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "index_scores",
    "index_topk",
    "indexer_loss",
    "scaled_dot_product_attention",
    "select_topk",
    "sparse_attention",
]

_functional: Any = functional
_pytorch: Any = _sdpa.pytorch


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
    """Scaled dot-product attention with the arguments and results of torch.nn.functional.scaled_dot_product_attention.

    query, key, value
                    [..., hq, sq, d], [..., hk, sk, d] and [..., hk, sk, dv]; hk = hq unless enable_gqa.
    attn_mask       bool, True = attend, or float, added to the scores; broadcasts to [..., hq, sq, sk].
    dropout_p       The share of weights that are dropped, 0 to 1.
    is_causal       True: row i attends to keys up to i (top-left alignment).
    scale           Default d**-0.5.
    enable_gqa      True: hk may be a divisor of hq.

    Returns [..., hq, sq, dv] of query's type. Calls that rapt cannot compute go to PyTorch's function with a
    FallbackWarning, as do arguments that PyTorch refuses. The module's docstring says what differs from PyTorch.
    """
    result: Tensor
    if not is_dynamo_compiling():
        done = _core.eager_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if done is not NotImplemented:
            result = done
            return result
    if has_torch_function_variadic(query, key, value, attn_mask):
        result = _overridden(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return result
    eager = _refusals.is_eager(query, key, value, attn_mask)
    inputs = query, key, value, attn_mask, dropout_p
    if not eager and not is_dynamo_compiling() and _context_parallel.computes(*inputs, enable_gqa):
        result = _context_parallel.attention(*inputs, is_causal, scale, enable_gqa)
        return result
    reason = _refusals.misuse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if type(dropout_p) is bool:  # of `self.training and 0.1`, say
        dropout_p = float(dropout_p)
    if not reason:
        kind = "cuda" if query.is_cuda else "cpu"
        if torch.is_autocast_enabled(kind):
            query, key, value, attn_mask = _autocast(kind, query, key, value, attn_mask)
        reason = _refusals.refusal(query, key, value, attn_mask, enable_gqa) or _refusals.preference(query, value)
        if not reason and dropout_p != 0:
            reason = _refusals.dropout_refusal(query, dropout_p)
        reason = reason or _refusals.gradient_refusal(query, key, value, attn_mask)
        if reason and attn_mask is not None:
            attn_mask, is_causal = _sdpa.merged(query, key, attn_mask, is_causal)
            if attn_mask.is_cuda:
                attn_mask = _sdpa.rounded(attn_mask, query)
        if not eager and not reason:
            reason = _refusals.graph_refusal(query, key, value, attn_mask)
    if reason:
        _refusals.warn(reason)
        result = _pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result
    run: Callable[..., Any] = _sdpa_autograd.operator
    if eager:
        grad = _refusals.needs_grad(query, key, value, attn_mask)
        run = _sdpa_autograd.forward_with_gradients if grad else _sdpa.forward
        if profiler._is_profiler_enabled:
            run = _sdpa.profiled(run)
    seed = None if dropout_p == 0 else _seed.new_seed()
    result = run(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, seed)
    return result


# torch.jit.script compiles PyTorch's function in its place.
_builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def enable(*, aten: bool = False) -> None:
    """Replaces torch.nn.functional.scaled_dot_product_attention by rapt's, in all threads, until disable().

    aten            True: also replaces PyTorch's own operators on the CPU (_scaled_dot_product_flash_attention_for_cpu,
                    its backward and _native_multi_head_attention), for callers in C++, for the fused inference path,
                    and for code that imported the function earlier. Nested tensors, weights and float64 stay PyTorch's.

    Code that imported the function before enable() keeps PyTorch's version, and that version mishandles CausalBias
    while rapt is enabled. Without `aten`, nn.TransformerEncoderLayer and nn.MultiheadAttention skip their fused
    inference path, which does not call the function (torch.backends.mha.set_fastpath_enabled). Rows of padding are then
    computed, and not 0. With `aten` the fused path stays.

    With `aten`, PyTorch's own function still decides which calls reach these operators. Called from C++, or from code
    that imported it earlier, it computes other calls itself, without a FallbackWarning: calls with dropout, with an
    attn_mask that requires grad or has three dimensions, and with tensors that broadcast or do not have four
    dimensions.
    """
    with _lock:
        _switch.check(on=True)
        _switch.on, _switch.aten = True, aten or _switch.aten
        _switch.apply()


def disable() -> None:
    """Undoes all calls of enable(). While an enabled() block is open, its replacements stay."""
    with _lock:
        _switch.check(on=bool(_switch.blocks))
        _switch.on = _switch.aten = False
        _switch.apply()


@contextmanager
def enabled(*, aten: bool = False) -> Iterator[None]:
    """A context manager: enable() for a with block.

    Blocks may nest and overlap, in one thread or several. The last block to end restores PyTorch's function.
    """
    with _lock:
        _switch.check(on=True)
        _switch.blocks.append(aten)
        _switch.apply()
    try:
        yield
    finally:
        with _lock:
            _switch.blocks.remove(aten)
            _switch.apply()


class _Switch:
    on = aten = False
    before: tuple[Any, bool] | None = None  # what was replaced: the function, and whether the fused path may be taken
    override: _aten.Override | None = None

    def __init__(self) -> None:
        self.blocks: list[bool] = []  # of enabled(): whether each wants PyTorch's operators, too

    def check(self, on: bool) -> None:
        """Raises where switching on or off would undo PyTorch's own replacement of the function."""
        if on != (self.before is not None) and _context_parallel.replaced():
            inside = "on within a context_parallel block" if on else "off within a context_parallel block"
            raise RuntimeError(f"rapt.torch: got switched {inside}; wanted it before or after the block, not within")

    def apply(self) -> None:
        wanted, aten = self.on or bool(self.blocks), self.aten or any(self.blocks)
        if wanted and self.before is None:
            self.before = _functional.scaled_dot_product_attention, mha.get_fastpath_enabled()
            _functional.scaled_dot_product_attention = scaled_dot_product_attention
        elif not wanted and self.before is not None:
            _functional.scaled_dot_product_attention, fast = self.before
            mha.set_fastpath_enabled(fast)
            self.before = None
        if aten and self.override is None:
            self.override = _aten.Override()
        elif not aten and self.override is not None:
            self.override.close()
            self.override = None
        if self.before is not None:
            mha.set_fastpath_enabled(aten and self.before[1])


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
        _refusals.warn(reason)
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


def _autocast(kind: str, *tensors: Tensor | None) -> list[Any]:
    dtype = torch.get_autocast_dtype(kind)
    return [
        t
        if t is None or not t.is_floating_point() or t.dtype is torch.float64 or t.device.type != kind
        else t.to(dtype)
        for t in tensors
    ]


