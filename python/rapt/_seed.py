"""Seeds of dropout: one for each call, the same in its backward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from rapt import _refusals
from rapt._operators import Operator

# Names of PyTorch 2.13 that another version need not have.
_BUDGET: Any = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)
_CheckpointMode: Any = getattr(checkpoint, "_CachingTorchDispatchMode", None)


def new_seed() -> Tensor:
    """Of one call's dropout, from PyTorch's default generator: a tensor, as compiled code draws its own at every call."""
    drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    return drawn if _refusals.is_eager() else _kept.overload(drawn)


def _keep(drawn: Tensor) -> Tensor:
    return drawn.clone()


_kept = Operator("kept_seed", _keep, torch.empty_like)  # one that says which node of a graph the seed is


def _trace(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Traces the operator as any other, and marks its node as one to save.

    With an activation memory budget below 1 (torch._functorch.config), PyTorch's partitioner computes in the backward what the
    forward did not save. A seed that is drawn again is another seed, and the backward would have another mask.
    """
    seed = mode.__torch_dispatch__(func, types, args, kwargs)
    slot: Any = get_proxy_slot(seed, mode.tracer, None) if isinstance(seed, Tensor) else None
    if slot is None:
        return seed
    meta = slot.proxy.node.meta
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if meta.get("custom", {}).get(_BUDGET) == 0:
        got = "dropout in region_activation_memory_budget(0), where PyTorch saves no seed"
        raise ValueError(f"dropout_p: got {got}; wanted a budget above 0, such as 1e-6, or no dropout")
    if config.activation_memory_budget == 0:  # the partitioner then saves nothing, whatever it is marked as
        meta["memory_budget"] = sys.float_info.min  # of the whole graph
    return seed


def _checkpoint(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """In a checkpointed region, where a policy says which results are saved."""
    policy, mode.policy_fn = mode.policy_fn, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    try:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    finally:
        mode.policy_fn = policy


_register: Any = torch.library.register_torch_dispatch
_register("rapt::kept_seed", ProxyTorchDispatchMode, _trace)
if _CheckpointMode is not None:
    _register("rapt::kept_seed", _CheckpointMode, _checkpoint)
