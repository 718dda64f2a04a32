"""rapt.torch against PyTorch's own scaled_dot_product_attention, whose signature and semantics it has."""

import inspect
import itertools
import os
import re
import signal
import threading
import warnings

import numpy as np
import pytest
import rapt
import rapt.torch
import torch
from kernel_calls import kernel_calls
from torch.nn import functional

ours = rapt.torch.scaled_dot_product_attention
theirs = functional.scaled_dot_product_attention
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def randn(*shape, dtype=torch.float32, **options):
    return torch.randn(*shape, **options).to(dtype)


def check(*tensors, **options):
    wanted, got = theirs(*tensors, **options), ours(*tensors, **options)
    assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE[wanted.dtype])


def test_signature():
    # PyTorch's is written in C++: its documentation says what it is.
    theirs_text = theirs.__doc__.split(") -> Tensor")[0]
    for name, parameter in inspect.signature(ours).parameters.items():
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        assert name + default in theirs_text
    assert [name for name, p in inspect.signature(ours).parameters.items() if p.kind is p.KEYWORD_ONLY] == [
        "scale",
        "enable_gqa",
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(9, 16), (4, 9, 16), (2, 4, 9, 16), (3, 2, 4, 9, 16), (0, 4, 9, 16), (2, 4, 0, 16)])
def test_ranks(shape, dtype):
    q, k, v = (randn(*shape, dtype=dtype) for _ in range(3))
    check(q, k, v)
    check(q, k, v, is_causal=True, scale=0.3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 128)])
def test_parity(shape, is_causal):
    q, k, v = (randn(*shape) for _ in range(3))
    max_err = (ours(q, k, v, is_causal=is_causal) - theirs(q, k, v, is_causal=is_causal)).abs().max()
    assert max_err < 5e-6


def test_lengths_and_head_dims():
    q = randn(2, 4, 9, 40)
    k, v = randn(2, 4, 21, 40), randn(2, 4, 21, 24)
    check(q, k, v)
    check(q, k, v, is_causal=True)
    check(q, k, v[..., :1])
    check(q, k[:, :, :0], v[:, :, :0])


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.stack([t, t], -1)[..., 1],
        lambda t: torch.stack([t, t], 2)[:, :, 1],
        lambda t: t[:1].expand(t.shape),
    ],
)
def test_strides(layout):
    q, k, v = (layout(randn(3, 4, 9, 16)) for _ in range(3))
    check(q, k, v)
    check(q, k, v, is_causal=True)


def permuted(shape, order):
    """A tensor of `shape` whose dimensions lie in memory in `order`."""
    return randn(*(shape[i] for i in order)).permute([order.index(i) for i in range(4)])


def test_results_lie_in_memory_as_pytorchs():
    orders = list(itertools.permutations(range(4)))
    for d, dv in ((8, 8), (8, 4)):
        for query, key, value in itertools.product(orders, orders[::5], orders[::5]):
            check(permuted((2, 3, 5, d), query), permuted((2, 3, 7, d), key), permuted((2, 3, 7, dv), value))


@pytest.mark.parametrize(
    "key, value, options",
    [
        ((1, 4, 7, 16), (1, 4, 7, 16), {}),
        ((2, 1, 7, 16), (2, 1, 7, 16), {}),
        ((4, 7, 16), (4, 7, 16), {}),
        ((2, 4, 7, 16), (4, 7, 16), {}),
        ((2, 2, 7, 16), (2, 2, 7, 16), {"enable_gqa": True}),
        ((2, 4, 0, 16), (2, 4, 0, 16), {}),
        ((2, 4, 7, 16), (2, 4, 7, 16), {"attn_mask": torch.zeros(5, 7)}),
        ((2, 4, 7, 16), (2, 4, 7, 16), {"attn_mask": torch.zeros(4, 5, 7)}),
        ((2, 4, 7, 16), (2, 4, 7, 16), {"attn_mask": torch.zeros(1, 4, 5, 7)}),
    ],
)
def test_results_of_strided_queries_lie_in_memory_as_pytorchs(key, value, options):
    check(permuted((2, 4, 5, 16), (0, 2, 1, 3)), randn(*key), randn(*value), **options)


def test_empty_tensors():
    for batch in itertools.product((0, 2), repeat=3):
        for rows, keys in ((9, 9), (0, 9), (9, 0)):
            q, k = randn(*batch, rows, 16), randn(*batch, keys, 16)
            for mask in (None, torch.zeros(*batch, rows, keys)):
                got, wanted = ours(q, k, k, mask), theirs(q, k, k, mask)
                torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore::rapt.torch.FallbackWarning")
def test_empty_tensors_that_broadcast():
    q, k = randn(1, 0, 16), randn(2, 9, 16)
    with pytest.warns(rapt.torch.FallbackWarning, match="empty tensors that broadcast"):
        assert ours(q, k, k).shape == theirs(q, k, k).shape


def negated(*shape):
    return torch.complex(randn(*shape), randn(*shape)).conj().imag


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("view", [negated, torch._efficientzerotensor])
def test_tensors_whose_memory_the_dispatcher_makes(view, place):
    tensors = [randn(2, 4, 9, 16), randn(2, 4, 9, 16), randn(2, 4, 9, 16), randn(9, 9)]
    tensors[place] = view(*tensors[place].shape)
    # PyTorch's own function reads memory that zeros do not have.
    wanted = theirs(*(torch.empty(t.shape).copy_(t) for t in tensors))
    torch.testing.assert_close(ours(*tensors), wanted, rtol=0, atol=TOLERANCE[torch.float32])
    tensors[0 if place else 1].requires_grad_()
    torch.testing.assert_close(ours(*tensors), wanted, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 4), (1, 4), (2, 4)),
        ((2, 4), (2, 1), (2, 1)),
        ((2, 4), (2, 1), (1, 4)),
        ((2, 1), (2, 4), (4,)),
        ((3, 2, 4), (2, 4), (4,)),
        ((2, 4), (3, 1, 4), (1, 1, 1)),
        ((4,), (), ()),
    ],
)
def test_broadcasting(q, k, v):
    check(randn(*q, 9, 16), randn(*k, 12, 16), randn(*v, 12, 16))


@pytest.mark.parametrize("q, k", [((2, 6), (2, 2)), ((6,), (3,)), ((3, 2, 6), (3, 2, 1)), ((2, 6), (1, 3))])
def test_gqa(q, k):
    check(randn(*q, 9, 16), randn(*k, 12, 16), randn(*k, 12, 16), enable_gqa=True)


MASKS = [(9, 12), (1, 12), (9, 1), (1, 1), (4, 9, 12), (4, 1, 1), (2, 1, 1, 12), (2, 4, 9, 12), (1, 4, 9, 1)]


@pytest.mark.parametrize("shape", MASKS)
def test_masks(shape):
    q, k, v = randn(2, 4, 9, 16), randn(2, 4, 12, 16), randn(2, 4, 12, 16)
    mask = randn(*shape)
    check(q, k, v, mask)
    check(q, k, v, mask > 0)
    check(*(t[None].repeat(3, 1, 1, 1, 1) for t in (q, k, v)), mask)
    check(q, k, v, mask.masked_fill(mask > 0.5, -torch.inf))
    if shape[-1] > 1:
        check(q, k, v, mask.masked_fill(mask > 0.5, torch.finfo(torch.float32).min))


def test_masks_of_five_dimensions():
    q, k, v = (randn(3, 2, 4, 9, 16) for _ in range(3))
    check(q, k, v, randn(3, 1, 1, 9, 9))
    check(q, k, v, randn(3, 2, 4, 9, 9) > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_of_halves(dtype):
    q, k, v = (randn(2, 4, 9, 16, dtype=dtype) for _ in range(3))
    check(q, k, v, randn(9, 9, dtype=dtype))
    check(q, k, v, randn(9, 9))


def test_fully_masked_rows_are_zero_as_in_pytorch():
    q, k, v = (randn(2, 4, 9, 16) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[3] = False
    check(q, k, v, mask)
    assert (ours(q, k, v, mask)[:, :, 3] == 0).all()
    check(q, k, v, torch.zeros(9, 9).masked_fill(~mask, -torch.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = (randn(2, 4, 9, 16) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        check(q, k, v, randn(9, 9))


def test_parameters_and_inference_mode():
    q, k, v = (torch.nn.Parameter(randn(2, 4, 9, 16)) for _ in range(3))
    with torch.no_grad():
        check(q, k, v)
    with torch.inference_mode():
        check(q, k, v)


GRAD_CASES = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.rand(9, 9) > 0.3},
    {"attn_mask": torch.rand(9, 9)},
    {"enable_gqa": True, "scale": 0.2},
]


@pytest.mark.parametrize("options", GRAD_CASES)
@pytest.mark.parametrize("run", [ours, torch.compile(ours, fullgraph=True)], ids=["eager", "compiled"])
def test_gradients(options, run):
    heads = 2 if options.get("enable_gqa") else 4
    inputs = [randn(2, h, 9, 16).requires_grad_() for h in (4, heads, heads)]
    grad = randn(2, 4, 9, 16)
    out = run(*inputs, **options)
    torch.testing.assert_close(out, theirs(*inputs, **options), rtol=0, atol=2e-6)
    got = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(theirs(*inputs, **options), inputs, grad)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_gradients_of_a_mask_with_causal():
    x, mask = randn(4, 9, 16).requires_grad_(), randn(9, 9)
    both = mask.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    for given, merged in ((mask, both), (mask > 0, both > 0)):
        got, wanted = ours(x, x, x, given, is_causal=True), ours(x, x, x, merged)
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(9, 9), (4, 1, 9), (1, 4, 9, 9)])
@pytest.mark.parametrize("run", [ours, torch.ops.rapt.scaled_dot_product_attention], ids=["function", "operator"])
def test_gradients_of_masks(run, shape, dtype):
    x = randn(2, 4, 9, 16, dtype=dtype).requires_grad_()
    mask, grad = randn(*shape).requires_grad_(), randn(2, 4, 9, 16, dtype=dtype)
    with kernel_calls() as kernel:
        out = ours(x, x, x, mask) if run is ours else run(x, x, x, mask, False, None, False)
    assert kernel.call_count == 1
    got = torch.autograd.grad(out, [x, mask], grad)
    wanted = torch.autograd.grad(theirs(x, x, x, mask), [x, mask], grad)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype] * 5, atol=TOLERANCE[dtype] * 5)


def test_training_with_a_position_bias_and_causal():
    """As T5's decoder: a mask that is learned, beside is_causal."""
    x, bias = randn(2, 4, 9, 16).requires_grad_(), randn(4, 9, 9).requires_grad_()
    wanted = theirs(x, x, x, bias.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf))
    for run in (ours, torch.compile(ours, fullgraph=True)):
        got = run(x, x, x, bias, is_causal=True)
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
        grads = [torch.autograd.grad(out.square().sum(), [x, bias], retain_graph=True) for out in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_fallbacks_of_a_mask_with_causal():
    x, mask = randn(2, 4, 9, 16).double(), randn(9, 9).double()
    both = mask.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    warnings.simplefilter("ignore", rapt.torch.FallbackWarning)
    for given, merged in ((mask, both), (mask > 0, both > 0)):
        assert (ours(x, x, x, given, is_causal=True) == theirs(x, x, x, merged)).all()


def test_no_keys_and_a_mask_that_requires_grad():
    q, k, mask = randn(2, 4, 9, 16).requires_grad_(), randn(2, 4, 0, 16), torch.zeros(9, 0, requires_grad=True)
    ours(q, k, k, mask).sum().backward()
    assert (q.grad == 0).all()


OPCHECK_CASES = [
    ([randn(2, 4, 9, 16) for _ in range(3)], None, True, None, False),
    ([randn(2, 4, 9, 16).requires_grad_() for _ in range(3)], torch.rand(9, 9), False, 0.3, False),
    ([randn(2, 9, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)], torch.rand(9, 9) > 0.3, False, None, False),
    ([randn(2, 9, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)], randn(9, 9).requires_grad_(), True, None, False),
    ([randn(4, 9, 16), randn(2, 9, 16), randn(2, 9, 16)], None, False, None, True),
    ([randn(2, 4, 9, 16).bfloat16(), *(randn(2, 4, 9, 24)[..., :16].bfloat16() for _ in range(2))], None, True, None, False),
]


@pytest.mark.parametrize("tensors, mask, is_causal, scale, gqa", OPCHECK_CASES)
def test_opcheck(tensors, mask, is_causal, scale, gqa):
    torch.library.opcheck(rapt._sdpa_autograd.operator, (*tensors, mask, is_causal, scale, gqa))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "q, k, v, mask, gqa, message",
    [
        ((2, 4, 9, 16), (2, 3, 9, 16), (2, 4, 9, 16), None, False, "whose shapes do not fit"),
        ((16,), (2, 4, 9, 16), (2, 4, 9, 16), None, False, "whose shapes do not fit"),
        ((2, 4, 9, 16), (2, 4, 9, 8), (2, 4, 9, 16), None, False, "whose shapes do not fit"),
        ((2, 4, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), None, True, "heads that do not divide"),
        ((4, 9, 16), (4, 9, 16), (9, 16), None, True, "heads that do not divide"),
        ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 0), None, False, "head dimensions of 0"),
        ((9, 16), (9, 16), (9, 16), torch.zeros(9), False, "attn_mask whose shape does not fit"),
        ((9, 16), (9, 16), (9, 16), torch.zeros(8, 9), False, "attn_mask whose shape does not fit"),
        ((9, 16), (9, 16), (9, 16), torch.zeros(9, 9, dtype=torch.int64), False, "attn_mask of torch.int64"),
    ],
)
def test_the_operator_refuses(q, k, v, mask, gqa, message, device):
    tensors = [randn(*shape, device=device) for shape in (q, k, v)]
    mask = None if mask is None else mask.to(device)
    with pytest.raises(ValueError, match=rf"rapt::scaled_dot_product_attention: got .*{message}.*; wanted"):
        torch.ops.rapt.scaled_dot_product_attention(*tensors, mask, False, None, gqa)


def test_compile_with_dynamic_shapes():
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    with kernel_calls() as kernel:
        for n in (8, 9, 33):
            q, k, v = (randn(2, n, 4, 16).transpose(1, 2) for _ in range(3))
            torch.testing.assert_close(compiled(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True), rtol=0, atol=2e-6)
    assert kernel.call_count == 3


class Model(torch.nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_export_and_tracing_keep_the_operator():
    x = randn(2, 4, 9, 16)
    operator = torch.ops.rapt.scaled_dot_product_attention.default
    with rapt.torch.enabled():
        for strict in (True, False):
            graph = torch.export.export(Model(), (x,), strict=strict).graph
            assert operator in [node.target for node in graph.nodes]
        traced = torch.fx.experimental.proxy_tensor.make_fx(Model())(x)
    assert operator in [node.target for node in traced.graph.nodes]


def test_enable_and_disable():
    x = randn(2, 4, 9, 16)
    with kernel_calls() as kernel:
        rapt.torch.enable()
        try:
            Model()(x)
            with rapt.torch.enabled():
                Model()(x)
            assert functional.scaled_dot_product_attention is ours
        finally:
            rapt.torch.disable()
        assert kernel.call_count == 2
        assert functional.scaled_dot_product_attention is theirs
        with pytest.raises(KeyError), rapt.torch.enabled():
            raise KeyError
        assert functional.scaled_dot_product_attention is theirs
        Model()(x)
        assert kernel.call_count == 2


def test_compiled_code_follows_enable():
    compiled, x = torch.compile(Model(), fullgraph=True), randn(2, 4, 9, 16)
    with kernel_calls() as kernel:
        compiled(x)
        assert kernel.call_count == 0
        with rapt.torch.enabled():
            compiled(x)
        assert kernel.call_count == 1
        compiled(x)
        assert kernel.call_count == 1


Q = randn(2, 4, 9, 16)
FALLBACKS = {
    "tensors of torch.float64": ((Q.double(),) * 3, {}),
    "not on the CPU": ((Q.to("meta"),) * 3, {}),
    "head dimensions of 0": ((Q, Q, Q[..., :0]), {}),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_fallbacks_are_pytorchs_and_say_so_once(reason):
    tensors, options = FALLBACKS[reason]
    for _ in range(2):  # an error every time, where the user wants errors
        with pytest.raises(rapt.torch.FallbackWarning, match=reason):
            ours(*tensors, **options)
    with warnings.catch_warnings(record=True) as caught, kernel_calls() as kernel:
        warnings.simplefilter("always")
        got = [ours(*tensors, **options) for _ in range(2)]
    assert [w.category for w in caught] == [rapt.torch.FallbackWarning] and reason in str(caught[0].message)
    assert caught[0].filename == __file__
    assert kernel.call_count == 0
    wanted = theirs(*tensors, **options)
    assert all((x.shape, x.dtype, x.device) == (wanted.shape, wanted.dtype, wanted.device) for x in got)
    if wanted.device.type == "cpu":
        assert (got[0] == wanted).all()


@pytest.mark.filterwarnings("ignore::rapt.torch.FallbackWarning")
@pytest.mark.parametrize(
    "tensors, options",
    [
        ((Q, Q.half(), Q), {}),
        ((Q, Q[..., :8], Q), {}),
        ((Q, Q[:, :3], Q[:, :3]), {}),
        ((Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}),
        ((Q, Q, Q, torch.zeros(9)), {}),
        ((Q, Q, Q, torch.zeros(3, 9, 9)), {}),
        ((Q, Q, Q, torch.zeros(9, 9, dtype=torch.int32)), {}),
        ((Q[0, 0, 0], Q, Q), {}),
        (([1], Q, Q), {}),
        ((None, Q, Q), {}),
        ((Q.numpy(), Q, Q), {}),
        ((Q, Q, Q, [1.0]), {}),
        ((Q, Q, Q), {"is_causal": 1}),
        ((Q, Q, Q), {"scale": "a"}),
        ((Q, Q, Q), {"dropout_p": "a"}),
        ((Q, Q, Q), {"dropout_p": 1.5}),
        ((Q, Q, Q), {"dropout_p": -0.5}),
        ((Q, Q, Q), {"enable_gqa": None}),
    ],
)
def test_wrong_arguments_raise_as_in_pytorch(tensors, options):
    with pytest.raises(Exception) as theirs_error:
        theirs(*tensors, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rapt.torch.FallbackWarning)
        with pytest.raises(type(theirs_error.value)) as our_error:
            ours(*tensors, **options)
    texts = [re.sub(r" \(position \d+\)", "", str(error.value)) for error in (our_error, theirs_error)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39])
def test_scales_that_are_no_finite_floats(scale):
    with pytest.warns(rapt.torch.FallbackWarning, match="no finite float32"):
        got = ours(Q, Q, Q, scale=scale)
    torch.testing.assert_close(got, theirs(Q, Q, Q, scale=scale), rtol=0, atol=0, equal_nan=True)


def test_numbers_of_numpy():
    check(Q, Q, Q, scale=np.float32(0.3))
    check(Q, Q, Q, scale=np.float16(0.5))
    check(Q, Q, Q, scale=1)


def test_compiled_fallbacks_say_so():
    x = randn(4, 9, 16).double()
    with pytest.warns(rapt.torch.FallbackWarning, match="float64"):
        warnings.simplefilter("always")
        torch.compile(ours, fullgraph=True)(x, x, x)


def test_attention_of_tensors_gives_tensors():
    q, k, v = (randn(2, 4, 9, 16) for _ in range(3))
    out, lse = rapt.attention(q, k, v, causal=True, return_lse=True)
    assert type(out) is type(lse) is torch.Tensor and lse.dtype == torch.float32
    torch.testing.assert_close(out, theirs(q, k, v, is_causal=True), rtol=0, atol=2e-6)
    mixed = rapt.attention(q.numpy(), k, v, causal=True)
    assert (torch.from_numpy(mixed) == out).all()
    with torch.no_grad():
        again = rapt.attention(q.requires_grad_(), k, v, causal=True)
    assert (again == out).all() and not again.requires_grad
    halves = [t.detach().bfloat16() for t in (q, k, v)]
    assert rapt.attention(*halves).dtype == torch.bfloat16


def test_threads_are_pytorchs():
    q, k, v = (randn(2, 4, 300, 64) for _ in range(3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert rapt.explain(q, k, v).threads == 1
    finally:
        torch.set_num_threads(before)


def test_many_threads_at_once():
    inputs = [[randn(1, 2, 50, 16) for _ in range(3)] for _ in range(4)]
    wanted = [theirs(*tensors) for tensors in inputs]
    failures = []

    def work(i):
        for _ in range(50):
            if not torch.allclose(ours(*inputs[i]), wanted[i], rtol=0, atol=2e-6):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child_computes():
    q, k, v = (randn(2, 4, 300, 64) for _ in range(3))
    wanted = ours(q, k, v).numpy()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        # NumPy compares: PyTorch's own threads do not survive a fork.
        same = (ours(q, k, v).numpy() == wanted).all()
        close = abs(rapt.attention(q, k, v, isa="generic").numpy() - wanted).max() < 1e-5
        os._exit(0 if same and close else 1)
    assert os.waitpid(child, 0)[1] == 0


def _error(out, q, k, v):
    """Relative Frobenius error, in units of the rounding of float32."""
    p = torch.softmax(q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
    want = p @ v.double()
    return float((out.double() - want).norm() / want.norm()) * 2**24


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("keys", [64, 512, 4096])
@pytest.mark.parametrize("value", [None, 0.1, 0.3, 0.7, 1.1])
def test_no_less_exact_than_pytorch(value, keys, rows):
    """docs/contract.md: no more than 1.25 times PyTorch's error, or 16 units."""
    torch.manual_seed(keys)
    q, k, v = (torch.randn(1, 2, n, 64) for n in (rows, keys, keys))
    if value is not None:
        q, k, v = (torch.full_like(t, value) for t in (q, k, v))
    theirs = _error(torch.nn.functional.scaled_dot_product_attention(q, k, v), q, k, v)
    assert _error(rapt.torch.scaled_dot_product_attention(q, k, v), q, k, v) <= max(1.25 * theirs, 16)
