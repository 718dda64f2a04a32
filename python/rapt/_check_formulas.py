"""What the checks of operations share: inputs, errors, and attention and the delta rule in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rapt._info import Entry

Arrays = list[Any]
Verdict = tuple[str, float]
"""A problem, and the error of its result as a share of what is allowed."""

# Allowed: |got - wanted| / |wanted|, by the type of the inputs and results.
BOUNDS = {"f32": 1e-5, "f16": 2.0**-9, "bf16": 2.0**-6}
DIRECTIONS = 3
"""In which gradients are compared."""


def numpy_types(entry: Entry) -> Iterator[tuple[str, Any]]:
    """Types of inputs that the entry takes and NumPy has here."""
    known: dict[str, Any] = {"f32": np.float32, "f16": np.float16}
    try:
        from ml_dtypes import bfloat16

        known["bf16"] = bfloat16
    except ImportError:
        pass
    return ((name, known[name]) for name in entry["dtypes"] if name in known)


def wide(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def share(got: Any, wanted: Any, bound: float) -> float:
    error = float(np.linalg.norm(wide(got) - wanted) / np.linalg.norm(wanted)) / bound
    return error if np.isfinite(error) else np.inf


def draw(seed: int, dtype: Any, *shapes: tuple[int, ...]) -> Arrays:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def softmax_attention(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """out and lse of causal attention, aligned bottom right, [b, h, s, d]."""
    group, (sq, sk) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    x = q @ np.repeat(k, group, 1).swapaxes(2, 3) * q.shape[3] ** -0.5
    x = np.where(np.arange(sk) <= np.arange(sq)[:, None] + sk - sq, x, -np.inf)
    p = np.exp(x - x.max(3, keepdims=True))
    total = p.sum(3, keepdims=True)
    return p / total @ np.repeat(v, group, 1), (np.log(total) + x.max(3, keepdims=True))[..., 0]


def recurrence(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    """out of the gated delta rule, [b, t, h, d]."""
    (b, t, h, d), out = q.shape, np.zeros(v.shape)
    state = np.zeros((b, h, d, v.shape[3]))
    for i in range(t):
        state = state * np.exp(g[:, i])[..., None, None]
        u = beta[:, i, :, None] * (v[:, i] - np.einsum("bhkv,bhk->bhv", state, k[:, i]))
        state = state + k[:, i, :, :, None] * u[:, :, None, :]
        out[:, i] = np.einsum("bhkv,bhk->bhv", state, q[:, i]) * d**-0.5
    return out


def slopes(function: Callable[..., Any], inputs: Arrays, dout: Any, gradients: Arrays, bound: float) -> float:
    """Gradients of sum(dout * function(*inputs)) against differences of the function, in random directions of each input."""
    random, step, worst = np.random.default_rng(100), 1e-5, 0.0
    for index, gradient in [*enumerate(gradients)] * DIRECTIONS:
        direction = random.standard_normal(inputs[index].shape)
        ends = []
        for sign in (step, -step):
            moved = [wide(x) for x in inputs]
            moved[index] = moved[index] + sign * direction
            ends.append(float((wide(dout) * function(*moved)).sum()))
        wanted, got = (ends[0] - ends[1]) / (2 * step), float((wide(gradient) * direction).sum())
        # An error of random signs has about its own norm along a random direction, seldom four times that.
        error = abs(got - wanted) / (4 * float(np.linalg.norm(wide(gradient)))) / bound
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst
