"""FlashMLA's functions on CPU tensors: its conventions, shapes and tolerances, against float64."""

import pytest
import rapt.mla
import torch
from torch._subclasses import FakeTensorMode
from rapt.mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

DECODE = {"absolute": 8e-4, "relative": 2.01 / 128, "cosine": 5e-6}
SPARSE_DECODE = DECODE | {"absolute": 1e-3}
SPARSE = {"absolute": 8e-4, "relative": 3.01 / 128, "cosine": 7e-6}
# rapt's lse of bfloat16 is within 2 eps where AMX sums weights that are bfloat16 (docs/contract.md). Of float32 it keeps FlashMLA's bounds.
LSE = {torch.float32: {"absolute": 1e-6, "relative": 8.01 / 65536}, torch.bfloat16: {"absolute": 2**-7, "relative": 8.01 / 65536}}
SPARSE_LSE = {torch.float32: {"absolute": 1e-6, "relative": 2.01 / 65536}, torch.bfloat16: {"absolute": 2**-7, "relative": 2.01 / 65536}}
LARGEST = SPARSE_LSE[torch.float32]
BOTH = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))

pytestmark = pytest.mark.usefixtures("seeded")


def assert_near(got, wanted, *, absolute, relative, cosine=None):
    """FlashMLA's own measure: each element by either bound, NaN and infinities in the same places, and the angle."""
    got, wanted = got.double(), wanted.double()
    assert got.shape == wanted.shape and not got.isnan().any()
    finite = wanted.isfinite()
    assert torch.equal(got[~finite], wanted[~finite]) and got[finite].isfinite().all()
    got, wanted = got[finite], wanted[finite]
    off = (got - wanted).abs()
    assert ((off <= absolute) | (off <= relative * wanted.abs())).all(), f"off by {off.max()}"
    if cosine is not None and got.norm() > 0:
        assert 1 - 2 * (got @ wanted) / (got @ got + wanted @ wanted) <= cosine


def numbers(*shape):
    return (torch.randn(shape) / 10).clamp(-1, 1).bfloat16()


def rows_of(q, keys, scale, dv, hidden=None):
    """out [sq, hq, dv], largest scores and lse [sq, hq], of q [sq, hq, d] and keys [sq, any, d] or [any, d], in double."""
    x = q.double() @ keys.double().mT * scale
    if hidden is not None:
        x = x.masked_fill(hidden[:, None], -torch.inf)
    lse = x.logsumexp(-1)
    values = keys[..., :dv].double()
    out = torch.exp(x - lse[..., None]).nan_to_num() @ (values if hidden is None else values.masked_fill(hidden[..., None], 0))
    return out, x.amax(-1), lse.masked_fill(lse == -torch.inf, torch.inf)


def with_sinks(out, lse, sinks):
    """Of rows without keys, 0 stays 0."""
    return out * torch.sigmoid(lse - sinks).nan_to_num()[..., None]


def fp8_rows(rows):
    """Rows of 656 bytes, as FlashMLA quantises [.., 576], and what they mean, in double."""
    x = rows[..., :512].float().unflatten(-1, (4, 128))
    scale = x.abs().amax(-1) / 448
    codes, rope = (x / scale[..., None]).to(torch.float8_e4m3fn), rows[..., 512:].bfloat16()
    meant = torch.cat(((codes.double() * scale.double()[..., None]).flatten(-2), rope.double()), -1)
    return torch.cat([part.view(torch.uint8) for part in (codes.flatten(-2), scale, rope)], -1), meant


def paged(lengths, hk, d, page_size=64, spare=3):
    """A cache and its table, shuffled; NaN and numbers of no page where no key is. And the keys of each sequence."""
    used = [-(-length // page_size) for length in lengths]
    table = torch.randint(-(2**31), 2**31 - 1, (len(lengths), max(used) + 1), dtype=torch.int32)
    order = torch.randperm(sum(used) + spare, dtype=torch.int32)
    cache = torch.full((len(order), page_size, hk, d), torch.nan, dtype=torch.bfloat16)
    keys = [numbers(length, hk, d) for length in lengths]
    for i, pages in enumerate(order[: sum(used)].split(used)):
        table[i, : used[i]] = pages
        for j, page in enumerate(pages.tolist()):
            some = keys[i][j * page_size : (j + 1) * page_size]
            cache[page, : len(some)] = some
    return cache, table, keys


@pytest.mark.parametrize(
    "b, sq, sk, hq, hk, causal",
    [
        (1, 1, 20, 1, 1, False),
        (2, 2, 140, 3, 1, True),
        (6, 4, 140, 64, 1, True),
        (2, 4, 20, 63, 3, True),
        (2, 2, 140, 128, 8, False),
        (2, 1, 4096, 9, 1, True),
        (1, 2, 4096, 128, 1, True),
    ],
)
@pytest.mark.parametrize("varying", (False, True))
@BOTH
def test_dense_decoding(b, sq, sk, hq, hk, causal, varying, dtype):
    lengths = [max(int(n), sq) for n in torch.normal(sk, sk / 2, (b,))] if varying else [sk] * b
    if varying and b > 1:
        lengths[1] = 0
    cache, table, keys = paged(lengths, hk, 576)
    q, cache = numbers(b, sq, hq, 576).to(dtype), cache.to(dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    metadata, splits = get_mla_metadata(seqlens, sq * hq // hk, hk)
    scale = 192**-0.5
    out, lse = flash_mla_with_kvcache(q, cache, table, seqlens, 512, metadata, splits, softmax_scale=scale, causal=causal)
    assert out.shape == (b, sq, hq, 512) and out.dtype is dtype and lse.dtype is torch.float32 and lse.shape == (b, hq, sq)
    for i, length in enumerate(lengths):
        if length == 0:
            assert not out[i].any() and lse[i].eq(torch.inf).all()
            continue
        hidden = torch.arange(length) > torch.arange(length - sq, length)[:, None] if causal else None
        for head in range(hk):
            group = slice(head * (hq // hk), (head + 1) * (hq // hk))
            keys_of_rows = keys[i][:, head].expand(sq, -1, -1)
            wanted, _, wanted_lse = rows_of(q[i, :, group], keys_of_rows, scale, 512, hidden)
            assert_near(out[i, :, group], wanted, **DECODE)
            assert_near(lse[i, group], wanted_lse.T, **LSE[dtype])


def test_rows_before_all_keys():
    """More queries than keys: bottom-right leaves the first without any."""
    cache, table, keys = paged([2], 1, 576)
    q = numbers(1, 5, 4, 576)
    out, lse = flash_mla_with_kvcache(q, cache, table, torch.tensor([2], dtype=torch.int32), 512, get_mla_metadata()[0], causal=True)
    assert not out[0, :3].any() and lse[0, :, :3].eq(torch.inf).all() and lse[0, :, 3:].isfinite().all()
    wanted, _, _ = rows_of(q[0, 3:], keys[0][:, 0].expand(2, -1, -1), 1 / 24, 512, torch.tensor([[False, True], [False, False]]))
    assert_near(out[0, 3:], wanted, **DECODE)  # of softmax_scale's default


def lists(sq, topk, keys, empty=()):
    """Positions of keys, all different, with entries that are none: -1, far below, at the end, far past it."""
    found = torch.rand(sq, max(keys, topk)).argsort(-1)[:, :topk].int()
    none = (found >= keys) | (torch.rand(sq, topk) < 0.1)
    found = torch.where(none, torch.tensor([-1, -(2**31), keys, 2**31 - 1], dtype=torch.int32)[torch.randint(4, none.shape)], found)
    for row in empty:
        found[row] = -1
    return found


@pytest.mark.parametrize("d", (512, 576))
@pytest.mark.parametrize("sinks, shorter", [(False, False), (True, True)])
@pytest.mark.parametrize(
    "sq, hq, sk, topk", [(1, 64, 128, 128), (62, 64, 592, 128), (9, 128, 153, 256), (21, 64, 114, 384), (5, 3, 1840, 256), (3, 8, 32, 2048)]
)
@BOTH
def test_sparse_prefill(sq, hq, sk, topk, d, sinks, shorter, dtype):
    q, kv = numbers(sq, hq, d).to(dtype), numbers(sk, 1, d).to(dtype)
    indices = lists(sq, topk, sk, empty=[0] if sq > 1 else [])
    length = torch.randint(0, topk + 1, (sq,), dtype=torch.int32) if shorter else None
    sink = torch.randn(hq) * 4 if sinks else None
    if sinks:
        sink[0], sink[1] = torch.inf, -torch.inf
    none = (indices < 0) | (indices >= sk)
    if shorter:
        none |= torch.arange(topk) >= length[:, None]
    unread = torch.ones(sk, dtype=torch.bool)
    unread[indices[~none].long()] = False
    clean = kv.clone()
    kv[unread] = torch.nan
    out, largest, lse = flash_mla_sparse_fwd(q, kv, indices[:, None], 0.7, 512, sink, length)
    wanted, wanted_largest, wanted_lse = rows_of(q, clean[indices.masked_fill(none, 0).long(), 0], 0.7, 512, none)
    if sinks:
        wanted = with_sinks(wanted, wanted_lse, sink)
    assert out.dtype is dtype and largest.dtype is lse.dtype is torch.float32
    assert_near(out, wanted, **SPARSE)
    assert_near(largest, wanted_largest, **LARGEST)
    assert_near(lse, wanted_lse, **SPARSE_LSE[dtype])
    if sq > 1:
        assert not out[0].any() and lse[0].eq(torch.inf).all() and largest[0].eq(-torch.inf).all()


def test_keys_that_are_listed_twice_count_twice():
    dtype, q, kv = torch.bfloat16, numbers(1, 2, 576), numbers(3, 1, 576)
    out, largest, lse = flash_mla_sparse_fwd(q, kv, torch.tensor([[[2, 0, 2, -1]]], dtype=torch.int32), 1.0)
    wanted = rows_of(q, kv[[2, 0, 2], 0], 1.0, 512)
    assert_near(out, wanted[0], **SPARSE)
    assert_near(largest, wanted[1], **LARGEST)
    assert_near(lse, wanted[2], **SPARSE_LSE[dtype])


@pytest.mark.parametrize("size", (0, 0.01, 1, 100))
@pytest.mark.parametrize("scale", (0.07, -0.07))
@BOTH
def test_the_largest_score(size, scale, dtype):
    """Of scores of any size, and where all are equal."""
    q, kv, indices = ((size * torch.randn(4, 2, 576)).to(dtype), torch.randn(3000, 1, 576).to(dtype), lists(4, 2048, 3000))
    largest = flash_mla_sparse_fwd(q, kv, indices[:, None], scale)[1]
    none = (indices < 0) | (indices >= 3000)
    _, wanted, _ = rows_of(q, kv[indices.masked_fill(none, 0).long(), 0], scale, 512, none)
    assert_near(largest, wanted, absolute=1e-6, relative=1e-6)


@pytest.mark.parametrize("b, sq, hq, sk, topk, page_size", [(4, 1, 64, 512, 64, 2), (4, 3, 64, 512, 64, 69), (2, 3, 128, 1024, 576, 61)])
@pytest.mark.parametrize("sinks, shorter", [(False, False), (True, True)])
@BOTH
def test_sparse_decoding(b, sq, hq, sk, topk, page_size, sinks, shorter, dtype):
    cache, table, keys = paged([sk] * b, 1, 576, page_size)
    q, cache = numbers(b, sq, hq, 576).to(dtype), cache.to(dtype)
    positions = lists(b * sq, topk, sk, empty=[2]).view(b, sq, topk)
    positions[positions >= sk] = -1
    page = table.gather(1, positions.clamp_min(0).flatten(1).long() // page_size).view_as(positions)
    indices = torch.where(positions < 0, positions, page * page_size + positions % page_size)
    length = torch.tensor([topk, topk // 2, 0, 1][:b], dtype=torch.int32) if shorter else None
    sink = torch.randn(hq) * 4 if sinks else None
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, 512, get_mla_metadata()[0], softmax_scale=0.7, indices=indices, attn_sink=sink, topk_length=length
    )
    assert out.shape == (b, sq, hq, 512) and lse.shape == (b, hq, sq)
    for i in range(b):
        none = positions[i] < 0
        if shorter:
            none |= torch.arange(topk) >= length[i]
        wanted, _, wanted_lse = rows_of(q[i], keys[i][positions[i].clamp_min(0).long(), 0], 0.7, 512, none)
        if sinks:
            wanted = with_sinks(wanted, wanted_lse, sink)
        assert_near(out[i], wanted, **SPARSE_DECODE)
        assert_near(lse[i], wanted_lse.T, **LSE[dtype])


def fp8_cache(lengths, page_size, hk=1):
    """paged() in rows of 656 bytes; what no key is in has bytes that are NaN as codes, scales and bfloat16."""
    cache, table, keys = paged(lengths, hk, 576, page_size)
    rows, _ = fp8_rows(cache)
    rows[cache[..., 0].isnan()] = 0xFF
    return rows, table, [fp8_rows(of_sequence)[1] for of_sequence in keys]


@pytest.mark.parametrize("b, sq, hq, hk, page_size", [(3, 1, 16, 1, 64), (2, 2, 128, 1, 1), (3, 3, 6, 2, 69), (1, 40, 2, 1, 7)])
@pytest.mark.parametrize("as_bytes", (False, True))
@BOTH
def test_dense_decoding_of_fp8_rows(b, sq, hq, hk, page_size, as_bytes, dtype):
    lengths = [300, 0, 45][:b]
    cache, table, keys = fp8_cache(lengths, page_size, hk)
    q, seqlens = numbers(b, sq, hq, 576).to(dtype), torch.tensor(lengths, dtype=torch.int32)
    if not as_bytes:
        cache = cache.view(torch.float8_e4m3fn)
    out, lse = flash_mla_with_kvcache(q, cache, table, seqlens, 512, softmax_scale=0.7, causal=True, is_fp8_kvcache=True)
    assert out.shape == (b, sq, hq, 512) and out.dtype is dtype
    for i, length in enumerate(lengths):
        if length == 0:
            assert not out[i].any() and lse[i].eq(torch.inf).all()
            continue
        hidden = torch.arange(length) > torch.arange(length - sq, length)[:, None]
        for head in range(hk):
            group = slice(head * (hq // hk), (head + 1) * (hq // hk))
            wanted, _, wanted_lse = rows_of(q[i, :, group], keys[i][:, head].expand(sq, -1, -1), 0.7, 512, hidden)
            assert_near(out[i, :, group], wanted, **DECODE)
            assert_near(lse[i, group], wanted_lse.T, **LSE[dtype])


@pytest.mark.parametrize("sq, hq, sk, topk, page_size", [(1, 64, 512, 64, 2), (3, 16, 512, 64, 69), (3, 128, 1024, 576, 61)])
@pytest.mark.parametrize("sinks, shorter", [(False, False), (True, True)])
@BOTH
def test_sparse_decoding_of_fp8_rows(sq, hq, sk, topk, page_size, sinks, shorter, dtype):
    b = 2
    cache, table, keys = fp8_cache([sk] * b, page_size)
    q = numbers(b, sq, hq, 576).to(dtype)
    positions = lists(b * sq, topk, sk, empty=[1]).view(b, sq, topk)
    positions[positions >= sk] = -1
    page = table.gather(1, positions.clamp_min(0).flatten(1).long() // page_size).view_as(positions)
    indices = torch.where(positions < 0, positions, page * page_size + positions % page_size)
    length = torch.tensor([topk // 2, topk], dtype=torch.int32) if shorter else None
    sink = torch.randn(hq) * 4 if sinks else None
    out, lse = flash_mla_with_kvcache(
        *(q, cache, None, None, 512),
        softmax_scale=0.7,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=sink,
        topk_length=length,
    )
    for i in range(b):
        none = positions[i] < 0
        if shorter:
            none |= torch.arange(topk) >= length[i]
        wanted, _, wanted_lse = rows_of(q[i], keys[i][positions[i].clamp_min(0).long(), 0], 0.7, 512, none)
        if sinks:
            wanted = with_sinks(wanted, wanted_lse, sink)
        assert_near(out[i], wanted, **SPARSE_DECODE)
        assert_near(lse[i], wanted_lse.T, **LSE[dtype])


@pytest.mark.parametrize("ragged", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float16))
def test_appending_fp8_rows(dtype, ragged):
    before, new, page_size = [5, 0], [3, 3], 4
    cache = torch.full((9, page_size, 1, 656), 0xB5, dtype=torch.uint8)
    table = torch.tensor([[3, 1], [7, 2]], dtype=torch.int32)
    rows = (torch.randn(2, 3, 576) * torch.logspace(-3, 3, 6).view(2, 3, 1)).to(dtype)
    rows[0, 1, 128:256] = 0
    given = rows.flatten(0, 1) if ragged else rows
    starts = torch.tensor([0, 3, 6], dtype=torch.int32) if ragged else None
    rapt.mla.append_fp8_rows(given, cache[:, :, 0], torch.tensor(before), block_table=table, cu_seqlens=starts)
    written = torch.zeros(9, page_size, dtype=torch.bool)
    for i in range(2):
        for t in range(new[i]):
            j = before[i] + t
            at = table[i, j // page_size], j % page_size
            written[at] = True
            row = cache[at][0]
            scale, rope = row[512:528].view(torch.float32), row[528:].view(torch.bfloat16)
            largest = rows[i, t, :512].float().unflatten(0, (4, 128)).abs().amax(-1)
            assert torch.allclose(scale, torch.where(largest == 0, 1, largest / 448), rtol=2**-22, atol=0)
            got = (row[:512].view(torch.float8_e4m3fn).double().unflatten(0, (4, 128)) * scale.double()[:, None]).flatten()
            off, x = (got - rows[i, t, :512].double()).abs(), rows[i, t, :512].double().abs()
            assert (off <= torch.maximum(x / 16, scale.repeat_interleave(128).double() / 1024) * 1.00001).all()
            assert torch.equal(rope, rows[i, t, 512:].bfloat16())
    assert cache[~written].eq(0xB5).all()
    q = numbers(2, 1, 4, 576)
    lengths = torch.tensor([8, 3], dtype=torch.int32)
    cache[3] = 0  # which the first sequence had
    out, _ = flash_mla_with_kvcache(q, cache, table, lengths, 512, softmax_scale=0.01, is_fp8_kvcache=True)
    page = cache[7, :3, 0]
    codes, scale = page[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128)), page[:, 512:528].view(torch.float32).double()
    keys = torch.cat(((codes * scale[..., None]).flatten(1), page[:, 528:].view(torch.bfloat16).double()), 1)
    assert_near(out[1], rows_of(q[1], keys, 0.01, 512)[0], absolute=1e-3, relative=2**-7)


FP8 = {"k_cache": fp8_rows(numbers(5, 8, 1, 576))[0], "is_fp8_kvcache": True}


def append_fp8(**change):
    given = {"kv_new": numbers(2, 3, 576), "kv": torch.zeros(2, 8, 656, dtype=torch.uint8), "seqlens": torch.tensor([0, 5])}
    rapt.mla.append_fp8_rows(**given | change)


def sparse(**change):
    given = {"q": numbers(3, 2, 576), "kv": numbers(9, 1, 576), "indices": torch.zeros(3, 1, 4).int(), "sm_scale": 1.0}
    return flash_mla_sparse_fwd(**given | change)


def decode(**change):
    given = {"q": numbers(2, 1, 4, 576), "k_cache": numbers(5, 8, 1, 576), "block_table": torch.zeros(2, 2).int()}
    given |= {"cache_seqlens": torch.tensor([9, 16]).int(), "head_dim_v": 512, "tile_scheduler_metadata": None}
    return flash_mla_with_kvcache(**given | change)


LISTS = {"indices": torch.zeros(2, 1, 4).int(), "block_table": None, "cache_seqlens": None}
FP8_LISTS = FP8 | LISTS
GAPS = torch.zeros(5, 8, 1, 658, dtype=torch.uint8)[..., :656]


@pytest.mark.parametrize(
    "call, change, error, message",
    [
        (decode, {"q": None}, TypeError, "q: got None; wanted a tensor"),
        (decode, {"k_cache": None}, TypeError, "k_cache: got None; wanted a tensor"),
        (decode, {"k_cache": FP8["k_cache"].view(torch.float8_e4m3fn)}, TypeError, "k_cache: got torch.float8_e4m3fn"),
        (decode, {"is_fp8_kvcache": "no"}, TypeError, "is_fp8_kvcache: got 'no'; wanted True or False"),
        (decode, {"causal": 1}, TypeError, "causal: got 1; wanted True or False"),
        (decode, LISTS | {"causal": 0}, TypeError, "causal: got 0; wanted True or False"),
        (decode, {"head_dim_v": True}, TypeError, "head_dim_v: got True; wanted an int"),
        (decode, {"head_dim_v": 512.0}, TypeError, "head_dim_v: got 512.0; wanted an int"),
        (decode, LISTS | {"head_dim_v": None}, TypeError, "head_dim_v: got None; wanted an int"),
        (decode, FP8 | {"head_dim_v": "512"}, TypeError, "head_dim_v: got '512'; wanted an int"),
        (decode, {"softmax_scale": 1e39}, ValueError, r"softmax_scale: got 1e\+39; wanted a finite number"),
        (sparse, {"d_v": 512.0}, TypeError, "d_v: got 512.0; wanted an int"),
        (sparse, {"d_v": None}, TypeError, "d_v: got None; wanted an int"),
        (sparse, {"sm_scale": 1e39}, ValueError, r"sm_scale: got 1e\+39; wanted a finite number"),
        (sparse, {"indices": None}, TypeError, "indices: got None; wanted a tensor"),
        (sparse, {"kv": torch.zeros(9, 1, 576).to_sparse()}, TypeError, "kv: got a tensor of torch.sparse_coo"),
        (decode, {"is_fp8_kvcache": True}, TypeError, "k_cache: got torch.bfloat16; wanted torch.uint8"),
        (decode, LISTS | {"is_fp8_kvcache": True}, TypeError, "k_cache: got torch.bfloat16; wanted torch.uint8"),
        (decode, {"k_cache": FP8["k_cache"]}, TypeError, "k_cache: got torch.uint8"),
        (decode, FP8 | {"k_cache": torch.zeros(5, 8, 1, 640, dtype=torch.uint8)}, ValueError, "k_cache: .*rows of 656 bytes"),
        (decode, FP8 | {"k_cache": GAPS}, ValueError, "k_cache: got strides .*4 bytes"),
        (decode, FP8_LISTS | {"k_cache": GAPS}, ValueError, "k_cache: got strides .*4 bytes"),
        (decode, FP8 | {"head_dim_v": 384}, ValueError, "head_dim_v: got 384; wanted 512"),
        (decode, FP8 | {"q": numbers(2, 1, 4, 512)}, ValueError, r"q: got shape .*; wanted 576 columns, as k_cache has"),
        (decode, FP8_LISTS | {"q": numbers(2, 1, 4, 512)}, ValueError, r"q: got shape .*; wanted 576 columns, as k_cache has"),
        (append_fp8, {"kv": numbers(2, 8, 576)}, TypeError, "kv: got torch.bfloat16"),
        (append_fp8, {"kv": torch.zeros(2, 8, 1, 656, dtype=torch.uint8)}, ValueError, "kv: got shape"),
        (append_fp8, {"kv_new": numbers(2, 3, 512)}, ValueError, "kv_new: got shape"),
        (append_fp8, {"kv_new": numbers(6, 576)}, ValueError, "kv_new: got shape"),
        (append_fp8, {"kv_new": numbers(2, 3, 576).double()}, TypeError, "kv_new: got dtype torch.float64"),
        (append_fp8, {"kv_new": numbers(1, 3, 576)}, ValueError, r"kv_new: got shape \[1, 3, 576\]; wanted 2 sequences"),
        (append_fp8, {"kv_new": numbers(2, 3, 576).requires_grad_()}, ValueError, "kv_new: got a tensor that requires grad"),
        (append_fp8, {"kv": torch.zeros(1, 8, 656, dtype=torch.uint8)}, ValueError, r"kv: got shape \[1, 8, 656\]; wanted 2 seq"),
        (append_fp8, {"kv": torch.zeros(1, 8, 656, dtype=torch.uint8).expand(2, -1, -1)}, ValueError, "kv: got strides"),
        (append_fp8, {"kv": torch.zeros(2, 8, 658, dtype=torch.uint8)[..., :656]}, ValueError, "kv: got strides .*4 bytes"),
        (append_fp8, {"seqlens": torch.tensor([0, 6])}, ValueError, "seqlens: got 6 keys and 3 new ones"),
        (append_fp8, {"seqlens": torch.tensor([0.0, 6.0])}, TypeError, "seqlens: got dtype torch.float32"),
        (append_fp8, {"seqlens": torch.tensor([[0, 5]])}, ValueError, r"seqlens: got shape \[1, 2\]; wanted \[b\]"),
        (append_fp8, {"seqlens": None}, ValueError, r"seqlens: got None; wanted \[b\]"),
        (sparse, {"kv": FP8["k_cache"][0]}, TypeError, "kv: got torch.uint8"),
        (decode, {"extra_k_cache": numbers(5, 8, 1, 576)}, ValueError, "extra_k_cache: .*second cache"),
        (decode, {"attn_sink": torch.zeros(4)}, ValueError, "attn_sink: .*belongs to indices"),
        (decode, {"topk_length": torch.zeros(2).int()}, ValueError, "topk_length: .*belongs to indices"),
        (decode, {"block_table": None}, ValueError, "block_table: got None"),
        (decode, {"cache_seqlens": None}, ValueError, "cache_seqlens: got None"),
        (decode, {"cache_seqlens": torch.tensor([9, 17]).int()}, ValueError, "cache_seqlens: "),
        (decode, {"head_dim_v": 577}, ValueError, "head_dim_v: got 577"),
        (decode, {"q": numbers(2, 4, 576)}, ValueError, r"q: got shape \[2, 4, 576\]"),
        (decode, {"q": numbers(2, 1, 4, 512)}, ValueError, r"q: got shape .*; wanted 576 columns, as k_cache has"),
        (decode, {"q": numbers(2, 1, 4, 576).double()}, TypeError, "q: got torch.float64; wanted torch.bfloat16, torch.float16 or torch.float32"),
        (decode, {"k_cache": numbers(5, 8, 3, 576)}, ValueError, "k_cache: got 3 heads for 4 query heads"),
        (decode, {"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
        (decode, {"softmax_scale": "1"}, TypeError, "softmax_scale: got '1'"),
        (decode, LISTS | {"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
        (decode, LISTS | {"q": numbers(2, 1, 4, 512)}, ValueError, r"q: got shape .*; wanted 576 columns, as k_cache has"),
        (decode, LISTS | {"causal": True}, ValueError, "causal: got True with indices"),
        (decode, LISTS | {"k_cache": numbers(5, 8, 2, 576)}, ValueError, "k_cache: .*one KV head"),
        (decode, LISTS | {"k_cache": numbers(5, 9, 1, 576)[:, :8]}, ValueError, "k_cache: .*end to end"),
        (decode, LISTS | {"indices": torch.zeros(2, 2, 4).int()}, ValueError, r"indices: .*; wanted \[2, 1, topk\]"),
        (decode, LISTS | {"topk_length": torch.zeros(3).int()}, ValueError, r"topk_length: .*; wanted \[2\]"),
        (decode, LISTS | {"attn_sink": torch.zeros(3)}, ValueError, r"attn_sink: .*; wanted \[4\]"),
        (sparse, {"kv": numbers(9, 2, 576)}, ValueError, "kv: .*one KV head"),
        (sparse, {"kv": numbers(9, 1, 512)}, ValueError, r"q: got shape .*; wanted 512 columns, as kv has"),
        (sparse, {"sm_scale": float("nan")}, ValueError, "sm_scale: got nan"),
        (sparse, {"sm_scale": "1"}, TypeError, "sm_scale: got '1'"),
        (sparse, {"sm_scale": None}, TypeError, "sm_scale: got None"),
        (sparse, {"indices": torch.zeros(3, 4).int()}, ValueError, r"indices: .*; wanted \[3, 1, topk\]"),
        (sparse, {"topk_length": torch.zeros(2).int()}, ValueError, "topk_length: "),
        (sparse, {"d_v": 0}, ValueError, "d_v: got 0"),
        (sparse, {"indexer_topk": 2}, ValueError, "indexer_topk: got 2"),
        (sparse, {"q": numbers(3, 2, 576).requires_grad_()}, ValueError, "q: got a tensor that requires grad"),
    ],
)
def test_bad_input(call, change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(**change)
    call()


@pytest.mark.parametrize("call, name, shape", ((sparse, "q", (3, 2, 576)), (decode, "q", (2, 1, 4, 576)), (append_fp8, "kv_new", (2, 3, 576))))
def test_tensors_without_memory(call, name, shape):
    with FakeTensorMode(), pytest.raises(TypeError, match=f"^{name}: got a FakeTensor; wanted one with memory"):
        call(**{name: torch.empty(shape)})


def test_tables_and_lengths_are_not_looked_at_with_lists():
    """FlashMLA ignores them, too."""
    given = {"q": numbers(2, 1, 4, 576), "k_cache": numbers(5, 8, 1, 576)}
    wanted, _ = decode(**given | LISTS)
    got, _ = decode(**given, indices=LISTS["indices"], block_table=torch.full((7, 1), -5), cache_seqlens=torch.full((3,), -1))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("scale", (1e25, 1e30, -1e30, 1e34, 2e38, -2e38))
@pytest.mark.parametrize("size", (1, 1e-5, 1e-36))
@BOTH
def test_the_largest_of_large_scores(scale, size, dtype):
    """Whether they or the scale are large, up to the end of float32."""
    q, kv, indices = torch.randn(4, 2, 64).to(dtype), (size * torch.randn(300, 1, 64)).to(dtype), lists(4, 100, 300, empty=[2])
    none = (indices < 0) | (indices >= 300)
    out, wanted, _ = rows_of(q, kv[indices.masked_fill(none, 0).long(), 0], scale, 64, none)
    if wanted[wanted.isfinite()].abs().max() > 1e38:
        return
    _, largest, _ = flash_mla_sparse_fwd(q, kv, indices[:, None], scale, 64)
    assert_near(largest, wanted, absolute=1e-6, relative=4e-6)


def test_nothing_to_do():
    assert [x.shape for x in sparse(q=numbers(0, 2, 576), indices=torch.zeros(0, 1, 4).int())] == [(0, 2, 512), (0, 2), (0, 2)]
    out, largest, lse = sparse(indices=torch.zeros(3, 1, 0).int())
    assert not out.any() and largest.eq(-torch.inf).all() and lse.eq(torch.inf).all()
