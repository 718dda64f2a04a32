"""Gathered keys: a list of keys for each query token, against the same keys chosen by a mask."""

import ml_dtypes
import numpy as np
import pytest
import rapt
import torch


def lists(b, sq, n, sk, seed=0):
    """Different keys for each token, -1 in about every fourth place."""
    random = np.random.default_rng(seed)
    indices = np.argsort(random.random((b, sq, sk)), axis=2)[..., :n].astype(np.int32)
    return np.where(random.random(indices.shape) < 0.25, np.int32(-1), indices)


def mask_of(indices, sk):
    mask = np.zeros((*indices.shape[:2], sk + 1), bool)  # -1 is the last column
    np.put_along_axis(mask, indices, True, 2)
    return mask[:, None, :, :sk]


def inputs(b=2, hq=6, hk=2, sq=9, sk=40, d=32, dv=24):
    random = np.random.default_rng(1)
    return [random.standard_normal(shape, np.float32) for shape in ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv))]


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-6), (ml_dtypes.bfloat16, 2e-2), (np.float16, 2e-3)])
@pytest.mark.parametrize("integers", [np.int32, np.int64])
def test_a_mask_gives_the_same(dtype, bound, integers):
    q, k, v = (x.astype(dtype) for x in inputs())
    indices = lists(2, 9, 12, 40).astype(integers)
    out, lse = rapt.attention(q, k, v, indices=indices, softcap=20, return_lse=True)
    wanted, wanted_lse = rapt.attention(q, k, v, mask=mask_of(indices, 40), softcap=20, return_lse=True)
    assert abs(out.astype(np.float32) - wanted.astype(np.float32)).max() <= bound
    # On CPUs with products of bf16 the masked call's sum may be one of rounded weights: see the contract.
    of_lse = 4 * float(ml_dtypes.finfo(dtype).eps) if dtype is ml_dtypes.bfloat16 else 1e-5
    assert abs(lse - wanted_lse).max() <= of_lse


def test_counts_and_what_is_never_read():
    q, k, v = inputs()
    indices = np.abs(lists(2, 9, 12, 38))
    counts = np.random.default_rng(2).integers(0, 13, (2, 9))
    counts[1, 3] = 0
    listed = np.where(np.arange(12) < counts[..., None], indices, -1)
    wanted = rapt.attention(q, k, v, indices=listed)
    k[:, :, 38:], v[:, :, 38:] = np.nan, np.nan
    indices = np.where(listed < 0, 1000, indices)  # no key
    assert np.array_equal(rapt.attention(q, k, v, indices=indices, counts=counts), wanted)
    assert not wanted[1, :, 3].any()


def test_a_pool_of_pages():
    q, k, v = inputs(hk=1, d=32, dv=32)
    pages = np.random.default_rng(3).standard_normal((10, 8, 1, 32), np.float32)  # [pages, page_size, 1, d]
    pool = pages.reshape(1, 80, 1, 32).swapaxes(1, 2)
    indices = lists(2, 9, 20, 80)
    out = rapt.attention(q, pool, pool[..., :16], indices=indices)
    both = np.broadcast_to(pool, (2, 1, 80, 32))
    assert abs(out - rapt.attention(q, both, both[..., :16], mask=mask_of(indices, 80))).max() < 1e-6
    assert "gathered" in str(rapt.explain(q, pool, pool[..., :16], indices=indices))


def test_tensors_of_pytorch():
    q, k, v = inputs()
    indices = lists(2, 9, 12, 40)
    out = rapt.attention(*map(torch.from_numpy, (q, k, v)), indices=torch.from_numpy(indices))
    assert isinstance(out, torch.Tensor)
    assert abs(out.numpy() - rapt.attention(q, k, v, indices=indices)).max() < 1e-6
    with pytest.raises(ValueError, match="^q: got a tensor that requires grad"):
        rapt.attention(torch.from_numpy(q).requires_grad_(), torch.from_numpy(k), torch.from_numpy(v), indices=torch.from_numpy(indices))
