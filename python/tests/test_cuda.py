"""rapt.attention on a GPU's tensors. Skipped where there is no GPU or rapt was built without CUDA."""

import pytest
import rapt
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip("rapt was built without CUDA", allow_module_level=True)


def tensors(dtype=torch.float32, sq=70, sk=90, d=40):
    torch.manual_seed(1)
    return [torch.randn(2, h, s, d).to(dtype) for h, s in ((6, sq), (2, sk), (2, sk))]


def relative(got, wanted):
    return ((got.cpu().double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True, "align": "bottom_right"},
        {"window": (20, 3), "align": "top_left", "softcap": 5.0},
        {"scale": 0.2, "return_lse": True},
    ],
)
def test_like_the_cpu(dtype, bound, arguments):
    q, k, v = tensors(dtype)
    wanted = rapt.attention(q, k, v, **arguments)
    got = rapt.attention(q.cuda(), k.cuda(), v.cuda(), **arguments)
    if not arguments.get("return_lse"):
        wanted, got = [wanted], [got]
    for a, b in zip(got, wanted, strict=True):
        assert a.device == torch.device("cuda:0")
        assert a.dtype is b.dtype and a.shape == b.shape
        assert relative(a, b) < bound


def test_tensors_of_scores():
    q, k, v = tensors()
    arguments = {
        "mask": torch.rand(70, 90) > 0.3,
        "bias": torch.randn(6, 1, 90),
        "alibi": torch.rand(6),
        "sinks": torch.randn(6),
    }
    wanted = rapt.attention(q, k, v, align="top_left", **arguments)
    on_gpu = {name: tensor.cuda() for name, tensor in arguments.items()}
    assert relative(rapt.attention(q.cuda(), k.cuda(), v.cuda(), align="top_left", **on_gpu), wanted) < 1e-6


def test_ragged_and_pages():
    q, k, v = (torch.randn(s, h, 32) for s, h in ((50, 4), (60, 2), (60, 2)))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 50], [0, 25, 60])]
    on_gpu = [t.cuda() for t in (q, k, v, *starts)]
    wanted = rapt.attention(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    got = rapt.attention(*on_gpu[:3], cu_seqlens_q=on_gpu[3], cu_seqlens_k=on_gpu[4])
    assert relative(got, wanted) < 1e-6

    q, pages, table = torch.randn(2, 4, 1, 32), torch.randn(8, 2, 16, 32), torch.tensor([[3, 1, 6], [0, 5, 2]])
    lengths = torch.tensor([37, 48])
    wanted = rapt.attention(q, pages, pages, block_table=table, cache_seqlens=lengths)
    got = rapt.attention(
        q.cuda(), pages.cuda(), pages.cuda(), block_table=table.cuda(), cache_seqlens=lengths.cuda()
    )
    assert relative(got, wanted) < 1e-6


def test_current_stream():
    q, k, v = (t.cuda() for t in tensors(sq=500, sk=500, d=128))
    wanted = rapt.attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.empty_like(q)
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        got = rapt.attention(late, k, v)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(got, wanted)


def test_explain():
    q, k, v = (t.cuda() for t in tensors())
    assert ".cuda" in rapt.explain(q, k, v).entry


def test_refusals():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k: got a tensor on another device than q"):
        rapt.attention(q.cuda(), k, v)
    with pytest.raises(ValueError, match="align: got none, with lengths on a device"):
        rapt.attention(q.cuda(), k.cuda(), v.cuda(), cache_seqlens=torch.tensor([90, 90]).cuda(), causal=True)
    with pytest.raises(ValueError, match="takes other element types"):
        codes = k.to(torch.int8).cuda()
        scale = torch.ones(1, 2, 1, 1).cuda()
        rapt.attention(q.cuda(), codes, codes, k_scale=scale, v_scale=scale)
