"""The delta rule of transformers' models with linear attention, by rapt.

Their layers (Qwen3-Next, Qwen3.5, Kimi Linear, OLMo Hybrid, ...) call functions of their module, which are flash-linear-attention's
where that is installed, and loops in PyTorch where it is not, as on most machines without a GPU. A layer that is to use rapt's
passes them a keyword; other models of the same module keep what they have.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from rapt import _fla, _refusals

_OURS = {
    "torch_chunk_gated_delta_rule": _fla.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _fla.fused_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": _fla.chunk_kda,
    "recurrent_kimi_delta_attention": _fla.fused_recurrent_kda,
}
_KEYWORD = "rapt_delta_rule"
calls = 0  # of rapt's functions


def choose(model: nn.Module, ours: bool) -> None:
    """Lets the layers of a model use rapt's functions, or not."""
    for layer in model.modules():
        kind: Any = type(layer)
        if not _calls_delta_rule(kind):
            continue
        hooks = [key for key, hook in layer._forward_pre_hooks.items() if isinstance(hook, _AddKeyword)]
        if ours and not hooks:
            layer.register_forward_pre_hook(_AddKeyword(kind), with_kwargs=True)
        for key in hooks:
            if not ours:
                del layer._forward_pre_hooks[key], layer._forward_pre_hooks_with_kwargs[key]


class _AddKeyword:
    """A hook. Where a pickled model is loaded, the module of its layers gets rapt's functions, too."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        _calls_delta_rule(layer)

    def __reduce__(self) -> Any:
        return _AddKeyword, (self.layer,)

    def __call__(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {_KEYWORD: True}


@cache
def _calls_delta_rule(layer: Any) -> bool:
    """Whether a layer calls one of these functions. If so, its module has rapt's beside them from now on."""
    found = False
    for base in layer.__mro__:
        forward = inspect.unwrap(vars(base).get("forward", base))
        for name in _OURS.keys() & set(forward.__code__.co_names if inspect.isfunction(forward) else ()):
            theirs, found = forward.__globals__[name], True
            if not hasattr(theirs, _KEYWORD):
                forward.__globals__[name] = _by_keyword(_OURS[name], theirs)
    return found


def _runs_here(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """On GPUs without gradients; where flash-linear-attention is there, prompts only with decays of channels, where rapt is faster."""
    if not query.is_cuda:
        return query.device.type == "cpu"
    if _refusals.needs_grad(query, key, value, *(x for x in kwargs.values() if isinstance(x, Tensor))):
        return False
    if query.shape[1] == 1 or not _has_fla():
        return _refusals.cuda_runs("delta_rule")
    g = kwargs.get("g")
    is_kda = g is not None and g.ndim == 4 and {x.dtype for x in (query, key, value)} == {torch.bfloat16}
    return is_kda and _refusals.cuda_prefills("delta_rule", "bf16", max(key.shape[-1], value.shape[-1]))


@cache
def _has_fla() -> bool:
    """Whether transformers' functions call flash-linear-attention's."""
    return importlib.util.find_spec("fla") is not None


_has_fla._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _by_keyword(ours: Any, theirs: Any) -> Any:
    @wraps(theirs)
    def delta_rule(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        global calls
        uses_ours = kwargs.pop(_KEYWORD, False) and not is_exporting() and _runs_here(query, key, value, kwargs)
        # The convolution before it is transformers', which does not keep packed sequences apart: it refuses them.
        uses_ours = uses_ours and kwargs.get("cu_seqlens") is None and kwargs.get("seq_idx") is None
        if uses_ours and not is_dynamo_compiling():
            calls += 1
        out, state = (ours if uses_ours else theirs)(query, key, value, **kwargs)
        return out, state

    setattr(delta_rule, _KEYWORD, True)
    return delta_rule
