"""Sparse and latent attention of a GPU's tensors: rapt.attention with lists of keys, rapt.torch, rapt.mla and FlashMLA's functions."""

import pytest
import rapt
import rapt.mla
import rapt.torch
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["operation"] == "attention" and entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))


def on_gpu(given):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def check(got, wanted, dtype):
    for one, other in zip(got, wanted):
        one, other = one.cpu().double(), other.double()
        assert one.shape == other.shape and torch.equal(one.isfinite(), other.isfinite())
        one, other = one[one.isfinite()], other[other.isfinite()]
        assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


def lists(b, tokens, n, rows):
    """With gaps, and a token without keys."""
    drawn = torch.randint(-rows // 8, rows, (b, tokens, n), dtype=torch.int32)
    drawn[-1, -1] = -1
    return drawn


@TYPES
@pytest.mark.parametrize("heads", [(8, 2, 64, 64), (16, 1, 576, 512), (128, 1, 576, 512)])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_gathered_like_the_cpu(dtype, heads, pool, tokens):
    torch.manual_seed(1)
    hq, hk, d, dv = heads
    k = torch.randn(1 if pool else 3, hk, 700, d).to(dtype)
    given = {
        "q": torch.randn(3, hq, tokens, d).to(dtype),
        "k": k,
        "v": k[..., :dv],
        "indices": lists(3, tokens, 300, 700),
        "counts": torch.randint(0, 301, (3, tokens)),
        "scale": 0.05,
    }
    if tokens > 1:  # tokens before heads, as models have them
        given["q"] = given["q"].transpose(1, 2).contiguous().transpose(1, 2)
    wanted = rapt.attention(**{name: x.float() if name in ("q", "k", "v") else x for name, x in given.items()}, return_lse=True)
    there = on_gpu(given)
    there["v"] = there["k"][..., :dv]
    for function in (rapt.attention, rapt.torch.sparse_attention):
        got = function(**there, return_lse=True)
        assert all(x.is_cuda for x in got) and got[0].dtype == dtype
        check(got, wanted, dtype)
    one_by_one = rapt.attention(**(there | {name: there[name][1:2] for name in ("q", "indices", "counts")} | ({} if pool else {
        name: there[name][1:2] for name in ("k", "v")})))
    assert torch.equal(one_by_one[0], got[0][1])


def test_compiled_in_a_graph_without_gradients():
    torch.manual_seed(2)
    q, k = torch.randn(1, 16, 4, 64, device="cuda", dtype=torch.bfloat16), torch.randn(1, 1, 99, 64, device="cuda", dtype=torch.bfloat16)
    indices = lists(1, 4, 40, 99).cuda()
    wanted = rapt.torch.sparse_attention(q, k, k, indices)
    assert torch.equal(torch.compile(rapt.torch.sparse_attention, fullgraph=True)(q, k, k, indices), wanted)
    out = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rapt.attention(q, k, k, indices=indices, out=out)
    indices.copy_(indices.flip(1))
    graph.replay()
    assert torch.equal(out, rapt.attention(q, k, k, indices=indices)) and not torch.equal(out, wanted)
    with pytest.raises(ValueError, match="gradients of gathered keys have no GPU kernels yet"):
        rapt.torch.sparse_attention(q.requires_grad_(), k, k, indices)


def test_entries_that_are_none_are_clamped():
    torch.manual_seed(8)
    q, k = torch.randn(1, 4, 3, 64, device="cuda"), torch.randn(1, 1, 50, 64, device="cuda")
    indices, counts = torch.randint(0, 90, (1, 3, 20), device="cuda"), torch.tensor([[-4, 70, 9]], device="cuda")
    wanted = rapt.attention(q, k, k, indices=indices.clamp(max=49), counts=counts.clamp(0, 20))
    assert torch.equal(rapt.attention(q, k, k, indices=indices, counts=counts), wanted)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_latent_attention_has_no_autocast(form):
    torch.manual_seed(9)
    given = on_gpu(latents(torch.float32))
    with torch.autocast("cuda"):
        got = rapt.mla.attention(**given, form=form)
    assert torch.equal(got, rapt.mla.attention(**given, form=form))


def test_devices_that_differ_are_refused():
    given = on_gpu(latents(torch.float32))
    with pytest.raises(ValueError, match="w_uk: got a tensor on cpu; wanted one on cuda:0, as q_nope is"):
        rapt.mla.attention(**given | {"w_uk": given["w_uk"].cpu()})


def latents(dtype):
    given = {
        "q_nope": torch.randn(2, 6, 16, 128),
        "q_rope": torch.randn(2, 6, 16, 64),
        "kv": torch.randn(2, 300, 576),
        "w_uk": torch.randn(16, 128, 512) / 20,
        "w_uv": torch.randn(16, 128, 512) / 20,
    }
    return {name: x.to(dtype) for name, x in given.items()}


@TYPES
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("keys", ["all", "some", "pages"])
def test_latent_like_the_cpu(dtype, form, keys):
    torch.manual_seed(3)
    given = latents(dtype) | {"causal": True, "align": "bottom_right", "form": form, "return_lse": True}
    if keys != "all":
        given["seqlens"] = torch.tensor([300, 41])
    if keys == "pages":
        given["kv"] = given["kv"].reshape(30, 20, 576)
        given["block_table"] = torch.randperm(30).reshape(2, 15)
    wanted = rapt.mla.attention(**{name: x.float() if name in latents(dtype) else x for name, x in given.items()})
    check(rapt.mla.attention(**on_gpu(given)), wanted, dtype)


@TYPES
def test_sparse_latents_like_the_cpu(dtype):
    torch.manual_seed(4)
    given = latents(dtype) | {"indices": lists(2, 6, 120, 300), "return_lse": True}
    wanted = rapt.mla.attention(**{name: x.float() if name in latents(dtype) else x for name, x in given.items()})
    check(rapt.mla.attention(**on_gpu(given)), wanted, dtype)
    with pytest.raises(ValueError, match="gradients of latent attention have no GPU kernels yet"):
        rapt.mla.attention(**on_gpu(given) | {"q_nope": given["q_nope"].cuda().requires_grad_()})


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_flash_mla(fp8, sparse):
    torch.manual_seed(5)
    new, lengths = torch.randn(2, 130, 576).bfloat16(), torch.tensor([130, 77], dtype=torch.int32)
    table = torch.randperm(10, dtype=torch.int32).reshape(2, 5)
    q = torch.randn(2, 2, 64, 576).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        empty, pages = torch.zeros(2, dtype=torch.int32, device=device), table.to(device)
        if fp8:
            cache = torch.zeros(10, 32, 656, dtype=torch.uint8, device=device)
            rapt.mla.append_fp8_rows(new.to(device), cache, empty, block_table=pages)
        else:
            cache = torch.zeros(10, 32, 576, dtype=torch.bfloat16, device=device)
            rows, latent = new[:, None].to(device), cache[:, None]
            rapt.append_kv(rows, rows[..., :512], latent, latent[..., :512], empty, block_table=pages)
        options = {"softmax_scale": 0.07, "is_fp8_kvcache": fp8}
        if sparse:
            torch.manual_seed(6)
            options["indices"] = lists(2, 2, 90, 320).to(device)
            options["attn_sink"] = torch.randn(64).to(device)
            options["topk_length"] = torch.tensor([90, 31], dtype=torch.int32, device=device)
        else:
            options["causal"] = True
        results.append(
            rapt.mla.flash_mla_with_kvcache(q.to(device), cache[:, :, None], pages, lengths.to(device), 512, **options)
        )
    check(results[1], results[0], torch.bfloat16)


def test_flash_mla_prefill():
    torch.manual_seed(7)
    q, kv = torch.randn(9, 128, 576).bfloat16() / 10, torch.randn(500, 1, 576).bfloat16() / 10
    indices = lists(9, 1, 200, 500)
    wanted = rapt.mla.flash_mla_sparse_fwd(q, kv, indices, 0.1)
    check(rapt.mla.flash_mla_sparse_fwd(q.cuda(), kv.cuda(), indices.cuda(), 0.1), wanted, torch.bfloat16)
