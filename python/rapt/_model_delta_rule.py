"""The delta rule of transformers' models with linear attention, by rapt on the CPU.

Their layers (Qwen3-Next, Qwen3.5, Kimi Linear, OLMo Hybrid, ...) call functions of their module which are flash-linear-attention's
where that is installed, and loops in PyTorch where it is not, as on every machine without a GPU.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from torch import Tensor
from torch.compiler import is_exporting

from rapt import _fla

_OURS = {
    "torch_chunk_gated_delta_rule": _fla.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _fla.fused_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": _fla.chunk_kda,
    "recurrent_kimi_delta_attention": _fla.fused_recurrent_kda,
}


def use_in(module: Any) -> None:
    """Puts rapt's functions in the place of a module's own. They leave what is not on the CPU to those."""
    for name, ours in _OURS.items():
        theirs = getattr(module, name, None)
        if theirs is not None and not hasattr(theirs, "_rapt_replaces"):
            setattr(module, name, _on_cpu(ours, theirs))


def _on_cpu(ours: Any, theirs: Any) -> Any:
    known = {p.name for p in inspect.signature(ours).parameters.values() if p.kind is not p.VAR_KEYWORD}

    @wraps(theirs)
    def delta_rule(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if query.device.type != "cpu" or args or is_exporting():
            result: tuple[Tensor, Tensor | None] = theirs(query, key, value, *args, **kwargs)
            return result
        taken = {name: value for name, value in kwargs.items() if name in known}
        out, state = ours(query, key, value, **taken)
        return out, state

    delta_rule._rapt_replaces = theirs  # type: ignore[attr-defined]
    return delta_rule
