"""Operators of PyTorch's whose kernels are functions of the extension: which calls come to these at once, and which do not."""

import sys
from pathlib import Path

import pytest
import rapt
import rapt._model_attention  # operators of models
import rapt.torch
import torch
from kernel_calls import backward_calls, by_python, kernel_calls
from rapt._autograd import register_gradients
from rapt._operators import Operator, attention_schemas
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

ours = rapt.torch.scaled_dot_product_attention
operator = torch.ops.rapt.scaled_dot_product_attention.default
with_lse = torch.ops.rapt.scaled_dot_product_attention_with_lse.default
backward = torch.ops.rapt.scaled_dot_product_attention_backward.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def call(q, k=None, v=None, mask=None, is_causal=False, scale=None, gqa=False, *dropout):
    k = q if k is None else k
    return operator(q, k, k if v is None else v, mask, is_causal, scale, gqa, *dropout)


@pytest.fixture
def x():
    return torch.randn(2, 4, 9, 16)


SURROUNDINGS = [
    torch.enable_grad,
    torch.no_grad,
    torch.inference_mode,
    torch.profiler.profile,
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    torch._C._AutoDispatchBelowAutograd,
]


SDPA = (None, False, None, False)
MODELS = (None, None, None, True, -1, None, 0.25, 0.0, None)


@pytest.mark.parametrize(
    "name, options",
    [("scaled_dot_product_attention", SDPA), ("scaled_dot_product_attention_with_lse", SDPA), ("attention", MODELS)],
)
def test_tangents_are_refused(x, name, options):
    def attention(t):
        return getattr(torch.ops.rapt, name)(t, t, t, *options)

    wanted = attention(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for surroundings in (torch.enable_grad, torch.no_grad):
            with surroundings(), pytest.raises(NotImplementedError, match=f"rapt::{name}: "):
                attention(dual)
        torch.testing.assert_close(attention(x), wanted, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=f"rapt::{name}: "):
        torch.func.jvp(attention, (x,), (x,))


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_the_extension_takes(x, surroundings):
    wanted = ours(x, x, x, is_causal=True)
    with kernel_calls() as kernel, surroundings():
        got = call(x, is_causal=True)
    assert (kernel.eager, kernel.by_python) == (1, 0)
    assert torch.equal(got, wanted) and got.dtype is torch.float32 and not got.requires_grad


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_the_extension_takes_what_requires_grad_where_none_is_recorded(x, surroundings):
    for y in (x.requires_grad_(), torch.nn.Parameter(x)):
        with kernel_calls() as kernel, surroundings():
            got = call(y)
        assert (kernel.eager, kernel.by_python) == (1, 0) and not got.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(), (None, True), (None, False, 0.3, True), ("mask",), ("bias", True)])
def test_the_extension_gives_what_python_gives(options, dtype):
    q, k, v = (torch.randn(2, h, s, 16).to(dtype) for h, s in ((6, 9), (3, 12), (3, 12)))
    kinds = {"mask": torch.rand(9, 12) > 0.3, "bias": torch.randn(2, 1, 9, 12)}
    mask, is_causal, scale, gqa = (*options, *(None, False, None, False)[len(options) :])
    mask = kinds.get(mask)
    q = q if gqa else q[:, :3]
    inputs = (q, k, v, mask, is_causal, scale, gqa)
    with kernel_calls() as kernel:
        got, pair = operator(*inputs), with_lse(*inputs)
    assert (kernel.eager, kernel.by_python) == (2, 0)
    with by_python(), kernel_calls() as kernel:
        wanted, wanted_pair = operator(*inputs), with_lse(*inputs)
    assert (kernel.eager, kernel.by_python) == (0, 2)
    assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(pair, wanted_pair))
    needed = [True, False, True, False]
    for dropout_p, seed in ((0.0, None), (0.25, torch.tensor(7))):
        given = (torch.ones_like(got), None, q, k, v, mask, *pair, seed, is_causal, scale, gqa, dropout_p, needed)
        made = backward(*given)
        with by_python():
            assert len(made) == 2 and all(torch.equal(a, b) for a, b in zip(made, backward(*given)))


def test_no_python_runs(x):
    """That is what the extension's kernels are for."""
    seen = []
    package = str(Path(rapt.__file__).parent)
    options = (None, False, None, False)
    out, lse = with_lse(x, x, x, *options)
    gradients = (x, None, x, x, x, None, out, lse, None, False, None, False, 0.0, [True] * 4)

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                operator(x, x, x, *options)
                with_lse(x, x, x, *options)
                backward(*gradients)
        assert not seen
        operator(x, x, x, *options, 0.25, torch.tensor(7))
        assert seen
    finally:
        sys.setprofile(None)


def test_what_python_is_asked_for(x):
    """Dropout, classes of others, and shapes that broadcast."""

    class Other(torch.Tensor):
        pass

    with kernel_calls() as kernel:
        other = call(x.as_subclass(Other))
        first = call(x, x[:1], x[:1])
        dropped = call(x, None, None, None, False, None, False, 0.25, torch.tensor(7))
    assert (kernel.eager, kernel.by_python) == (0, 3)
    torch.testing.assert_close(other.as_subclass(torch.Tensor), call(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(first, call(x, x[:1].expand(x.shape)), rtol=0, atol=1e-6)
    assert not torch.equal(dropped, call(x))


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_modes_see_the_operator(x, grad):
    x.requires_grad_(grad)
    with Seeing() as mode:
        got = call(x)
    assert (with_lse if grad else operator) in mode.seen and got.requires_grad == grad
    assert torch.equal(got, ours(x, x, x))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(call(x)).__name__ == "FakeTensor"


def test_what_the_dispatcher_resolves(x):
    wanted = call(-x)
    got = call(torch._neg_view(x))
    assert torch.equal(got, wanted)
    imaginary = torch.complex(torch.zeros_like(x), x).conj().imag  # -x, negated when it is read
    assert imaginary.is_neg() and torch.equal(call(imaginary), wanted)
    zeros = torch._efficientzerotensor(x.shape)
    assert (call(x, x, zeros) == 0).all()


def test_transforms_have_their_part(x):
    with pytest.raises(RuntimeError, match="setup_context"):  # torch.library's gradients know none
        torch.func.grad(lambda q: call(q, x, x).sum())(x)
    functional = torch.func.functionalize(lambda q: call(q, x, x))(x)
    assert torch.equal(functional, call(x))
    each = torch.vmap(lambda q: call(q, q, q))(x)
    torch.testing.assert_close(each, torch.stack([call(q) for q in x]), rtol=0, atol=1e-6)


def test_a_gradient_is_recorded(x):
    for needed in ((0,), (1,), (2,), (0, 1, 2)):
        tensors = [x.clone().requires_grad_(i in needed) for i in range(3)]
        out = call(*tensors)
        assert out.requires_grad
        got = torch.autograd.grad(out.square().sum(), [tensors[i] for i in needed])
        wanted = torch.autograd.grad(ours(*tensors).square().sum(), [tensors[i] for i in needed])
        for a, b in zip(got, wanted):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_kernels_are_not_compiled(x):
    """By torch.compile, where a frame has left its graph and calls the operator by itself."""

    seed = torch.tensor(7)

    def left(x):
        y = x + 1
        torch._dynamo.graph_break()
        try:
            print(end="")
            z = operator(y, y, y, None, False, None, False, 0.25, seed)
        finally:
            pass
        return z

    counter = CompileCounter()
    torch.compile(left, backend=counter)(x)
    assert counter.frame_count == 1


def test_compiled_training_calls_the_extension(x):
    x.requires_grad_()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with kernel_calls() as kernel, backward_calls() as backward:
        compiled(x, x, x).sum().backward()
    assert (kernel.eager, kernel.by_python) == (1, 0)
    assert backward.names == ["dispatched_sdpa_gradients"]


def test_gradients_of_others():
    """Calls whose gradients rapt does not compute are recorded by others, eager and in graphs. On a GPU's tensors these are
    PyTorch's; here, an operator on the CPU has them."""
    ran = []

    def run(x, factor, dropout_p=0.0, seed=None, *, with_lse=False):
        ran.append("run")
        return x * factor, x.sum(-1) if with_lse else None

    def gradients(grad_out, grad_lse, x, out, lse, seed, factor, dropout_p, wanted):
        ran.append("rapt")
        return [grad_out * factor]

    def setup_others(ctx, inputs, output):
        ctx.factor = inputs[1]

    def others(ctx, grad):
        ran.append("others")
        return grad * ctx.factor, None, None, None

    name = "test_gradients_of_others"
    schemas = attention_schemas("Tensor x", "float factor")
    plain = Operator(name, lambda *given: run(*given)[0], lambda x, *_: torch.empty_like(x), schema=schemas[0])
    pair = Operator(
        name + "_with_lse",
        lambda *given: run(*given, with_lse=True),
        lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:-1])),
        schema=schemas[1],
    )
    of_pair = Operator(name + "_backward", gradients, lambda grad, *_: [torch.empty_like(grad)], schema=schemas[2])
    by_others = plain.autograd_of(others, setup_others, "CPU")
    register_gradients(
        *(plain, pair, of_pair, 1, run, gradients),
        otherwise=lambda keyset, x, factor, *rest: NotImplemented if factor > 0 else by_others(keyset, x, factor, *rest),
    )
    for function in (plain, torch.compile(lambda *given: plain(*given), fullgraph=True, backend="aot_eager")):
        for factor, who in ((2.0, "rapt"), (-2.0, "others")):
            ran.clear()
            x = torch.randn(3, 4, requires_grad=True)
            function(x, factor).sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, factor))
            assert ran.count("run") == 1 and ran.count("rapt") == (who == "rapt")
            assert "others" in ran or who == "rapt"
        ran.clear()
        assert not function(x.detach(), -2.0).requires_grad and ran == ["run"]
