"""Tiny random models through vLLM, with rapt's kernels and with vLLM's own: the same tokens. It needs vLLM, and some minutes.

    python -m pytest python/tests/test_vllm.py python/tests/test_vllm_layers.py python/tests/test_vllm_engine.py
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
import vllm_models  # noqa: E402

HERE = Path(__file__).parent
NAMES = [*vllm_models.MODELS, "llama_fp8", "llama_tp2", "mqa_dcp2", "mqa_a2a"]
LIMIT_S = 1800  # of all models with one kind of kernels, where two cores are busy


def environment(folder, **more):
    """Of a process that runs vLLM: offline, on two threads, and with the entry point also where rapt was not installed by pip."""
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if not any(point.value == "rapt.vllm:register" for point in entry_points(group="vllm.general_plugins")):
        info = folder / "rapt_attention-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rapt-attention\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrapt = rapt.vllm:register\n")
        paths.insert(0, str(folder))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # two ranks on one NUMA node
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in vllm_models.MODELS:
        vllm_models.make(name, str(folder / name), torch.bfloat16 if name == "qwen3_next" else torch.float32)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """What vllm_generate.py wrote, and the log, with vLLM's own kernels (0) and rapt's (1)."""
    made = []
    for wanted in "01":
        command = [sys.executable, str(HERE / "vllm_generate.py"), str(folder), *NAMES]
        done = subprocess.run(
            command, env=environment(folder, RAPT_VLLM=wanted), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        made.append((json.loads((folder / f"out.{wanted}.json").read_text()), done.stdout + done.stderr))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_same_results(results, name):
    (theirs, _), (ours, _) = results
    theirs, ours = theirs[name], ours[name]
    assert "error" not in ours, ours["error"]
    if name in ("mqa_dcp2", "mqa_a2a"):  # vLLM's own kernels refuse: these tokens are to be those of one process
        assert "error" in theirs
        theirs = results[0][0]["mqa"]
    assert "error" not in theirs, theirs["error"]
    assert theirs["taken"] == 0
    assert ours["taken"] > 0 and ours["left"] == 0
    if name == "bert":
        torch.testing.assert_close(torch.tensor(ours["vectors"]), torch.tensor(theirs["vectors"]), rtol=1e-4, atol=1e-4)
    elif name in ("qwen3_next", "llama_fp8"):  # near-ties: most first tokens, before rounding has chosen another text
        first = [[tokens[0] for run in made["tokens"] for tokens in run] for made in (ours, theirs)]
        assert sum(a == b for a, b in zip(*first)) >= 2 / 3 * len(first[0])
    else:
        assert ours["tokens"] == theirs["tokens"]
        assert len({tuple(tokens) for tokens in ours["tokens"][0]}) > 1  # models that say one thing only would prove nothing


def test_log_says_who_computes(results):
    (_, theirs), (_, ours) = results
    assert "rapt computes" not in theirs and "rapt leaves" not in theirs
    for what in ("attention", "multi-head latent attention", "the gated delta rule"):
        assert f"rapt computes {what} (RAPT_VLLM=0 switches it off)" in ours


def test_server(folder, results):
    """The OpenAI server on the loopback interface gives the tokens that LLM.generate() gives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "llama"), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--served-model-name", "tiny"]
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment(folder, RAPT_VLLM="1"), stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(server, url + "/health", log)
        wanted = results[1][0]["llama"]
        body = {"model": "tiny", "prompt": wanted["prompts"], "temperature": 0, "max_tokens": 24}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            choices = json.load(answer)["choices"]
        assert [choice["token_ids"] for choice in choices] == wanted["tokens"][0]
        assert "rapt computes attention" in log.read_text()
    finally:
        server.terminate()
        server.wait(60)


def _wait(server, url, log, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise TimeoutError(log.read_text()[-4000:])
