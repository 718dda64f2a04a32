"""Norms of q and k, rotary embedding and the append to the cache in one call, in layers of transformers' models.

A model with rapt's attention gets a new forward for each class of its layers whose source has the known form
(_model_rotary_source). It runs the model's own code if the layer's config names another attention, while gradients are
recorded, and in compiled or traced code.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as all_modules
from transformers import DynamicCache

from rapt import _core, _refusals
from rapt._cache import cache_arguments
from rapt._model_cache import Cache
from rapt._model_rotary_forms import ROTATE, Rotation, norm_of
from rapt._model_rotary_source import rewritten

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MARK = "rapt_rotary"
_CACHES = (Cache, DynamicCache)
_NO_NORMS: Any = (None, None, 0.0, False)
_NO_CACHE = cache_arguments()
_log = logging.getLogger("rapt.transformers")
names: set[str] = set()
"""Of attention, as configs have them."""


def prepare(model: nn.Module) -> None:
    """Replaces the forward of a model's layers where it has the known form."""
    for kind in {type(layer) for layer in model.modules()}:
        theirs = _forward_of(kind)
        if theirs is None:
            continue
        reason = _replace(kind, theirs)
        if reason:
            _log.debug("%s keeps its code around attention: %s", kind.__name__, reason)


def fused(model: nn.Module) -> dict[str, str]:
    """Tells which layers of a model do the norms of q and k, the rotary embedding and the append to the cache in one
    call.

    model           A model of transformers.

    Returns a dict: the name of each class of layers that calls apply_rotary_pos_emb, and "rapt" if it makes that call,
    else the reason why it runs its own code. Raises TypeError if model is not a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; wanted a model of transformers")
    found: dict[str, str] = {}
    for layer in model.modules():
        theirs = _forward_of(type(layer))
        if theirs is not None and found.get(type(layer).__name__, "rapt") == "rapt":  # the first reason counts
            found[type(layer).__name__] = _why_not(layer, theirs) or "rapt"
    return found


def _forward_of(kind: Any) -> FunctionType | None:
    """The forward of a class of layers if it rotates q and k, as transformers has it."""
    theirs = inspect.unwrap(kind.forward)
    return theirs if isinstance(theirs, FunctionType) and ROTATE in theirs.__code__.co_names else None


def _replace(kind: Any, theirs: FunctionType) -> str:
    """Puts rapt's forward in place of a class's. Returns why that cannot be, "" if it can."""
    ours = _ours(theirs)
    if isinstance(ours, str):
        return ours
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    if owner.forward is theirs:
        setattr(owner, "forward", ours)
    made = owner.forward  # of another thread, maybe
    return "" if hasattr(made, _MARK) and made.__wrapped__ is theirs else "its forward is decorated"


def _why_not(layer: Any, theirs: FunctionType) -> str:
    if getattr(getattr(layer, "config", None), "_attn_implementation", None) not in names:
        return "its attention is another, or has fuse=False"
    if "forward" in vars(layer) and not hasattr(layer.forward, _MARK):
        return "its forward was replaced"
    return _replace(type(layer), theirs)


@cache
def _ours(theirs: FunctionType) -> FunctionType | str:
    made = rewritten(theirs, names, _is_intercepted, _step)
    if isinstance(made, FunctionType):
        setattr(made, _MARK, True)
    return made


def _is_intercepted() -> bool:
    """Whether PyTorch is to see every operator, or every tensor as it is."""
    if _refusals.is_traced() or torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return True
    c: Any = torch._C
    modes = c._len_torch_dispatch_stack() or c._len_torch_function_stack()
    return bool(modes or c._functorch.maybe_current_level() is not None)


def _step(rotation: Rotation, theirs: FunctionType, moved: tuple[bool, bool]) -> Callable[..., Any]:
    """What a layer calls; _model_rotary_source.rewritten() has the arguments. `theirs` is the layer's own forward."""
    interleaved, all_channels, columns, rounds_last = rotation
    variables = theirs.__globals__
    rotate = variables[ROTATE]  # whose source rapt knows, unless somebody replaces it

    def tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, Any, int] | None:
        """cos, sin and the number of channels that are rotated, where rapt computes what the model does."""
        dtype = q.dtype
        if type(q) is not Tensor or type(k) is not Tensor or type(cos) is not Tensor:
            return None
        if not (q.is_cpu or (q.is_cuda and _refusals.cuda_runs("rotary_append_kv"))):
            return None
        if dtype not in _DTYPES or k.dtype is not dtype or cos.dim() != 3:
            return None
        if cos.dtype is not dtype and not rounds_last:
            return None
        r = cos.shape[2]
        if columns == "first half":
            cos, sin = cos[..., : r // 2], sin[..., : r // 2]
        elif columns == "half":
            r *= 2
        return None if all_channels and r != q.shape[3] else (cos, sin, r)

    def step(q: Any, k: Any, v: Any, cos: Any, sin: Any, past: Any, index: Any, q_norm: Any, k_norm: Any) -> Any:
        norms = _NO_NORMS if q_norm is None and k_norm is None else _weights(q_norm, k_norm, q.dtype)
        if norms is None:  # modules of other kinds
            q, k = _normed(q_norm, q, moved[0]), _normed(k_norm, k, moved[1])
            q_norm, k_norm, norms = None, None, _NO_NORMS
        if cos is not None and variables[ROTATE] is rotate and "forward" not in vars(rotate):
            found = tables(q, k, cos, sin)
            if found is not None:
                cos_rows, sin_rows, r = found
                options = (cos_rows, sin_rows, None, *norms, interleaved, r, 0, torch.empty_like(q))
                done = _fused(q, k, v, options, past, index)
                if done is not None:
                    return done
        q, k = _normed(q_norm, q, moved[0]), _normed(k_norm, k, moved[1])
        if cos is not None:
            q, k = variables[ROTATE](q, k, cos, sin)
        if past is not None:
            k, v = past.update(k, v, index)
        return q, k, v

    return step


def _normed(norm: Any, x: Tensor, moved: bool) -> Tensor:
    if norm is None:
        return x
    made: Tensor = norm(x.transpose(1, 2)).transpose(1, 2) if moved else norm(x)
    return made


def _weights(q_norm: Any, k_norm: Any, dtype: torch.dtype) -> tuple[Any, Any, float, bool] | None:
    """Weights, epsilon and whether 1 is added, of two RMS norms. None if a module does anything else, or has hooks."""
    q, k = _weight(q_norm, dtype), _weight(k_norm, dtype)
    if q is None or k is None or all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks:
        return None
    (q_weight, epsilon, plus_one), (k_weight, k_epsilon, k_plus_one) = q, k
    if q_weight is None:
        epsilon, plus_one = k_epsilon, k_plus_one
    elif k_weight is not None and (epsilon != k_epsilon or plus_one != k_plus_one):
        return None
    return q_weight, k_weight, epsilon, plus_one


def _weight(norm: Any, dtype: torch.dtype) -> Any:
    if norm is None:
        return None, 0.0, False
    cls: Any = type(norm)
    kind = norm_of(cls, cls.forward)
    if kind is None:
        return None
    state = vars(norm)
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
        return None
    weight = state["_parameters"].get("weight")
    if type(weight) is not nn.Parameter or weight.dtype is not dtype or weight.dim() != 1:
        return None
    return weight, state.get(kind.epsilon), kind.plus_one


def _fused(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], past: Any, index: int) -> Any:
    """Rotated queries, and keys and values of the cache. None where rapt refuses such tensors."""
    if type(past) in _CACHES and index < len(past.layers) and not past.offloading and "update" not in vars(past):
        append = getattr(past.layers[index], "append_rotated", None)
        rows = None if append is None else append(q, k, v, options)
        if rows is not None:
            return options[-1], *rows
    turned = torch.empty_like(k)
    try:
        _core.rotary_append_kv(q, k, None, None, None, None, None, *options, turned, *_NO_CACHE)
    except (TypeError, ValueError):
        return None
    if past is not None:
        turned, v = past.update(turned, v, index)
    return options[-1], turned, v
