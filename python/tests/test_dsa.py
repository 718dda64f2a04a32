"""rapt.dsa of arrays against the definition in float64, and rapt.torch's functions, their gradients by autograd of that."""

import ml_dtypes
import numpy as np
import pytest
import rapt
import rapt.torch
import torch
from rapt import _dsa_torch
from torch.autograd import forward_ad

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
QUANTISED = [np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def draw(b=2, sq=7, sk=19, h=5, d=24, dtype=np.float32, k_dtype=None, seed=0):
    """q, k and w, and k_scale where k is quantised."""
    rng = np.random.default_rng(seed)
    q, k, w = (rng.standard_normal(shape, np.float32) for shape in ((b, sq, h, d), (b, sk, d), (b, sq, h)))
    if k_dtype not in QUANTISED:
        return {"q": q.astype(dtype), "k": k.astype(k_dtype or dtype), "w": w}
    largest = {np.int8: 127, ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344}[k_dtype]
    scale = np.abs(k).max(-1) / largest
    codes = k / scale[..., None]
    return {"q": q.astype(dtype), "k": (codes.round() if k_dtype is np.int8 else codes).astype(k_dtype), "w": w, "k_scale": scale}


def visible(b, sq, sk, align=None, causal=True, seqlens=None, key_begin=None, key_end=None):
    lengths = np.full(b, sk) if seqlens is None else np.asarray(seqlens)
    i, j = np.arange(sq)[:, None], np.arange(sk)
    starts = lengths - sq if align == "bottom_right" else np.full(b, align if isinstance(align, int) else 0)
    seen = np.broadcast_to(j < lengths[:, None, None], (b, sq, sk)).copy()
    if causal:
        seen &= j <= i + starts[:, None, None]
    if key_begin is not None:
        seen &= j >= np.asarray(key_begin)[..., None]
    if key_end is not None:
        seen &= j < np.asarray(key_end)[..., None]
    return seen


def definition(q, k, w, relu=True, scale=None, k_scale=None, **hiding):
    """The scores, and what they may be off by."""
    q, k, w = (np.asarray(x).astype(np.float64) for x in (q, k, w))
    d = q.shape[-1]
    products, sizes = np.einsum("bihd,bjd->bihj", q, k), np.einsum("bihd,bjd->bihj", abs(q), abs(k))
    factor = (d**-0.5 if scale is None else scale) * (1 if k_scale is None else np.asarray(k_scale, np.float64)[:, None])
    scores = factor * np.einsum("bih,bihj->bij", w, np.maximum(products, 0) if relu else products)
    bound = 2.0**-24 * (d + q.shape[2] + 6) * abs(factor) * np.einsum("bih,bihj->bij", abs(w), sizes)
    return np.where(visible(q.shape[0], q.shape[1], k.shape[1], **hiding), scores, -np.inf), bound


def selection(scores, n):
    """By a stable sort: NaN first, then the largest; -1 for -inf and past the end."""
    scores = np.asarray(scores)
    order = np.where(np.isnan(scores), -np.inf, -(scores + 0.0))
    indices = np.argsort(order, axis=-1, kind="stable")[..., :n].astype(np.int32)
    indices[np.take_along_axis(scores, indices, -1) == -np.inf] = -1
    return np.concatenate([indices, np.full((*scores.shape[:-1], max(n - scores.shape[-1], 0)), -1, np.int32)], -1)


def check(tensors, n=4, **options):
    """Scores, the selection from these, and the fused one."""
    scores = rapt.dsa.index_scores(**tensors, **options)
    wanted, bound = definition(**tensors, **options)
    assert scores.dtype == np.float32 and scores.flags.c_contiguous and scores.shape == wanted.shape
    assert np.array_equal(scores == -np.inf, wanted == -np.inf)
    seen = wanted != -np.inf
    assert (abs(scores[seen] - wanted[seen]) <= bound[seen]).all()
    apart, fused = rapt.dsa.select_topk(scores, n), rapt.dsa.index_topk(**tensors, n=n, **options)
    assert fused.dtype == np.int32 and fused.flags.c_contiguous and np.array_equal(fused, apart)
    assert np.array_equal(apart, selection(scores, n))
    return scores


@pytest.mark.parametrize("k_dtype", FLOATS + QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_types(dtype, k_dtype):
    check(draw(dtype=dtype, k_dtype=k_dtype), align="bottom_right")


@pytest.mark.parametrize("isa", rapt.info()["isas"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_instruction_sets(isa, dtype):
    tensors = draw(sq=20, sk=150, h=33, d=100, dtype=dtype)
    wanted, bound = definition(**tensors, align=40)
    seen = wanted != -np.inf
    assert (abs(rapt.dsa.index_scores(**tensors, align=40, isa=isa)[seen] - wanted[seen]) <= bound[seen]).all()


RNG = np.random.default_rng(5)
OPTIONS = {
    "full": {"causal": False},
    "top left": {"align": "top_left"},
    "offset": {"align": 3},
    "queries without keys": {"align": -4},
    "linear": {"align": 5, "relu": False},
    "scale": {"align": 5, "scale": -0.3},
    "no scale": {"align": 5, "scale": 0},
    "lengths": {"align": "bottom_right", "seqlens": np.int32([19, 8])},
    "short sequences": {"align": "bottom_right", "seqlens": np.int64([3, 0])},
    "lengths, full": {"causal": False, "seqlens": np.int64([1, 13])},
    "begins": {"align": 12, "key_begin": RNG.integers(-3, 25, (2, 7))},
    "ends": {"align": 12, "key_end": RNG.integers(-3, 25, (2, 7), np.int32)},
    "ranges": {"causal": False, "key_begin": RNG.integers(0, 12, (2, 7)), "key_end": RNG.integers(6, 20, (2, 7))},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_options(name, dtype):
    check(draw(dtype=dtype), **OPTIONS[name])
    check(draw(dtype=dtype), n=30, **OPTIONS[name])


@pytest.mark.parametrize("k_dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("page", [1, 4, 32])
def test_pages(page, k_dtype):
    """The same bits as keys one behind the other; entries past a length are not looked at."""
    tensors = draw(sk=64, dtype=ml_dtypes.bfloat16, k_dtype=k_dtype)
    lengths = np.int32([64, 33])
    wanted = check(tensors, seqlens=lengths, align="bottom_right")
    table = np.random.default_rng(1).permutation(2 * 64 // page + 3)[: 2 * 64 // page].reshape(2, -1)
    pages = {"k": np.zeros((2 * 64 // page + 3, page, 24), k_dtype), "k_scale": np.zeros((2 * 64 // page + 3, page), np.float32)}
    for name in pages:
        if name in tensors:
            pages[name][table] = tensors[name].reshape(2, -1, page, *tensors[name].shape[2:])
            tensors[name] = pages[name]
    table[1, -(-33 // page) :] = -77
    more = {"seqlens": lengths, "block_table": table, "align": "bottom_right"}
    assert np.array_equal(rapt.dsa.index_scores(**tensors, **more), wanted)
    assert np.array_equal(rapt.dsa.index_topk(**tensors, n=6, **more), rapt.dsa.select_topk(wanted, 6))


def test_many_keys():
    """Of which most are thrown away on the way, and which several threads share; the same bits for any number of them."""
    tensors = draw(b=1, sq=3, sk=30000, h=4, d=16)
    tensors["k"][0, 20000:] = tensors["k"][0, :10000]  # ties
    for n in (1, 50, 2048, 30000):
        scores = rapt.dsa.index_scores(**tensors, causal=False, threads=1)
        wanted = selection(scores, n)
        for threads in (1, 2, 5):
            more = {"causal": False, "threads": threads}
            assert np.array_equal(rapt.dsa.index_scores(**tensors, **more), scores)
            assert np.array_equal(rapt.dsa.index_topk(**tensors, n=n, **more), wanted)
            assert np.array_equal(rapt.dsa.select_topk(scores, n, threads=threads), wanted)


def test_bits_depend_on_query_and_key_alone():
    tensors = draw(b=3, sq=40, sk=90)
    whole = rapt.dsa.index_scores(**tensors, align=50)
    one = {"q": tensors["q"][1:2, 30:31], "k": tensors["k"][1:2, :85], "w": tensors["w"][1:2, 30:31]}
    assert np.array_equal(rapt.dsa.index_scores(**one, align=80)[0, 0, :81], whole[1, 30, :81])


def test_selection():
    inf, nan = np.inf, np.nan
    row = np.float32([1, -inf, 3, -0.0, 0, 3, nan, -2, -nan, inf, 1e-40, -1e-40])
    wanted = [6, 8, 9, 2, 5, 0, 10, 3, 4, 11, 7, -1, -1]
    for n in range(1, 14):
        assert rapt.dsa.select_topk(row, n).tolist() == wanted[:n]
    nothing = np.full((2, 0), 0, np.float32)
    assert rapt.dsa.select_topk(nothing, 3).tolist() == [[-1, -1, -1]] * 2
    assert rapt.dsa.select_topk(np.full(70, -inf, np.float32), 2).tolist() == [-1, -1]
    assert rapt.dsa.select_topk(np.full(70, nan, np.float32), 2).tolist() == [0, 1]
    assert rapt.dsa.select_topk(np.zeros((0, 70), np.float32), 2).shape == (0, 2)


@pytest.mark.parametrize("shape", [(500,), (4, 500), (2, 3, 500), (2, 3, 4, 500)])
@pytest.mark.parametrize("kind", ["normal", "few values", "rising", "falling", "with NaN"])
def test_selections(kind, shape):
    rng = np.random.default_rng(3)
    scores = rng.standard_normal(shape, np.float32)
    if kind == "few values":
        scores = scores.round()
    if kind in ("rising", "falling"):
        scores = np.sort(scores)[..., :: 1 if kind == "rising" else -1]
    if kind == "with NaN":
        scores[rng.random(shape) < 0.2] = np.nan
    scores = np.where(rng.random(shape) < 0.1, np.float32(-np.inf), scores)
    for n in (1, 17, 64, 499, 600):
        assert np.array_equal(rapt.dsa.select_topk(scores, n), selection(scores, n))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_hidden_keys_never_leak(dtype):
    tensors = draw(sk=70, dtype=dtype)
    options = {"align": "bottom_right", "seqlens": np.int32([70, 40]), "key_begin": np.full((2, 7), 9)}
    wanted = rapt.dsa.index_scores(**tensors, **options)
    for value in (np.nan, np.inf):
        tensors["k"][:, :9] = tensors["k"][1, 40:] = tensors["k"][0, 68:] = value
        got = rapt.dsa.index_scores(**tensors, **options)
        assert np.array_equal(got[1], wanted[1]) and np.array_equal(got[0, :5], wanted[0, :5])
        assert not np.isin(rapt.dsa.index_topk(**tensors, n=70, **options)[1], [*range(9), *range(40, 70)]).any()
    tensors["k"][0, 20] = tensors["q"][0, 2, 1] = np.nan  # are seen: NaN is the largest
    got, best = rapt.dsa.index_scores(**tensors, **options), rapt.dsa.index_topk(**tensors, n=1, **options)
    assert np.isnan(got[0, :, 20]).all() and np.isnan(got[0, 2, 9:66]).all() and (best[0, [0, 1, 3, 4]] == 20).all()


@pytest.mark.parametrize("isa", rapt.info()["isas"])
def test_empty_ranges_between_others(isa):
    """Wherever a query that sees no key has its range, the queries beside it keep their keys."""
    tensors = draw(b=1, sq=4, sk=150, h=40, d=32, dtype=ml_dtypes.bfloat16)
    whole = rapt.dsa.index_scores(**tensors, causal=False, isa=isa)
    for place in range(0, 151, 16):
        ranges = {"key_begin": np.int32([[0, place, 0, place]]), "key_end": np.int32([[150, place, 150, 0]])}
        out = np.full((1, 4, 150), np.nan, np.float32)
        rapt.dsa.index_scores(**tensors, **ranges, causal=False, isa=isa, threads=1, out=out)
        assert np.array_equal(out[:, ::2], whole[:, ::2]) and (out[:, 1::2] == -np.inf).all()
        best = rapt.dsa.index_topk(**tensors, **ranges, n=150, causal=False, isa=isa, threads=1)
        assert np.array_equal(best, selection(out, 150))


def test_out():
    tensors = draw()
    scores, best = np.zeros((2, 19, 7), np.float32).swapaxes(1, 2), np.zeros((2, 7, 8), np.int32)[..., ::2]
    assert rapt.dsa.index_scores(**tensors, align=12, out=scores) is scores
    assert rapt.dsa.index_topk(**tensors, n=4, align=12, out=best) is best
    assert np.array_equal(scores, rapt.dsa.index_scores(**tensors, align=12))
    assert np.array_equal(best, rapt.dsa.select_topk(scores, 4))
    assert rapt.dsa.select_topk(scores, 4, out=best) is best and np.array_equal(best, selection(scores, 4))


def test_strides_and_other_libraries():
    tensors = draw()
    wanted = rapt.dsa.index_scores(**tensors, align=12, threads=1)
    strided = {name: np.ascontiguousarray(x.swapaxes(1, -1)).swapaxes(1, -1) for name, x in tensors.items()}
    assert np.array_equal(rapt.dsa.index_scores(**strided, align=12, threads=2), wanted)
    same = np.broadcast_to(tensors["k"][:1], (2, 19, 24))
    copy = rapt.dsa.index_scores(**tensors | {"k": same.copy()}, align=12)
    assert np.array_equal(rapt.dsa.index_scores(**tensors | {"k": same}, align=12), copy)
    torches = {name: torch.from_numpy(x) for name, x in tensors.items()}
    scores, best = rapt.dsa.index_scores(**torches, align=12), rapt.dsa.index_topk(**torches, n=4, align=12)
    assert isinstance(scores, torch.Tensor) and isinstance(best, torch.Tensor) and best.dtype == torch.int32
    assert np.array_equal(scores, wanted) and torch.equal(rapt.dsa.select_topk(scores, 4), best)
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        rapt.dsa.index_scores(**torches | {"q": torches["q"].clone().requires_grad_()}, align=12)


def test_quantised_tensors_of_pytorch():
    tensors = draw(dtype=ml_dtypes.bfloat16, k_dtype=ml_dtypes.float8_e4m3fn)
    made = {
        "q": torch.from_numpy(tensors["q"].view(np.int16)).view(torch.bfloat16),
        "k": torch.from_numpy(tensors["k"].view(np.uint8)).view(torch.float8_e4m3fn),
        "w": torch.from_numpy(tensors["w"]),
        "k_scale": torch.from_numpy(tensors["k_scale"]),
    }
    assert np.array_equal(rapt.torch.index_scores(**made, align=12), rapt.dsa.index_scores(**tensors, align=12))


def test_empty():
    for sizes in ({"b": 0}, {"sq": 0}, {"sk": 0}):
        tensors = draw(**sizes)
        scores = rapt.dsa.index_scores(**tensors, causal=False)
        assert scores.shape == (*tensors["q"].shape[:2], tensors["k"].shape[1])
        assert (rapt.dsa.index_topk(**tensors, n=3, causal=False) == -1).all()


T = draw()
CODES = draw(k_dtype=np.int8)
PAGES = {"k": np.zeros((9, 4, 24), np.float32), "block_table": np.zeros((2, 5), np.int32), "seqlens": np.int32([19, 7])}
SCORES = np.zeros((2, 7, 19), np.float32)
REFUSED = {
    "q: got shape [2, 7, 120]; wanted [b, sq, h, d]": {"q": T["q"].reshape(2, 7, 120)},
    "k: got shape [2, 19, 23]; wanted": {"k": T["k"][..., 1:]},
    "k: got shape [2, 456]; wanted [b, sk, d]": {"k": T["k"].reshape(2, -1)},
    "w: got shape [2, 7, 4]; wanted": {"w": T["w"][..., 1:]},
    "w: got shape [2, 6, 5]; wanted": {"w": T["w"][:, 1:]},
    "align: got none, with 7 queries and 19 keys": {"align": None},
    "align: got 'left'; wanted None, \"top_left\", \"bottom_right\" or an int offset": {"align": "left"},
    "scale: got nan; wanted a finite number": {"scale": np.nan},
    "k_scale: got no tensor; wanted scales for i8": {"k": CODES["k"]},
    "k_scale: got scales for keys that are not quantised": {"k_scale": CODES["k_scale"]},
    "k_scale: got shape [2, 18]": {"k": CODES["k"], "k_scale": CODES["k_scale"][:, 1:]},
    "seqlens: got length 20 of sequence 1; wanted 0 to sk = 19": {"seqlens": np.int32([3, 20])},
    "seqlens: got no tensor; wanted [b] for pages": PAGES | {"seqlens": None},
    "block_table: got page 9 at [1, 1]": PAGES | {"block_table": np.int64([[0] * 5, [0, 9, 0, 0, 0]])},
    "block_table: got shape [10]; wanted [b, m]": PAGES | {"block_table": np.zeros(10, np.int32)},
    "key_begin: got shape [2, 6]": {"key_begin": np.zeros((2, 6), np.int32)},
    "key_end: got shape [7]": {"key_end": np.zeros(7, np.int32)},
    "threads: got 0": {"threads": 0},
}
REFUSED_TYPES = {
    "q: got dtype float64; wanted float32, bfloat16 or float16": {"q": T["q"].astype(np.float64)},
    "q: got builtins.NoneType without a shape": {"q": None},
    "k: got dtype int32; wanted float32, bfloat16, float16, int8": {"k": T["k"].astype(np.int32)},
    "w: got dtype float16; wanted float32": {"w": T["w"].astype(np.float16)},
    "align: got 1.5; wanted": {"align": 1.5},
    "relu: got 1; wanted True or False": {"relu": 1},
    "causal: got 'yes'; wanted True or False": {"causal": "yes"},
    "scale: got 'x'; wanted a number": {"scale": "x"},
    "seqlens: got dtype float32; wanted int32 or int64": {"seqlens": np.float32([1, 2])},
    "key_end: got dtype float32; wanted int32 or int64": {"key_end": np.zeros((2, 7), np.float32)},
}


@pytest.mark.parametrize("message", [*REFUSED, *REFUSED_TYPES])
def test_refusals(message):
    for function, more in ((rapt.dsa.index_scores, {}), (rapt.dsa.index_topk, {"n": 3})):
        with pytest.raises(TypeError if message in REFUSED_TYPES else ValueError) as raised:
            function(**T | more | {"align": "bottom_right"} | (REFUSED | REFUSED_TYPES)[message])
        # Where nothing asks how many keys there are before the library does, that names what k should be.
        assert str(raised.value).startswith(message.replace("; wanted [b, sk, d]", "") if "n" in more else message)


def test_refused_results():
    codes = SCORES.view(np.int32)
    scores, fused, apart = rapt.dsa.index_scores, rapt.dsa.index_topk, rapt.dsa.select_topk
    options = T | {"align": 12}
    for function, given, error, message in [
        (scores, options | {"out": SCORES[:, 1:]}, ValueError, "out: got shape [2, 6, 19]"),
        (scores, options | {"out": SCORES.astype(np.float16)}, TypeError, "out: got dtype float16; wanted float32"),
        (scores, options | {"out": SCORES, "w": SCORES[..., :5]}, ValueError, "out: got memory shared with w"),
        (fused, options | {"n": 0}, ValueError, "n: got 0; wanted 1 to 2**31 - 1"),
        (fused, options | {"n": 2**31}, ValueError, "n: got 2147483648; wanted 1 to 2**31 - 1"),
        (fused, options | {"n": 2.0}, TypeError, "n: got 2.0; wanted an int"),
        (fused, options | {"n": True}, TypeError, "n: got True; wanted an int"),
        (fused, options | {"n": 2, "out": codes[..., :3]}, ValueError, "out: got shape [2, 7, 3]; wanted [2, 7, 2]"),
        (fused, options | {"n": 3, "out": np.zeros((2, 7, 3), np.int64)}, TypeError, "out: got dtype i64; wanted i32"),
        (apart, {"scores": SCORES.astype(np.float64), "n": 2}, TypeError, "scores: got dtype float64; wanted float32"),
        (apart, {"scores": SCORES, "n": -1}, ValueError, "n: got -1; wanted"),
        (apart, {"scores": np.float32(3).reshape(()), "n": 1}, ValueError, "scores: got shape []; wanted one dimension or more"),
        (apart, {"scores": torch.tensor(3.0), "n": 1}, ValueError, "scores: got shape []; wanted one dimension or more"),
        (apart, {"scores": SCORES[..., None, None], "n": 1}, ValueError, "scores: got 5 dimensions; wanted 1 to 4"),
        (apart, {"scores": SCORES, "n": 2, "out": SCORES[..., :2]}, TypeError, "out: got dtype float32"),
        (apart, {"scores": SCORES, "n": 2, "out": codes[..., :2]}, ValueError, "out: got memory shared with scores"),
    ]:
        with pytest.raises(error) as raised:
            function(**given)
        assert str(raised.value).startswith(message)


def test_entries_and_problems():
    assert {"index_scores", "select_topk"} <= {entry["operation"] for entry in rapt.info()["entries"]}
    indexer = "index_scores dtype=bf16 b=1 sq=64 sk=8192 h=64 d=128 align=bottom_right topk=2048"
    for text in (indexer, "select_topk rows=64 sk=8192 n=2048"):
        made = rapt.explain_problem(text)
        assert made.entry.startswith(text.split()[0]) and made.problem == text


# rapt.torch.


def leaves(dtype=torch.float32, **sizes):
    tensors = {name: torch.from_numpy(x) for name, x in draw(**sizes).items()}
    return {name: (x.to(dtype) if name != "w" else x).requires_grad_() for name, x in tensors.items()}


def formula(q, k, w, relu=True, scale=None, k_scale=None, **hiding):
    """The scores in double, from PyTorch's plain operators."""
    products = torch.einsum("bihd,bjd->bihj", q.double(), k.double())
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * torch.einsum("bih,bihj->bij", w.double(), products.relu() if relu else products)
    if k_scale is not None:
        scores = scores * k_scale.double()[:, None]
    hiding = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in hiding.items()}
    seen = torch.from_numpy(visible(q.shape[0], q.shape[1], k.shape[1], **hiding))
    return scores.masked_fill(~seen, -torch.inf)


def gradients(function, tensors, wanted="qkw", **options):
    """Of a loss like the one that trains an indexer, of the scores' softmax."""
    copies = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in tensors.items()}
    scores = function(**copies, **options)
    torch.manual_seed(3)
    weights = torch.randn(scores.shape).double()
    rows = (scores.detach() != -torch.inf).any(-1)
    loss = (scores.double().log_softmax(-1)[rows].exp() * weights[rows]).sum()
    grads = torch.autograd.grad(loss, [copies[name] for name in wanted], allow_unused=True)
    return dict(zip(wanted, grads))


def check_gradients(tensors, unit=2e-6, wanted="qkw", **options):
    got, right = gradients(rapt.torch.index_scores, tensors, wanted, **options), gradients(formula, tensors, wanted, **options)
    for name in wanted:
        assert got[name].dtype == tensors[name].dtype and got[name].is_contiguous()
        error = (got[name].double() - right[name].double()).norm() / right[name].double().norm()
        assert error < unit, (name, error)


@pytest.mark.parametrize("dtype, unit", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("chunk", [1, 300, 1 << 21])
def test_gradients(dtype, unit, chunk, monkeypatch):
    monkeypatch.setattr(_dsa_torch, "_CHUNK", chunk)
    check_gradients(leaves(dtype), unit, align="bottom_right")


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "no scale"])
@pytest.mark.parametrize("chunk", [300, 1 << 21])
def test_gradients_of_options(name, chunk, monkeypatch):
    monkeypatch.setattr(_dsa_torch, "_CHUNK", chunk)
    options = {key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in OPTIONS[name].items()}
    check_gradients(leaves(), 1e-5, **options)


def test_gradients_over_quantised_keys():
    tensors = {name: torch.from_numpy(x) for name, x in CODES.items()}
    check_gradients(tensors, wanted="qw", align=12)


def test_some_gradients_only():
    tensors = leaves()
    every = gradients(rapt.torch.index_scores, tensors, align=12)
    for name in "qkw":
        assert torch.equal(gradients(rapt.torch.index_scores, tensors, name, align=12)[name], every[name])
    scores = rapt.torch.index_scores(**tensors, align=12)
    (dq,) = torch.autograd.grad(scores[:, :, 0].square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        dq.sum().backward()


def test_gradients_of_hidden_keys():
    """Nothing comes from them, whatever the gradient of their scores, and whatever they hold."""
    tensors = leaves(sk=70)
    options = {"align": "bottom_right", "seqlens": torch.tensor([70, 40]), "key_begin": torch.full((2, 7), 9)}

    def grads():
        scores = rapt.torch.index_scores(**tensors, **options)
        seen = scores.detach() != -torch.inf
        return torch.autograd.grad(scores, list(tensors.values()), torch.where(seen, scores.detach(), torch.nan))

    wanted = grads()
    assert all(torch.isfinite(x).all() for x in wanted)
    assert not wanted[1][:, :9].any() and not wanted[1][1, 40:].any()
    with torch.no_grad():
        tensors["k"][:, :9] = tensors["k"][1, 40:] = torch.nan
        tensors["k"][0, 68] = torch.inf  # is seen by the last two queries of the first sequence
    got = grads()
    torch.testing.assert_close(got[0][1], wanted[0][1])
    torch.testing.assert_close(got[0][0, :5], wanted[0][0, :5])
    torch.testing.assert_close(got[1][1], wanted[1][1])
    assert not torch.isfinite(got[0][0, 5:]).all() and not got[1][:, :9].any()


def test_selections_have_no_gradient():
    tensors = leaves()
    scores = rapt.torch.index_scores(**tensors, align=12)
    apart, fused = rapt.torch.select_topk(scores, 4), rapt.torch.index_topk(**tensors, n=4, align=12)
    assert apart.dtype == torch.int32 and not apart.requires_grad and not fused.requires_grad and torch.equal(apart, fused)
    values = scores.gather(-1, apart.long().clamp(min=0))  # which have one
    assert torch.autograd.grad(values.sum(), tensors["w"])[0].any()


def test_operators():
    tensors = leaves()
    given = [*tensors.values(), None, torch.tensor([19, 8]), None, torch.full((2, 7), 1), None]
    options = _dsa_torch.Options("bottom_right", 0, True, True, 0.3)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    ops = torch.ops.rapt
    hidden = rapt.torch.index_scores(**tensors, align="bottom_right").detach()
    torch.library.opcheck(ops.index_scores.default, (*given, *options[:3], False, 0.3), test_utils=tests)
    given = [x if x is None else x.detach() for x in given]
    torch.library.opcheck(ops.index_topk.default, (*given, *options, 5), test_utils=tests)
    torch.library.opcheck(ops.select_topk.default, (hidden, 5), test_utils=tests)
    backward = (hidden.masked_fill(hidden == -torch.inf, 0), *given, *options, [True, False, True])
    torch.library.opcheck(ops.index_scores_backward.default, backward, test_utils=tests[:2])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    tensors = leaves()

    def step(q, k, v, n, align):
        scores = rapt.torch.index_scores(q * 2, k, v, align=align)
        best = rapt.torch.index_topk(q * 2, k, v, n, align=align)
        same = rapt.torch.select_topk(scores, n)
        return scores.gather(-1, best.long().clamp(min=0)).sum(), best, same

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    calls = (4, "bottom_right"), (4, 12), (6, 14)
    for n, align in calls if backend == "aot_eager" else calls[:1]:  # inductor compiles C++ for each, which takes seconds
        results = [function(*tensors.values(), n, align) for function in (step, compiled)]
        for got, wanted in zip(*results):
            torch.testing.assert_close(got, wanted)
        assert torch.equal(results[1][1], results[1][2])
        (got, wanted) = (torch.autograd.grad(loss, list(tensors.values())) for loss, *_ in results)
        torch.testing.assert_close(got, wanted)


def test_compiled_for_any_size():
    compiled = torch.compile(rapt.torch.index_topk, backend="aot_eager", fullgraph=True, dynamic=True)
    for sq, sk, n in ((7, 19, 4), (1, 300, 16), (9, 33, 5)):
        tensors = leaves(sq=sq, sk=sk) | {"n": n, "align": "bottom_right"}
        assert torch.equal(compiled(**tensors), rapt.torch.index_topk(**tensors))
    pages = {name: torch.from_numpy(x) for name, x in (draw() | PAGES).items()}
    compiled = torch.compile(rapt.torch.index_scores, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**pages, align="bottom_right"), rapt.torch.index_scores(**pages, align="bottom_right"))


def test_refusals_of_tensors():
    tensors = {name: x.detach() for name, x in leaves().items()}
    training = tensors | {"q": tensors["q"].clone().requires_grad_()}
    with pytest.raises(ValueError, match="k: got a tensor on meta; wanted one on the cpu: gradients of the indexer have no GPU"):
        rapt.torch.index_scores(**training | {"k": tensors["k"].to("meta")}, align=12)
    with pytest.raises(TypeError, match="w: got numpy.ndarray; wanted a tensor, or rapt.dsa.index_topk"):
        rapt.torch.index_topk(**tensors | {"w": tensors["w"].numpy()}, n=2, align=12)
    with pytest.raises(TypeError, match="scores: got numpy.ndarray; wanted a tensor, or rapt.dsa.select_topk"):
        rapt.torch.select_topk(SCORES, 2)
    with pytest.raises(ValueError, match="out: got a tensor with gradients or under torch.compile; wanted None"):
        rapt.torch.index_scores(**training, align=12, out=torch.zeros(2, 7, 19))
    with pytest.raises(ValueError, match="threads: got 1 with gradients or under torch.compile; wanted None"):
        rapt.torch.index_scores(**training, align=12, threads=1)
    with pytest.raises(ValueError, match="block_table: got pages with inputs that require grad"):
        rapt.torch.index_scores(**training | {name: torch.from_numpy(x) for name, x in PAGES.items()}, align=12)
    codes = {name: torch.from_numpy(x) for name, x in CODES.items()}
    with pytest.raises(ValueError, match="k_scale: got a tensor that requires grad"):
        rapt.torch.index_scores(**codes | {"k_scale": codes["k_scale"].clone().requires_grad_()}, align=12)
    with pytest.raises(ValueError, match="k: got a tensor of torch.float8_e5m2 that requires grad"):
        rapt.torch.index_scores(**tensors | {"k": tensors["k"].to(torch.float8_e5m2).requires_grad_()}, align=12)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="q: got a tensor of forward mode"):
        rapt.torch.index_scores(**tensors | {"q": forward_ad.make_dual(tensors["q"], tensors["q"])}, align=12)
    for grad in (tensors, training):
        for options in (
            *({"scale": "x"}, {"scale": "1"}, {"scale": True}, {"relu": 1}),
            *({"align": "left"}, {"align": 1.5}, {"align": True}, {"align": None}),
        ):
            with pytest.raises((TypeError, ValueError)) as wanted:
                rapt.dsa.index_scores(**T | {"align": 12} | options)
            with pytest.raises(type(wanted.value)) as raised:
                rapt.torch.index_scores(**grad | {"align": 12} | options)
            assert str(raised.value) == str(wanted.value)
        options = {"align": np.int64(12), "scale": np.float32(0.25), "relu": np.bool_(True), "causal": np.bool_(False)}
        assert np.array_equal(rapt.torch.index_scores(**grad, **options).detach(), rapt.dsa.index_scores(**T, **options))
    for n in (0, 2.5):
        with pytest.raises((TypeError, ValueError), match="n: got"):
            rapt.torch.index_topk(**training, n=n, align=12)
