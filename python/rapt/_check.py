"""`python -m rapt check`: every kernel of this machine against formulas in float64.

Each kernel runs in a process of its own, forced by RAPT_KERNEL: one that crashes is reported, and the others are still checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import rapt
from rapt._info import Entry

Arrays = list[Any]
Verdict = tuple[str, float]
"""A problem, and the error of its result as a share of what is allowed."""

# Allowed: |got - wanted| / |wanted|, by the type of the inputs and results.
BOUNDS = {"f32": 1e-5, "f16": 2.0**-9, "bf16": 2.0**-6}
TIMEOUT_S = 300
"""For one kernel."""
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


def attention(entry: Entry) -> Iterator[Verdict]:
    sq, sk = (3, 200) if entry["phase"] == "decode" else (150, 200)
    for name, dtype in numpy_types(entry):
        q, k, v = draw(1, dtype, (2, 4, sq, 64), (2, 2, sk, 64), (2, 2, sk, 64))
        out, lse = rapt.attention(q, k, v, causal=True, align="bottom_right", return_lse=True, kernel=entry["name"])
        wanted, wanted_lse = softmax_attention(wide(q), wide(k), wide(v))
        yield f"attention of {name}", max(share(out, wanted, BOUNDS[name]), share(lse, wanted_lse, BOUNDS[name]))
        if "i8" in entry["dtypes"] and name != "f16":
            random = np.random.default_rng(2)
            codes = [random.integers(-127, 128, (2, 2, sk, 64), np.int8) for _ in "kv"]
            scales = [random.uniform(0.005, 0.02, (2, 2, sk, 1)).astype(np.float32) for _ in "kv"]
            out = rapt.attention(q, *codes, k_scale=scales[0], v_scale=scales[1], causal=True, align="bottom_right", kernel=entry["name"])
            wanted, _ = softmax_attention(wide(q), *(wide(c) * s for c, s in zip(codes, scales, strict=True)))
            yield f"attention of {name} over an i8 cache", share(out, wanted, BOUNDS[name])


def attention_backward(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        q, k, v, dout = draw(3, dtype, (1, 4, 150, 64), (1, 2, 200, 64), (1, 2, 200, 64), (1, 4, 150, 64))
        out, lse = softmax_attention(wide(q), wide(k), wide(v))
        gradients = rapt.attention_backward(
            dout, q, k, v, out.astype(dtype), lse.astype(np.float32), causal=True, align="bottom_right"
        )
        error = slopes(lambda *x: softmax_attention(*x)[0], [q, k, v], dout, [gradients.dq, gradients.dk, gradients.dv], BOUNDS[name])
        yield f"gradients of attention of {name}", error


def delta_inputs(dtype: Any, t: int) -> Arrays:
    q, k, v, g, beta = draw(4, np.float32, *((2, t, 4, 32),) * 3, *((2, t, 4),) * 2)
    k /= np.linalg.norm(k, axis=3, keepdims=True)
    return [x.astype(dtype) for x in (q, k, v, -np.abs(g) / 8, 1 / (1 + np.exp(-beta)))]


def delta_rule(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        inputs = delta_inputs(dtype, 1 if entry["phase"] == "decode" else 150)
        wanted = recurrence(*(wide(x) for x in inputs))
        yield f"the delta rule of {name}", share(rapt.delta_rule(*inputs), wanted, BOUNDS[name])


def delta_rule_backward(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        inputs = delta_inputs(dtype, 60)
        (dout,) = draw(5, dtype, (2, 60, 4, 32))
        found = rapt.delta_rule_backward(*inputs, dout=dout)
        gradients = [found.dq, found.dk, found.dv, found.dg, found.dbeta]
        yield f"gradients of the delta rule of {name}", slopes(recurrence, inputs, dout, gradients, BOUNDS[name])


def index_scores(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        q, k = draw(6, dtype, (1, 70, 8, 64), (1, 200, 64))
        (w,) = draw(7, np.float32, (1, 70, 8))
        scores = rapt.dsa.index_scores(q, k, w, causal=False)
        wanted = np.einsum("bih,bihj->bij", wide(w), np.maximum(np.einsum("bihd,bjd->bihj", wide(q), wide(k)), 0)) / 8
        yield f"index scores of {name}", share(scores, wanted, BOUNDS["f32"])  # exact products, and results of f32


def select_topk(entry: Entry) -> Iterator[Verdict]:
    (scores,) = draw(8, np.float32, (20, 3000))
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, :100]
    yield "the largest of f32", 0.0 if (rapt.dsa.select_topk(scores, 100) == wanted).all() else np.inf


def append_kv(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        k_new, v_new = draw(9, dtype, (2, 2, 5, 32), (2, 2, 5, 32))
        k, v = (np.full((2, 2, 20, 32), 7, np.int8) for _ in "kv")
        k_scale, v_scale = (np.ones((2, 2, 20, 1), np.float32) for _ in "kv")
        rapt.append_kv(k_new, v_new, k, v, np.array([3, 15]), k_scale=k_scale, v_scale=v_scale)
        worst = 0.0
        for new, codes, scales in ((k_new, k, k_scale), (v_new, v, v_scale)):
            for i, first in enumerate((3, 15)):
                rows = slice(first, first + 5)
                off = np.abs(wide(codes[i, :, rows]) * scales[i, :, rows] - wide(new[i])) / scales[i, :, rows]
                others = np.delete(codes[i], np.arange(first, first + 5), axis=1)
                worst = max(worst, float(off.max()) / 0.51 if (others == 7).all() else np.inf)
        yield f"an i8 cache of {name}", worst


def merge_states(entry: Entry) -> Iterator[Verdict]:
    for name, dtype in numpy_types(entry):
        outs = draw(10, dtype, *((2, 4, 30, 48),) * 3)
        lses = draw(11, np.float32, *((2, 4, 30),) * 3)
        weights = np.exp(wide(lses))
        wanted = (weights[..., None] * wide(outs)).sum(0) / weights.sum(0)[..., None]
        yield f"merged states of {name}", share(rapt.merge_states(outs, lses), wanted, BOUNDS[name])


CHECKS: dict[str, Callable[[Entry], Iterator[Verdict]]] = {
    check.__name__: check
    for check in (attention, attention_backward, delta_rule, delta_rule_backward, index_scores, select_topk, append_kv, merge_states)
}


def check_entry(name: str) -> None:
    """Prints the verdicts of one kernel as JSON."""
    (entry,) = (entry for entry in rapt.info()["entries"] if entry["name"] == name)
    print(json.dumps(list(CHECKS[entry["operation"]](entry))))


def run_child(entry: Entry) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RAPT_ISA", "RAPT_GUARDS")}
    environment["RAPT_KERNEL"] = entry["name"]
    code = f"from rapt import _check; _check.check_entry({entry['name']!r})"
    command = [sys.executable, "-c", code]
    try:  # -c looks for modules in the folder where it runs first
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=Path(rapt.__file__).parents[1])
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no result after {TIMEOUT_S} s")


def run() -> int:
    """Prints a line for each kernel with a wrong result or none, then one for all. Returns 0 if every result is right."""
    usable = [entry for entry in rapt.info()["entries"] if entry["backend"] == "cpu" and not entry["unusable"]]
    kernels = [entry for entry in usable if entry["operation"] in CHECKS]
    for operation in sorted({entry["operation"] for entry in usable} - CHECKS.keys()):
        print(f"{operation}: not checked: there is no formula for it here")
    checked = problems = 0
    worst = 0.0
    failures = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        children = list(pool.map(run_child, kernels))
    for entry, child in zip(kernels, children, strict=True):
        if child.returncode != 0:
            failures.append(f"{entry['name']}: exit code {child.returncode}: {(child.stderr.strip().splitlines() or [''])[-1]}")
            continue
        verdicts = json.loads(child.stdout)
        if not verdicts:
            print(f"{entry['name']}: not checked: it takes {', '.join(entry['dtypes'])}, and there is no ml_dtypes here")
            continue
        checked, problems = checked + 1, problems + len(verdicts)
        worst = max(worst, *(error for _, error in verdicts))
        failures += [f"{entry['name']}: {problem}: the error is {error:.3g} of what is allowed" for problem, error in verdicts if not error <= 1]
    print("\n".join(failures), end="\n" if failures else "")
    what = f"rapt {rapt.__version__}: {checked} kernels, {problems} problems, largest error {worst:.2f} of what is allowed"
    print(f"{'FAILED' if failures or not checked else 'OK'}: {what}")
    return 1 if failures or not checked else 0
