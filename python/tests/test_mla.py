"""rapt.mla: both forms of latent attention against float64, where keys and values of all heads are made and nothing is saved."""

import itertools
from unittest import mock

import numpy as np
import pytest
import rapt
import rapt.mla
import torch
from autograd_reference import attention as plain_attention
from autograd_reference import doubled, relative_error
from rapt._mla import Options, Sizes, cheaper_form, seen_keys
from torch._dynamo.testing import CompileCounter

FORMS = ("absorbed", "expanded")
NAMES = ("q_nope", "q_rope", "kv", "w_uk", "w_uv")
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}

pytestmark = pytest.mark.usefixtures("seeded")


def inputs(b=2, sq=7, sk=20, h=3, n=12, r=6, c=24, v=10, dtype=torch.float32):
    shapes = {"q_nope": (b, sq, h, n), "q_rope": (b, sq, h, r), "kv": (b, sk, c + r), "w_uk": (h, n, c), "w_uv": (h, v, c)}
    return {name: (torch.randn(shape) * (0.3 if name[0] == "w" else 1)).to(dtype) for name, shape in shapes.items()}


def reference(q_nope, q_rope, kv, w_uk, w_uv, **options):
    """out [b, sq, h, v] and lse [b, h, sq]; scale is to be given."""
    c = w_uk.shape[2]
    k = torch.einsum("bkc,hnc->bhkn", kv[..., :c], w_uk)
    q = q_nope
    if q_rope is not None:
        k = torch.cat((k, kv[:, None, :, c:].expand(-1, k.shape[1], -1, -1)), -1)
        q = torch.cat((q, q_rope), -1)
    out, lse = plain_attention(q.transpose(1, 2), k, torch.einsum("bkc,hvc->bhkv", kv[..., :c], w_uv), **options)
    return out.transpose(1, 2), lse


def in_double(given):
    return {name: None if x is None else x.double() for name, x in given.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_both_forms(form, dtype):
    given, sinks = inputs(dtype=dtype), torch.randn(3)
    out, lse = rapt.mla.attention(**given, causal=True, align="bottom_right", sinks=sinks, form=form, return_lse=True)
    wanted, wanted_lse = reference(**in_double(given), causal=True, offset=13, scale=18**-0.5, sinks=sinks.double())
    assert out.dtype is dtype and out.shape == (2, 7, 3, 10) and lse.dtype is torch.float32
    assert relative_error(out, wanted) < BOUNDS[dtype]
    assert (lse - wanted_lse).abs().max() < 10 * BOUNDS[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_alignments_and_scale(form):
    given = inputs()
    for align, offset in (("top_left", 0), ("bottom_right", 13), (5, 5), (-3, -3)):
        out = rapt.mla.attention(**given, causal=True, align=align, scale=0.7, form=form)
        assert relative_error(out, reference(**in_double(given), causal=True, offset=offset, scale=0.7)[0]) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_what_is_past_a_length_is_not_read(form):
    given, lengths = inputs(b=3), torch.tensor([20, 9, 0])
    for row, length in zip(given["kv"], lengths):
        row[length:] = torch.nan
    cached = given | {"kv": given["kv"].nan_to_num()}
    options = {"causal": True, "align": "bottom_right", "form": form, "return_lse": True}
    out, lse = rapt.mla.attention(**given, seqlens=lengths, **options)
    for i, length in enumerate(lengths.tolist()):
        one = {name: x[i : i + 1] if name[0] in "qk" else x for name, x in in_double(cached).items()}
        wanted, wanted_lse = reference(**one | {"kv": one["kv"][:, :length]}, causal=True, offset=length - 7, scale=18**-0.5)
        torch.testing.assert_close(out[i : i + 1].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[i : i + 1].double(), wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("integers", (torch.int32, torch.int64))
def test_pages(form, integers):
    given, lengths = inputs(), torch.tensor([20, 9], dtype=integers)
    options = {"causal": True, "align": "bottom_right", "form": form, "seqlens": lengths}
    wanted = rapt.mla.attention(**given, **options)
    pages = torch.full((12, 4, 30), torch.nan)
    table = torch.tensor([[7, 2, 9, 0, 4], [1, 11, 5, 99, -7]], dtype=integers)  # what no key is in may be no page
    for rows, row, length in zip(given["kv"], table.tolist(), lengths.tolist()):
        for key in range(length):
            pages[row[key // 4], key % 4] = rows[key]
    out = rapt.mla.attention(**given | {"kv": pages}, block_table=table, **options)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)
    table[1, 2] = 12
    with pytest.raises(ValueError, match="block_table: .*(12|no page)"):
        rapt.mla.attention(**given | {"kv": pages}, block_table=table, **options)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_rotary_part(form):
    given = inputs(r=0) | {"q_rope": None}
    assert relative_error(rapt.mla.attention(**given, form=form), reference(**in_double(given), scale=12**-0.5)[0]) < 2e-6


def test_one_matrix_of_models_is_both():
    """Of DeepSeek-V3's sizes; the scale is that of 192 columns."""
    given, weight = inputs(b=1, sq=3, sk=40, h=2, n=128, r=64, c=512, v=128), torch.randn(2 * 256, 512) / 16
    given["w_uk"], given["w_uv"] = weight.view(2, 256, 512).split((128, 128), 1)
    outs = [rapt.mla.attention(**given, form=form) for form in FORMS]
    wanted, _ = reference(**in_double(given), scale=192**-0.5)
    other, _ = reference(**in_double(given), scale=576**-0.5)
    assert all(relative_error(out, wanted) < 2e-6 for out in outs) and relative_error(other, wanted) > 0.1


def test_values_are_columns_of_the_keys():
    given = inputs()
    with mock.patch.object(rapt, "attention", wraps=rapt.attention) as kernel:
        rapt.mla.attention(**given, form="absorbed")
    (_, k, v), _ = kernel.call_args
    assert k.data_ptr() == v.data_ptr() == given["kv"].data_ptr() and v.shape == (2, 1, 20, 24) and v.stride() == k.stride()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", (None, (20, 6)))
def test_gradients(form, lengths):
    given, sinks = inputs(), torch.randn(3)
    if lengths is not None:
        given["kv"][1, 6:] = torch.nan
    leaves = {name: x.clone().requires_grad_() for name, x in (given | {"sinks": sinks}).items()}
    clean = given | {"kv": given["kv"].nan_to_num(), "sinks": sinks}
    exact = doubled(clean)
    along, along_lse = torch.randn(2, 7, 3, 10), torch.randn(2, 3, 7)
    seqlens = None if lengths is None else torch.tensor(lengths)
    out, lse = rapt.mla.attention(
        **leaves, seqlens=seqlens, causal=True, align="bottom_right" if lengths is None else 2, form=form, return_lse=True
    )
    ((out * along).sum() + (lse * along_lse).sum()).backward()
    out, lse = reference(**exact, causal=True, offset=13 if lengths is None else 2, scale=18**-0.5, lengths=lengths)
    ((out * along).sum() + (lse * along_lse).sum()).backward()
    for name, x in leaves.items():
        assert x.grad.dtype is x.dtype and relative_error(x.grad, exact[name].grad) < 5e-6, name
    if lengths is not None:
        assert not leaves["kv"].grad[1, 6:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("align, offset", (("top_left", 0), (4, 4), (-3, -3), (-7, -7)))
def test_gradients_where_nobody_sees_the_last_keys(form, align, offset):
    """They may be what a cache has there: anything."""
    given = inputs()
    clean = doubled(given)
    given["kv"][:, offset + 7 :] = torch.nan
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    for options in ({}, {"seqlens": torch.tensor([20, 20])}, {"seqlens": torch.tensor([20, 12])}):
        out = rapt.mla.attention(**leaves, **options, causal=True, align=align, form=form)
        got = torch.autograd.grad(out.square().sum(), leaves.values())
        wanted, _ = reference(**clean, causal=True, offset=offset, scale=18**-0.5)
        wanted = torch.autograd.grad(wanted.square().sum(), clean.values())
        for x, y in zip(got, wanted):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_bfloat16_and_of_some_inputs(form):
    given = inputs(dtype=torch.bfloat16)
    exact = doubled(given)
    reference(**exact, scale=18**-0.5)[0].square().sum().backward()
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    rapt.mla.attention(**leaves, form=form).float().square().sum().backward()
    assert all(relative_error(x.grad, exact[name].grad) < 2e-2 for name, x in leaves.items())
    some = given | {name: given[name].clone().requires_grad_() for name in ("q_rope", "w_uk")}
    rapt.mla.attention(**some, form=form).float().square().sum().backward()
    assert all((x.grad is None) == (name not in ("q_rope", "w_uk")) for name, x in some.items())
    assert torch.equal(some["w_uk"].grad, leaves["w_uk"].grad)


def test_second_derivatives_are_refused():
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    (grad,) = torch.autograd.grad(rapt.mla.attention(**given).sum(), [given["kv"]], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_compiled(form):
    given, lengths = inputs(), torch.tensor([20, 9])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(given, seqlens):
        return rapt.mla.attention(**given, seqlens=seqlens, causal=True, align="bottom_right", form=form)

    def gradients(function):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        out = function(leaves, lengths)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in leaves.values())]

    for got, wanted in zip(gradients(compiled), gradients(compiled._torchdynamo_orig_callable)):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(given, lengths), compiled._torchdynamo_orig_callable(given, lengths), rtol=0, atol=1e-5)


def lists_of_keys(b=2, sq=7, n=6, sk=20):
    lists = torch.rand(b, sq, sk).argsort(-1)[..., :n].int()
    lists[torch.rand(lists.shape) < 0.2] = -1
    lists[0, 3] = -1
    return lists


def by_mask(given, lists):
    chosen = torch.zeros(*lists.shape[:2], given["kv"].shape[1] + 1, dtype=torch.bool).scatter(-1, lists.long() % 21, True)
    return reference(**in_double(given), mask=chosen[:, None, :, :20], scale=18**-0.5)


def test_lists_of_keys():
    given, lists = inputs(), lists_of_keys()
    wanted, wanted_lse = by_mask(given, lists)
    out, lse = rapt.mla.attention(**given, indices=lists, return_lse=True)
    assert relative_error(out, wanted) < 2e-6 and not out[0, 3].any() and lse[0, :, 3].eq(-torch.inf).all()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)
    counts = torch.randint(0, 7, (2, 7))
    shorter = torch.where(torch.arange(6) < counts[..., None], lists, -1)
    assert torch.equal(rapt.mla.attention(**given, indices=lists, counts=counts), rapt.mla.attention(**given, indices=shorter))


def test_a_pool_of_keys():
    given, lists = inputs(), lists_of_keys()
    pool = given["kv"].flatten(0, 1)[None].clone()
    there = torch.where(lists < 0, -1, lists + torch.tensor([0, 20])[:, None, None])
    unread = torch.ones(40, dtype=torch.bool)
    unread[there[there >= 0].long()] = False
    pool[0, unread] = torch.nan
    got = rapt.mla.attention(**given | {"kv": pool}, indices=there)
    assert unread.any() and relative_error(got, by_mask(given, lists)[0]) < 2e-6


V3 = Sizes(1, 1, 0, 128, 64, 512, 128)


def chosen(sq, sk, **options):
    return cheaper_form(V3._replace(sq=sq, sk=sk), Options(128, 1.0, **options))


def test_the_cheaper_form():
    assert chosen(170, 10**7) == "absorbed" and chosen(171, 10**7) == "expanded"
    assert chosen(1, 100) == chosen(4, 100, causal=True, align="bottom_right") == "absorbed"
    assert chosen(100, 100, causal=True) == chosen(2000, 2000, causal=True) == "expanded"
    # Half of the pairs are hidden where queries are as many as keys; what is expanded is what is seen.
    assert chosen(300, 400) == chosen(300, 400, causal=True, align="bottom_right") == "expanded"
    assert chosen(150, 10**6) == "absorbed" and chosen(150, 10**6, causal=True, align="top_left") == "expanded"


def test_how_many_keys_are_seen():
    sizes = V3._replace(sq=7, sk=20)
    for align, offset, wanted in (("top_left", 0, 7), ("offset", 5, 12), ("offset", -7, 0), ("offset", 30, 20), ("bottom_right", 0, 20)):
        assert seen_keys(sizes, Options(128, 1.0, True, align, offset)) == wanted
        assert seen_keys(sizes, Options(128, 1.0, False, align, offset)) == 20


@pytest.mark.parametrize("sq", (1, 7, 20))
def test_auto_is_one_of_them(sq):
    given = inputs(sq=sq, n=16, r=8, c=64, v=16)
    options = {"causal": True, "align": "bottom_right"}
    form = cheaper_form(Sizes(2, sq, 20, 16, 8, 64, 16), Options(16, 1.0, **options))
    assert form == ("expanded" if sq == 20 else "absorbed")
    outs = {each: rapt.mla.attention(**given, **options, form=each) for each in (*FORMS, "auto")}
    assert torch.equal(outs["auto"], outs[form]) and not torch.equal(outs["absorbed"], outs["expanded"])


def test_lengths_do_not_choose_the_form():
    """A sequence has the same bits whatever the length of the other, and in a graph, which knows none."""
    given, lengths = inputs(sq=3), torch.tensor([1, 20])
    options = {"causal": True, "align": "bottom_right"}
    wanted = rapt.mla.attention(**given, **options, seqlens=lengths)
    alone = rapt.mla.attention(**given, **options, seqlens=torch.tensor([1, 1]))
    compiled = torch.compile(rapt.mla.attention, backend="aot_eager", fullgraph=True)(**given, **options, seqlens=lengths)
    assert torch.equal(alone[0], wanted[0]) and torch.equal(compiled, wanted)


@pytest.mark.parametrize("form", ("auto", *FORMS))
def test_results_are_contiguous(form):
    for sq in (1, 7, 20):
        assert rapt.mla.attention(**inputs(sq=sq), form=form).is_contiguous()


@pytest.mark.parametrize("form", ("auto", *FORMS))
@pytest.mark.parametrize("options", ({}, {"seqlens": True}, {"causal": True, "align": "bottom_right"}))
def test_graphs_of_any_batch(form, options):
    """One graph is enough, for the largest batch as for the smallest."""
    counter = CompileCounter()
    compiled = torch.compile(rapt.mla.attention, backend=counter, dynamic=True, fullgraph=True)
    for b in range(2, 13):
        lengths = {"seqlens": torch.full((b,), 5)} if "seqlens" in options else {}
        compiled(**inputs(b=b), **options | lengths, form=form)
    assert counter.frame_count == 1


def test_exported_for_any_batch():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weights = inputs()
            self.w_uk, self.w_uv = torch.nn.Parameter(weights["w_uk"]), torch.nn.Parameter(weights["w_uv"])

        def forward(self, q_nope, q_rope, kv):
            return rapt.mla.attention(q_nope, q_rope, kv, self.w_uk, self.w_uv)

    def given(b):
        return {name: x for name, x in inputs(b=b).items() if name[0] != "w"}

    layer, b = Layer(), torch.export.Dim("b", min=2, max=64)
    exported = torch.export.export(layer, (), given(2), dynamic_shapes={name: {0: b} for name in given(2)})
    for batch in (2, 5):
        some = given(batch)
        torch.testing.assert_close(exported.module()(**some), layer(**some), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("spoilt", ("q_nope", "q_rope", "dout"))
def test_gradients_of_queries_without_keys(form, sinks, spoilt):
    """Such as those of padding: they give nothing, whatever they and their gradients hold."""
    given, dout = inputs(), torch.randn(2, 7, 3, 10)
    given |= {"sinks": torch.randn(3)} if sinks else {}

    def gradients():
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        out = rapt.mla.attention(**leaves, causal=True, align=-2, form=form)  # the first two see none
        return torch.autograd.grad(out, list(leaves.values()), dout)

    wanted = gradients()
    {**given, "dout": dout}[spoilt][:, :2] = torch.nan
    for name, got, before in zip(given, gradients(), wanted):
        assert torch.equal(got, before), name


@pytest.mark.parametrize("prefix", ((20, 9), (20, 0)))
def test_a_cached_prefix_and_new_tokens_are_merged(prefix):
    """Chunked prefill. A sequence without a prefix has what its new tokens give."""
    given = inputs()
    new = given | {"kv": torch.randn(2, 7, 30)}
    outs, lses = zip(
        rapt.mla.attention(**given, seqlens=torch.tensor(prefix), form="absorbed", return_lse=True),
        rapt.mla.attention(**new, causal=True, form="expanded", return_lse=True),
    )
    merged = rapt.merge_states([out.transpose(1, 2) for out in outs], lses).transpose(1, 2)
    for i, length in enumerate(prefix):
        one = {name: x[i : i + 1] if name[0] in "qk" else x for name, x in given.items()}
        one["kv"] = torch.cat((given["kv"][i : i + 1, :length], new["kv"][i : i + 1]), 1)
        wanted, _ = reference(**in_double(one), causal=True, offset=length, scale=18**-0.5)
        assert relative_error(merged[i : i + 1], wanted) < 2e-6


def test_token_by_token_over_a_cache():
    given = inputs(sq=20, sk=20)
    wanted, _ = reference(**in_double(given), causal=True, scale=18**-0.5)
    cache, lengths, outs = torch.full((2, 1, 32, 30), torch.nan), torch.zeros(2, dtype=torch.int64), []
    for first, last in itertools.pairwise((0, 12, *range(13, 21))):
        rows = given["kv"][:, None, first:last]
        rapt.append_kv(rows, rows[..., :24], cache, cache[..., :24], lengths)
        lengths += last - first
        queries = {name: given[name][:, first:last] for name in ("q_nope", "q_rope")}
        new = given | queries | {"kv": cache[:, 0]}
        outs.append(rapt.mla.attention(**new, seqlens=lengths, causal=True, align="bottom_right"))
    assert relative_error(torch.cat(outs, 1), wanted) < 2e-6


LISTS = {"indices": torch.zeros(2, 7, 2).int(), "form": "absorbed"}
NO_RANK = {"w_uk": torch.zeros(3, 12, 0), "w_uv": torch.zeros(3, 10, 0)}
NO_COLUMNS = {"q_nope": torch.zeros(2, 7, 3, 0), "q_rope": None, "kv": torch.zeros(2, 20, 24), "w_uk": torch.zeros(3, 0, 24)}


@pytest.mark.parametrize("form", ("auto", *FORMS))
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q_nope": torch.zeros(2, 7, 36)}, ValueError, r"q_nope: got shape \[2, 7, 36\]"),
        ({"q_rope": torch.zeros(2, 6, 3, 6)}, ValueError, r"q_rope: .*; wanted \[2, 7, 3, rope\]"),
        ({"q_rope": None}, ValueError, r"kv: got shape \[2, 20, 30\]; wanted \[b, sk, 24\], 24 latent and 0 rotary"),
        ({"q_rope": torch.zeros(2, 7, 3, 6).half()}, TypeError, "q_rope: got torch.float16; wanted q_nope's"),
        ({"kv": torch.zeros(3, 20, 30)}, ValueError, r"kv: .*; wanted \[2, sk, 30\]"),
        ({"kv": torch.zeros(2, 20, 30).double()}, TypeError, "kv: got torch.float64"),
        ({"kv": torch.zeros(2, 20, 30).int()}, TypeError, "kv: got torch.int32; wanted .*torch.uint8 or torch.float8_e4m3fn"),
        ({"kv": torch.zeros(2, 20, 30).to_sparse()}, TypeError, "kv: got a tensor of torch.sparse_coo"),
        ({"return_lse": 1}, TypeError, "return_lse: got 1; wanted True or False"),
        ({"kv": torch.zeros(2, 20, 6)} | NO_RANK, ValueError, r"w_uk: got shape \[3, 12, 0\]; wanted a rank of 1"),
        ({"w_uv": torch.zeros(3, 0, 24)}, ValueError, r"w_uv: got shape \[3, 0, 24\]; wanted values of 1 column"),
        (NO_COLUMNS, ValueError, r"q_nope: got shape \[2, 7, 3, 0\]"),
        ({"kv": [1.0]}, TypeError, "kv: got builtins.list"),
        ({"w_uk": torch.zeros(3, 24, 12)}, ValueError, r"w_uk: .*; wanted \[3, 12, rank\]"),
        ({"w_uv": torch.zeros(3, 24, 10)}, ValueError, r"w_uv: .*; wanted \[3, v, 24\]"),
        ({"w_uv": None}, TypeError, "w_uv: got None"),
        ({"sinks": torch.zeros(4)}, ValueError, "sinks: "),
        ({"scale": "1"}, TypeError, "scale: got '1'; wanted a number"),
        ({"scale": True}, TypeError, "scale: got True; wanted a number"),
        ({"scale": float("nan")}, ValueError, "scale: got nan"),
        ({"causal": True}, ValueError, "align: got "),
        ({"causal": 1}, TypeError, "causal: got 1"),
        ({"align": "middle"}, ValueError, "align: got 'middle'; wanted None"),
        ({"align": True}, TypeError, "align: got True; wanted None"),
        ({"align": 1.5}, TypeError, "align: got 1.5; wanted None"),
        ({"form": "absorb"}, ValueError, "form: got 'absorb'"),
        ({"seqlens": torch.tensor([20, 21])}, ValueError, "seqlens: got length 21 of sequence 1; wanted 0 to 20"),
        ({"seqlens": torch.tensor([20.0, 2.0])}, ValueError, "seqlens: got torch.float32"),
        ({"block_table": torch.zeros(2, 1).int()}, ValueError, "block_table: got pages without seqlens"),
        (LISTS | {"form": "expanded"}, ValueError, 'form: got "expanded" with indices'),
        (LISTS | {"seqlens": torch.tensor([3, 3])}, ValueError, "seqlens: got one with indices"),
        (LISTS | {"block_table": torch.zeros(2, 1).int()}, ValueError, "block_table: got one with indices; wanted None"),
        (LISTS | {"kv": torch.zeros(3, 20, 30)}, ValueError, r"kv: .*; wanted \[2 or 1, sk, 30\]"),
        (LISTS | {"causal": True}, ValueError, "causal: got "),
        (LISTS | {"indices": torch.full((2, 7, 2), 20)}, ValueError, "indices: got key 20"),
        ({"counts": torch.zeros(2, 7).int()}, ValueError, "counts: got a tensor without indices; wanted both"),
    ],
)
def test_bad_input(change, error, message, form):
    with pytest.raises(error, match=f"^{message}"):
        rapt.mla.attention(**inputs() | {"form": form} | change)


def test_refusals_of_the_operator_name_the_arguments_too():
    """Lengths are looked at where there are some: in graphs, by the operator."""
    compiled = torch.compile(rapt.mla.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="^seqlens: got length 21"):
        compiled(**inputs(), seqlens=torch.tensor([20, 21]), form="absorbed")


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_are_not_pythons(form):
    given = inputs()
    wanted = rapt.mla.attention(**given, causal=True, align=5, scale=0.25, form=form)
    for align, scale in ((np.int64(5), np.float32(0.25)), (torch.tensor(5), torch.tensor(0.25))):
        assert torch.equal(rapt.mla.attention(**given, causal=np.bool_(True), align=align, scale=scale, form=form), wanted)


@pytest.mark.parametrize("pool", (False, True))
def test_gradients_of_listed_keys(pool):
    """Of a key that is listed twice twice; none of one that is on no list, whatever it holds."""
    given, lists, sinks = inputs(), lists_of_keys(), torch.randn(3)
    counts = torch.randint(1, 7, (2, 7))
    lists[1, 2], counts[1, 2] = 7, 3
    along, along_lse = torch.randn(2, 7, 3, 10), torch.randn(2, 3, 7)
    listed = torch.where(torch.arange(6) < counts[..., None], lists, -1).long()
    times = torch.zeros(2, 7, 21).scatter_add(-1, listed % 21, torch.ones(2, 7, 6))[..., :20]
    exact = doubled(given | {"sinks": sinks})
    # A key that counts n times has a score that is log n larger.
    out, lse = reference(**exact, bias=times.double().log()[:, None], scale=18**-0.5)
    ((out * along).sum() + (lse * along_lse).masked_fill(lse == -torch.inf, 0).sum()).backward()
    wanted = {name: x.grad for name, x in exact.items()}
    unread = times.sum(1) == 0
    given["kv"][unread] = torch.nan
    if pool:
        lists = torch.where(lists < 0, -1, lists + torch.tensor([0, 20])[:, None, None])
        given["kv"], wanted["kv"] = given["kv"].view(1, 40, 30), wanted["kv"].view(1, 40, 30)
    leaves = {name: x.clone().requires_grad_() for name, x in (given | {"sinks": sinks}).items()}
    out, lse = rapt.mla.attention(**leaves, indices=lists, counts=counts, return_lse=True)
    ((out * along).sum() + (lse * along_lse).masked_fill(lse == -torch.inf, 0).sum()).backward()
    assert unread.any() and times.max() > 1
    for name, x in leaves.items():
        assert relative_error(x.grad, wanted[name]) < 5e-6, name


def test_what_has_no_gradients_says_so():
    given = inputs()
    given["w_uk"].requires_grad_()
    with pytest.raises(ValueError, match="block_table: .*no gradients"):
        rapt.mla.attention(**given, block_table=torch.zeros(2, 1).int(), seqlens=torch.tensor([1, 1]))


def fp8_inputs(dtype=torch.float32, rows=20):
    """Of DeepSeek's sizes, kv in rows of 656 bytes and, in float32, what they mean."""
    given = inputs(sk=rows, n=16, r=64, c=512, dtype=dtype)
    kv = torch.empty(2, rows, 656, dtype=torch.uint8)
    rapt.mla.append_fp8_rows(given["kv"], kv, torch.zeros(2, dtype=torch.int64))
    codes, scale = kv[..., :512].view(torch.float8_e4m3fn).float(), kv[..., 512:528].view(torch.float32)
    meant = torch.cat((codes * scale.repeat_interleave(128, -1), kv[..., 528:].view(torch.bfloat16).float()), -1)
    assert relative_error(meant, given["kv"].double()) < 0.04
    return given | {"kv": kv}, given | {"kv": meant}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("keys", ("all", "lengths", "pages", "lists"))
@pytest.mark.parametrize("compiled", (False, True))
def test_rows_of_8_bit_floats(dtype, keys, compiled):
    given, meant = fp8_inputs(dtype)
    options = {"causal": True, "align": "bottom_right"}
    if keys in ("lengths", "pages"):
        options["seqlens"] = torch.tensor([20, 13])
        given["kv"][1, 13:] = 0xFF
        meant["kv"][1, 13:] = torch.nan
    if keys == "lists":
        options = {"indices": torch.randint(-1, 20, (2, 7, 9))}
    wanted, wanted_lse = rapt.mla.attention(**in_double_as_float(meant), **options, form="absorbed", return_lse=True)
    if keys == "pages":
        options["block_table"] = torch.tensor([[5, 0, 1, 7, 2], [3, 8, 4, 6, 9]])
        given["kv"] = given["kv"].view(10, 4, 656)[options["block_table"].flatten().argsort()]
    call = torch.compile(rapt.mla.attention, fullgraph=True, backend="aot_eager") if compiled else rapt.mla.attention
    with torch.no_grad():
        out, lse = call(**given, **options, return_lse=True)
    assert out.dtype is dtype and relative_error(out, wanted.double()) < BOUNDS[dtype]
    assert (lse - wanted_lse).abs().max() < 10 * BOUNDS[dtype]


def in_double_as_float(given):
    return {name: x.float() for name, x in given.items()}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"form": "expanded"}, 'form: got "expanded" with kv of torch.uint8'),
        ({"kv": torch.zeros(2, 20, 655, dtype=torch.uint8)}, "kv: .*rows of 656 bytes"),
        ({"q_rope": None}, "kv: .*512 latent and 0 rotary columns; wanted 512 and 64"),
        ({"w_uk": torch.zeros(3, 16, 512, requires_grad=True)}, "kv: .*no gradients"),
    ],
)
def test_refusals_of_rows_of_8_bit_floats(change, message):
    given, _ = fp8_inputs()
    with pytest.raises(ValueError, match=message):
        rapt.mla.attention(**given | change)
    rapt.mla.attention(**given)
