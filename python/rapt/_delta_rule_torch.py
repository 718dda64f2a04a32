"""rapt.torch.delta_rule: the delta rule as PyTorch's operators, with gradients."""

from __future__ import annotations

import inspect
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rapt
from rapt import _flops, _refusals
from rapt._autograd import no_second_derivatives
from rapt._delta_rule import Rule, result_shapes, results
from rapt._scalars import boolean, real

_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias")


class Options(NamedTuple):
    """What is no tensor."""

    rule: str
    scale: float | None
    l2norm_qk: bool
    beta_sigmoid: bool
    beta_double: bool
    gate: bool
    gate_lower_bound: float | None
    state_v_first: bool


# What every operator is given, in this order: _TENSORS and cu_seqlens; Options.
_INPUTS = """Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? a_log, Tensor? dt_bias,
    Tensor? cu_seqlens"""
_OPTIONS = """str rule, float? scale, bool l2norm_qk, bool beta_sigmoid, bool beta_double, bool gate, float? gate_lower_bound,
    bool state_v_first"""


def _arguments(inputs: Any, options: Any) -> dict[str, Any]:
    """As rapt's functions take them."""
    return dict(zip((*_TENSORS, "cu_seqlens"), inputs)) | Options(*options)._asdict()


def _run(inputs: Any, return_state: bool, options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        result = rapt.delta_rule(**_arguments(inputs, options), return_state=return_state, **more)
    return result if return_state else (result, inputs[0].new_empty(0, dtype=torch.float32))


@torch.library.custom_op(
    "rapt::delta_rule",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}, bool return_state, {_OPTIONS}) -> (Tensor, Tensor)",
)
def operator(*given: Any) -> tuple[Tensor, Tensor]:
    return _run(given[:9], given[9], given[10:])


@operator.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *_, cu_seqlens, return_state = given[:10]
    out, state = result_shapes(q, k, v, cu_seqlens, Options(*given[10:]).state_v_first)
    return q.new_empty(out), q.new_empty(state if return_state else (0,), dtype=torch.float32)


@torch.library.custom_op(
    "rapt::delta_rule_",
    mutates_args=("out", "final_state"),
    device_types=("cpu", "cuda"),
    schema=f"(Tensor(a!) out, Tensor(b!)? final_state, Tensor? state_slots, Tensor? accepted, {_INPUTS}, {_OPTIONS}) -> ()",
)
def _operator_in_place(out: Any, final_state: Any, state_slots: Any, accepted: Any, *given: Any) -> None:
    more = {"out": out, "final_state": final_state, "state_slots": state_slots, "accepted": accepted}
    _run(given[:9], False, given[9:], **more)


@_operator_in_place.register_fake
def _(*given: Any) -> None:
    return None


@torch.library.custom_op(
    "rapt::delta_rule_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor? dout, Tensor? dfinal_state, {_INPUTS}, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
def _backward_operator(dout: Tensor | None, dfinal_state: Tensor | None, *given: Any) -> list[Tensor]:
    """Those of the gradients of _TENSORS that are wanted."""
    want: Any = [name for name, wanted in zip(_TENSORS, given[-1]) if wanted]
    with torch.no_grad():
        made = rapt.delta_rule_backward(**_arguments(given[:9], given[9:-1]), dout=dout, dfinal_state=dfinal_state, want=want)
    return [gradient for gradient in made if gradient is not None]


@_backward_operator.register_fake
def _(dout: Any, dfinal_state: Any, *given: Any) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x, wanted in zip(given[:8], given[-1]) if wanted
    ]


_backward_operator.register_autograd(no_second_derivatives("delta rule"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[10:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[: len(_TENSORS)])
    if dstate is not None and dstate.numel() == 0 and dstate.ndim == 1:  # of a state that was not asked for
        dstate = None
    some = iter(_backward_operator(dout, dstate, *ctx.saved_tensors, *ctx.options, wanted))
    made = [next(some) if want else None for want in wanted]
    return (*made, None, None, *[None] * len(ctx.options))


operator.register_autograd(_backward, setup_context=_setup_context)


def _products(of_states: tuple[int, int], of_outs: int, *given: Any) -> Any:
    """Products of vectors of K and V, and of these with states, as of one token after another: so many with each state, without
    and with the prediction, and for each head of q."""
    q, k, v, *_, rule = given
    h = max(k.shape[-2], v.shape[-2])
    products = h * of_states["delta" in rule] + of_outs * max(q.shape[-2] - h, 0)
    return 2 * prod(q.shape[:-2]) * q.shape[-1] * v.shape[-1] * products


@_flops.counted("delta_rule")
def _flops_of(*given: Any, out_val: Any) -> Any:
    return _products((2, 3), 1, *given[:9], given[10])


@_flops.counted("delta_rule_")
def _flops_in_place(*given: Any, out_val: Any) -> Any:
    return _products((2, 3), 1, *given[4:14])


@_flops.counted("delta_rule_backward")
def _flops_of_backward(*given: Any, out_val: Any) -> Any:
    return _products((5, 8), 2, *given[2:12])


def checked(options: Options) -> Options:
    """What the operator's schema would refuse, in rapt.delta_rule's words."""
    checked: dict[str, Any] = {}
    for name, x in options._asdict().items():
        if name != "rule":
            checked[name] = (real if name in ("scale", "gate_lower_bound") else boolean)(name, x)
    if not isinstance(options.rule, str):
        raise ValueError(f'rule: got {options.rule!r}; wanted "linear", "gated", "delta" or "gated_delta"')
    return options._replace(**checked)


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
    """rapt.delta_rule for PyTorch tensors, with gradients on the CPU and as an operator under torch.compile.

    Takes and returns what rapt.delta_rule does. `threads` and `isa` are for eager calls without gradients. Those of q,
    k, v, g, beta, initial_state, a_log and dt_bias that require grad get gradients, computed by
    rapt.delta_rule_backward. A call that writes to your tensors (out, final_state, state_slots) records none. There are
    no second derivatives. Raises TypeError or ValueError, which names the argument.
    """
    tensors = (q, k, v, g, beta, initial_state, a_log, dt_bias)
    named = dict(zip(_TENSORS, tensors)) | {"cu_seqlens": cu_seqlens, "state_slots": state_slots, "accepted": accepted}
    named |= {"final_state": final_state, "out": out}
    _refusals.check_tensors(named, "rapt.delta_rule")
    grad = _refusals.needs_grad(*tensors)
    if grad and q.is_cuda:
        _refusals.check_tensors(named, "rapt.delta_rule", "gradients of the delta rule have no GPU kernels yet")
    if final_state is not None and final_state.requires_grad and torch.is_grad_enabled():
        raise ValueError("final_state: got a tensor that requires grad; wanted one that does not")
    inputs = (*tensors, cu_seqlens)
    options = checked(Options(rule, scale, l2norm_qk, beta_sigmoid, beta_double, gate, gate_lower_bound, state_v_first))
    writes = {"out": out, "final_state": final_state, "state_slots": state_slots}
    if grad and any(x is not None for x in writes.values()):
        name = next(name for name, x in writes.items() if x is not None)
        raise ValueError(f"{name}: got a tensor with inputs that require grad; wanted none, or torch.no_grad()")
    if not grad and _refusals.is_eager(*inputs, state_slots, accepted, final_state, out):
        more: Any = writes | {"accepted": accepted, "threads": threads, "isa": isa}
        made, state = _run(inputs, return_state, options, **more)
        return (made, state) if return_state else made
    for name, limit in (("threads", threads), ("isa", isa)):
        if limit is not None:
            raise ValueError(f"{name}: got {limit!r} with gradients or under torch.compile; wanted None")
    if all(x is None for x in writes.values()):
        made, state = operator(*inputs, return_state, *options)
    else:
        made, state = results(q, k, v, cu_seqlens, return_state, out, final_state, state_slots, state_v_first)
        _operator_in_place(made, state, state_slots, accepted, *inputs, *options)
    return (made, state) if return_state else made


assert list(inspect.signature(delta_rule).parameters) == list(inspect.signature(rapt.delta_rule).parameters)
