"""rapt.dsa.select_topk and rapt.torch.select_topk on a GPU's tensors."""

import pytest
import rapt
import rapt.dsa
import rapt.torch
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["operation"] == "select_topk" and entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)


@pytest.fixture
def scores():
    """Numbers, a ReLU's zeros, hidden keys and NaN."""
    torch.manual_seed(1)
    rows = torch.randn(4, 6, 5000)
    rows[1] = rows[1].relu()
    rows[2, :, ::3] = -torch.inf
    rows[3, :, :2] = torch.nan
    rows[3, 1] = -torch.inf
    return rows


@pytest.mark.parametrize("n", [1, 64, 2048, 6000])
def test_like_the_cpu(scores, n):
    wanted = rapt.dsa.select_topk(scores, n)
    there = scores.cuda()
    strided = there.transpose(0, 1).contiguous().transpose(0, 1)
    compiled = torch.compile(rapt.torch.select_topk, fullgraph=True)
    for function, given in [(rapt.dsa.select_topk, there), (rapt.torch.select_topk, strided), (compiled, there)]:
        got = function(given, n)
        assert got.device == there.device and got.dtype == torch.int32
        assert torch.equal(got.cpu(), wanted)
    out = torch.empty_like(wanted, device="cuda")
    assert rapt.torch.select_topk(there, n, out=out) is out
    assert torch.equal(out.cpu(), wanted)


def test_in_a_graph(scores):
    there, out = scores.cuda(), torch.empty(4, 6, 2048, device="cuda", dtype=torch.int32)
    rapt.torch.select_topk(there, 2048, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rapt.torch.select_topk(there, 2048, out=out)
    there.copy_(scores.flip(-1))
    graph.replay()
    assert torch.equal(out.cpu(), rapt.dsa.select_topk(scores.flip(-1), 2048))


def test_refusals(scores):
    with pytest.raises(ValueError, match="^out: "):
        rapt.torch.select_topk(scores.cuda(), 4, out=torch.empty(4, 6, 4, dtype=torch.int32))
