"""Gradients of gathered keys, and the loss of the indexer that selects them, against float64 and dense keys."""

import ml_dtypes
import numpy as np
import pytest
import rapt
import rapt.torch
import torch

B, HQ, HK, SQ, SK, N, D, DV = 2, 6, 2, 9, 40, 14, 32, 24


def lists(b=B, sq=SQ, n=N, sk=SK, seed=0):
    """Rows of k, some of them twice, the last three never, -1 in about every fourth place; one token without keys."""
    random = np.random.default_rng(seed)
    indices = random.integers(0, sk - 3, (b, sq, n), np.int32)
    indices[random.random(indices.shape) < 0.25] = -1
    indices[-1, 2] = -1
    return indices


def inputs(b=B, pool=B, d=D, dv=DV, seed=1):
    random = np.random.default_rng(seed)
    shapes = ((b, HQ, SQ, d), (pool, HK, SK, d), (pool, HK, SK, dv), (b, HQ, SQ, dv))
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def attention(q, k, v, indices, scale=None, softcap=None, sinks=None):
    """(out, lse) in PyTorch, of any type: every token over a copy of its keys."""
    seen, rows = indices >= 0, indices.clamp_min(0).long()
    group = q.shape[1] // k.shape[1]
    entry = torch.arange(len(q))[:, None, None] if len(k) > 1 else torch.zeros(1, 1, 1, dtype=torch.long)
    keys, values = (x.transpose(1, 2)[entry, rows].repeat_interleave(group, 3) for x in (k, v))  # [b, sq, n, hq, d]
    x = torch.einsum("bhtd,btnhd->bhtn", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[None, :, None, None].expand(*x.shape[:3], 1)], 3)
    lse = x.logsumexp(3)
    p = (x - lse[..., None]).exp().masked_fill((lse == -torch.inf)[..., None], 0.0)
    return torch.einsum("bhtn,btnhd->bhtd", p[..., : rows.shape[2]], values), lse


def reference(arrays, dout, indices, dlse=None, **options):
    """Gradients of q, k, v and, with sinks, of these, by float64 autograd."""
    tensors = [torch.from_numpy(np.asarray(x, np.float64)).requires_grad_() for x in arrays]
    names = dict(zip(("q", "k", "v", "sinks"), tensors))
    out, lse = attention(**names, indices=torch.from_numpy(indices), **options)
    loss = (out * torch.from_numpy(np.asarray(dout, np.float64))).sum()
    if dlse is not None:
        loss = loss + (lse * torch.from_numpy(dlse.astype(np.float64))).masked_fill(lse == -torch.inf, 0.0).sum()
    return [x.numpy() for x in torch.autograd.grad(loss, tensors)]


def close(made, wanted, bound):
    made = made.float().numpy() if isinstance(made, torch.Tensor) else made.astype(np.float64)
    assert np.abs(made - wanted).max() <= bound * max(np.abs(wanted).max(), 1)


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-6), (ml_dtypes.bfloat16, 3e-2), (np.float16, 4e-3)])
@pytest.mark.parametrize("pool", [1, B])
def test_arrays(dtype, bound, pool):
    q, k, v, dout = (x.astype(dtype) for x in inputs(pool=pool))
    indices, sinks = lists(), np.linspace(-1, 1, HQ, dtype=np.float32)
    k[:, :, SK - 3 :], v[:, :, SK - 3 :] = np.nan, np.nan  # on no list
    options = {"indices": indices, "softcap": 9.0, "sinks": sinks}
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    dlse = np.random.default_rng(2).standard_normal(lse.shape, np.float32)
    made = rapt.attention_backward(dout, q, k, v, out, lse, dlse=dlse, want=("q", "k", "v", "sinks"), **options)
    k[:, :, SK - 3 :], v[:, :, SK - 3 :] = 0, 0
    for x, wanted in zip((made.dq, made.dk, made.dv, made.dsinks), reference((q, k, v, sinks), dout, indices, dlse, softcap=9.0)):
        assert x.shape == wanted.shape
        close(x, wanted, bound)
    assert not made.dk[:, :, SK - 3 :].any() and not made.dv[:, :, SK - 3 :].any()
    assert not made.dq[-1, :, 2].any()  # of the token without keys


def test_counts_and_threads_change_nothing():
    q, k, v, dout = inputs()
    indices, counts = np.abs(lists()), np.random.default_rng(3).integers(0, N + 1, (B, SQ))
    listed = np.where(np.arange(N) < counts[..., None], indices, -1)
    out, lse = rapt.attention(q, k, v, indices=listed, return_lse=True)
    wanted = rapt.attention_backward(dout, q, k, v, out, lse, indices=listed)
    indices = np.where(listed < 0, 1000, indices)  # no key
    for threads in (1, 2, 3, 5):
        made = rapt.attention_backward(dout, q, k, v, out, lse, indices=indices, counts=counts, threads=threads)
        assert all(np.array_equal(x, y) for x, y in zip(made[:3], wanted[:3]))


def test_lists_of_all_keys_are_dense():
    q, k, v, dout = inputs()
    indices = np.argsort(np.random.default_rng(4).random((B, SQ, SK)), axis=2).astype(np.int64)
    out, lse = rapt.attention(q, k, v, return_lse=True)
    dense = rapt.attention_backward(dout, q, k, v, out, lse)
    for x, wanted in zip(rapt.attention_backward(dout, q, k, v, out, lse, indices=indices)[:3], dense[:3]):
        close(x, wanted, 2e-6)


def test_refusals():
    q, k, v, dout = inputs()
    out, lse = rapt.attention(q, k, v, indices=lists(), return_lse=True)
    with pytest.raises(ValueError, match="kv.indices|indices"):
        rapt.attention_backward(dout, q, k, v, out, lse, indices=lists() + SK)
    with pytest.raises(ValueError, match="causal"):
        rapt.attention_backward(dout, q, k, v, out, lse, indices=lists(), causal=True)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    with pytest.raises(ValueError, match="rapt.torch"):  # not detached in silence
        rapt.attention(*tensors, indices=torch.from_numpy(lists()))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("compiled", [False, True])
def test_autograd(dtype, bound, compiled):
    if compiled and dtype != torch.float32:
        pytest.skip("one type is enough")
    arrays, indices = inputs(), torch.from_numpy(lists())
    q, k, v, dout = (torch.from_numpy(x).to(dtype) for x in arrays)
    sinks = torch.linspace(-1, 1, HQ)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    run = torch.compile(rapt.torch.sparse_attention, fullgraph=True) if compiled else rapt.torch.sparse_attention
    out, lse = run(q, k, v, indices, sinks=sinks, scale=0.3, return_lse=True)
    plain = rapt.attention(*(x.detach() for x in (q, k, v)), indices=indices, sinks=sinks.detach(), scale=0.3)
    assert torch.equal(out.detach(), plain)
    dlse = torch.randn(lse.shape)
    made = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    wanted = reference([x.detach().double().numpy() for x in leaves], dout.double().numpy(), indices.numpy(), dlse.numpy(), scale=0.3)
    for x, y, leaf in zip(made, wanted, leaves):
        assert x.dtype == leaf.dtype
        close(x, y, bound)


def test_autograd_of_what_is_wanted():
    q, k, v, dout = map(torch.from_numpy, inputs())
    indices = torch.from_numpy(lists())
    assert not rapt.torch.sparse_attention(q, k, v, indices).requires_grad
    out = rapt.torch.sparse_attention(q, k.requires_grad_(), v, indices)
    (dk,) = torch.autograd.grad(out, k, dout, retain_graph=True)
    close(dk, reference([x.detach().numpy() for x in (q, k, v)], dout.numpy(), indices.numpy())[1], 2e-6)
    (again,) = torch.autograd.grad(out, k, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="second|first derivatives"):
        torch.autograd.grad(again.sum(), k)
    lse = rapt.torch.sparse_attention(q, k, v, indices, return_lse=True)[1]
    assert torch.autograd.grad(lse[:, :, :2].sum(), k)[0].isfinite().all()  # and none of out


def test_numbers_are_those_that_attention_takes():
    q, k, v, _ = map(torch.from_numpy, inputs())
    indices = torch.from_numpy(lists())
    wanted = rapt.attention(q, k, v, indices=indices, scale=0.25, softcap=20)
    for number, refused in ((np.float32, str), (torch.tensor, bool)):
        for grad in (False, True):
            given = (q.clone().requires_grad_(grad), k, v, indices)
            out = rapt.torch.sparse_attention(*given, scale=number(0.25), softcap=number(20))
            assert torch.equal(out.detach(), wanted)
            for name in ("scale", "softcap"):
                with pytest.raises(TypeError, match=f"^{name}: got .*; wanted a number"):
                    rapt.torch.sparse_attention(*given, **{name: refused(0.25)})


def test_latent_attention_whose_values_are_columns_of_the_keys():
    q, k, _, _ = map(torch.from_numpy, inputs(pool=1, d=48))
    indices = torch.from_numpy(lists())
    k.requires_grad_()
    out = rapt.torch.sparse_attention(q, k, k[..., :32], indices)
    dout = torch.randn(out.shape)
    (dk,) = torch.autograd.grad(out, k, dout)
    exact = k.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(attention(q.double(), exact, exact[..., :32], indices)[0], exact, dout.double())
    close(dk, wanted.numpy(), 2e-6)


def teacher(q, k, seen, scale, sinks):
    """[b, sq, sk] of float64: what the definition says."""
    x = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    x = x.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[None, :, None, None].expand(*x.shape[:3], 1)], 3)
    p = x.softmax(3)[..., : seen.shape[2]].nan_to_num(0.0).sum(1)
    return p / p.sum(2, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_loss_of_the_indexer(selected, with_sinks, monkeypatch):
    monkeypatch.setattr(rapt._dsa_loss, "_CHUNK", 500)  # several pieces
    q, k, _, _ = map(torch.from_numpy, inputs())
    sinks = torch.linspace(-1, 1, HQ) if with_sinks else None
    generator = torch.Generator().manual_seed(5)
    qi, ki = torch.randn(B, SQ, 4, 16, generator=generator), torch.randn(B, SK, 16, generator=generator)
    w = torch.randn(B, SQ, 4, generator=generator)
    leaves = [x.requires_grad_() for x in (qi, ki, w)]
    scores = rapt.torch.index_scores(*leaves, align="bottom_right")
    indices = rapt.torch.index_topk(*leaves, N, align="bottom_right") if selected else None
    if selected:
        indices[0, 3, 4:] = -1
        indices[1, 1] = -1  # a token without keys
    loss = rapt.torch.indexer_loss(scores, q, k, indices, sinks=sinks)
    made = torch.autograd.grad(loss, leaves)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    dense = (torch.einsum("bthd,bsd->bths", exact[0], exact[1]).relu() * exact[2][..., None]).sum(2) * 16**-0.5
    seen = torch.ones(B, SQ, SK, dtype=torch.bool).tril(SK - SQ)
    if selected:
        chosen = torch.zeros(B, SQ, SK + 1, dtype=torch.bool).scatter_(2, indices.long() % (SK + 1), True)[..., :SK]
        seen &= chosen
    p = teacher(q.double(), k.double(), seen, D**-0.5, None if sinks is None else sinks.double())
    log_i = dense.masked_fill(~seen, -torch.inf).log_softmax(2).masked_fill(~seen, 0.0)
    wanted = (torch.special.xlogy(p, p) - p * log_i).sum()
    assert abs(loss.item() - wanted.item()) < 1e-5 * wanted.item()
    for x, y in zip(made, torch.autograd.grad(wanted, exact)):
        close(x, y.numpy(), 1e-5)


def test_the_loss_of_the_indexer_is_0_where_it_has_learnt():
    q, k, _, _ = map(torch.from_numpy, inputs())
    seen = torch.ones(B, SQ, SK, dtype=torch.bool)
    scores = teacher(q.double(), k.double(), seen, D**-0.5, None).log().float().requires_grad_()
    loss = rapt.torch.indexer_loss(scores, q, k)
    assert abs(loss.item()) < 1e-5 and torch.autograd.grad(loss, scores)[0].abs().max() < 1e-6


@pytest.mark.parametrize("selected", [False, True])
def test_the_memory_of_the_loss_of_the_indexer(selected, monkeypatch):
    """Probabilities of six heads, and with lists copies of their keys, which are larger: 2 x 32 columns."""
    pieces, make = [], rapt._dsa_loss._teacher

    def teacher(q, k, seen, *rest):
        pieces.append((len(q) * seen.numel(), k.numel() if k.ndim == 4 else 0))
        return make(q, k, seen, *rest)

    monkeypatch.setattr(rapt._dsa_loss, "_CHUNK", 2000)
    monkeypatch.setattr(rapt._dsa_loss, "_teacher", teacher)
    q, k, _, _ = map(torch.from_numpy, inputs())
    rapt.torch.indexer_loss(torch.randn(B, SQ, SK), q, k, torch.from_numpy(lists()) if selected else None)
    assert 1 < len(pieces) and 1000 < max(map(max, pieces)) <= 2000


def loss_inputs():
    q, k, _, _ = map(torch.from_numpy, inputs())
    scores = torch.randn(B, SQ, SK, generator=torch.Generator().manual_seed(6))
    return scores, q, k, rapt.torch.select_topk(scores, N)


@pytest.mark.parametrize("selected", [False, True])
def test_the_loss_of_the_indexer_does_not_hide_nan(selected):
    scores, q, k, indices = loss_inputs()
    scores[1, 4] = torch.nan
    indices = rapt.torch.select_topk(scores, N) if selected else None
    scores.requires_grad_()
    loss = rapt.torch.indexer_loss(scores, q, k, indices)
    (grad,) = torch.autograd.grad(loss, scores)
    assert loss.isnan() and grad[1, 4].isnan().any() and grad[0].isfinite().all() and grad[1, :4].isfinite().all()


@pytest.mark.parametrize("selected", [False, True])
def test_the_loss_of_the_indexer_has_no_second_derivatives(selected):
    scores, q, k, indices = loss_inputs()
    scores.requires_grad_()
    loss = rapt.torch.indexer_loss(scores, q, k, indices if selected else None)
    (wanted,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
    assert torch.equal(grad, wanted) and not wanted.requires_grad
    with pytest.raises(RuntimeError, match="create_graph: .*indexer_loss.*first derivatives only"):
        (loss + grad.square().sum()).backward()


def test_the_loss_of_the_indexer_with_sinks_far_above_all_scores():
    """Attention leaves its keys next to nothing, and p is what they have of that: not 0, as exp() would make it."""
    scores, q, k, _ = loss_inputs()
    scores.requires_grad_()
    sinks = torch.linspace(999, 1001, HQ)
    loss = rapt.torch.indexer_loss(scores, q, k, sinks=sinks)
    seen = torch.ones(B, SQ, SK, dtype=torch.bool)
    # A sink that is 1000 lower leaves exp(1000) times as much, where it is far above the scores still.
    p = teacher(q.double(), k.double(), seen, D**-0.5, sinks.double() - 950)
    exact = scores.detach().double().requires_grad_()
    wanted = (torch.special.xlogy(p, p) - p * exact.log_softmax(2)).sum()
    assert abs(loss.item() - wanted.item()) < 1e-4 * wanted.item()
    close(torch.autograd.grad(loss, scores)[0], torch.autograd.grad(wanted, exact)[0].numpy(), 1e-4)
    loss = rapt.torch.indexer_loss(scores, q, k, sinks=torch.full((HQ,), torch.inf))
    assert loss.item() == 0 and not torch.autograd.grad(loss, scores)[0].any()


def test_the_loss_of_the_indexer_counts_a_key_as_often_as_it_is_listed():
    scores, q, k, indices = loss_inputs()
    twice = torch.cat((indices, indices), 2)
    losses = [rapt.torch.indexer_loss(scores.requires_grad_(), q, k, lists) for lists in (indices, twice)]
    grads = [torch.autograd.grad(loss, scores)[0] for loss in losses]
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]  # both distributions are halved, and listed twice
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"scores": torch.zeros(SQ, SK)}, ValueError, r"scores: got shape \[9, 40\]"),
        ({"scores": torch.zeros(B, SQ, SK).double()}, TypeError, "scores: got torch.float64"),
        ({"scores": torch.zeros(B, SQ, SK).to_sparse()}, TypeError, "scores: got .*sparse"),
        ({"q": torch.zeros(B, HQ, SQ - 1, D)}, ValueError, "q: got shape"),
        ({"q": torch.zeros(B, 0, SQ, D)}, ValueError, "q: got shape"),
        ({"q": None}, TypeError, "q: got None; wanted a tensor"),
        ({"k": torch.zeros(B, HK, SK - 1, D)}, ValueError, "k: got shape"),
        ({"k": torch.zeros(B, HK, SK, D).to(torch.int8)}, TypeError, "k: got torch.int8"),
        ({"indices": torch.full((B, SQ, N), SK)}, ValueError, "indices: got 40; wanted less than sk = 40"),
        ({"sinks": torch.zeros(1)}, ValueError, r"sinks: got shape \[1\]; wanted q's heads hq = 6"),
        ({"sinks": torch.tensor(0.0)}, ValueError, r"sinks: got shape \[\]; wanted 1 dim"),
        ({"sinks": torch.zeros(HQ).int()}, TypeError, "sinks: got torch.int32"),
        ({"scale": float("nan")}, ValueError, "scale: got nan; wanted a finite number"),
        ({"scale": 1e39}, ValueError, r"scale: got 1e\+39; wanted a finite number"),
        ({"scale": "a"}, TypeError, "scale: got 'a'; wanted a number"),
        ({"scale": [1]}, TypeError, r"scale: got \[1\]; wanted a number"),
    ],
)
def test_the_loss_of_the_indexer_refuses(change, error, message):
    given = dict(zip(("scores", "q", "k", "indices"), loss_inputs()))
    with pytest.raises(error, match=f"^{message}"):
        rapt.torch.indexer_loss(**given | change)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"indices": None}, TypeError, "indices: got None; wanted a tensor"),
        ({"v": None}, TypeError, "v: got None; wanted a tensor"),
        ({"k": torch.zeros(B, HK, SK, D).to(torch.float8_e4m3fn)}, TypeError, "k: got torch.float8_e4m3fn; wanted torch.float32"),
        ({"v": torch.zeros(B, HK, SK, DV).to(torch.int8)}, TypeError, "v: got torch.int8; wanted torch.float32"),
        ({"k": torch.zeros(B, HK, SK, D).to_sparse()}, TypeError, "k: got .*sparse"),
        ({"return_lse": 1}, TypeError, "return_lse: got 1; wanted True or False"),
    ],
)
def test_sparse_attention_refuses(change, error, message, grad):
    q, k, v, _ = map(torch.from_numpy, inputs())
    given = {"q": q.requires_grad_(grad), "k": k, "v": v, "indices": torch.from_numpy(lists())}
    with pytest.raises(error, match=f"^{message}"):
        rapt.torch.sparse_attention(**given | change)
