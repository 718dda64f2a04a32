"""torch.distributed.tensor.experimental.context_parallel: on CPUs, where PyTorch has no attention for it, and for the
calls on GPUs that rapt computes.

PyTorch replaces scaled_dot_product_attention by a function that makes its arguments DTensors, spread along the
sequence, and then calls the function that it has replaced: rapt's. Only this file uses PyTorch's private attributes
for that. The case private_parts of python/tests/context_parallel_cases.py fails if PyTorch changes them.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from rapt import _refusals

_PRIVATE = "torch.distributed.tensor.experimental._context_parallel._attention"
_SEQUENCE = 2  # the dimension that PyTorch spreads


def replaced() -> bool:
    """Whether a context_parallel block has its own function in scaled_dot_product_attention's place."""
    private: Any = sys.modules.get(_PRIVATE)
    return private is not None and functional.scaled_dot_product_attention in private._replaced_functions


def is_spread(query: Any) -> bool:
    """Whether a call comes from a context_parallel block: PyTorch's dispatch rules for it are active, and query is a
    DTensor that is spread along the sequence over a mesh of one dimension."""
    private: Any = sys.modules.get(_PRIVATE)
    if private is None or not isinstance(query, private.DTensor):
        return False
    rules = private.DTensor._op_dispatcher._custom_op_handlers
    return private._sdpa_handler in rules.values() and tuple(query.placements) == (private.Shard(_SEQUENCE),)


def computes(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, enable_gqa: bool) -> bool:
    """Whether rapt computes, or refuses, a call in a context_parallel block. On GPUs PyTorch has the calls that rapt would
    refuse or compute slowly. Depends on nothing that should differ between ranks."""
    if not is_spread(query) or query.device.type not in ("cpu", "cuda"):
        return False
    if query.device.type == "cpu":
        return True
    reason = _refusals.refusal(query, key, value, None, enable_gqa) or _refusals.preference(query, value)
    return not (reason or attn_mask is not None or dropout_p or _refusals.gradient_refusal(query, key, value, None))


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """scaled_dot_product_attention where is_spread(query): all_gather_attention, or ring_attention after
    set_rotate_method("alltoall")."""
    from rapt import distributed
    from rapt._distributed_check import agree, ranks_of

    private: Any = sys.modules[_PRIVATE]
    if isinstance(private._replaced_functions, dict):
        # PyTorch never removes its function, and with it the mesh: gloo's threads would crash as the program ends.
        private._replaced_functions = WeakKeyDictionary(private._replaced_functions)
    mesh, placements = query.device_mesh, query.placements
    wrong = ""
    for name, given, wanted in (("attn_mask", attn_mask is not None, "None"), ("dropout_p", dropout_p != 0, "0")):
        if given:
            wrong = f"{name}: got one in a context_parallel block; wanted {wanted}: a rank has only its part"
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, private.DTensor) or x.device_mesh != mesh or x.placements != placements:
            wrong = f"{name}: got a tensor that is not spread like query; wanted this rank's part of it"
    if not enable_gqa and query.shape[1] != key.shape[1]:
        wrong = f"key: got {key.shape[1]} heads; wanted query's {query.shape[1]}, or enable_gqa=True"
    if wrong:  # maybe on this rank only
        agree(ranks_of(mesh.get_group(), "all_gather_attention"), None, ValueError(wrong))
    options = private._cp_options
    by_ring = options.rotate_method is private._RotateMethod.ALL_TO_ALL
    run: Any = distributed.ring_attention if by_ring else distributed.all_gather_attention
    q, k, v = (x.to_local() for x in (query, key, value))
    out: Tensor = run(
        q, k, v, causal=is_causal, scale=scale, balanced=options.enable_load_balance, group=mesh.get_group()
    )
    return private.DTensor.from_local(out, mesh, placements, run_check=False)
