"""Gradients of rapt.torch: those of float64 autograd of the plain formula, by rapt's own backward."""

import os
import signal
import warnings
from unittest import mock

import pytest
import rapt.torch
import torch
from autograd_reference import UNITS, attention, doubled, relative_error
from kernel_calls import backward_calls, by_python
from rapt import _model_attention, _sdpa_autograd
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

ours = rapt.torch.scaled_dot_product_attention
theirs = functional.scaled_dot_product_attention
DTYPES = list(UNITS)
OPERATORS = torch.ops.rapt


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def draw(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def check(function, inputs, names, grad, **options):
    """Gradients of `function` are those of the formula: to 1e-5 in fp32, else within three times PyTorch's error."""
    with backward_calls() as calls:
        got = torch.autograd.grad(function(*inputs), inputs, grad)
    assert calls.count == 1
    wide = doubled(dict(zip(names, inputs)))
    wanted = torch.autograd.grad(attention(**wide, **options)[0], list(wide.values()), grad.double())
    for name, x, g, w in zip(names, inputs, got, wanted):
        assert g.shape == x.shape and g.dtype == x.dtype
        if x.dtype is torch.float32 and grad.dtype is torch.float32 and x.shape[-1] > 1:
            assert relative_error(g, w) <= 1e-5, name
    return got, wanted


CASES = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"causal": True}),
    "scaled": ({"scale": 0.3}, {"scale": 0.3}),
    "mask": ({"attn_mask": (m := torch.rand(2, 1, 45, 61, generator=torch.Generator().manual_seed(1)) > 0.4)}, {"mask": m}),
    "grouped": ({"enable_gqa": True}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(case, dtype, compiled):
    options, reference = CASES[case]
    heads, keys = 2 if case == "grouped" else 4, 45 if case == "causal" else 61
    inputs = draw((2, 4, 45, 32), (2, heads, keys, 32), (2, heads, keys, 32), dtype=dtype)
    grad = torch.randn(2, 4, 45, 32).to(dtype)
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    got, wanted = check(lambda *x: run(*x, **options), inputs, "qkv", grad, **reference)
    pytorchs = torch.autograd.grad(theirs(*inputs, **options), inputs, grad)
    for g, p, w in zip(got, pytorchs, wanted):
        assert (g.double() - w).norm() <= 3 * (p.double() - w).norm() + 2**-24 * w.norm()


MASKS = [(45, 61), (1, 61), (45, 1), (4, 45, 61), (4, 1, 1), (2, 1, 1, 61), (2, 4, 45, 61), (1, 4, 45, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MASKS)
def test_gradients_of_masks(shape, dtype):
    inputs = draw((2, 4, 45, 32), (2, 4, 61, 32), (2, 4, 61, 32), shape, dtype=dtype)
    grad = torch.randn(2, 4, 45, 32).to(dtype)
    got, wanted = check(ours, inputs, ("q", "k", "v", "bias"), grad)
    pytorchs = torch.autograd.grad(theirs(*inputs), inputs, grad)
    for g, p, w in zip(got, pytorchs, wanted):
        size = w if w.shape[-1] > 1 else grad  # what moves all of a row changes nothing: its gradient is 0
        assert (g.double() - w).norm() <= 3 * (p.double() - w).norm() + 2 * UNITS[dtype] * size.double().norm()


def test_gradients_of_float_masks_of_halves():
    inputs = [*draw(*[(2, 4, 45, 32)] * 3, dtype=torch.bfloat16), *draw((4, 45, 45))]
    got, wanted = check(ours, inputs, ("q", "k", "v", "bias"), torch.randn(2, 4, 45, 32).bfloat16())
    assert got[3].dtype == torch.float32 and relative_error(got[3], wanted[3]) < 0.02


@pytest.mark.parametrize(
    "q, k, v, mask",
    [
        ((9, 16), (12, 16), (12, 16), (9, 12)),
        ((4, 9, 16), (4, 12, 16), (4, 12, 16), (4, 1, 12)),
        ((2, 4, 9, 16), (1, 4, 12, 16), (2, 1, 12, 16), (1, 12)),
        ((2, 1, 9, 16), (2, 4, 12, 16), (4, 12, 16), (9, 1)),
        ((2, 4, 9, 16), (2, 1, 12, 16), (2, 1, 12, 16), None),
        ((3, 2, 4, 9, 16), (3, 2, 4, 12, 16), (3, 2, 4, 12, 16), (3, 1, 1, 9, 12)),
        ((3, 2, 4, 9, 16), (2, 4, 12, 16), (3, 1, 4, 12, 16), (1, 1, 4, 9, 1)),
        ((3, 1, 4, 9, 16), (1, 2, 1, 12, 16), (4, 12, 16), (2, 4, 9, 12)),
    ],
)
def test_gradients_of_what_broadcasts(q, k, v, mask):
    inputs = draw(*(shape for shape in (q, k, v, mask) if shape))
    out = ours(*inputs)
    grad = torch.randn(out.shape)
    got = torch.autograd.grad(out, inputs, grad)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    scores = wide[0] @ wide[1].transpose(-1, -2) * 0.25 + (wide[3] if mask else 0)
    wanted = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, grad.double())
    for g, w in zip(got, wanted):
        if w.shape[-1] > 1:
            assert relative_error(g, w) <= 1e-5
        else:  # what moves all of a row changes nothing
            assert g.shape == w.shape and g.abs().max() < 1e-5


@pytest.mark.parametrize(
    "expand",
    [
        lambda out: out.sum(),
        lambda out: out.transpose(1, 2).contiguous().square().sum(),
        lambda out: out[:, :, ::2].sum(),
        lambda out: out.mean(2).square().sum(),
    ],
)
def test_gradients_of_results_of_any_strides(expand):
    inputs = draw(*[(2, 45, 4, 32)] * 3)

    def grads(function):
        return torch.autograd.grad(expand(function(*(t.transpose(1, 2) for t in inputs))), inputs)

    for g, w in zip(grads(ours), grads(lambda *x: attention(*(t.double() for t in x))[0])):
        assert relative_error(g, w) <= 1e-5


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (3,), (1, 3)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_some_inputs(needed, compiled):
    inputs = draw(*[(2, 4, 9, 16)] * 3, (9, 9))
    every = torch.autograd.grad(ours(*inputs).square().sum(), inputs)
    some = [t.detach().requires_grad_(i in needed) for i, t in enumerate(inputs)]
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    run(*some).square().sum().backward()
    for i, (t, wanted) in enumerate(zip(some, every)):
        assert (t.grad is not None) is (i in needed)
        if i in needed:
            torch.testing.assert_close(t.grad, wanted, rtol=0, atol=1e-6)


def test_gradients_lie_in_memory_as_what_they_are_of():
    q = torch.randn(2, 9, 4, 16).transpose(1, 2).requires_grad_()
    (grad,) = torch.autograd.grad(ours(q, q.detach(), q.detach()).sum(), q)
    assert grad.stride() == q.stride()


def test_one_tensor_as_query_key_and_value():
    x, grad = draw((2, 4, 9, 16))[0], torch.randn(2, 4, 9, 16)
    (got,) = torch.autograd.grad(ours(x, x, x, is_causal=True), x, grad)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(attention(wide, wide, wide, causal=True)[0], wide, grad.double())
    assert relative_error(got, wanted) <= 1e-5


def test_rows_and_batches_without_keys():
    for shapes in (((2, 4, 9, 16), (2, 4, 0, 16)), ((0, 4, 9, 16), (0, 4, 9, 16)), ((2, 4, 0, 16), (2, 4, 9, 16))):
        q, k = draw(*shapes)
        ours(q, k, k).sum().backward()
        assert (q.grad == 0).all() and (k.grad == 0).all() and q.grad.shape == q.shape and k.grad.shape == k.shape
    q, hidden = draw((2, 4, 9, 16))[0], torch.ones(9, 9, dtype=torch.bool)
    hidden[3] = False
    ours(q, q, q, hidden).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    inputs = draw(*[(2, 4, 45, 32)] * 3, (45, 45))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype=dtype), backward_calls() as calls:
        out = ours(*inputs)
        assert out.dtype is dtype
        got = torch.autograd.grad(out.float().square().sum(), inputs)
    assert calls.count == 1
    wanted = torch.autograd.grad(attention(*wide[:3], bias=wide[3])[0].square().sum(), wide)
    for g, w in zip(got, wanted):
        assert g.dtype is torch.float32 and relative_error(g, w) < 16 * UNITS[dtype]


def test_lse_is_computed_for_gradients_only():
    seen = []

    def recorded(name):
        function = getattr(rapt._core, name)

        def record(*arguments):
            result = function(*arguments)
            if result is not NotImplemented:
                seen.append(name.endswith("with_lse") or (name == "sdpa" and arguments[7] is not None))
            return result

        return record

    x = torch.randn(2, 4, 9, 16)
    names = ("sdpa", "dispatched_sdpa", "dispatched_sdpa_with_lse")
    with mock.patch.multiple(rapt._core, **{name: recorded(name) for name in names}):
        torch.compile(ours, backend="aot_eager")(x, x, x)
        torch.ops.rapt.scaled_dot_product_attention(x, x, x, None, False, None, False)
        with torch.no_grad():
            y = x.clone().requires_grad_()
            torch.ops.rapt.scaled_dot_product_attention(y, y, y, None, False, None, False)
        assert seen == [False] * 3
        with by_python():
            ours(y, y, y)
        torch.ops.rapt.scaled_dot_product_attention(y, y, y, None, False, None, False)
        assert seen == [False] * 3 + [True] * 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
def test_second_derivatives_are_refused_by_name(compiled):
    x = draw((2, 4, 9, 16))[0]
    run = torch.ops.rapt.scaled_dot_product_attention if compiled else ours
    out = run(x, x, x, None, False, None, False) if compiled else ours(x, x, x)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(ours(x, x, x).square().sum(), x)
    torch.testing.assert_close(first, plain, rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="create_graph: got .*; wanted PyTorch's own attention .*SDPBackend.MATH"):
        first.sum().backward()


def test_second_derivatives_by_the_way_that_the_message_names():
    warnings.simplefilter("ignore", rapt.torch.FallbackWarning)
    x = draw((2, 4, 9, 16))[0]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (first,) = torch.autograd.grad(ours(x, x, x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad.isfinite().all() and (x.grad != 0).any()


def composed(q, k, v, bias=None):
    return _model_attention.composed(q, k, v, None, bias, None, True, -1, None, 0.25)


def test_where_the_backward_is_pytorchs():
    """On GPUs, of calls of rapt.transformers that PyTorch has no function for. There are second derivatives, and nothing is computed that is not wanted."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            out = _model_attention.forward(*inputs)
            _model_attention._setup_again(ctx, inputs, out)
            return out

        backward = staticmethod(_model_attention._backward_again)

    def again(q, k, v, bias):
        return Again.apply(q, k, v, None, bias, None, True, -1, None, 0.25, 0.0, None).transpose(1, 2)

    def derivatives(function, inputs):
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    inputs = draw(*[(2, 4, 9, 16)] * 3, (9, 9))
    wanted = derivatives(lambda *t: composed(*t).transpose(1, 2), inputs)
    for got, each in zip(derivatives(again, inputs), wanted):
        assert relative_error(got, each) < 1e-5
    some = [t.detach().requires_grad_(i == 1) for i, t in enumerate(inputs)]
    out, asked, grad = again(*some).square().sum(), [], torch.autograd.grad
    with mock.patch.object(torch.autograd, "grad", lambda out, of, *rest, **more: asked.append(len(of)) or grad(out, of, *rest, **more)):
        out.backward()
    assert asked == [1] and relative_error(some[1].grad, wanted[1]) < 1e-5
    x = inputs[0]  # as all three
    (got,) = grad(again(x, x, x, None).square().sum(), x, create_graph=True)
    assert relative_error(got, grad(composed(x, x, x).square().sum(), x)[0]) < 1e-5 and got.requires_grad


class Wrapped(torch.Tensor):
    """A tensor of a class that the dispatcher asks, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))


GRADIENTS = {
    "negated": lambda grad: torch._neg_view(-grad),
    "imaginary part of a conjugate": lambda grad: torch.complex(grad, -grad).conj().imag,
    "zeros": lambda grad: torch._efficientzerotensor(grad.shape),
    "wrapped": Wrapped,
}


@pytest.mark.parametrize("heads", [4, 1])  # which the extension differentiates, or Python
@pytest.mark.parametrize("grad", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize(
    "of, options",
    [
        (_sdpa_autograd, (None, True, 0.25, False, 0.0, None)),
        (_model_attention, (None, None, None, True, -1, None, 0.25, 0.0, None)),
    ],
    ids=["sdpa", "transformers"],
)
def test_gradients_that_the_dispatcher_resolves(of, options, grad, heads):
    inputs = draw((2, 4, 9, 16), *[(2, heads, 9, 16)] * 2)
    out = of.forward_with_gradients(*inputs, *options)
    plain = torch.randn(out.shape)
    wanted = torch.autograd.grad(out, inputs, torch.zeros_like(plain) if grad is GRADIENTS["zeros"] else plain, retain_graph=True)
    with backward_calls() as calls:
        got = torch.autograd.grad(out, inputs, grad(plain))
    assert calls.count == 1 and all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("run", [ours, OPERATORS.scaled_dot_product_attention], ids=["eager", "operator"])
def test_batches_of_gradients_are_refused_by_name(run):
    x = draw((2, 4, 9, 16))[0]
    out = ours(x, x, x) if run is ours else run(x, x, x, None, False, None, False)
    grads = torch.randn(3, *out.shape)
    with pytest.raises(NotImplementedError, match="is_grads_batched: got a batch .*; wanted one call for each, or .*SDPBackend.MATH"):
        torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    with pytest.raises(NotImplementedError, match="is_grads_batched: got a batch"):
        torch.vmap(lambda grad: torch.autograd.grad(out, x, grad, retain_graph=True))(grads)
    torch.autograd.grad(out, x, grads[0])


def test_gradcheck():
    """Numbers' differences of rapt's forward, in float32, and those of the formula in float64."""
    torch.manual_seed(3)
    inputs = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: attention(*t[:3], bias=t[3])[0], (*inputs, bias))

    def narrow(*t):
        return ours(*(x.float() for x in t)).double()

    assert torch.autograd.gradcheck(narrow, (*inputs, bias), eps=1e-2, atol=1e-3, rtol=1e-3, nondet_tol=0.0)


OPCHECK = [
    *((draw(*[(2, 4, 9, 16)] * 3, dtype=dtype), None, True) for dtype in DTYPES),
    ([t.transpose(1, 2) for t in draw(*[(2, 9, 4, 16)] * 3)], draw((9, 9))[0], False),
    (draw((2, 4, 9, 16), (1, 4, 9, 16), (4, 9, 16)), torch.rand(9, 9) > 0.3, False),
]


@pytest.mark.parametrize("tensors, mask, is_causal", OPCHECK)
def test_opcheck(tensors, mask, is_causal):
    options = (is_causal, None, False)
    torch.library.opcheck(OPERATORS.scaled_dot_product_attention_with_lse, (*tensors, mask, *options))
    tensors, mask = [t.detach() for t in tensors], None if mask is None else mask.detach()
    out, lse = OPERATORS.scaled_dot_product_attention_with_lse(*tensors, mask, *options)
    wanted = [True, False, True, mask is not None and mask.is_floating_point()]
    grads = torch.randn(out.shape).to(out.dtype), torch.randn(lse.shape)
    arguments = (*grads, *tensors, mask, out, lse, None, *options, 0.0, wanted)
    torch.library.opcheck(OPERATORS.scaled_dot_product_attention_backward, arguments)


@pytest.mark.parametrize(
    "of, tensors, options, wanted",
    [
        (_sdpa_autograd, 4, (False, None, False, 0.0), "4 bools, of query, key, value, attn_mask"),
        (_model_attention, 6, (False, -1, None, 0.25, 0.0), "6 bools, of query, key, value, mask, bias, sinks"),
    ],
)
def test_too_few_flags_of_what_is_wanted(of, tensors, options, wanted):
    x, lse = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9)
    inputs = (x, x, x, *[None] * (tensors - 3))
    with pytest.raises(ValueError, match=rf"wanted: got \[True\]; wanted {wanted}"):
        of._backward_operator(x, None, *inputs, x, lse, None, *options, [True])


def test_gradients_of_lse():
    inputs = draw(*[(2, 4, 9, 16)] * 3)
    for uses_out in (False, True):
        out, lse = OPERATORS.scaled_dot_product_attention_with_lse(*inputs, None, True, None, False)
        got = torch.autograd.grad(lse.square().sum() + (out.sum() if uses_out else 0), inputs, allow_unused=True)
        wide = [t.detach().double().requires_grad_() for t in inputs]
        out, lse = attention(*wide, causal=True)
        wanted = torch.autograd.grad(lse.square().sum() + (out.sum() if uses_out else 0), wide, allow_unused=True)
        for g, w in zip(got, wanted):
            assert (g == 0).all() if w is None else relative_error(g, w) <= 1e-5  # lse does not depend on v


class Layer(torch.nn.Module):
    def __init__(self, size=32, heads=4):
        super().__init__()
        self.qkv, self.out, self.heads = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size), heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def trained(run, steps=3):
    """Weights after some steps."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Layer(), Layer()), torch.randn(2, 19, 32)
    optimizer, step = torch.optim.SGD(model.parameters(), 0.1), run(model)
    for _ in range(steps):
        optimizer.zero_grad()
        step(x).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize(
    "run",
    [
        lambda model: model,
        lambda model: torch.compile(model, fullgraph=True),
        lambda model: torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager"),
        lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
        lambda model: lambda x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=True),
        lambda model: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    ],
    ids=["eager", "compiled", "dynamic", "checkpoint", "reentrant", "functional_call"],
)
def test_training(run):
    wanted = trained(lambda model: model)
    with rapt.torch.enabled(), backward_calls() as calls:
        got = trained(run)
    assert calls.count == 6
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def _train_on(rank, store, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Layer(), Layer()), torch.randn(2, 19, 32)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    with rapt.torch.enabled():
        parallel(x[rank : rank + 1]).square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], path)
    os._exit(0)  # what DDP holds of the group would wait, with Python's lock, for a thread of gloo that wants the lock


def test_two_processes_train_as_one(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    path = tmp_path / "grads"
    torch.multiprocessing.spawn(_train_on, (str(tmp_path / "store"), str(path)), nprocs=2)
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Layer(), Layer()), torch.randn(2, 19, 32)
    with rapt.torch.enabled():
        model(x).square().mean().backward()
    torch.testing.assert_close(torch.load(path), [p.grad for p in model.parameters()], rtol=0, atol=1e-6)


def test_a_forked_child_differentiates():
    q, dout = torch.randn(2, 4, 300, 64), torch.ones(2, 4, 300, 64)
    out, lse = rapt.attention(q, q, q, return_lse=True)
    wanted = rapt.attention_backward(dout, q, q, q, out, lse).dq.numpy()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        # NumPy compares: PyTorch's own threads do not survive a fork.
        same = (rapt.attention_backward(dout, q, q, q, out, lse).dq.numpy() == wanted).all()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


DROPOUT = [{"is_causal": True}, {"attn_mask": torch.rand(45, 45, generator=torch.Generator().manual_seed(1)) > 0.4}]


def dropped_by(seed, p, *shape):
    return ~torch.from_numpy(rapt.dropout_mask(*shape, p, int(seed)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", DROPOUT)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dropout(options, compiled, dtype):
    inputs, grad = draw(*[(2, 4, 45, 32)] * 3, dtype=dtype), torch.randn(2, 4, 45, 32).to(dtype)
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    torch.manual_seed(5)
    out = run(*inputs, dropout_p=0.3, **options)
    got = torch.autograd.grad(out, inputs, grad)
    torch.manual_seed(5)
    assert torch.equal(run(*inputs, dropout_p=0.3, **options), out)
    assert not torch.equal(run(*inputs, dropout_p=0.3, **options), out)
    torch.manual_seed(5)
    dropped = dropped_by(rapt._seed.new_seed(), 0.3, 2, 4, 45, 45)
    assert 0.27 < dropped.float().mean() < 0.33
    wide = [t.detach().double().requires_grad_() for t in inputs]
    reference = {"causal": options.get("is_causal", False), "mask": options.get("attn_mask")}
    result, _ = attention(*wide, **reference, dropped=dropped, dropout_p=0.3)
    limit = 1e-5 if dtype is torch.float32 else 3 * UNITS[dtype]
    assert relative_error(out, result) <= limit
    for g, w in zip(got, torch.autograd.grad(result, wide, grad.double())):
        assert relative_error(g, w) <= limit


def test_dropout_of_everything_and_of_no_probability():
    q = draw((2, 4, 9, 16))[0]
    out = ours(q, q, q, dropout_p=1.0)
    assert (out == 0).all()
    out.sum().backward()
    assert (q.grad == 0).all()
    assert (ours(q, q, q, dropout_p=True) == 0).all()
    assert torch.equal(ours(q, q, q, dropout_p=False), ours(q, q, q))  # what `self.training and 0.1` is in evaluation
    warnings.simplefilter("ignore", rapt.torch.FallbackWarning)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        ours(q, q, q, dropout_p=1.5)


def test_gradients_of_meta_tensors():
    x = torch.empty(2, 4, 9, 16, device="meta", requires_grad=True)
    _sdpa_autograd.operator(x, x, x, None, False, None, False).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same_mask_again(reentrant):
    def layer(t):
        return ours(ours(t, t, t, dropout_p=0.3), t, t, dropout_p=0.3)

    def gradient(run):
        x = draw((2, 4, 45, 32))[0]
        run(x).square().sum().backward()
        return x.grad

    torch.manual_seed(7)
    wanted = gradient(layer)
    torch.manual_seed(7)
    assert torch.equal(gradient(lambda t: checkpoint(layer, t, use_reentrant=reentrant)), wanted)


def test_dropout_of_five_dimensions_is_one_mask_forward_and_backward():
    inputs = draw(*[(3, 2, 4, 9, 16)] * 3)
    torch.manual_seed(5)
    out = ours(*inputs, dropout_p=0.4)
    got = torch.autograd.grad(out, inputs, torch.ones(out.shape))
    torch.manual_seed(5)
    dropped = dropped_by(rapt._seed.new_seed(), 0.4, 6, 4, 9, 9)
    wide = [t.detach().double().flatten(0, 1).requires_grad_() for t in inputs]
    result, _ = attention(*wide, dropped=dropped, dropout_p=0.4)
    wanted = torch.autograd.grad(result, wide, torch.ones(result.shape).double())
    for g, w in zip(got, wanted):
        assert relative_error(g.flatten(0, 1), w) <= 1e-5
