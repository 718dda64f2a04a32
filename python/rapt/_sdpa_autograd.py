"""scaled_dot_product_attention as PyTorch's operators, with gradients: for its dispatcher, and for eager calls without that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt import _core, _flops, _refusals, _sdpa
from rapt._autograd import check_wanted, register_gradients
from rapt._operators import Operator, attention_schemas


def _check(*inputs: Any) -> None:
    q, k, v, mask, _, _, gqa, *_ = inputs
    misfit = _refusals.misfit(q, k, v, mask, gqa)
    if misfit:
        raise ValueError(
            f"rapt::scaled_dot_product_attention: got {misfit}; wanted what"
            " torch.nn.functional.scaled_dot_product_attention takes, of float32, bfloat16 or float16"
        )


def _forward(*inputs: Any) -> Tensor:
    _check(*inputs)
    return _sdpa.forward(*inputs)


def _forward_with_lse(*inputs: Any) -> Any:
    _check(*inputs)
    return _sdpa.run(*inputs, with_lse=True)


def _fake_with_lse(*inputs: Any) -> tuple[Tensor, Tensor]:
    _check(*inputs)
    q, k, v, mask, _, _, gqa, *_ = inputs
    batch = _sdpa.batch_of(q, k, v, gqa)
    return _sdpa.result_like(q, k, v, mask, batch, gqa), _sdpa.lse_like(q, batch)


def _fake(*inputs: Any) -> Tensor:
    return _fake_with_lse(*inputs)[0]


def _backward(*inputs: Any) -> list[Tensor]:
    """Those of the gradients of query, key, value and attn_mask that are wanted."""
    check_wanted(inputs[-1], "query", "key", "value", "attn_mask")
    return [t for t in _sdpa.gradients(*inputs) if t is not None]


def _fake_backward(grad_out: Tensor | None, grad_lse: Tensor | None, *inputs: Any) -> list[Tensor]:
    return [t for t in _sdpa.gradients(grad_out, grad_lse, *inputs, compute=False) if t is not None]


_NAME = "scaled_dot_product_attention"
_FORWARD, _WITH_LSE, _BACKWARD = attention_schemas(
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask", "bool is_causal, float? scale, bool enable_gqa"
)
_operator = Operator(_NAME, _forward, _fake, ("CPU", "CUDA"), "dispatched_sdpa", _FORWARD)
_operator_with_lse = Operator(
    _NAME + "_with_lse", _forward_with_lse, _fake_with_lse, ("CPU", "CUDA"), "dispatched_sdpa_with_lse", _WITH_LSE
)
_backward_operator = Operator(
    _NAME + "_backward", _backward, _fake_backward, ("CPU", "CUDA"), "dispatched_sdpa_gradients", _BACKWARD
)
operator = _operator.overload
_flops.counted(_NAME, _NAME + "_with_lse")(_flops.attention)
_flops.counted(_NAME + "_backward")(_flops.attention_backward(6))


def forward_with_gradients(*inputs: Any) -> Tensor:
    """_sdpa.forward() of eager calls where a gradient is to be recorded."""
    return _run(*inputs, None)


def recorded(made: tuple[Tensor, Tensor], *inputs: Any) -> Tensor:
    """`out` with its gradients, where the extension has made (out, lse), without dropout."""
    return _run(*inputs, 0.0, None, made)


def _by_extension(*inputs: Any) -> Any:
    return _core.eager_sdpa_gradients(*inputs)


_run, _ = register_gradients(
    _operator,
    _operator_with_lse,
    _backward_operator,
    4,
    _sdpa.run,
    _sdpa.gradients,
    _by_extension,
)
