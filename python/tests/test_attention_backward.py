"""rapt.attention_backward against float64 autograd of the plain formula."""

import inspect
import typing

import numpy as np
import pytest
import rapt
import torch
from autograd_reference import UNITS, attention, doubled, relative_error
from rapt._attention import Differentiable

DTYPES = list(UNITS)


def draw(b=2, hq=4, hk=2, sq=37, sk=53, d=24, dv=16, dtype=torch.float32, seed=0, **extra):
    """q, k, v and others of these shapes."""
    torch.manual_seed(seed)
    shapes = {"q": (b, hq, sq, d), "k": (b, hk, sk, d), "v": (b, hk, sk, dv), **extra}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def check(tensors, dtype=torch.float32, with_lse=False, reference=None, **options):
    """All gradients of `tensors`, which are q, k, v and any of bias, sinks and alibi."""
    out, lse = rapt.attention(**tensors, **options, return_lse=True)
    dout = torch.randn(out.shape).to(dtype)
    dlse = torch.randn(lse.shape) * (lse > -torch.inf) if with_lse else None
    got = rapt.attention_backward(dout, tensors["q"], tensors["k"], tensors["v"], out, lse, dlse=dlse, want=tuple(tensors),
                                  **{n: t for n, t in tensors.items() if n not in "qkv"}, **options)  # fmt: skip
    wide = doubled(tensors)
    wanted_out, wanted_lse = attention(**wide, **(options if reference is None else reference))
    loss = (wanted_out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (wanted_lse.masked_fill(lse == -torch.inf, 0) * dlse).sum()
    wanted = torch.autograd.grad(loss, list(wide.values()))
    for name, w in zip(wide, wanted):
        g = getattr(got, "d" + name)
        assert g.shape == tensors[name].shape and g.dtype == tensors[name].dtype and g.is_contiguous()
        assert relative_error(g, w) <= (1e-5 if dtype is torch.float32 else 3 * UNITS[dtype]), name
    assert all((getattr(got, "d" + name) is None) is (name not in tensors) for name in ("q", "k", "v", "bias", "sinks", "alibi"))


CASES = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"causal": True, "align": "top_left", "window": (7, -1), "scale": 0.3},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "mask": {"mask": torch.rand(2, 1, 37, 53, generator=torch.Generator().manual_seed(1)) > 0.3},
}


def reference_of(options):
    given = {name: x for name, x in options.items() if name != "align"}
    return given | ({"offset": 53 - 37} if options.get("align") == "bottom_right" else {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients(case, dtype, with_lse):
    check(draw(dtype=dtype), dtype, with_lse, reference_of(CASES[case]), **CASES[case])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_sinks_and_slopes(dtype):
    check(draw(dtype=dtype, sinks=(4,)), dtype)
    for slopes in ((4,), (2, 4)):
        tensors = draw(dtype=dtype, alibi=slopes)
        tensors["alibi"] = tensors["alibi"].abs() / 8
        check(tensors, dtype, align="top_left", reference={})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (1, 4, 37, 53), (4, 1, 53), (37, 53), (53,), (2, 1, 1, 53)])
def test_gradients_of_biases(shape, dtype):
    check(draw(dtype=dtype, bias=shape), dtype)


def test_rows_without_keys_and_keys_past_a_length_have_gradients_of_zero():
    tensors, lengths = draw(), np.array([53, 20])
    mask = torch.ones(2, 1, 37, 53, dtype=torch.bool)
    mask[:, :, 5] = False
    check(tensors, mask=mask, cache_seqlens=lengths, reference={"mask": mask, "lengths": lengths})
    out, lse = rapt.attention(**tensors, mask=mask, cache_seqlens=lengths, return_lse=True)
    made = rapt.attention_backward(torch.ones_like(out), **tensors, out=out, lse=lse, mask=mask, cache_seqlens=lengths)
    assert (made.dq[:, :, 5] == 0).all() and (made.dk[1, :, 20:] == 0).all() and (made.dv[1, :, 20:] == 0).all()


def test_ragged_batches():
    tensors, borders = draw(b=1, sq=50, sk=50), np.array([0, 20, 50])
    flat = {name: t[0].transpose(0, 1) for name, t in tensors.items()}
    ragged = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "causal": True}
    out, lse = rapt.attention(**flat, **ragged, return_lse=True)
    dout = torch.randn(out.shape)
    got = rapt.attention_backward(dout, **flat, out=out, lse=lse, **ragged)
    for rows in (slice(0, 20), slice(20, 50)):
        alone = {name: t[:, :, rows].contiguous() for name, t in tensors.items()}
        one, sums = rapt.attention(**alone, causal=True, return_lse=True)
        wanted = rapt.attention_backward(dout[rows].transpose(0, 1)[None], **alone, out=one, lse=sums, causal=True)
        for name in ("dq", "dk", "dv"):
            part = getattr(got, name)[rows].transpose(0, 1)[None]
            torch.testing.assert_close(part, getattr(wanted, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("of", ["float32", "float16", "bfloat16"])
def test_numpy(of):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if of == "bfloat16" else of
    tensors = draw()
    arrays = {name: t.numpy().astype(dtype) for name, t in tensors.items()}
    out, lse = rapt.attention(**arrays, causal=True, align="top_left", return_lse=True)
    dout = np.broadcast_to(np.ones((), out.dtype), out.shape)
    got = rapt.attention_backward(dout, **arrays, out=out, lse=lse, causal=True, align="top_left")
    same = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, of)) for x in (dout, *arrays.values(), out)]
    wanted = rapt.attention_backward(*same, torch.from_numpy(lse), causal=True, align="top_left")
    for g, w, x in zip(got, wanted, arrays.values()):
        assert type(g) is np.ndarray and g.dtype == x.dtype and g.shape == x.shape
        np.testing.assert_allclose(g.astype(np.float32), w.float().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "words, message",
    [
        ("grads=", "dq: got no gradient at all; wanted one or more of dq, dk, dv, dbias, dsinks and dalibi"),
        ("dbias", "dbias: got a gradient without bias; wanted bias, too"),
        ("dsinks", "dsinks: got a gradient without sinks; wanted sinks, too"),
        ("dalibi", "dalibi: got a gradient without alibi; wanted alibi, too"),
    ],
)
def test_problems_that_no_arguments_could_give(words, message):
    with pytest.raises(ValueError, match=message):
        rapt.explain_problem(f"attention_backward hq=2 sq=9 d=16 {words}")


def test_lse_of_ragged_batches_the_other_way_round():
    x, borders = torch.randn(50, 4, 16), torch.tensor([0, 20, 50])
    ragged = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
    out, lse = rapt.attention(x, x, x, **ragged, return_lse=True)
    assert lse.shape == (50, 4)
    for wrong, wanted in (
        (lse.T, r"\[total_q, hq\] with q's rows total_q = 50"),
        (lse[:, :3], "q's heads hq = 4"),
        (lse[None], r"\[total_q, hq\]"),
    ):
        with pytest.raises(ValueError, match=rf"lse: got shape .*; wanted {wanted}$"):
            rapt.attention_backward(out, x, x, x, out, wrong, **ragged)


def test_nothing_to_differentiate():
    for empty in ({"b": 0}, {"sq": 0}, {"sk": 0}):
        tensors = draw(**empty)
        out, lse = rapt.attention(**tensors, return_lse=True)
        made = rapt.attention_backward(torch.ones_like(out), **tensors, out=out, lse=lse)
        assert all(t.shape == x.shape and (t == 0).all() for t, x in zip(made, tensors.values()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wanted_gradients_alone(dtype):
    tensors = draw(sinks=(4,), bias=(4, 1, 53), alibi=(4,), dtype=dtype)
    out, lse = rapt.attention(**tensors, align="top_left", return_lse=True)
    options = dict(tensors, out=out, lse=lse, align="top_left")
    dout = torch.randn(out.shape).to(dtype)
    every = rapt.attention_backward(dout, **options, want=tuple(tensors))
    for name in tensors:
        alone = rapt.attention_backward(dout, **options, want=name)
        assert [n for n, t in alone._asdict().items() if t is not None] == ["d" + name]
        assert torch.equal(getattr(alone, "d" + name), getattr(every, "d" + name))


def test_threads_change_no_bit():
    tensors = draw(sq=300, sk=300)
    out, lse = rapt.attention(**tensors, return_lse=True)
    made = [rapt.attention_backward(torch.ones_like(out), **tensors, out=out, lse=lse, threads=n) for n in (1, 2, None)]
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0][:3], other[:3]))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"lse": None}, ValueError, r"lse: got no tensor; wanted \[b, hq, sq\]"),
        ({"dout": None}, ValueError, "dout: got no tensor; wanted the gradient of out"),
        ({"dout": torch.zeros(2, 4, 37, 15)}, ValueError, r"dout: got shape \[2, 4, 37, 15\]; wanted out's, \[2, 4, 37, 16\]"),
        ({"dout": torch.zeros(2, 4, 37, 16).double()}, TypeError, "dout: got dtype torch.float64; wanted float32"),
        ({"lse": torch.zeros(2, 4, 37).half()}, TypeError, "lse: got dtype torch.float16; wanted float32"),
        ({"lse": torch.zeros(2, 4, 36)}, ValueError, r"lse: got shape \[2, 4, 36\]; wanted q's rows sq = 37"),
        ({"dlse": torch.zeros(2, 4, 36)}, ValueError, r"dlse: got shape \[2, 4, 36\]; wanted lse's"),
        ({"want": ()}, ValueError, r"want: got \(\); wanted one or more of 'q', 'k'"),
        ({"want": ("q", "out")}, ValueError, r"want: got \('q', 'out'\); wanted one or more of"),
        ({"want": ("q", ["k"])}, ValueError, r"want: got \('q', \['k'\]\); wanted one or more of"),
        ({"want": 5}, TypeError, "want: got 5; wanted one or more of 'q', 'k'"),
        ({"want": None}, TypeError, "want: got None; wanted one or more of 'q', 'k'"),
        ({"want": "bias"}, ValueError, "want: got 'bias', and no bias; wanted gradients of what is given: 'q', 'k', 'v'$"),
        ({"scale": float("nan")}, ValueError, "scale: got nan; wanted a finite number"),
        ({"k": torch.zeros(2, 2, 53, 24, dtype=torch.int8)}, TypeError, "[kv]: got dtype"),
        ({"causal": True}, ValueError, "align: got none, with 37 queries and 53 keys"),
        ({"q": torch.zeros(2, 4, 37, 24, requires_grad=True)}, ValueError, "q: got a tensor that requires grad"),
    ],
)
def test_errors(change, error, message):
    tensors = draw()
    out, lse = rapt.attention(**tensors, return_lse=True)
    arguments = dict(tensors, out=out, lse=lse, dout=torch.ones_like(out)) | change
    with pytest.raises(error, match=message):
        rapt.attention_backward(**arguments)


def test_arguments_of_the_forward_are_attentions():
    wanted, got = typing.get_type_hints(rapt.attention), typing.get_type_hints(Differentiable)
    assert got == {name: wanted[name] for name in got}
    names = list(inspect.signature(rapt.attention_backward).parameters)
    assert names[:6] == ["dout", "q", "k", "v", "out", "lse"] and names[6:-4] == list(got)
    assert names[-4:] == ["dlse", "want", "threads", "isa"]


def test_an_argument_without_gradients_is_refused_by_name():
    x = np.zeros((1, 1, 2, 8), np.float32)
    with pytest.raises(TypeError, match=r"attention_backward\(\) got an unexpected keyword argument 'ring'"):
        rapt.attention_backward(x, x, x, x, x, x[..., 0], ring=True)
