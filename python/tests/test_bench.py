"""python -m rapt.bench on a problem small enough for a test. What it times is not looked at, only that it does."""

import json
import os
import subprocess
import sys
import xml.dom.minidom

import pytest
import rapt.torch
import torch
from rapt import bench

SMALL = [bench.Case("square & causal", 1, 2, 2, 40, 40, 16, True), bench.Case("decode", 2, 4, 2, 1, 50, 16, False)]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(bench.SETS, "quick", lambda: SMALL)
    return ["--seconds", "0", "--sample-ms", "0", "--samples", "2", "--seeds", "2"]


def test_report(small, tmp_path, capsys):
    threads = torch.get_num_threads()
    files = tmp_path / "bench.json", tmp_path / "bench.svg"
    bench.main([*small, "--dtype", "fp32,bf16", "--threads", "1,2", "--json", str(files[0]), "--svg", str(files[1])])
    assert torch.get_num_threads() == threads
    document = json.loads(files[0].read_text())
    rows = document["rows"]
    assert [(row["threads"], row["dtype"], row["name"]) for row in rows] == [
        (n, dtype, case.name) for n in (1, 2) for dtype in ("fp32", "bf16") for case in SMALL
    ]
    for row in rows:
        bound = 1e-5 if row["dtype"] == "fp32" else 0.05
        for side in bench.SIDES:
            numbers = row[side]
            assert 0 < numbers["best_ms"] <= numbers["median_ms"]
            assert 0 < numbers["rel_err"] < bound and 0 < numbers["max_err"] < bound
            assert numbers["peak_bytes"] is None or 0 <= numbers["peak_bytes"] < 1 << 28
        assert row["vs_torch"] > 0
        assert row["vs_torch_best"] == pytest.approx(row["torch"]["best_ms"] / row["rapt"]["best_ms"])
    assert [line["cases"] for line in document["summary"]] == [2] * 4
    text = " ".join(t.data for t in nodes(xml.dom.minidom.parse(str(files[1]))))
    printed = capsys.readouterr().out
    for case in SMALL:
        assert case.name in text and case.name in printed
    assert "bf16, 2 threads" in text and "geometric mean" in printed


def nodes(node):
    if node.nodeType == node.TEXT_NODE:
        yield node
    for child in node.childNodes:
        yield from nodes(child)


def test_memory_is_at_least_that_of_the_result():
    case = bench.Case("", 1, 8, 8, 1024, 1024, 64, False)
    peaks = bench.memory(case, ["rapt", "math"], "fp32", 1)
    if None in peaks.values():
        pytest.skip("this system does not tell")
    result, scores = 8 * 1024 * 64 * 4, 8 * 1024 * 1024 * 4
    slack = 1 << 19  # Linux counts by the 64 pages of a thread
    assert result - slack < peaks["rapt"] < scores - slack < peaks["math"]


@pytest.mark.filterwarnings("error::rapt.torch.FallbackWarning")
def test_every_case_runs_on_rapt():
    for name in bench.SETS:
        for case in bench.SETS[name]():
            rapt.torch._warned.clear()
            with torch.inference_mode():
                q, k, v = case.tensors(torch.float32, 0)
                out = bench.run_side("rapt", case, [q[:, :, :1], k[:, :, :2], v[:, :, :2]])
            assert out.shape == (case.b, case.hq, 1, case.d)


@pytest.mark.parametrize("with_tqdm", [False, True])
def test_progress(with_tqdm, monkeypatch, capsys):
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = bench.Progress(4)
    for name in ("first", "second"):
        progress.begin(name)
        progress.step()
    progress.close()
    shown = capsys.readouterr().err
    assert "second" in shown and ("1/4" in shown or "25%" in shown)


@pytest.mark.parametrize("words", [["--dtype", "int8"], ["--threads", "0"], ["--set", "none"], ["--json", "/no/such/x"]])
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert stop.value.code == 2 and words[0] in capsys.readouterr().err


def test_without_torch_it_says_what_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", "rapt.bench"], capture_output=True, text=True, env=environment)
    assert run.returncode == 1 and "pip install torch" in run.stderr
