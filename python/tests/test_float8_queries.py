"""Queries of float8_e4m3fn, with scales and without, against float64 and against float32 queries of the same numbers."""

import ml_dtypes
import numpy as np
import pytest
import rapt
import rapt.mla
import rapt.torch
import reference
import torch
from rapt import _refusals
from reference import assert_close, inputs

BF16 = 2.0**-8
Q, K, V = inputs(2, 4, 2, 5, 9, 16)
CODES = Q.astype(ml_dtypes.float8_e4m3fn)
SCALES = {
    "rows": np.random.default_rng(1).uniform(-2, 2, (2, 4, 5, 1)).astype(np.float32),
    "heads": np.random.default_rng(2).uniform(0.5, 2, (1, 4, 1, 1)).astype(np.float32),
    "sequences": np.random.default_rng(3).uniform(0.5, 2, (2, 4, 1, 1)).astype(np.float32),
    "none": None,
}


def numbers(codes, scale):
    """As float32, which is what the library computes with."""
    return codes.astype(np.float32) * (1 if scale is None else scale)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_arrays(scale, dtype):
    q_scale, k, v = SCALES[scale], K.astype(dtype), V.astype(dtype)
    wide = numbers(CODES, q_scale)
    wanted, wanted_lse = reference.attention(wide, k.astype(np.float32), v.astype(np.float32))
    out, lse = rapt.attention(CODES, k, v, q_scale=q_scale, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    assert_close(out.astype(np.float32), wanted, BF16 / 8)
    exact = np.empty(wanted.shape, np.float32)
    assert rapt.attention(CODES, k, v, q_scale=q_scale, out=exact) is exact
    assert (exact == rapt.attention(wide, k, v)).all()
    if dtype != ml_dtypes.bfloat16:
        assert_close(exact, wanted)
        assert_close(lse, wanted_lse)


@pytest.mark.parametrize("scale", SCALES)
def test_tensors(scale):
    q_scale = None if SCALES[scale] is None else torch.from_numpy(SCALES[scale])
    codes = torch.from_numpy(CODES.view(np.uint8)).view(torch.float8_e4m3fn)
    k, v = torch.from_numpy(K), torch.from_numpy(V)
    wide = codes.float() * (1 if q_scale is None else q_scale)
    out = rapt.attention(codes, k, v, q_scale=q_scale)
    assert out.dtype is torch.bfloat16 and out.is_contiguous()
    exact = rapt.attention(codes, k, v, q_scale=q_scale, out=torch.empty(2, 4, 5, 16))
    assert_close(exact, reference.attention(wide.numpy(), K, V)[0])
    assert (out == exact.bfloat16()).all()
    problem = rapt.explain(codes, k, v, q_scale=q_scale).problem
    assert "q=f8e4m3" in problem and ("q_scale" in problem) == (q_scale is not None)


def test_sequences_of_unequal_length():
    borders = np.array([0, 2, 5])
    rows = np.ascontiguousarray(CODES[0].transpose(1, 0, 2))  # [5, 4, 16]
    for shape in ((5, 4, 1), (1, 4, 1)):
        scale = np.random.default_rng(4).uniform(-2, 2, shape).astype(np.float32)
        lengths = np.array([9, 4])
        out = rapt.attention(rows, K, V, q_scale=scale, cu_seqlens_q=borders, cache_seqlens=lengths, out=np.empty((5, 4, 16), np.float32))
        wide = numbers(rows, scale).transpose(1, 0, 2)[None]
        for n in range(2):
            part, keys = slice(*borders[n : n + 2]), slice(lengths[n])
            wanted = reference.attention(wide[:, :, part], K[n : n + 1, :, keys], V[n : n + 1, :, keys])[0]
            assert_close(out[part].transpose(1, 0, 2)[None], wanted)


def test_caches_in_pages_with_scales_of_heads():
    rng = np.random.default_rng(5)
    table = rng.permutation(6).reshape(2, 3).astype(np.int32)
    pages = [rng.standard_normal((6, 2, 3, 16)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2)]
    scales = [rng.uniform(0.5, 2, (1, 2, 1, 1)).astype(np.float32) for _ in range(2)]
    options = {
        "q_scale": SCALES["heads"],
        "k_scale": scales[0],
        "v_scale": scales[1],
        "block_table": table,
        "cache_seqlens": np.array([9, 9]),
    }
    out = rapt.attention(CODES, *pages, **options)
    k, v = (
        (page.astype(np.float32) * scale)[table].transpose(0, 2, 1, 3, 4).reshape(2, 2, 9, 16)
        for page, scale in zip(pages, scales)
    )
    assert_close(out.astype(np.float32), reference.attention(numbers(CODES, SCALES["heads"]), k, v)[0], BF16 / 8)
    assert "head_scales q_scale" in rapt.explain(CODES, *pages, **options).problem


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": Q}, ValueError, r"q_scale: got scales for f32; wanted none, or queries of f8e4m3"),
        ({"q_scale": np.ones((2, 4, 5, 1))}, TypeError, r"q_scale: got dtype float64; wanted float32$"),
        ({"q_scale": np.ones((2, 1, 5, 1), np.float32)}, ValueError, r"q_scale: got shape \[2, 1, 5, 1\]; wanted q's heads hq = 4"),
        ({"q_scale": np.ones((2, 4, 5), np.float32)}, ValueError, r"q_scale: got shape \[2, 4, 5\]; wanted \[b or 1, hq, sq or 1, 1\]"),
        ({"q": Q.astype(ml_dtypes.float8_e5m2)}, TypeError, r"q: got dtype f8e5m2; wanted f32, bf16, f16 or f8e4m3"),
        ({"q": CODES.view(np.int8)}, TypeError, r"q: got dtype i8; wanted"),
        ({"q": CODES.view(np.uint8)}, TypeError, r"q: got dtype uint8; wanted"),
        ({"out": np.empty_like(CODES)}, TypeError, r"out: got dtype f8e4m3; wanted f32, bf16 or f16"),
    ],
)
def test_refusals(change, error, message):
    for call in (rapt.attention, rapt.explain):
        with pytest.raises(error, match=message):
            call(**{"q": CODES, "k": K, "v": V, "q_scale": SCALES["rows"]} | change)


def test_no_gradients():
    out, lse = rapt.attention(CODES, K, V, return_lse=True)
    with pytest.raises(TypeError, match="q: got dtype f8e4m3; wanted f32, bf16 or f16"):
        rapt.attention_backward(out, CODES, K, V, out, lse)
    q = torch.zeros(1, 1, 2, 16).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        rapt.attention(q, *(torch.zeros(1, 1, 2, 16) for _ in range(2)))


def test_operators_with_results_of_the_queries_type():
    q = torch.zeros(1, 2, 1, 64).to(torch.float8_e4m3fn)
    rows, lists = torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 3, dtype=torch.int32)
    with pytest.raises(TypeError, match="^q: got torch.float8_e4m3fn; wanted torch.float32"):
        rapt.torch.sparse_attention(q, rows, rows, lists)
    with pytest.raises(TypeError, match="^q: got torch.float8_e4m3fn; wanted torch.bfloat16"):
        rapt.mla.flash_mla_sparse_fwd(q[0, :, 0][None], rows[0, 0][:, None], lists, 1.0, 64, attn_sink=torch.zeros(2))
    with pytest.raises(TypeError, match="^q: got torch.float8_e4m3fn; wanted torch.bfloat16"):
        rapt.mla.flash_mla_with_kvcache(q.transpose(1, 2), rows.transpose(1, 2), None, None, 64, None, None, indices=lists)


def test_pytorchs_attention_is_not_ours():
    """It has no scales, and results of the queries' type: such calls stay PyTorch's, which takes them or says that it does not."""
    q = torch.zeros(1, 2, 4, 16).to(torch.float8_e4m3fn)

    def outcome():
        try:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype
        except Exception as error:
            return type(error), str(error)

    wanted = outcome()
    _refusals.warned.clear()
    with rapt.torch.enabled(), pytest.warns(rapt.torch.FallbackWarning, match="tensors of torch.float8_e4m3fn"):
        assert outcome() == wanted
    with pytest.raises(ValueError, match="got tensors of torch.float8_e4m3fn; wanted what .* of float32, bfloat16 or float16"):
        torch.ops.rapt.scaled_dot_product_attention(q, q, q, None, False, None, False)
