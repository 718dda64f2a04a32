"""The indexer of sparse attention on a GPU's tensors: rapt.dsa and rapt.torch."""

import pytest
import rapt
import rapt.torch
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["operation"] == "index_scores" and entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)


def draw(dtype, sq=9, sk=300, h=12, d=64):
    torch.manual_seed(1)
    return {"q": torch.randn(2, sq, h, d).to(dtype), "k": torch.randn(2, sk, d).to(dtype), "w": torch.randn(2, sq, h)}


def on_gpu(given):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def close(got, wanted):
    assert got.is_cuda and got.dtype == torch.float32
    got = got.cpu()
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    seen = wanted > -torch.inf
    return ((got - wanted)[seen].norm() / wanted[seen].norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [rapt.dsa, rapt.torch])
def test_like_the_cpu(dtype, module):
    given = draw(dtype) | {"align": "bottom_right"}
    scores = module.index_scores(**on_gpu(given))
    assert close(scores, rapt.dsa.index_scores(**given))
    best = module.index_topk(**on_gpu(given), n=20)
    assert best.is_cuda and torch.equal(best.cpu(), rapt.dsa.select_topk(scores.cpu(), 20))


def test_pages_of_quantised_keys():
    given = draw(torch.bfloat16, sk=192)
    pages = {
        "k": (given.pop("k") * 30).round().clamp(-127, 127).to(torch.int8).view(12, 32, 64),
        "k_scale": torch.rand(12, 32),
        "seqlens": torch.tensor([150, 192], dtype=torch.int32),
        "block_table": torch.tensor([[7, 2, 11, 0, 5, 9], [1, 3, 4, 6, 8, 10]]),
    }
    given |= pages | {"align": "bottom_right"}
    assert close(rapt.dsa.index_scores(**on_gpu(given)), rapt.dsa.index_scores(**given))


def test_compiled_and_in_a_graph():
    given = on_gpu(draw(torch.bfloat16)) | {"n": 20, "align": "bottom_right"}
    wanted = rapt.torch.index_topk(**given)
    compiled = torch.compile(rapt.torch.index_topk, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given), wanted)
    out = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rapt.dsa.index_topk(**given, out=out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


def test_gradients_are_refused():
    given = on_gpu(draw(torch.float32))
    given["q"].requires_grad_()
    with pytest.raises(ValueError, match="q: got a tensor on cuda:0; wanted one on the cpu: gradients of the indexer"):
        rapt.torch.index_scores(**given, align="bottom_right")
