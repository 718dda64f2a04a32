"""rapt.torch.enable(aten=True): PyTorch's own operators are rapt's."""

import warnings
from contextlib import nullcontext

import pytest
import rapt.torch
import torch
from kernel_calls import backward_calls, kernel_calls
from torch.nn import functional

theirs = functional.scaled_dot_product_attention
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def draw(dtype=torch.float32, heads=4):
    tensors = torch.randn(2, 9, 4, 16).transpose(1, 2), torch.randn(2, heads, 12, 16), torch.randn(2, heads, 12, 16)
    return [t.to(dtype).requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.rand(9, 12) > 0.3}, {"scale": 0.3}])
def test_the_function_of_those_who_imported_it_before(options, dtype):
    inputs, grad = draw(dtype), torch.randn(2, 4, 9, 16).to(dtype)
    wanted = theirs(*inputs, **options)
    wanted_grads = torch.autograd.grad(wanted, inputs, grad)
    with rapt.torch.enabled(aten=True), kernel_calls() as forward, backward_calls() as backward:
        out = theirs(*inputs, **options)
        grads = torch.autograd.grad(out, inputs, grad)
    assert (forward.by_python, backward.count) == (1, 1)
    assert out.stride() == wanted.stride() and [g.stride() for g in grads] == [g.stride() for g in wanted_grads]
    limit = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close([out, *grads], [wanted, *wanted_grads], rtol=0, atol=limit)


def test_the_operator_and_its_lse():
    inputs = [t.detach() for t in draw()]
    wanted = flash(*inputs)
    with rapt.torch.enabled(aten=True):
        got = flash(*inputs)
    assert [t.stride() for t in got] == [t.stride() for t in wanted]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward, backward", [(False, True), (True, False), (True, True)])
def test_rows_without_keys_on_either_side_of_the_switch(forward, backward, dtype):
    inputs, grad = draw(dtype), torch.randn(2, 4, 9, 16).to(dtype)
    mask = torch.rand(9, 12) > 0.3
    mask[3] = False
    wanted = torch.autograd.grad(theirs(*inputs, mask), inputs, grad)
    with rapt.torch.enabled(aten=True) if forward else nullcontext():
        out = theirs(*inputs, mask)
    with rapt.torch.enabled(aten=True) if backward else nullcontext():
        got = torch.autograd.grad(out, inputs, grad)
    assert (out[:, :, 3] == 0).all() and (got[0][:, :, 3] == 0).all()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 5e-2)
    bias = torch.zeros(9, 12, dtype=dtype).masked_fill(~mask, -torch.inf)
    with rapt.torch.enabled(aten=True):
        lse = flash(*(t.detach() for t in inputs), attn_mask=bias)[1]
    torch.testing.assert_close(lse, flash(*(t.detach() for t in inputs), attn_mask=bias)[1], rtol=0, atol=1e-2)


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"attn_mask": torch.zeros(9, 12, requires_grad=True)}])
def test_what_pytorch_computes_above_its_operators_does_not_come_to_them(options):
    """And says nothing: the guide does."""
    with rapt.torch.enabled(aten=True), kernel_calls() as forward, backward_calls() as backward:
        theirs(*draw(), **options).sum().backward()
    assert forward.call_count == backward.count == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training(backend):
    inputs = draw()

    def loss(q, k, v):
        return theirs(q, k, v).square().sum()

    wanted = torch.autograd.grad(loss(*inputs), inputs)
    with rapt.torch.enabled(aten=True), kernel_calls() as forward, backward_calls() as backward:
        got = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(*inputs), inputs)
    assert forward.by_python == backward.count == 1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_what_it_does_not_take_is_pytorchs():
    inputs = [t.detach().double() for t in draw()]
    wanted = theirs(*inputs)
    with rapt.torch.enabled(aten=True), kernel_calls() as forward:
        with pytest.warns(rapt.torch.FallbackWarning, match="float64"):
            got = theirs(*inputs)
        assert forward.call_count == 0
    assert torch.equal(got, wanted)


def test_transforms_get_there_too():
    inputs = [torch.randn(3, 2, 4, 9, 16) for _ in range(3)]
    with rapt.torch.enabled(aten=True), kernel_calls() as forward, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.vmap(theirs)(*inputs)
    assert forward.by_python >= 1
    torch.testing.assert_close(got, theirs(*inputs), rtol=0, atol=1e-5)


def test_switches():
    inputs = [t.detach() for t in draw()]

    def is_ours():
        with kernel_calls() as calls:
            flash(*inputs)
        return calls.call_count == 1

    assert not is_ours()
    for _ in range(2):
        rapt.torch.enable()
        assert not is_ours() and not torch.backends.mha.get_fastpath_enabled()
        rapt.torch.enable(aten=True)
        assert is_ours() and torch.backends.mha.get_fastpath_enabled()
        with rapt.torch.enabled(aten=True):
            rapt.torch.disable()
            assert is_ours()
        assert not is_ours() and functional.scaled_dot_product_attention is theirs
        assert torch.backends.mha.get_fastpath_enabled()
    with rapt.torch.enabled():
        with rapt.torch.enabled(aten=True):
            assert is_ours()
        assert not is_ours() and not torch.backends.mha.get_fastpath_enabled()


MASKS = [
    {},
    {"attn_mask": torch.ones(9, 9, dtype=torch.bool).triu(1)},
    {"key_padding_mask": torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])},
    {
        "attn_mask": torch.ones(9, 9, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]]),
    },
]


@pytest.mark.parametrize("options", MASKS)
def test_the_fused_path_of_multihead_attention(options):
    attention, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting mask without torch.bool")
        wanted = attention(x, x, x, need_weights=False, **options)
        with rapt.torch.enabled(aten=True), kernel_calls() as forward:
            got = attention(x, x, x, need_weights=False, **options)
    assert forward.by_python == 1 and got[1] is None
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"src_key_padding_mask": MASKS[2]["key_padding_mask"]}])
def test_the_fused_path_of_encoder_layers(options):
    layer, x = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.randn(2, 9, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting mask without torch.bool")
        wanted = layer(x, **options)
        with rapt.torch.enabled(aten=True), kernel_calls() as forward:
            got = layer(x, **options)
    assert forward.by_python == 1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_weights_are_pytorchs():
    attention, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
    with torch.no_grad():
        wanted = attention(x, x, x)
        with rapt.torch.enabled(aten=True), pytest.warns(rapt.torch.FallbackWarning, match="with weights"):
            got = attention(x, x, x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
