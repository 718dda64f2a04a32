"""Calls that the extension decides on by itself: which those are, and that they give what Python's way gives."""

import itertools
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import rapt
import rapt.torch
import torch
from kernel_calls import backward_calls, by_python, kernel_calls
from rapt import _core
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ours = rapt.torch.scaled_dot_product_attention
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.usefixtures("seeded")


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


Q, MASK = randn(2, 4, 9, 16), randn(9, 9)


def sdpa(query=Q, key=Q, value=Q, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return _core.eager_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def attention(
    query=Q, key=Q, value=Q, mask=None, bias=None, sinks=None, causal=True, window=None, softcap=None, scale=None, dropout=0.0
):
    return _core.eager_attention(query, key, value, mask, bias, sinks, causal, window, softcap, scale, dropout)


DOORS = [sdpa, attention]


def refused(result):
    return result is NotImplemented


# Who else may have a part in a call


class FunctionMode(TorchFunctionMode):
    seen = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen = (*self.seen, func)
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def vmapped():
    torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


@contextmanager
def differentiated():
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


SURROUNDINGS = {
    "a mode of functions": FunctionMode,
    "a default device": lambda: torch.device("cpu"),
    "a mode of the dispatcher": DispatchMode,
    "vmap": vmapped,
    "grad": differentiated,
    "forward-mode gradients": forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a profiler": torch.autograd.profiler.profile,
    "another backend": lambda: sdpa_kernel(SDPBackend.MATH),
    "export": lambda: mock.patch.object(torch.compiler, "_is_compiling_flag", True),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("door", DOORS)
def test_surroundings(door, surroundings):
    assert not refused(door())
    with surroundings():
        assert refused(door())
    assert not refused(door())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("door", DOORS)
def test_within_a_trace(door):
    results = []

    def traced(x):
        results.append(door(Q, Q, Q))
        return x

    torch.jit.trace(traced, Q, check_trace=False)
    assert refused(results[0]) and not refused(door())


@pytest.mark.parametrize("door", DOORS)
def test_modes_are_not_shown_what_is_asked(door):
    with FunctionMode() as mode:
        assert refused(door())
    assert not mode.seen


# Tensors


class Subclass(torch.Tensor):
    pass


def fake(t):
    with torch._subclasses.FakeTensorMode():
        return torch.empty(t.shape, dtype=t.dtype)


UNUSUAL = {
    "an array": lambda t: t.numpy(),
    "a subclass": lambda t: t.as_subclass(Subclass),
    "negated": lambda t: torch._neg_view(t.clone()),
    "zeros without memory": lambda t: torch._efficientzerotensor(*t.shape),
    "without storage": lambda t: (u := t.clone(), u.untyped_storage().resize_(0))[0],
    "on another device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "fake": fake,
    "double": lambda t: t.double(),
    "complex": lambda t: torch.complex(t, t).conj(),
}
TENSORS = [(sdpa, "query"), (sdpa, "key"), (sdpa, "value"), (sdpa, "attn_mask")]
TENSORS += [(attention, name) for name in ("query", "key", "value", "mask", "bias", "sinks")]


def usual(name):
    return MASK if name in ("attn_mask", "mask", "bias") else randn(4) if name == "sinks" else Q


@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("door, name", TENSORS)
def test_tensors(door, name, unusual):
    tensor = usual(name)
    assert not refused(door(**{name: tensor}))
    assert refused(door(**{name: unusual(tensor)}))


@pytest.mark.parametrize("door, name", TENSORS)
def test_gradients_that_nobody_records(door, name):
    tensor = torch.nn.Parameter(usual(name))
    recorded = door(**{name: tensor})
    assert refused(recorded) if door is attention else recorded.requires_grad
    with torch.no_grad():
        out = door(**{name: tensor})
    assert type(out) is torch.Tensor and not out.requires_grad
    with torch.inference_mode():
        out = door(**{name: tensor})
    assert type(out) is torch.Tensor and out.is_inference()


# Gradients: the same bits by either way

GRADIENTS = [
    ({}, None),
    ({"is_causal": True, "scale": -0.3}, None),
    ({}, (2, 4, 9, 12)),
    ({"is_causal": True}, (9, 12)),
    ({}, (4, 1, 12)),
    ({}, (1, 4, 9, 12)),
    ({}, (4, 9, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("options, mask", GRADIENTS)
def test_gradients(options, mask, heads, dtype):
    shapes = [(2, 4, 9, 16), (2, heads, 12, 16), (2, heads, 12, 24)]
    tensors = [randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    grad = randn(2, 4, 24, 9, dtype=dtype).transpose(2, 3)
    masks = [None] if mask is None else [randn(*mask) > 0, randn(*mask, dtype=dtype).requires_grad_(), randn(*mask).requires_grad_()]
    for each in masks:
        inputs = [t for t in (*tensors, each) if t is not None and t.requires_grad]

        def run():
            out = ours(*tensors, each, enable_gqa=heads < 4, **options)
            with backward_calls() as calls:
                made = torch.autograd.grad(out, inputs, grad, retain_graph=True)
                alone = torch.autograd.grad(out, inputs[-1], grad)
            assert calls.count == 2 and torch.equal(alone[0], made[-1])
            return [out, *made]

        with kernel_calls() as kernel:
            got = run()
        assert kernel.eager == 1
        with by_python():
            wanted = run()
        for g, w in zip(got, wanted):
            assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride()) and torch.equal(g, w)


@pytest.mark.parametrize(
    "shapes",
    [
        [(9, 16)] * 3,
        [(4, 9, 16)] * 3,
        [(2, 1, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16)],
        [(2, 4, 9, 16), (1, 4, 9, 16), (2, 4, 9, 16)],
    ],
)
def test_gradients_that_python_gives(shapes):
    tensors = [randn(*shape).requires_grad_() for shape in shapes]
    out, answers, ask = ours(*tensors), [], _core.eager_sdpa_gradients
    with mock.patch.object(_core, "eager_sdpa_gradients", lambda *given: answers.append(ask(*given)) or answers[-1]):
        with backward_calls() as calls:
            torch.autograd.grad(out, tensors, torch.ones(out.shape))
    assert answers == [NotImplemented] and calls.count == 1


def test_what_autograd_refuses():
    """A second backward of what the first has freed, and one after a change of what was saved."""
    x = Q.clone().requires_grad_()
    out = ours(x, x, x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()
    y = x * 1
    out = ours(y, y, y).sum()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# Arguments and shapes

ARGUMENTS = [
    (sdpa, {"dropout_p": 0.1}),
    (sdpa, {"dropout_p": None}),
    (sdpa, {"dropout_p": "0"}),
    (sdpa, {"is_causal": 1}),
    (sdpa, {"enable_gqa": None}),
    (sdpa, {"scale": float("nan")}),
    (sdpa, {"scale": float("inf")}),
    (sdpa, {"scale": 1e39}),
    (sdpa, {"scale": 10**400}),
    (sdpa, {"scale": np.float32(1)}),
    (sdpa, {"scale": True}),
    (sdpa, {"scale": "1"}),
    (sdpa, {"attn_mask": [1.0]}),
    (sdpa, {"attn_mask": MASK.half()}),
    (sdpa, {"attn_mask": MASK.int()}),
    (attention, {"dropout": 0.1}),
    (attention, {"scale": float("nan")}),
    (attention, {"softcap": -1.0}),
    (attention, {"softcap": "1"}),
    (attention, {"window": 4.0}),
    (attention, {"mask": MASK, "bias": MASK}),
    (attention, {"sinks": randn(2, 4, 9, 1)}),
    (attention, {"sinks": randn(3)}),
    (attention, {"sinks": randn(4).int()}),
    (attention, {"mask": MASK.int()}),
    (attention, {"bias": MASK > 0}),
    (attention, {"query": Q[0], "key": Q[0], "value": Q[0]}),
]


@pytest.mark.parametrize("door, arguments", ARGUMENTS)
def test_arguments(door, arguments):
    assert refused(door(**arguments))


SHAPES = [
    ((2, 4, 9, 16), (2, 4, 9, 8), (2, 4, 9, 16)),
    ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 8, 16)),
    ((2, 4, 9, 16), (1, 4, 9, 16), (1, 4, 9, 16)),
    ((2, 4, 9, 16), (2, 4, 9, 16), (1, 4, 9, 16)),
    ((2, 4, 9, 16), (1, 4, 9, 16), (2, 4, 9, 16)),
    ((2, 4, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16)),
    ((2, 4, 9, 16), (2, 4, 9, 16), (2, 2, 9, 16)),
    ((2, 4, 9, 16), (4, 9, 16), (4, 9, 16)),
    ((4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16)),
    ((1, 2, 4, 9, 16), (1, 2, 4, 9, 16), (1, 2, 4, 9, 16)),
    ((16,), (16,), (16,)),
    ((2, 4, 0, 16), (2, 4, 9, 16), (2, 4, 9, 16)),
    ((2, 4, 9, 16), (2, 4, 0, 16), (2, 4, 0, 16)),
    ((2, 4, 9, 16), (2, 0, 9, 16), (2, 0, 9, 16)),
    ((2, 4, 9, 0), (2, 4, 9, 0), (2, 4, 9, 16)),
    ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 0)),
    ((1, 1, 1, 8200), (1, 1, 1, 8200), (1, 1, 1, 16)),
    ((1, 1, 1, 16), (1, 1, 1, 16), (1, 1, 1, 8200)),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("gqa", [False, True])
def test_shapes(shapes, gqa):
    tensors = [randn(*shape) for shape in shapes]
    assert refused(sdpa(*tensors, enable_gqa=gqa))
    assert refused(attention(*tensors))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("types", itertools.product(DTYPES, repeat=3))
def test_types(door, types):
    assert refused(door(*(Q.to(dtype) for dtype in types))) is (len(set(types)) > 1)
    assert refused(door(Q.to(torch.int8), Q.to(torch.int8), Q.to(torch.int8)))


def test_groups_of_heads_are_asked_for():
    k = Q[:, :2]
    assert refused(sdpa(Q, k, k)) and not refused(sdpa(Q, k, k, enable_gqa=True))
    assert refused(sdpa(Q[0, 0], Q[0, 0], Q[0, 0], enable_gqa=True)) and not refused(sdpa(Q[0, 0], Q[0, 0], Q[0, 0]))


@pytest.mark.parametrize("shape", [(9,), (8, 9), (9, 8), (3, 9, 9), (3, 4, 9, 9), (1, 2, 4, 9, 9)])
def test_masks_that_do_not_fit(shape):
    assert refused(sdpa(attn_mask=randn(*shape)))
    for mask in (randn(*shape), randn(*shape) > 0):
        assert refused(attention(mask=mask))


# The same bits by either way


def same(function):
    with kernel_calls() as kernel:
        got = function()
    assert (kernel.eager, kernel.by_python) == (1, 0)
    with by_python(), kernel_calls() as kernel:
        wanted = function()
    assert kernel.by_python == 1
    assert (type(got), got.dtype, got.shape, got.stride()) == (type(wanted), wanted.dtype, wanted.shape, wanted.stride())
    assert torch.equal(got, wanted)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 16), (4, 9, 16), (2, 4, 9, 16)])
def test_sdpa(shape, dtype):
    q, k, v = (randn(*shape[:-2], n, d, dtype=dtype) for n, d in ((9, 16), (12, 16), (12, 24)))
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"scale": -1}, {"is_causal": True, "scale": 0.3}):
        same(lambda: ours(q, k, v, **options))
    masks = [(9, 12), (1, 12), (9, 1), (4, 1, 12), (1, 9, 12), (2, 4, 9, 12), (2, 1, 1, 12)]
    for size in (m for m in masks if len(m) <= len(shape) and (len(shape) == 4 or m[0] != 4 or shape[0] == 4)):
        mask = randn(*size)
        for each in (mask, mask > 0, mask.to(dtype)):
            same(lambda: ours(q, k, v, each))
            same(lambda: ours(q, k, v, each, is_causal=True))
    if len(shape) > 2:
        k, v = k[..., :2, :, :], v[..., :2, :, :]
        same(lambda: ours(q, k, v, enable_gqa=True))


def test_sdpa_layouts():
    orders = list(itertools.permutations(range(4)))
    for order, dv, options in itertools.product(orders, (16, 8), ({}, {"attn_mask": randn(3, 5, 7)})):
        memory = randn(*((2, 3, 5, 16)[i] for i in order)).permute([order.index(i) for i in range(4)])
        k, v = randn(2, 3, 7, 16), randn(2, 7, 3, dv).transpose(1, 2)
        same(lambda: ours(memory, k, v, **options))
        same(lambda: ours(memory, k, v.transpose(2, 3).contiguous().transpose(2, 3), **options))


HOOK_CASES = {
    "causal": {},
    "not causal": {"is_causal": False},
    "window": {"sliding_window": 4},
    "wide window": {"sliding_window": 100},
    "window without rows": {"sliding_window": 0},
    "window, not causal": {"sliding_window": 4, "is_causal": False},
    "scale": {"scaling": 0.3},
    "softcap": {"softcap": 2.0},
    "sinks": {"s_aux": randn(4), "sliding_window": 5},
    "other sinks": {"sinks": randn(4).bfloat16()},
    "mask": {"attention_mask": randn(2, 1, 9, 12) > 0},
    "mask of rows": {"attention_mask": randn(2, 1, 9, 1) > 0},
    "mask of sequences": {"attention_mask": randn(2, 1, 1, 1)},
    "bias": {"attention_mask": randn(2, 4, 9, 12)},
    "position bias": {"position_bias": randn(1, 4, 9, 12)},
    "mask and bias": {"attention_mask": randn(2, 1, 9, 12) > 0, "position_bias": randn(1, 4, 9, 12)},
    "window and mask": {"attention_mask": randn(2, 1, 9, 12) > 0, "sliding_window": 4},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [9, 1])
@pytest.mark.parametrize("options", HOOK_CASES.values(), ids=HOOK_CASES)
def test_transformers(options, rows, dtype):
    hooks = pytest.importorskip("rapt.transformers", exc_type=ImportError)
    q, k, v = randn(2, rows, 4, 16, dtype=dtype).transpose(1, 2), randn(2, 2, 12, 16, dtype=dtype), randn(2, 2, 12, 8, dtype=dtype)
    options = {n: t[..., :rows, :] if isinstance(t, torch.Tensor) and t.dim() == 4 else t for n, t in options.items()}
    out = same(lambda: hooks._attention_forward(torch.nn.Module(), q, k, v, position_ids=1, **{"attention_mask": None} | options)[0])
    assert out.shape == (2, rows, 4, 8) and out.is_contiguous()


# Tensors read by PyTorch's table and by their attributes


@contextmanager
def by_attributes():
    _core.read_torch_by_table(False)
    try:
        yield
    finally:
        _core.read_torch_by_table(True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_readers_see_the_same(dtype):
    q, k = randn(3, 9, 4, 16, dtype=dtype)[1:].transpose(1, 2), randn(2, 4, 9, 32, dtype=dtype)[..., ::2]
    lengths = torch.tensor([3, 9])
    options = {"mask": randn(9, 9) > 0, "alibi": randn(4), "cache_seqlens": lengths, "align": "top_left", "return_lse": True}
    wanted = rapt.attention(q, k, k, **options), ours(q, k, k)
    with by_attributes():
        assert refused(sdpa(q, k, k))
        got = rapt.attention(q, k, k, **options), ours(q, k, k)
    for a, b in zip((*got[0], got[1]), (*wanted[0], wanted[1])):
        assert torch.equal(a, b)


# Threads


THREADS = """
import os, torch, rapt.torch
from rapt import _core
def threads():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
x = torch.randn(4, 4, 512, 64)
assert _core.eager_sdpa(x, x, x, None, 0.0, False, None, False) is not NotImplemented
one = threads()
torch.set_num_threads(2)
assert _core.eager_sdpa(x, x, x, None, 0.0, False, None, False) is not NotImplemented
print(threads() - one)
"""


def in_new_process(script):
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_calls_follow_the_number_of_threads():
    assert in_new_process(THREADS) == "1\n"


def test_first_calls_of_two_threads():
    # An import hook that lets the other thread run while the extension looks up PyTorch's functions.
    script = """
import builtins, faulthandler, threading, time
import torch, rapt.torch
faulthandler.dump_traceback_later(60, exit=True)
q, real = torch.randn(1, 2, 8, 16), builtins.__import__
def slow(name, *arguments, **others):
    time.sleep(0.02)
    return real(name, *arguments, **others)
builtins.__import__ = slow
refused = []
def call():
    refused.append(rapt.torch._core.eager_sdpa(q, q, q, None, 0.0, False, None, False) is NotImplemented)
threads = [threading.Thread(target=call) for _ in range(2)]
[t.start() for t in threads], [t.join() for t in threads]
print(refused)
"""
    assert in_new_process(script) == "[False, False]\n"


def test_arrays_while_torch_is_imported():
    script = """
import sys
import numpy as np, rapt
x = np.ones((1, 1, 4, 8), np.float32)
class Finder:
    busy = False
    def find_spec(self, name, path, target=None):
        if name.startswith("torch") and not self.busy:
            self.busy = True
            rapt.attention(x, x, x)
            self.busy = False
sys.meta_path.insert(0, Finder())
import torch
print(rapt.attention(torch.ones(1, 1, 4, 8), *2 * [torch.ones(1, 1, 4, 8)]).shape)
"""
    assert "[1, 1, 4, 8]" in in_new_process(script)
