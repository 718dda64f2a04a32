"""Paged, ring and quantised caches, append_kv and merge_states, against float64."""

import inspect

import ml_dtypes
import numpy as np
import pytest
import rapt
import reference
import torch
from rapt import _core
from rapt._cache import cache_arguments
from reference import assert_close, inputs


class Cache:
    """Room for `room` keys of each of b sequences, in the layout and type of `kind` and `dtype`."""

    def __init__(self, kind, dtype, b, hk, room, d, dv, page_size=4, zeros=False, tail=0):
        self.kind, self.length = kind, np.zeros(b, np.int64)
        lead = (b, hk, room)
        self.options = {"ring": kind == "ring"}
        if kind == "paged":
            n = -(-room // page_size)
            self.options["block_table"] = np.random.default_rng(0).permutation(b * n).astype(np.int32).reshape(b, n)
            lead = (b * n, hk, page_size)
        sizes = (d - tail, dv)
        if tail:
            self.options["k_tail"] = np.zeros((*lead, tail), ml_dtypes.bfloat16)
        if dtype == "i4x2":
            self.options["kv_dtype"], dtype, sizes = dtype, np.uint8, ((d - tail) // 2, dv // 2)
        self.k, self.v = (np.zeros((*lead, size), dtype) for size in sizes)
        if np.dtype(dtype) in (np.int8, np.uint8):
            names = ["k_scale", "v_scale", *(["k_zero", "v_zero"] if zeros else [])]
            self.options |= {name: np.zeros((*lead, 2), np.float32) for name in names}

    def append(self, k, v):
        rapt.append_kv(k, v, self.k, self.v, self.length, **self.options)
        self.length += k.shape[2]

    def attention(self, q, **options):
        return rapt.attention(q, self.k, self.v, cache_seqlens=self.length, **self.options, **options)


@pytest.mark.parametrize("kind", ["strided", "paged", "ring"])
@pytest.mark.parametrize(
    "dtype, bound",
    [
        (np.float32, 1e-5),
        (ml_dtypes.bfloat16, 2e-2),
        (np.float16, 2e-3),
        (np.int8, 3e-2),
        (ml_dtypes.float8_e4m3fn, 0.15),
        (ml_dtypes.float8_e5m2, 0.3),
        ("i4x2", 0.5),
    ],
)
def test_generation(kind, dtype, bound):
    b, hq, hk, d, dv, prompt, steps = 2, 4, 2, 24, 16, 6, 5
    rows = prompt + steps
    q, k, v = inputs(b, hq, hk, rows, rows, d, dv)
    cache = Cache(kind, dtype, b, hk, rows, d, dv)
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, rows))]:
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
        out = cache.attention(q[:, :, begin:end], causal=True, align="bottom_right")
        wanted, _ = reference.attention(
            q[:, :, begin:end], k[:, :, :end], v[:, :, :end], causal=True, offset=begin
        )
        assert np.abs(out - wanted).max() < bound


def test_a_ring_keeps_the_last():
    q, k, v = inputs(1, 2, 2, 1, 11, 16)
    cache = Cache("ring", np.float32, 1, 2, 4, 16, 16)
    for i in range(11):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert_close(cache.attention(q), reference.attention(q, k[:, :, 7:], v[:, :, 7:])[0])
    q = inputs(1, 2, 2, 3, 1, 16)[0]
    with pytest.raises(ValueError, match=r"^k: got a ring of 4 rows, where key 5 .* overwritten; wanted one query row"):
        cache.attention(q, causal=True, align="bottom_right")
    out = cache.attention(q, causal=True, align="bottom_right", window=(1, -1))
    assert_close(out, reference.attention(q, k, v, causal=True, offset=8, window=(1, -1))[0])


def test_zeros_halve_the_error_of_numbers_of_one_sign():
    q, k, v = inputs(1, 2, 2, 3, 32, 16)
    k, v = np.abs(k), np.abs(v) + 3
    wanted, _ = reference.attention(q, k, v)
    errors = []
    for zeros in (False, True):
        cache = Cache("strided", np.int8, 1, 2, 32, 16, 16, zeros=zeros)
        cache.append(k, v)
        errors.append(np.abs(cache.attention(q) - wanted).max())
    assert errors[1] < errors[0] < 0.03


def test_given_scales_may_be_read_only():
    q, k, v = inputs(1, 2, 2, 3, 8, 16)
    cache = Cache("strided", np.int8, 1, 2, 8, 16, 16)
    for name in ("k_scale", "v_scale"):
        cache.options[name] = np.broadcast_to(np.float32(4 / 127), (1, 2, 1, 1))
    cache.append(k.clip(-4, 4), v.clip(-4, 4))
    assert np.abs(cache.attention(q) - reference.attention(q, k, v)[0]).max() < 0.05


def test_different_numbers_of_new_rows():
    cache = Cache("paged", np.float32, 3, 2, 12, 16, 16)
    _, k, v = inputs(1, 2, 2, 1, 9, 16)
    q = inputs(3, 2, 2, 1, 1, 16)[0]
    rows = [t[0].transpose(1, 0, 2) for t in (k, v)]  # [total, hk, d]
    borders = np.array([0, 2, 2, 9], np.int32)
    rapt.append_kv(*rows, cache.k, cache.v, cache.length, cu_seqlens=borders, **cache.options)
    cache.length += np.diff(borders)
    out = cache.attention(q)
    for i in range(3):
        part = slice(*borders[i : i + 2])
        assert_close(out[i : i + 1], reference.attention(q[i : i + 1], k[:, :, part], v[:, :, part])[0])


FLOAT8 = {torch.float8_e4m3fn: ("f8e4m3", 0.15), torch.float8_e5m2: ("f8e5m2", 0.3)}


@pytest.mark.parametrize("dtype", FLOAT8)
def test_tensors_of_8_bits(dtype):
    name, bound = FLOAT8[dtype]
    q, k, v = (torch.from_numpy(t) for t in inputs(2, 4, 2, 3, 9, 16))
    small = [t.to(dtype) for t in (k, v)]
    out = rapt.attention(q, *small)
    assert_close(out, reference.attention(*(t.double().numpy() for t in (q, *small)))[0])
    assert (rapt.attention(q, *(t.view(torch.uint8) for t in small), kv_dtype=name) == out).all()
    room = [torch.zeros_like(t) for t in small]
    assert rapt.append_kv(k, v, *room, torch.zeros(2, dtype=torch.int32)) is None
    assert all((a.view(torch.uint8) == b.view(torch.uint8)).all() for a, b in zip(room, small))
    assert (out - rapt.attention(q, k, v)).abs().max() < bound


def test_packed_integers_count_as_the_contract_says():
    rng = np.random.default_rng(0)
    codes = [rng.integers(-8, 8, (2, 2, 9, 16)) for _ in range(2)]
    packed = [((c[..., 1::2] & 15) << 4 | c[..., ::2] & 15).astype(np.uint8) for c in codes]
    scales = [rng.random((2, 2, 9, 4), np.float32) for _ in range(2)]
    zeros = rng.integers(-3, 3, (2, 2, 9, 4)).astype(np.float32)
    numbers = [c * np.repeat(s, 4, -1) for c, s in zip((codes[0] - np.repeat(zeros, 4, -1), codes[1]), scales)]
    q = inputs(2, 4, 2, 3, 9, 16)[0]
    options = {"k_scale": scales[0], "v_scale": scales[1], "k_zero": zeros, "kv_dtype": "i4x2"}
    out, lse = rapt.attention(q, *packed, return_lse=True, **options)
    wanted, wanted_lse = reference.attention(q, *numbers)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)
    assert "i4x2" in rapt.explain(q, *packed, **options).problem


def test_what_append_kv_refuses():
    k = np.ones((1, 2, 3, 16), np.float32)
    room = [np.zeros((1, 2, 4, 16), np.float32) for _ in range(2)]
    frozen = room[0].copy()
    frozen.flags.writeable = False
    grad = torch.zeros(1, 2, 4, 16, requires_grad=True)
    length, pages = np.array([0]), {"block_table": np.array([[0, 7]])}
    for error, message, arguments, options in [
        (ValueError, "cache_seqlens: got 2 keys and 3 new ones; wanted at most 4", (k, k, *room, np.array([2])), {}),
        (ValueError, "k: got a read-only array", (k, k, frozen, room[1], length), {}),
        (ValueError, "v: got a tensor that requires grad", (k, k, room[0], grad, length), {}),
        (ValueError, "block_table: got page 7 for key 4 of sequence 0; wanted 0 to 0", (k, k, *room, np.array([2])), pages),
        (TypeError, "k_new: got dtype float64", (k.astype(float), k, *room, length), {}),
        (TypeError, "v: got dtype f16; wanted k's, f32", (k, k, room[0], room[1].astype(np.float16), length), {}),
        (ValueError, "k: got no tensor; wanted", (k, k, None, room[1], length), {}),
    ]:
        with pytest.raises(error, match=message):
            rapt.append_kv(*arguments, **options)
    assert not any(t.any() for t in room)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_merged_parts(kind):
    q, k, v = (kind(t) for t in inputs(2, 4, 2, 5, 20, 16))
    parts = [rapt.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 7), (7, 7), (7, 20))]
    outs, lses = zip(*parts)
    out, lse = rapt.merge_states(outs, lses, return_lse=True)
    wanted, wanted_lse = reference.attention(q, k, v)
    assert type(out) is type(lse) is type(q)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)
    again = outs[0] * 0
    assert rapt.merge_states(outs, lses, out=again) is again and (again == out).all()


def test_what_merge_states_refuses():
    out, lse = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)
    for message, arguments in [
        ("outs: got no arrays", ([], [])),
        ("lses: got 1 tensors", ([out, out], [lse])),
        (r"lses\[0\]: got shape \[3\]", ([out], [np.zeros(3, np.float32)])),
        (r"outs\[1\]: got dtype", ([out, out.astype(float)], [lse, lse])),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            rapt.merge_states(*arguments)


def saved_by_autograd(tensor):
    """The tensor, and a result whose backward needs what it holds now."""
    return tensor, (tensor * torch.ones_like(tensor, requires_grad=True)).sum()


@pytest.mark.parametrize("kind", ["strided", "paged", "ring"])
@pytest.mark.parametrize("dtype, bound", [(np.int8, 3e-2), (ml_dtypes.float8_e4m3fn, 0.15), ("i4x2", 0.5)])
def test_keys_whose_last_columns_are_not_quantised(kind, dtype, bound):
    b, hq, hk, d, dv, prompt, rows, tail = 2, 4, 2, 32, 16, 6, 9, 12
    q, k, v = inputs(b, hq, hk, rows, rows, d, dv)
    k[..., -tail:] = k[..., -tail:].astype(ml_dtypes.bfloat16)
    cache = Cache(kind, dtype, b, hk, rows, d, dv, tail=tail)
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, rows))]:
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
    if kind != "paged":
        assert (cache.options["k_tail"][:, :, :rows].astype(np.float32) == k[..., -tail:]).all()
    out = cache.attention(q[:, :, -3:], causal=True, align="bottom_right")
    wanted, _ = reference.attention(q[:, :, -3:], k, v, causal=True, offset=rows - 3)
    assert_close(out, wanted, bound)
    only_tail = q[:, :, -3:].copy()
    only_tail[..., :-tail] = 0  # scores of what is not quantised are exact
    _, lse = cache.attention(only_tail, causal=True, align="bottom_right", return_lse=True)
    assert_close(lse, reference.attention(only_tail, k, v, causal=True, offset=rows - 3)[1], 1e-5)
    with pytest.raises(ValueError, match="k: got shape"):
        rapt.attention(q[:, :, -3:], cache.k, cache.v, **{**cache.options, "k_tail": None}, cache_seqlens=cache.length)
    with pytest.raises(ValueError, match="k_tail: got columns beside keys of f32"):
        rapt.attention(q, k[..., tail:], v, k_tail=k[..., -tail:])


@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale", "k_tail"])
def test_append_marks_tensors_as_written(name):
    row = torch.full((1, 1, 1, 2), 5.0)
    int8 = name.endswith(("_scale", "_tail"))
    cache = {x: torch.ones(1, 1, 2, 2, dtype=torch.int8 if int8 else torch.float32) for x in ("k", "v")}
    if int8:
        cache |= {x: torch.ones(1, 1, 2, 1) for x in ("k_scale", "v_scale")}
    k_new = row
    if name == "k_tail":
        cache["k_tail"], k_new = torch.ones(1, 1, 2, 3), torch.full((1, 1, 1, 5), 5.0)
    _, loss = saved_by_autograd(cache[name])
    rapt.append_kv(k_new, row, cache_seqlens=torch.zeros(1, dtype=torch.int64), **cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_append_leaves_what_it_only_reads_unmarked():
    row, scale = torch.full((1, 1, 1, 2), 5.0), torch.ones(1, 1, 1, 1)
    _, loss = saved_by_autograd(scale)
    k, v = (torch.zeros(1, 1, 2, 2, dtype=torch.int8) for _ in range(2))
    rapt.append_kv(row, row, k, v, torch.zeros(1, dtype=torch.int64), k_scale=scale, v_scale=scale)
    loss.backward()
    with torch.inference_mode():  # whose tensors have no version
        cache = torch.zeros(1, 1, 2, 2)
        rapt.append_kv(row, row, cache, torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64))
    assert (cache[0, 0, 0] == 5).all()


def test_out_is_marked_as_written():
    x = torch.randn(1, 1, 3, 2)
    part, lse = rapt.attention(x, x, x, return_lse=True)
    for write in (
        lambda out: rapt.attention(x, x, x, out=out),
        lambda out: rapt.merge_states([part, part], [lse, lse], out=out),
    ):
        out, loss = saved_by_autograd(torch.zeros(1, 1, 3, 2))
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    out, loss = saved_by_autograd(torch.zeros(1, 1, 3, 2))
    rapt.explain(x, x, x, out=out)
    loss.backward()


def test_refusals_name_pythons_arguments():
    rows = np.zeros((1, 1, 1, 4), np.float32)
    k, length = np.zeros((1, 1, 8, 4), np.float32), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="^v: got memory shared with k; wanted"):
        rapt.append_kv(rows, rows, k[:, :, 1:], k[:, :, :-1], length)
    with pytest.raises(ValueError, match="^v_new: got rows of its own .* wanted columns 0 to 3 of k_new"):
        rapt.append_kv(rows, rows.copy(), k, k, length)
    with pytest.raises(TypeError, match="^cache_seqlens: got dtype float32; wanted int32 or int64$"):
        rapt.append_kv(rows, rows, k, k.copy(), length.astype(np.float32))
    with pytest.raises(TypeError, match="^cu_seqlens: got dtype uint16; wanted int32 or int64$"):
        rapt.append_kv(rows[0], rows[0], k, k.copy(), length, cu_seqlens=np.zeros(2, np.uint16))
    lse = np.zeros((1, 1, 1), np.float32)
    with pytest.raises(ValueError, match=r"^lses\[1\]: got shape \[1, 1, 2\]; wanted .* \[1, 1, 1\]$"):
        rapt.merge_states([rows, rows], [lse, lse.repeat(2, 2)])
    with pytest.raises(TypeError, match=r"^lses\[1\]: got dtype float64; wanted float32$"):
        rapt.merge_states([rows, rows], [lse, lse.astype(np.float64)])


@pytest.mark.parametrize("function", [rapt.attention, rapt.append_kv, rapt.rotary_append_kv])
def test_all_that_the_extension_knows_of_caches_has_a_name_in_python(function, monkeypatch):
    """A new layout's arguments, too: callers that do not know them pass the defaults."""
    calls, parameters = [], inspect.signature(function).parameters
    monkeypatch.setattr(_core, function.__name__, lambda *arguments: calls.append(arguments))
    names = _core.cache_arguments()
    assert cache_arguments() == tuple(parameters[name].default for name in names)
    given = {name: object() for name in names}
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    function(**dict.fromkeys(needed) | {"k": "rows"} | given)
    (got,) = calls
    first = got.index(given[names[0]])
    assert got[first : first + len(names)] == cache_arguments(**given) == tuple(given.values())


@pytest.mark.parametrize("name", ["attention", "append_kv", "rotary_append_kv"])
def test_a_call_without_an_argument_is_no_refusal(name):
    """Models catch refusals and take a slower way; this they must not catch."""
    with pytest.raises(RuntimeError, match=r"^got 2 arguments; wanted \d+$"):
        getattr(_core, name)(None, None)
