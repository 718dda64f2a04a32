"""flash-attn's functions but the one over a cache, against float64."""

import inspect
import random

import pytest
import torch
from flash_attn_reference import DTYPES, GRADIENTS, LSE, OUT, batch, near, one, randn
from rapt import flash_attn
from rapt.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")
HEADS = ((4, 4), (6, 1), (6, 2))  # MHA, MQA, GQA
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = ((1, 1), (3, 1), (1, 30), (17, 17), (31, 64), (64, 31), (40, 113))


def modifiers(rng, b, hq):
    """Some of all at random, by the names of flash-attn."""
    given = {
        "causal": rng.random() < 0.5,
        "window_size": rng.choice(((-1, -1), (rng.randint(0, 40), 0), (rng.randint(0, 40), rng.randint(0, 40)), (None, 5))),
        "softcap": rng.choice((0.0, 2.0, 30.0)),
        "softmax_scale": rng.choice((None, 0.1)),
        "alibi_slopes": rng.choice((None, torch.rand(hq), torch.rand(b, hq))),
        "s_aux": rng.choice((None, None, torch.randn(hq))),
    }
    return given


def meant(given):
    """modifiers() by the names of the reference."""
    names = {"window_size": "window", "softmax_scale": "scale", "alibi_slopes": "slopes", "s_aux": "sinks"}
    return {names.get(name, name): x for name, x in given.items()}


def check_gradients(made, wanted, tensors, dtype):
    """made, wanted: (out, lse) of flash-attn and of float64, by which loss weighs the same numbers."""
    douts = [torch.randn(x.shape, dtype=torch.float64) for x in made]
    losses = [sum((x.double() * d).masked_fill(w.isinf(), 0).sum() for x, d, w in zip(xs, douts, wanted)) for xs in (made, wanted)]
    grads = [torch.autograd.grad(loss, tensors, allow_unused=True) for loss in losses]
    for got, true in zip(*grads):
        near(torch.zeros(()) if got is None else got, torch.zeros(()) if true is None else true, GRADIENTS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_dense_calls(d, dtype):
    rng = random.Random(d)
    for (hq, hk), (sq, sk) in zip(HEADS, rng.sample(LENGTHS, 3)):
        q, k, v = (randn(2, s, h, d, dtype=dtype, grad=True) for s, h in ((sq, hq), (sk, hk), (sk, hk)))
        given = modifiers(rng, 2, hq)
        out, lse, mask = flash_attn_func(q, k, v, **given, return_attn_probs=True)
        wanted = batch(q, k, v, **meant(given))
        assert out.dtype is dtype and lse.dtype is torch.float32 and out.is_contiguous() and mask.numel() == 0
        near(out, wanted[0], OUT[dtype])
        near(lse, wanted[1], LSE[dtype])
        assert torch.equal(flash_attn_func(q, k, v, **given), out)
        with torch.no_grad():
            assert torch.equal(flash_attn_func(q, k, v, **given), out)
        check_gradients((out, lse), wanted[:2], (q, k, v), dtype)


def test_packed_is_unpacked():
    qkv, kv = randn(2, 20, 3, 4, 32, grad=True), randn(2, 33, 2, 2, 32, grad=True)
    q = randn(2, 20, 4, 32, grad=True)
    for out, parts, whole in (
        (flash_attn_qkvpacked_func(qkv, causal=True), qkv.unbind(2), qkv),
        (flash_attn_kvpacked_func(q, kv, causal=True), (q, *kv.unbind(2)), kv),
    ):
        wanted = flash_attn_func(*parts, causal=True)
        assert torch.equal(out, wanted)
        grads = [torch.autograd.grad(x.square().sum(), whole)[0] for x in (out, wanted)]
        assert torch.equal(*grads) and grads[0].shape == whole.shape
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    for out, parts in (
        (flash_attn_varlen_qkvpacked_func(qkv[0], cu, 13, window_size=(4, 1)), qkv[0].unbind(1)),
        (flash_attn_varlen_kvpacked_func(q[0], kv[0, :20], cu, cu, 13, 13, window_size=(4, 1)), (q[0], *kv[0, :20].unbind(1))),
    ):
        assert torch.equal(out, flash_attn_varlen_func(*parts, cu, cu, 13, 13, window_size=(4, 1)))


def borders(rng, b, most):
    """Of b sequences, the second one empty, and some others."""
    lengths = [0 if i == 1 else rng.choice((0, 1, rng.randint(1, most), most)) for i in range(b)]
    return torch.tensor([0, *lengths]).cumsum(0).to(rng.choice((torch.int32, torch.int64)))


def sequences(x, cu, used=None):
    cu = cu.tolist()
    ends = cu[1:] if used is None else [begin + n for begin, n in zip(cu, used.tolist())]
    return [x[begin:end] for begin, end in zip(cu, ends)]


def ragged(qs, ks, vs, given, kept=None, p=0.0):
    """out [total_q, hq, dv], lse [hq, total_q] and probabilities of each sequence."""
    made = []
    for i, (q, k, v) in enumerate(zip(qs, ks, vs)):
        slopes = given["alibi_slopes"]
        slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[i]
        mask = None if kept is None else kept[i, :, : len(q), : len(k)]
        made.append(one(q, k, v, **meant(given | {"alibi_slopes": slopes}), kept=mask, p=p))
    outs, lses, probs = zip(*made)
    return torch.cat(outs), torch.cat(lses, 1), probs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ("plain", "used", "spare"))
def test_ragged_calls(kind, dtype):
    """used: seqused_q, seqused_k. spare: tensors with rows of no sequence."""
    for seed, (hq, hk) in enumerate(HEADS * 2):
        rng = random.Random(seed)
        d, dv = rng.choice(HEAD_DIMS[:7]), rng.choice((32, 48))
        cu_q, cu_k = borders(rng, 4, 40), borders(rng, 4, 70)
        spare = 5 if kind == "spare" else 0
        q = randn(cu_q[-1] + spare, hq, d, dtype=dtype, grad=True)
        k, v = (randn(cu_k[-1] + spare, hk, size, dtype=dtype, grad=True) for size in (d, dv))
        given, used, counting = modifiers(rng, 4, hq), {}, torch.ones(len(q), dtype=torch.bool)
        if kind == "used":
            used = {name: (torch.rand(4) * (cu.diff() + 1)).int() for name, cu in (("seqused_q", cu_q), ("seqused_k", cu_k))}
            place = torch.arange(len(q)) - torch.repeat_interleave(cu_q[:-1], cu_q.diff())
            counting = place < torch.repeat_interleave(used["seqused_q"], cu_q.diff())
        counting[cu_q[-1] :] = False
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 70, **given, **used, return_attn_probs=True)
        keys = [sequences(x, cu_k, used.get("seqused_k")) for x in (k, v)]
        wanted = ragged(sequences(q, cu_q, used.get("seqused_q")), *keys, given)[:2]
        assert (out[~counting] == 0).all() and (lse[:, ~counting] == torch.inf).all() and lse.is_contiguous()
        made = out[counting], lse[:, counting]
        near(made[0], wanted[0], OUT[dtype])
        near(made[1], wanted[1], LSE[dtype])
        check_gradients(made, wanted, (q, k, v), dtype)


@pytest.mark.parametrize("lengths_are", ("cu_seqlens_k", "seqused_k"))
def test_ragged_queries_over_pages(lengths_are):
    for seed in range(12):
        rng = random.Random(seed)
        hq, hk = rng.choice(HEADS)
        cu_q, cu_k, page_size = borders(rng, 4, 20), borders(rng, 4, 70), rng.choice((1, 16, 48))
        q, k, v = (randn(int(cu[-1]), h, 64) for cu, h in ((cu_q, hq), (cu_k, hk), (cu_k, hk)))
        most = -(-70 // page_size)
        table = torch.randperm(4 * most).view(4, most).int()
        pages = [torch.full((4 * most, page_size, hk, 64), torch.nan) for _ in range(2)]
        for i, (begin, end) in enumerate(zip(cu_k.tolist(), cu_k[1:].tolist())):
            for j in range(end - begin):
                for x, cache in zip((k, v), pages):
                    cache[table[i, j // page_size], j % page_size] = x[begin + j]
        given = modifiers(rng, 4, hq)
        lengths = {"cu_seqlens_k": cu_k} if lengths_are == "cu_seqlens_k" else {"cu_seqlens_k": None, "seqused_k": cu_k.diff()}
        out, lse, _ = flash_attn_varlen_func(
            q, *pages, cu_q, max_seqlen_q=20, max_seqlen_k=70, **lengths, **given, block_table=table, return_attn_probs=True
        )
        wanted = ragged(*(sequences(x, cu) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))), given)
        near(out, wanted[0], OUT[torch.float32])
        near(lse, wanted[1], LSE[torch.float32])


def test_gradients_of_slopes_and_sinks():
    q, k, v = (randn(2, s, h, 32, grad=True) for s, h in ((20, 4), (33, 2), (33, 2)))
    given = {"alibi_slopes": torch.rand(2, 4).requires_grad_(), "s_aux": randn(4, grad=True), "causal": True}
    made = flash_attn_func(q, k, v, **given, return_attn_probs=True)[:2]
    check_gradients(made, batch(q, k, v, **meant(given))[:2], (q, k, v, *list(given.values())[:2]), torch.float32)


def test_dropout():
    """By the mask that S_dmask shows."""
    q, k, v = (randn(2, s, h, 32, grad=True) for s, h in ((50, 4), (70, 2), (70, 2)))
    out, lse, mask = flash_attn_func(q, k, v, 0.3, causal=True, return_attn_probs=True)
    probs = batch(q, k, v, causal=True)[2]
    near(mask.abs(), probs, OUT[torch.float32])
    kept = ~mask.signbit()
    assert abs(kept[probs > 0].float().mean() - 0.7) < 0.02  # 16 000 draws: 5 standard deviations
    wanted = batch(q, k, v, causal=True, kept=kept, p=0.3)
    near(out, wanted[0], OUT[torch.float32] / 0.7)
    near(lse, wanted[1], LSE[torch.float32])
    check_gradients((out, lse), wanted[:2], (q, k, v), torch.float32)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(flash_attn_func(q, k, v, 0.3))
    assert torch.equal(*results[:2]) and not torch.equal(*results[1:])
    assert (flash_attn_func(q, k, v, 1.0) == 0).all()


def test_dropout_of_ragged_batches():
    cu_q, cu_k = torch.tensor([0, 9, 9, 30]), torch.tensor([0, 20, 25, 70])
    q, k, v = (randn(s, h, 32, grad=True) for s, h in ((33, 4), (72, 2), (72, 2)))  # some rows of no sequence
    out, lse, mask = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 21, torch.tensor(45), 0.3, return_attn_probs=True)
    assert mask.shape == (3, 4, 21, 45) and (out[30:] == 0).all()
    out, lse = out[:30], lse[:, :30]
    parts = [sequences(x, cu) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))]
    wanted = ragged(*parts, {"alibi_slopes": None}, kept=~mask.signbit(), p=0.3)
    near(mask[2].abs(), wanted[2][2], OUT[torch.float32])
    near(mask[0, :, :9, :20].abs(), wanted[2][0], OUT[torch.float32])
    near(out, wanted[0], OUT[torch.float32] / 0.7)
    check_gradients((out, lse), wanted[:2], (q, k, v), torch.float32)
    with pytest.raises(ValueError, match="max_seqlen_k: got 44; wanted 45"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 21, 44, 0.3, return_attn_probs=True)


def test_empty_tensors():
    for b, sq, sk in ((0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)):
        q, k, v = (randn(b, s, 2, 16, grad=True) for s in (sq, sk, sk))
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        assert out.shape == (b, sq, 2, 16) and lse.shape == (b, 2, sq) and (out == 0).all()
        assert sk or (lse == torch.inf).all()
        out.sum().backward()
        assert all((x.grad == 0).all() for x in (q, k, v))
    none = torch.zeros(4, dtype=torch.int32)
    empty = randn(0, 2, 16, grad=True)
    out = flash_attn_varlen_func(empty, empty, empty, none, none, 0, 0)
    out.sum().backward()
    assert out.shape == (0, 2, 16)


def test_strides_of_any_kind():
    q, k, v = (torch.randn(2, h, 16, s).permute(0, 3, 1, 2).requires_grad_() for s, h in ((20, 4), (33, 2), (33, 2)))
    given = {"causal": True}
    made = flash_attn_func(q, k, v, **given, return_attn_probs=True)[:2]
    wanted = batch(q, k, v, **given)[:2]
    near(made[0], wanted[0], OUT[torch.float32])
    check_gradients(made, wanted, (q, k, v), torch.float32)


def test_compiled_without_breaks():
    q, k, v = (randn(2, s, h, 32, grad=True) for s, h in ((20, 4), (33, 2), (33, 2)))
    cu_q, cu_k = torch.tensor([0, 15, 40], dtype=torch.int32), torch.tensor([0, 33, 66], dtype=torch.int32)

    def both(q, k, v, cu_q, cu_k):
        out, lse, _ = flash_attn_func(q, k, v, causal=True, softcap=5.0, return_attn_probs=True)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        more, sums, _ = flash_attn_varlen_func(*flat, cu_q, cu_k, 25, 33, window_size=(9, 9), return_attn_probs=True)
        packed = flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), causal=True)
        return out, lse, more, sums.masked_fill(sums == torch.inf, 0), packed

    made, wanted = torch.compile(both, backend="aot_eager", fullgraph=True)(q, k, v, cu_q, cu_k), both(q, k, v, cu_q, cu_k)
    for got, true in zip(made, wanted):
        assert torch.equal(got, true)
    grads = [torch.autograd.grad(sum(x.square().sum() for x in xs), (q, k, v)) for xs in (made, wanted)]
    for got, true in zip(*grads):
        near(got, true, 1e-6)


def test_pages_and_dropout_are_compiled():
    q, pages = randn(9, 4, 32), randn(6, 16, 2, 32)
    cu, table, used = torch.tensor([0, 4, 9]), torch.tensor([[3, 1], [0, 5]]), torch.tensor([20, 32])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def paged(q, pages, cu, table, used):
        return flash_attn_varlen_func(q, pages, pages, cu, None, 5, 32, causal=True, block_table=table, seqused_k=used)

    wanted = flash_attn_varlen_func(q, pages, pages, cu, None, 5, 32, causal=True, block_table=table, seqused_k=used)
    assert torch.equal(paged(q, pages, cu, table, used), wanted)

    x = randn(1, 50, 2, 16, grad=True)
    dropped = torch.compile(lambda x: flash_attn_func(x, x, x, 0.5), backend="aot_eager", fullgraph=True)
    first, second = dropped(x), dropped(x)
    assert not torch.equal(first, second) and not torch.equal(first, flash_attn_func(x, x, x))
    assert all(torch.autograd.grad(y.sum(), x)[0].isfinite().all() for y in (first, second))


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    q, k = randn(2, 20, 4, 32, grad=True), randn(2, 33, 2, 32)
    with FlopCounterMode(display=False) as counter:
        flash_attn_func(q, k, k)
    assert counter.get_total_flops() == 4 * 2 * 4 * 20 * 33 * 32
    cu_q, cu_k = torch.tensor([0, 15, 40]), torch.tensor([0, 30, 66])
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), cu_q, cu_k, 25, 36).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 4 * (15 * 30 + 25 * 36) * 32


def test_second_derivatives_are_refused():
    q = randn(1, 5, 2, 16, grad=True)
    (grad,) = torch.autograd.grad(flash_attn_func(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        grad.sum().backward()


SIGNATURES = {
    "flash_attn_func": "q k v",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
}
SHARED = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
SHARED |= {"deterministic": False, "return_attn_probs": False}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = [p for p in inspect.signature(getattr(flash_attn, name)).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed, others = SIGNATURES[name].split(), dict(SHARED)
    if name == "flash_attn_varlen_func":
        others["block_table"] = None
    assert [p.name for p in parameters] == needed + list(others)
    assert {p.name: p.default for p in parameters[len(needed) :]} == others
