"""rapt.torch.delta_rule: the delta rule as PyTorch's operators, with gradients."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._delta_rule import Rule, result_shapes
from rapt._delta_rule_gradients import Options, gradients, wanted_gradients

_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias")


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None, a_log: Tensor | None,
    dt_bias: Tensor | None, cu_seqlens: Tensor | None, return_state: bool, options: Options, **more: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():
        result = rapt.delta_rule(
            q, k, v, g, beta, initial_state=initial_state, a_log=a_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens,
            return_state=return_state, **options._asdict(), **more
        )  # fmt: skip
    return result if return_state else (result, q.new_empty(0, dtype=torch.float32))


@torch.library.custom_op("rapt::delta_rule", mutates_args=(), device_types="cpu")
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
    rule: str,
    scale: float,
    l2norm_qk: bool,
    beta_sigmoid: bool,
    beta_double: bool,
    gate: bool,
    gate_lower_bound: float | None,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    options = Options(rule, scale, l2norm_qk, beta_sigmoid, beta_double, gate, gate_lower_bound, state_v_first)
    return _run(q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens, return_state, options)


@operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, initial_state: Any, a_log: Any, dt_bias: Any, cu_seqlens: Any,
    return_state: bool, *options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, state = result_shapes(q, k, v, cu_seqlens, Options(*options).state_v_first)
    return q.new_empty(out), q.new_empty(state if return_state else (0,), dtype=torch.float32)


@torch.library.custom_op("rapt::delta_rule_", mutates_args=("out", "final_state"), device_types="cpu")
def _operator_in_place(
    out: Tensor,
    final_state: Tensor | None,
    state_slots: Tensor | None,
    accepted: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: str,
    scale: float,
    l2norm_qk: bool,
    beta_sigmoid: bool,
    beta_double: bool,
    gate: bool,
    gate_lower_bound: float | None,
    state_v_first: bool,
) -> None:
    options = Options(rule, scale, l2norm_qk, beta_sigmoid, beta_double, gate, gate_lower_bound, state_v_first)
    more = {"out": out, "final_state": final_state, "state_slots": state_slots, "accepted": accepted}
    _run(q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens, False, options, **more)


@_operator_in_place.register_fake
def _(*arguments: Any) -> None:
    return None


@torch.library.custom_op("rapt::delta_rule_backward", mutates_args=(), device_types="cpu")
def _backward_operator(
    dout: Tensor | None,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: str,
    scale: float,
    l2norm_qk: bool,
    beta_sigmoid: bool,
    beta_double: bool,
    gate: bool,
    gate_lower_bound: float | None,
    state_v_first: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Those of the gradients of q to dt_bias that are wanted."""
    options = Options(rule, scale, l2norm_qk, beta_sigmoid, beta_double, gate, gate_lower_bound, state_v_first)
    tensors = (q, k, v, g, beta, initial_state, a_log, dt_bias)
    return wanted_gradients(gradients(tensors, cu_seqlens, options, dout, dstate), tensors, wanted)


@_backward_operator.register_fake
def _(dout: Any, dstate: Any, *inputs: Any) -> list[Tensor]:
    tensors, wanted = inputs[: len(_TENSORS)], inputs[-1]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, want in zip(tensors, wanted) if want]


def _no_second_derivatives(ctx: Any, *_: Any) -> Any:
    raise RuntimeError("create_graph: got a gradient of rapt's delta rule to differentiate; wanted first derivatives only")


_backward_operator.register_autograd(_no_second_derivatives)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    count = len(_TENSORS) + 1
    ctx.save_for_backward(*inputs[:count])
    ctx.options = inputs[count + 1 :]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[: len(_TENSORS)])
    if dstate is not None and dstate.numel() == 0 and dstate.ndim == 1:  # of a state that was not asked for
        dstate = None
    some = iter(_backward_operator(dout, dstate, *ctx.saved_tensors, *ctx.options, wanted))
    made = [next(some) if want else None for want in wanted]
    return (*made, None, None, *[None] * len(ctx.options))


operator.register_autograd(_backward, setup_context=_setup_context)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    rule: Rule = "gated_delta",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_slots: Tensor | None = None,
    accepted: Tensor | None = None,
    l2norm_qk: bool = False,
    beta_sigmoid: bool = False,
    beta_double: bool = False,
    gate: bool = False,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    state_v_first: bool = False,
    out: Tensor | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """rapt.delta_rule of PyTorch's tensors on the CPU, with gradients, and under torch.compile an operator of its graph.

    Arguments and results are those of rapt.delta_rule; `threads` and `isa` are for eager calls without gradients only.
    Gradients go to q, k, v, g, beta, initial_state, a_log and dt_bias; a call that writes to tensors of yours (out,
    final_state, state_slots) has none. They are PyTorch's arithmetic, token by token, and not fast yet: a kernel of rapt's
    is missing. There are no second derivatives.
    """
    tensors = (q, k, v, g, beta, initial_state, a_log, dt_bias)
    named = dict(zip(_TENSORS, tensors)) | {"cu_seqlens": cu_seqlens, "state_slots": state_slots, "accepted": accepted}
    for name, x in (named | {"final_state": final_state, "out": out}).items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted a tensor, or rapt.delta_rule")
        if x is not None and x.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {x.device}; wanted one on the cpu: the delta rule has no GPU kernels yet")
    given = (
        k.shape[-1] ** -0.5 if scale is None else float(scale),
        *(l2norm_qk, beta_sigmoid, beta_double, gate, gate_lower_bound, state_v_first),
    )
    options = Options(rule, *given)
    grad = _refusals.needs_grad(*tensors)
    writes = {"out": out, "final_state": final_state, "state_slots": state_slots}
    if grad and any(x is not None for x in writes.values()):
        name = next(name for name, x in writes.items() if x is not None)
        raise ValueError(f"{name}: got a tensor with inputs that require grad; wanted none, or torch.no_grad()")
    if not grad and _refusals.is_eager(*tensors, cu_seqlens, state_slots, accepted, final_state, out):
        more: Any = writes | {"accepted": accepted, "threads": threads, "isa": isa}
        made, state = _run(*tensors, cu_seqlens, return_state, options, **more)
        return (made, state) if return_state else made
    for name, limit in (("threads", threads), ("isa", isa)):
        if limit is not None:
            raise ValueError(f"{name}: got {limit!r} with gradients or under torch.compile; wanted None")
    if all(x is None for x in writes.values()):
        made, state = operator(*tensors, cu_seqlens, return_state, *options)
        return (made, state) if return_state else made
    shape, of_state = result_shapes(q, k, v, cu_seqlens, state_v_first)
    if return_state and final_state is None:
        if state_slots is not None:
            raise ValueError("final_state: got None with state_slots and return_state; wanted the pool to write to")
        final_state = q.new_empty(of_state, dtype=torch.float32)
    if out is None:
        out = q.new_empty(shape)
    _operator_in_place(out, final_state, state_slots, accepted, *tensors, cu_seqlens, *options)
    return (out, final_state) if return_state else out


assert list(inspect.signature(delta_rule).parameters) == list(inspect.signature(rapt.delta_rule).parameters)
