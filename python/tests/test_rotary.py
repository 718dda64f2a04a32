"""rapt.rotary_append_kv against formulas in float64, and beside rapt.append_kv."""

import numpy as np
import pytest

import rapt

B, HQ, HK, N, D, DV, ROOM = 2, 4, 2, 3, 16, 12, 20


def draw(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def tables(positions=ROOM, r=D, seed=5):
    angles = np.random.default_rng(seed).uniform(-3, 3, (positions, r))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x, cos, sin, interleaved=False, first=0):
    """x [b, h, n, d] by cos and sin [b, n, r], in float64."""
    x, (cos, sin) = x.astype(np.float64).copy(), (t.astype(np.float64)[:, None] for t in (cos, sin))
    r = cos.shape[-1]
    part = x[..., first : first + r].copy()
    turned = np.empty_like(part)
    if interleaved:
        turned[..., ::2], turned[..., 1::2] = -part[..., 1::2], part[..., ::2]
    else:
        turned[..., : r // 2], turned[..., r // 2 :] = -part[..., r // 2 :], part[..., : r // 2]
    x[..., first : first + r] = part * cos + turned * sin
    return x


def normed(x, weight, eps=1e-6):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_strided_cache(interleaved, norm):
    q, k_new, v_new = draw(B, HQ, N, D), draw(B, HK, N, D, seed=2), draw(B, HK, N, DV, seed=3)
    k, v, before = np.full((B, HK, ROOM, D), 7, np.float32), np.full((B, HK, ROOM, DV), 7, np.float32), np.array([4, 17])
    cos, sin = tables()
    weights = {"q_norm": draw(D, seed=8), "k_norm": draw(D, seed=9), "norm_plus_one": True} if norm else {}
    q_out, nothing = rapt.rotary_append_kv(q, k_new, v_new, k, v, before, cos=cos, sin=sin, interleaved=interleaved, **weights)
    assert nothing is None
    at = before[:, None] + np.arange(N)
    if norm:
        q, k_new = (normed(x, 1 + weights[w]) for x, w in ((q, "q_norm"), (k_new, "k_norm")))
    np.testing.assert_allclose(q_out, rotated(q, cos[at], sin[at], interleaved), rtol=1e-5, atol=1e-5)
    keys = rotated(k_new, cos[at], sin[at], interleaved)
    for i in range(B):
        rows = slice(before[i], before[i] + N)
        np.testing.assert_allclose(k[i, :, rows], keys[i], rtol=1e-5, atol=1e-5)
        assert (v[i, :, rows] == v_new[i]).all()
        for cache in (k, v):
            assert (np.delete(cache[i], np.arange(*rows.indices(ROOM)), 1) == 7).all()


def test_without_a_cache_and_in_place():
    q, k_new = draw(B, HQ, N, D), draw(B, HK, N, D, seed=2)
    cos, sin = tables(r=4)
    positions = np.array([[3, 0, 19]])
    wanted = [rotated(x, cos[positions], sin[positions], first=8) for x in (q, k_new)]
    found = rapt.rotary_append_kv(q, k_new, cos=cos, sin=sin, positions=positions, rotary_offset=8)
    again = rapt.rotary_append_kv(q, k_new, cos=cos[positions], sin=sin[positions], rotary_offset=8, q_out=q, k_out=k_new)
    assert again[0] is q and again[1] is k_new
    for got, in_place, x in zip(found, again, wanted):
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)
        assert (got == in_place).all()


def test_quantised_pages_are_those_of_append_kv():
    k_new, v_new, (cos, sin) = draw(5, HK, D), draw(5, HK, DV, seed=3), tables(r=D // 2)
    lengths = {"cu_seqlens": np.array([0, 3, 5]), "block_table": np.array([[2, 0], [3, 1]])}
    caches = []
    for _ in range(2):
        caches.append([np.zeros((4, HK, 4, D), np.int8), np.zeros((4, HK, 4, DV), np.int8), *(np.ones((4, HK, 4, 1), np.float32) for _ in "kv")])
    (k, v, ks, vs), (k2, v2, ks2, vs2) = caches
    before = np.array([2, 0])
    rapt.rotary_append_kv(None, k_new, v_new, k, v, before, cos=cos, sin=sin, rotary_dim=D, k_scale=ks, v_scale=vs, **lengths)
    _, keys = rapt.rotary_append_kv(None, k_new, cache_seqlens=before, cos=cos, sin=sin, rotary_dim=D, cu_seqlens=lengths["cu_seqlens"])
    rapt.append_kv(keys, v_new, k2, v2, before, k_scale=ks2, v_scale=vs2, **lengths)
    for got, wanted in zip(caches[0], caches[1]):
        assert (got == wanted).all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"cos": None}, ValueError, "cos: "),
        ({"cos": np.ones((3, D), np.float32), "sin": np.ones((3, D), np.float32)}, ValueError, "cos: got position 4"),
        ({"sin": np.ones((ROOM, D), np.float64)}, TypeError, "sin: "),
        ({"rotary_dim": 3}, ValueError, "rotary_dim: got 3"),
        ({"rotary_dim": "x"}, TypeError, "rotary_dim: "),
        ({"rotary_offset": 1}, ValueError, "rotary_offset: got 1"),
        ({"q_norm": np.ones(D - 1, np.float32)}, ValueError, "q_norm: "),
        ({"norm_plus_one": True}, ValueError, "norm_plus_one: "),
        ({"norm_eps": -1.0}, ValueError, "norm_eps: got -1"),
        ({"norm_eps": None}, TypeError, "norm_eps: got None; wanted a number"),
        ({"rotary_dim": 0}, ValueError, "rotary_dim: got 0; wanted None or an even number from 2"),
        ({"cos": np.ones(D, np.float32)}, ValueError, r"cos: got shape \[\d+\]; wanted \[positions, r\], or a row for each new row"),
        (
            {"cos": np.ones((1, N, D), np.float32), "sin": np.ones((1, N, D), np.float32), "positions": np.zeros((B, N), np.int32)},
            ValueError,
            r"positions: got a tensor; wanted one only with tables cos \[positions, r\]$",
        ),
        (
            {"k": None, "v": None, "v_new": None, "kv_dtype": "i4x2"},
            ValueError,
            "kv_dtype: got 'i4x2'; wanted None without a cache",
        ),
        ({"positions": np.full((B, N), 99)}, ValueError, "positions: got position 99"),
        ({"k_out": np.zeros((B, HK, N, D), np.float32)}, ValueError, "k_out: "),
        ({"v_new": None}, ValueError, "v_new: "),
        ({"cache_seqlens": np.array([4, 18])}, ValueError, "cache_seqlens: "),
    ],
)
def test_refusals(change, error, message):
    cos, sin = tables()
    k, v = np.zeros((B, HK, ROOM, D), np.float32), np.zeros((B, HK, ROOM, DV), np.float32)
    given = {"q": draw(B, HQ, N, D), "k_new": draw(B, HK, N, D), "v_new": draw(B, HK, N, DV), "k": k, "v": v}
    given |= {"cache_seqlens": np.array([4, 17]), "cos": cos, "sin": sin} | change
    with pytest.raises(error, match=f"^{message}"):
        rapt.rotary_append_kv(**given)
    assert not k.any() and not v.any()


def test_torch():
    torch = pytest.importorskip("torch")
    q, k_new, v_new = (torch.from_numpy(draw(B, h, N, D, seed=h)) for h in (HQ, HK, HK))
    k, v = torch.zeros(B, HK, ROOM, D), torch.zeros(B, HK, ROOM, D)
    cos, sin = (torch.from_numpy(t) for t in tables())
    before, after = torch.tensor([4, 17]), k._version
    q_out, _ = rapt.rotary_append_kv(q, k_new, v_new, k, v, before, cos=cos, sin=sin)
    at = before[:, None] + torch.arange(N)
    np.testing.assert_allclose(q_out, rotated(q.numpy(), cos[at].numpy(), sin[at].numpy()), rtol=1e-5, atol=1e-6)
    assert isinstance(q_out, torch.Tensor) and k._version > after
    with pytest.raises(ValueError, match="^q: "):
        rapt.rotary_append_kv(q.requires_grad_(), k_new, v_new, k, v, before, cos=cos, sin=sin)
