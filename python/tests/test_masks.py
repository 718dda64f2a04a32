"""Masks and biases of every shape that broadcasts: values, gradients, and the memory that they take."""

import itertools
import random
import warnings
from contextlib import nullcontext

import pytest
import rapt
import rapt.torch
import torch
from autograd_reference import UNITS, attention, relative_error
from kernel_calls import by_python, kernel_calls
from torch.autograd.profiler import profile
from torch.nn import functional

ours = rapt.torch.scaled_dot_product_attention
theirs = functional.scaled_dot_product_attention
MIB = 2**20


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def is_close(got, wanted, dtype, scale=0.0):
    """`scale` is that of the terms of a sum that may cancel."""
    limit = 1e-5 if dtype is torch.float32 else 8 * UNITS[dtype]
    error = (got.detach().double() - wanted.detach()).norm()
    return got.shape == wanted.shape and bool(error <= limit * (wanted.detach().norm() + scale))


def peak_bytes(function):
    """The most memory that PyTorch's tensors have taken while it ran, beyond those from before."""
    with profile(profile_memory=True) as profiler:
        kept = function()
    sizes = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes and kept is not None
    return max(itertools.accumulate(sizes))


# scaled_dot_product_attention: the sizes before the heads of queries and of a mask; to what the caller expands the mask's; and how
# many calls of the kernel that takes, without dropout and with it.
LEADING = [
    ((3, 2), (3, 2), None, 1, 2),
    ((3, 2), (3, 1), None, 2, 2),
    ((3, 2), (1, 2), None, 2, 2),
    ((3, 2), (2,), None, 2, 2),
    ((3, 2), (1, 1), None, 1, 1),
    ((2, 3), (2, 1), None, 2, 2),
    ((2, 3), (2, 1), (2, 3), 2, 2),
    ((2, 3), (1, 1), (2, 3), 1, 2),
    ((2, 1, 3), (2, 1, 1), None, 2, 2),
    ((2, 1, 3), (2, 1, 3), None, 1, 2),
    ((2, 3, 2), (2, 3, 1), None, 2, 4),
    ((2, 3, 2), (1, 3, 2), None, 2, 4),
    ((2, 3, 2), (2, 1, 2), None, 4, 4),
    ((2, 3, 2), (3, 2), None, 2, 4),
    ((2, 3, 2), (2, 1, 1), None, 2, 2),
    ((0, 2), (1, 2), None, 0, 0),
    ((2, 0), (2, 1), None, 0, 0),
]


def masks_of(leading, expanded, heads, rows, keys, dtype):
    """Float masks of all sizes of heads, rows and keys, and a boolean one."""
    for last in itertools.product((1, heads), (1, rows), (1, keys)):
        mask = torch.randn(*leading, *last).to(dtype)
        yield mask if expanded is None else mask.expand(*expanded, *last)
    yield mask > -1 if expanded is None else (mask > -1).expand(*expanded, *last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead, of_mask, expanded, calls, _", LEADING)
def test_masks_of_any_rank(lead, of_mask, expanded, calls, _, dtype):
    for mask in masks_of(of_mask, expanded, 4, 9, 12, dtype):
        q, k, v = (torch.randn(*lead, h, s, 16).to(dtype).requires_grad_() for h, s in ((4, 9), (2, 12), (2, 12)))
        learnt = mask.is_floating_point()
        inputs = [q, k, v, *([mask.requires_grad_()] if learnt else [])]
        grad = torch.randn(*lead, 4, 9, 16).to(dtype)
        with kernel_calls() as kernel:
            out = ours(q, k, v, mask, enable_gqa=True)
        assert kernel.call_count == calls
        got = torch.autograd.grad(out, inputs, grad)
        wide = [t.detach().double().requires_grad_() for t in inputs]
        wanted = theirs(*wide[:3], wide[3] if learnt else mask, enable_gqa=True)
        assert is_close(out, wanted, dtype)
        for g, w in zip(got, torch.autograd.grad(wanted, wide, grad.double(), materialize_grads=True)):
            assert is_close(g, w, dtype, grad.double().norm()) and g.dtype is dtype


def test_the_operator_with_masks_that_take_several_calls():
    tensors = [torch.randn(2, 3, 4, 9, 16, requires_grad=True) for _ in range(3)]
    for mask in (torch.randn(2, 1, 4, 9, 9, requires_grad=True), torch.rand(1, 3, 1, 9, 1) > 0.3):
        torch.library.opcheck(torch.ops.rapt.scaled_dot_product_attention, (*tensors, mask, True, None, False))
        wanted = ours(*tensors, mask)
        got = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)(*tensors, mask)
        assert torch.equal(got, wanted)
        inputs = [t for t in (*tensors, mask) if t.requires_grad]
        grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, wanted)]
        assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("lead, of_mask, expanded, _, calls", LEADING)
def test_dropout_with_masks_of_any_rank(lead, of_mask, expanded, _, calls):
    """Each call of the kernel has its own weights to drop, which the backward finds whatever became of the mask's memory."""
    mask = torch.randn(*of_mask, 1, 9, 9)
    mask = mask if expanded is None else mask.expand(*expanded, 1, 9, 9)
    inputs = [torch.randn(*lead, 2, 9, 16, requires_grad=True) for _ in range(3)]

    def gradients():
        torch.manual_seed(5)
        with kernel_calls() as kernel:
            out = ours(*inputs, mask, dropout_p=0.4)
        assert kernel.call_count == calls
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    got = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
        assert all(map(torch.equal, got, gradients()))
    one, other = (ours(*inputs, torch.zeros_like(mask), dropout_p=0.4) for _ in range(2))
    assert one.numel() == 0 or not torch.equal(one, other)


def test_dropout_of_several_calls_is_that_of_their_seeds():
    q, mask = torch.randn(2, 3, 4, 9, 16), torch.randn(2, 1, 4, 9, 9)
    inputs = [q.requires_grad_(), mask.requires_grad_()]
    torch.manual_seed(5)
    out = ours(q, q, q, mask, dropout_p=0.4)
    got = torch.autograd.grad(out.square().sum(), inputs)
    torch.manual_seed(5)
    seed, wide = int(rapt._seed.new_seed()), [t.detach().double().requires_grad_() for t in inputs]
    dropped = [~torch.from_numpy(rapt.dropout_mask(3, 4, 9, 9, 0.4, seed + i)) for i in range(2)]
    parts = [attention(*3 * [wide[0][i]], bias=wide[1][i], dropped=dropped[i], dropout_p=0.4)[0] for i in range(2)]
    wanted = torch.stack(parts)
    assert relative_error(out, wanted) < 1e-5
    for g, w in zip(got, torch.autograd.grad(wanted.square().sum(), wide)):
        assert relative_error(g, w) < 1e-5


BROADCAST = {
    "pair biases": ((2, 16), lambda: torch.randn(2, 1, 2, 256, 256)),
    "shifted windows": ((16, 2), lambda: torch.randn(2, 1, 256, 256)),
    "boolean": ((2, 16), lambda: torch.randn(2, 1, 2, 256, 256) > 0),
    "expanded": ((2, 16), lambda: torch.randn(2, 1, 2, 256, 256).expand(2, 16, 2, 256, 256)),
    "of rows": ((2, 16), lambda: torch.randn(2, 16, 2, 256, 1)),
    "of keys": ((2, 16), lambda: torch.randn(2, 1, 1, 1, 256)),
}


@pytest.mark.parametrize("lead, mask", BROADCAST.values(), ids=BROADCAST)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_no_mask_is_written_out(lead, mask, dropout_p):
    """Of all scores there are 16 MiB, in float32."""
    mask, q = mask(), torch.randn(*lead, 2, 256, 4)
    assert peak_bytes(lambda: ours(q, q, q, mask, dropout_p)) < MIB
    inputs = [q.requires_grad_()]
    if mask.is_floating_point() and not 0 in mask.stride():  # what is expanded has a gradient of all its elements
        inputs.append(mask.requires_grad_())
    most = 3 * MIB + 3 * sum(t.numel() * t.element_size() for t in inputs)
    assert peak_bytes(lambda: torch.autograd.grad(ours(q, q, q, mask, dropout_p).sum(), inputs)) < most < 10 * MIB


# rapt.transformers


def some_shape(rng, scores, misfits):
    """One that broadcasts to scores', of any rank; or, sometimes, one that does not."""
    shape = [rng.choice((1, size)) for size in scores][rng.randint(0, len(scores)) :]
    if misfits and rng.random() < 0.03:
        at = rng.randrange(len(shape) + 1)
        shape = [*shape[:at], scores[-1] + 1, *shape[at + 1 :]]
    return shape


def some_float(rng, shape, dtype):
    """With -inf here and there, and in whole rows."""
    t = torch.randn(shape).to(rng.choice((torch.float32, dtype)))
    return t.masked_fill(torch.rand(shape) < 0.1, -torch.inf) if rng.random() < 0.3 else t


def some_call(rng):
    """Queries, keys and values, and what else goes to attention: mask, position_bias, ..."""
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    b, hk, group, n, m = (rng.choice(sizes) for sizes in ((1, 2, 3), (1, 2), (1, 2), (1, 3, 9, 20), (1, 7, 30, 45)))
    h, d, dv = hk * group, rng.choice((8, 16)), rng.choice((8, 16))
    q, k, v = (torch.randn(shape).to(dtype) for shape in ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv)))
    scores, options = (b, h, n, m), {}
    kind = rng.choice(("none", "bool", "float", "float"))
    options["attention_mask"] = None
    if kind == "bool":
        options["attention_mask"] = torch.rand(some_shape(rng, scores, True)) > 0.3
    elif kind == "float":
        options["attention_mask"] = some_float(rng, some_shape(rng, scores, True), dtype)
    if rng.random() < 0.3:
        options["position_bias"] = some_float(rng, some_shape(rng, scores, True), dtype)
    if rng.random() < 0.3:
        options["sliding_window"] = rng.randint(1, m + 2)
    if rng.random() < 0.3:
        options["softcap"] = 2.0
    if rng.random() < 0.3:
        of_rows = rng.random() < 0.5
        options["s_aux"] = torch.randn((rng.choice((1, b)), h, rng.choice((1, n)), 1) if of_rows else (h,)).to(dtype)
    if rng.random() < 0.3:
        options["scaling"] = 0.3
    if rng.random() < 0.5:
        options["is_causal"] = rng.random() < 0.5
    return (q, k, v), options


def in_float64(
    q, k, v, attention_mask, position_bias=None, sliding_window=None, softcap=None, s_aux=None, scaling=None, is_causal=True
):
    bias, causal = position_bias, attention_mask is None and is_causal
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        bias, attention_mask = attention_mask if bias is None else attention_mask + bias, None
    window = (sliding_window - 1, -1) if causal and sliding_window is not None else (-1, -1)
    options = {"causal": causal, "offset": k.shape[2] - q.shape[2], "window": window, "scale": scaling, "softcap": softcap}
    out, _ = attention(q, k, v, mask=attention_mask, bias=bias, sinks=s_aux, **options)
    return out.transpose(1, 2)


def test_random_calls_of_transformers_interface():
    """2,000 calls agree with float64, or are refused where their masks do not broadcast to the scores, as eager attention does.
    Python decides every fourth of them, not the extension; many of every third have gradients."""
    hooks = pytest.importorskip("rapt.transformers", exc_type=ImportError)
    rng, refused, broadcast = random.Random(46), 0, 0
    for number in range(2000):
        tensors, options = some_call(rng)
        (b, h, n, _), m, dtype = tensors[0].shape, tensors[1].shape[2], tensors[0].dtype
        said = f"call {number}: {[t.shape for t in tensors]}, { {name: getattr(x, 'shape', x) for name, x in options.items()} }"
        masks = [t for t in (options["attention_mask"], options.get("position_bias")) if t is not None]

        def run():
            with by_python() if number % 4 == 0 else nullcontext():
                return hooks._attention_forward(torch.nn.Module(), *tensors, **options)[0]

        if not all(fits(t.shape, (b, h, n, m)) for t in masks):
            with warnings.catch_warnings(), pytest.raises((ValueError, RuntimeError)):
                warnings.simplefilter("ignore", rapt.torch.FallbackWarning)  # PyTorch says what does not fit
                run()
            refused += 1
            continue
        broadcast += any(t.dim() < 2 or t.shape[-1] < m for t in masks)
        learnt = [t for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        graded = [t.requires_grad_() for t in learnt if number % 3 == 0 and rng.random() < 0.7]
        wide = {id(t): t.detach().double().requires_grad_() for t in learnt}
        out = run()
        wanted = in_float64(*(wide[id(t)] for t in tensors), **{name: wide.get(id(x), x) for name, x in options.items()})
        assert out.dtype is dtype and out.requires_grad is bool(graded) and is_close(out, wanted, dtype, 1.0), said
        if graded:
            grad = torch.randn(out.shape).to(dtype)
            got = torch.autograd.grad(out, graded, grad)
            for t, g, w in zip(graded, got, torch.autograd.grad(wanted, [wide[id(t)] for t in graded], grad.double())):
                assert g.dtype is t.dtype and is_close(g, w, dtype, grad.double().norm()), f"{said}, gradient of {t.shape}"
    assert refused > 50 and broadcast > 500


def fits(shape, scores):
    try:
        return torch.broadcast_shapes(shape, scores) == scores
    except RuntimeError:
        return False


def test_a_mask_of_five_dimensions_is_refused():
    hooks = pytest.importorskip("rapt.transformers", exc_type=ImportError)
    q = torch.randn(2, 4, 3, 16)
    with pytest.raises(ValueError, match="mask: got .*5 dimensions"):
        hooks._attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 1, 1, 3, 3, dtype=torch.bool), softcap=2.0)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_no_position_bias_is_written_out(options):
    """Of all scores there are 8 MiB, in float32."""
    hooks = pytest.importorskip("rapt.transformers", exc_type=ImportError)
    q, bias = torch.randn(1, 2, 1024, 4, requires_grad=True), torch.randn(1, 2, 1024, 1, requires_grad=True)

    def run():
        out, _ = hooks._attention_forward(torch.nn.Module(), q, q, q, None, is_causal=False, position_bias=bias, **options)
        return torch.autograd.grad(out.square().sum(), [q, bias])

    assert peak_bytes(run) < MIB


@pytest.mark.parametrize("softcap, causal, with_sinks", [(None, False, False), (2.0, True, True), (None, True, False)])
def test_rows_without_keys_by_pytorchs_operators(softcap, causal, with_sinks):
    """Where rapt has no kernel; a bias of -inf hides keys as a mask does, of whole rows, too."""
    hooks = pytest.importorskip("rapt._model_attention", exc_type=ImportError)
    q, k, v, bias = (torch.randn(2, h, s, d) for h, s, d in ((4, 5, 8), (2, 7, 8), (2, 7, 16), (4, 5, 7)))
    bias[0, :, 1], bias[1, 2, 3, :4] = -torch.inf, -torch.inf
    sinks = torch.randn(4) if with_sinks else None
    inputs = [t.requires_grad_() for t in (q, k, v, bias, sinks) if t is not None]
    out = hooks.composed(q, k, v, None, bias, sinks, causal, -1, softcap, 0.3)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    options = {"bias": wide[3], "sinks": wide[4] if with_sinks else None, "causal": causal, "offset": 2, "softcap": softcap}
    wanted = attention(*wide[:3], scale=0.3, **options)[0].transpose(1, 2)
    assert is_close(out, wanted, torch.float32)
    grad = torch.randn(out.shape)
    for g, w in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, wide, grad.double())):
        assert is_close(g, w, torch.float32, grad.double().norm())
