"""python -m rapt.bench on problems small enough for a test. What it times is not looked at, only that it does, and what it
makes of given times."""

import importlib
import json
import math
import os
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest
import rapt.torch
import torch
from rapt import _chart, bench
from rapt.bench import ops, timing
from rapt.bench.report import Progress

SMALL = [ops.Case("square & causal", 1, 2, 2, 40, 40, 16, True), ops.Case("decode", 2, 4, 2, 1, 50, 16, False)]
ONCE = ["--seconds", "0", "--sample-ms", "0", "--samples", "2"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(ops.SETS, "quick", lambda: SMALL)
    monkeypatch.setattr(timing, "NOISY", math.inf)
    return [*ONCE, "--seeds", "2"]


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
        for side in ops.SIDES:
            numbers = row[side]
            assert 0 < numbers["best_ms"] <= numbers["median_ms"]
            assert 0 < numbers["rel_err"] < bound and 0 < numbers["max_err"] < bound
            assert numbers["peak_bytes"] is None or 0 <= numbers["peak_bytes"] < 1 << 28
        assert row["vs_torch"] > 0
        assert row["vs_torch_best"] == pytest.approx(row["torch"]["best_ms"] / row["rapt"]["best_ms"])
        for way in (row["torch"], row["rapt"]):
            assert 0 < way["back_to_back"]["best_ms"] <= way["back_to_back"]["median_ms"]
        ratio = row["torch"]["back_to_back"]["best_ms"] / row["rapt"]["back_to_back"]["best_ms"]
        assert row["vs_torch_back_to_back_best"] == pytest.approx(ratio)
    for line in document["summary"]:
        assert [(line[way]["cases"], line[way]["left_out"]) for way in ("paused", "back_to_back")] == [(2, 0)] * 2
    text = " ".join(t.data for t in nodes(xml.dom.minidom.parse(str(files[1]))))
    printed = capsys.readouterr().out
    for case in SMALL:
        assert case.name in text and case.name in printed
    assert "bf16, 2 threads" in text and "paused: geometric mean" in printed and "back to back: geometric mean" in printed


def nodes(node):
    if node.nodeType == node.TEXT_NODE:
        yield node
    for child in node.childNodes:
        yield from nodes(child)


def test_memory_is_at_least_that_of_the_result():
    case = ops.Case("", 1, 8, 8, 1024, 1024, 64, False)
    peaks = ops.memory(case, ["rapt", "math"], "fp32", 1)
    if None in peaks.values():
        pytest.skip("this system does not tell")
    result, scores = 8 * 1024 * 64 * 4, 8 * 1024 * 1024 * 4
    slack = 1 << 19  # Linux counts by the 64 pages of a thread
    assert result - slack < peaks["rapt"] < scores - slack < peaks["math"]


@pytest.mark.filterwarnings("error::rapt.torch.FallbackWarning")
def test_every_case_runs_on_rapt():
    for name in ops.SETS:
        for case in ops.SETS[name]():
            rapt.torch._warned.clear()
            with torch.inference_mode():
                q, k, v = case.tensors(torch.float32, 0)
                out = ops.run_side("rapt", case, [q[:, :, :1], k[:, :, :2], v[:, :, :2]])
            assert out.shape == (case.b, case.hq, 1, case.d)


@pytest.mark.parametrize("with_tqdm", [False, True])
def test_progress(with_tqdm, monkeypatch, capsys):
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(4)
    for name in ("first", "second"):
        progress.begin(name)
        progress.step()
    progress.close()
    shown = capsys.readouterr().err
    assert "second" in shown and ("1/4" in shown or "25%" in shown)


@pytest.mark.parametrize("words", [["--dtype", "int8"], ["--threads", "0"], ["--set", "none"], ["--json", "/no/such/x"], ["--quick"]])
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert stop.value.code == 2 and words[0] in capsys.readouterr().err


def row_of(name, paused, back_to_back):
    row = {"name": name, "dtype": "fp32", "threads": 1, "rapt": timing.statistics_of(paused[1])}
    timing.add_ratio(row, "vs_torch", *paused)
    timing.add_ratio(row, "vs_torch_back_to_back", *back_to_back)
    return row


STEADY, NOISY = [1.0, 1.0, 1.1, 1.1, 1.1], [1.0, 1.0, 1.1, 1.5, 9.0]


def test_noisy_rows_are_marked_and_left_out():
    assert timing.spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)  # quartiles 2 and 4, median 3
    assert timing.spread_of(STEADY) < timing.NOISY == 0.2 < timing.spread_of(NOISY)
    twice = [2 * x for x in STEADY]
    rows = [
        row_of("steady", (twice, STEADY), (STEADY, STEADY)),
        row_of("ours noisy", (twice, NOISY), (twice, STEADY)),
        row_of("both ways noisy", (NOISY, STEADY), (STEADY, NOISY)),
    ]
    both = ["vs_torch", "vs_torch_back_to_back"]
    assert [row["noisy"] for row in rows] == [[], both[:1], both]
    assert [row["vs_torch"] for row in rows][:2] == pytest.approx([2, 2])
    paused, back_to_back = (timing.mean_of(rows, name) for name in both)
    assert paused == pytest.approx({"cases": 1, "left_out": 2, "geomean": 2, "least": 2, "most": 2})
    assert back_to_back == pytest.approx({"cases": 2, "left_out": 1, "geomean": 2**0.5, "least": 1, "most": 2})
    assert timing.mean_text(paused) == "geometric mean 2.00, 2.00 to 2.00 (1 row; 2 left out as noisy)"
    assert timing.mean_text(timing.mean_of(rows[2:], "vs_torch")) == "no mean; 1 left out as noisy"
    context = {"torch_cpu_capability": "", "cpu": "", "rapt": "", "torch": "", "date": ""}
    for shown, count in ((rows, 3), (rows[2:], 1)):
        drawing = xml.dom.minidom.parseString(_chart.svg(context, shown))
        text = " ".join(t.data for t in nodes(drawing))
        assert "both ways noisy" not in text and f"left out as noisy: 1 of {count} rows" in text
        assert ("ours noisy" in text and "noisy, back to back 2.00×" in text) == (count == 3)
        bars = [r for r in drawing.getElementsByTagName("rect") if r.getAttribute("x") == str(_chart.LABELS)]
        assert len(bars) == (3 if count == 3 else 0)


def test_compare_torch_leaves_out_noisy_rows(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    compare_torch = importlib.import_module("compare_torch")
    rows = []
    for paused, back_to_back in (STEADY, STEADY), (NOISY, STEADY):
        samples = {"": [[x / 2 for x in STEADY], paused], "back_to_back_": [STEADY, back_to_back]}
        rows.append({"dtype": "f32", "threads": 1, "d": 64} | compare_torch.timings(samples, ["torch_"]))
    peers = {"vs_torch": "torch, paused", "vs_torch_back_to_back": "torch, back to back"}
    (line,) = compare_torch.summarise(rows, peers)
    assert [line[peer]["left_out"] for peer in peers] == [1, 0]
    assert [line[peer]["geomean"] for peer in peers] == pytest.approx([2, 1])
    assert rows[1]["torch_median_ms"] == 1100 and rows[1]["torch_back_to_back_spread"] < timing.NOISY
    compare_torch.print_summary([line], peers)
    assert "| f32 | 1 | 64 | **2.00** / 2.00 | 1 (1) | **1.00** / 1.00 | 2 (0) |" in capsys.readouterr().out


@pytest.mark.parametrize("pause", [True, False])
def test_turns(pause, monkeypatch):
    """Paused, each side calls alone after a pause and a call that is not counted; back to back, they alternate."""
    turns = []
    monkeypatch.setattr(timing, "calls_per_sample", lambda call, least_s: 2 if call.__name__ == "a" else 3)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: turns.append("-"))

    def a():
        turns.append("a")

    def b():
        turns.append("b")

    samples = timing.interleave([[a, b]], pause=pause, seconds=0, samples=2, sample_s=0)
    assert "".join(turns) == ("-aaa-bbbb" if pause else "ababab") * 2
    assert [len(own) for own in samples] == [2, 2]


def test_models(tmp_path, capsys, monkeypatch):
    models = pytest.importorskip("rapt.bench.models", reason="needs transformers")
    monkeypatch.setattr(timing, "NOISY", math.inf)
    file = tmp_path / "models.json"
    bench.main(["--models", "--quick", *ONCE, "--threads", "1,2", "--json", str(file)])
    document = json.loads(file.read_text())
    assert {"cpu", "cpus", "torch", "transformers", "rapt", "date"} <= set(document["context"])
    order = [(n, dtype, m.name) for n in (1, 2) for dtype in ("fp32", "bf16") for m in models.quick()]
    assert [(row["threads"], row["dtype"], row["name"]) for row in document["rows"]] == order
    for row in document["rows"]:
        assert 0 < row["difference"] / row["largest"] < (1e-5 if row["dtype"] == "fp32" else 0.05)
        assert row["vs_sdpa_best"] == pytest.approx(row["sdpa"]["best_ms"] / row["rapt"]["best_ms"])
        for side in models.SIDES:
            assert 0 < row[side]["best_ms"] <= row[side]["median_ms"] and 0 < row[side]["attention"] < 1
    assert [line["back_to_back"]["cases"] for line in document["summary"]] == [6] * 4
    printed = capsys.readouterr().out
    assert "sdpa / rapt, back to back: geometric mean" in printed and "decode after 1024" in printed


def test_models_share_weights_and_keep_their_caches():
    models = pytest.importorskip("rapt.bench.models", reason="needs transformers")
    case = models.quick()[-1]
    pair = models.Pair(case, torch.float32)
    sdpa, other = pair.sides["sdpa"], pair.sides["rapt"]
    assert [s.model.config._attn_implementation for s in (sdpa, other)] == ["sdpa", "rapt"]
    for ours, theirs in zip(other.model.parameters(), sdpa.model.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
    with torch.inference_mode():
        assert torch.equal(other(), other())
    assert other.cache is not sdpa.cache and other.cache.get_seq_length() == case.length
    assert other.attention_s == 0  # no clock
    with torch.inference_mode(), other.clocked():
        other()
        assert other.attention_s > 0 and sdpa.attention_s == 0


def test_models_are_those_that_people_use():
    models = pytest.importorskip("rapt.bench.models", reason="needs transformers")
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in models.build(m)[0].parameters()) / 1e6 for m in models.MODELS]
    assert sizes == pytest.approx([109.5, 22.7, 86.4, 20.6, 213.1, 213.1], rel=0.01)


@pytest.mark.parametrize(
    "words, missing, command", [([], "torch", "pip install torch"), (["--models"], "transformers", "pip install 'transformers")]
)
def test_what_is_missing_is_named(words, missing, command, tmp_path):
    (tmp_path / f"{missing}.py").write_text("raise ImportError")
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-m", "rapt.bench", *words], capture_output=True, text=True, env=environment)
    assert run.returncode == 1 and command in run.stderr
