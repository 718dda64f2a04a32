"""python -m rapt.bench on problems small enough for a test. What it times is not looked at, only that it does, and what it
makes of given times."""

import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest
import rapt.torch
import torch
from rapt import _chart, _core, bench
from kernel_calls import backward_calls
from rapt.bench import ops, report, sets, timing
from rapt.bench.report import Progress

SMALL = """# Two problems that PyTorch has a counterpart of
b=1 hq=2 sq=40 d=16 causal  # square & causal

b=2 hq=4 hk=2 sq=1 sk=50 d=16 dv=8
kv=i8 groups=1 b=1 hq=2 sq=1 sk=64 d=16
"""
NAMES = ["square & causal", "b=2 hq=4 hk=2 sq=1 sk=50 d=16 dv=8"]
ONCE = ["--seconds", "0", "--sample-ms", "0", "--samples", "2"]
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or all(e["backend"] != "cuda" or e["unusable"] for e in rapt.info()["entries"]),
    reason="no CUDA device, or rapt has no CUDA here",
)


@pytest.fixture
def small(monkeypatch, tmp_path):
    (tmp_path / "small.txt").write_text(SMALL)
    monkeypatch.setattr(timing, "NOISY", math.inf)
    return [*ONCE, "--seeds", "2", "--set", str(tmp_path / "small.txt")]


def test_report(small, tmp_path, capsys):
    threads = torch.get_num_threads()
    files = tmp_path / "bench.json", tmp_path / "bench.svg"
    bench.main([*small, "--dtype", "f32,bf16", "--threads", "1,2", "--json", str(files[0]), "--svg", str(files[1])])
    assert torch.get_num_threads() == threads
    document = json.loads(files[0].read_text())
    rows = document["rows"]
    assert [(row["threads"], row["dtype"], row["name"]) for row in rows] == [
        (n, dtype, name) for n in (1, 2) for dtype in ("f32", "bf16") for name in NAMES
    ]
    assert document["context"]["left_out"] == ["kv=i8 groups=1 b=1 hq=2 sq=1 sk=64 d=16"]
    for row in rows:
        bound = 1e-5 if row["dtype"] == "f32" else 0.05
        types = "" if row["dtype"] == "f32" else "dtype=bf16 "
        assert row["problem"] == f"attention {types}" + ("b=1 hq=2 sq=40 d=16 causal" if row["causal"] else NAMES[1])
        sides = ["rapt", "torch", *["folded"] * (row["sq"] == 1), "math"]
        assert [side for side in ops.SIDES if side in row] == sides
        assert row["fastest"] == min(sides[1:], key=lambda side: row[side]["median_ms"])
        assert row["vs_fastest"] == row[f"vs_{row['fastest']}"]
        for side in sides:
            numbers, case = row[side], sets.parse(row["problem"])
            work = numbers["gflops"] * numbers["median_ms"] * 1e6, numbers["gbs"] * numbers["median_ms"] * 1e6
            assert work == pytest.approx((case.flops, case.bytes))
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
    for name in NAMES:
        assert name in text and name in printed
    assert "no counterpart: kv=i8 groups=1 b=1 hq=2 sq=1 sk=64 d=16\n" in printed
    assert "its fastest way: geometric mean" in printed
    assert "bf16, 2 threads" in text and "paused: geometric mean" in printed and "back to back: geometric mean" in printed


def test_rows_of_a_gpu_have_no_threads(small):
    """They have no turns back to back and no resident memory either; tables and charts do without."""
    options = bench.parse_arguments(small)
    options.threads = [None]
    rows = ops.measure(options)
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        assert "vs_torch_back_to_back" not in row and row["rapt"]["peak_bytes"] is None and row["vs_fastest"] > 0
        assert len(ops.cells_of(row)) == len(ops.HEAD)
    assert list(report.groups_of(rows)) == [("f32", None)]
    context = {"torch_cpu_capability": "", "cpu": "", "rapt": "", "torch": "", "date": ""}
    text = " ".join(t.data for t in nodes(xml.dom.minidom.parseString(_chart.svg(context, rows))))
    assert "f32, GPU" in text and NAMES[1] in text and "back to back" not in text


@on_gpu
def test_cuda(small, tmp_path, capsys):
    file = tmp_path / "bench.json"
    bench.main([*small, "--dtype", "f32,bf16", "--device", "cuda", "--json", str(file), "--svg", str(tmp_path / "bench.svg")])
    document = json.loads(file.read_text())
    assert document["context"]["device"] == torch.cuda.get_device_name()
    assert [(row["threads"], row["dtype"], row["name"]) for row in document["rows"]] == [
        (None, dtype, name) for dtype in ("f32", "bf16") for name in NAMES
    ]
    for row in document["rows"]:
        assert ".cuda" in row["entry"] and "device=cuda" in row["problem"] and "vs_torch_back_to_back" not in row
        sides = [side for side in ops.SIDES if side in row]
        assert {"rapt", "torch", "math"} <= set(sides) and row["fastest"] in sides[1:]
        for side in sides:
            assert 0 < row[side]["rel_err"] < (1e-5 if row["dtype"] == "f32" else 0.05) and row[side]["best_ms"] > 0
    assert any("efficient" in row or "flash" in row for row in document["rows"])
    assert "bf16, GPU:" in capsys.readouterr().out
    pytest.importorskip("transformers")
    bench.main(["--models", "--quick", *ONCE, "--device", "cuda", "--json", str(file)])
    for row in json.loads(file.read_text())["rows"]:
        assert row["rapt"]["best_ms"] > 0 and row["rapt"]["attention"] is None
        difference = row["difference"] / row["largest"]
        # In fp32 two kernels never agree to the bit in all of a model; in bf16 small ones may.
        assert 0 < difference < 1e-5 if row["dtype"] == "f32" else 0 <= difference < 0.05


@on_gpu
@pytest.mark.parametrize("more", [["--cache", "i8"], ["--fill", "--batch", "2"]], ids=str)
def test_generation_on_cuda(more, tmp_path, capsys):
    pytest.importorskip("rapt.bench.generate", reason="needs transformers")
    files = tmp_path / "generation.json", tmp_path / "generation.svg"
    words = ["--generate", "--quick", *ONCE[:2], "--samples", "1", "--tokens", "4", "--lengths", "300", "--device", "cuda", *more]
    bench.main([*words, "--json", str(files[0]), "--svg", str(files[1])])
    document = json.loads(files[0].read_text())
    assert document["context"]["device"] == torch.cuda.get_device_name() and document["context"]["left_out"] == []
    sides = ["sdpa, DynamicCache", "sdpa, StaticCache", "rapt, Cache", *["rapt, Cache i8"] * (more[-1] == "i8")]
    assert [(row["threads"], row["dtype"], row["side"]) for row in document["rows"]] == [
        (None, dtype, side) for dtype in ("f32", "bf16") for side in sides
    ]
    for row in document["rows"]:
        assert row["peak_bytes"] >= row["cache_bytes"] > 0 and row["step"]["samples"] == 3 and row["speedup"] > 0
        assert (row["first"] is None) == ("--fill" in more)
    printed = capsys.readouterr().out
    assert "bf16, GPU:" in printed and torch.cuda.get_device_name() in printed


def nodes(node):
    if node.nodeType == node.TEXT_NODE:
        yield node
    for child in node.childNodes:
        yield from nodes(child)


def test_memory_is_at_least_that_of_the_result():
    peaks = ops.memory(sets.parse("b=1 hq=8 sq=1024 d=64"), ["rapt", "math"], 1)
    if None in peaks.values():
        pytest.skip("this system does not tell")
    result, scores = 8 * 1024 * 64 * 4, 8 * 1024 * 1024 * 4
    slack = 1 << 19  # Linux counts by the 64 pages of a thread
    assert result - slack < peaks["rapt"] < scores - slack < peaks["math"]


@pytest.mark.filterwarnings("error::rapt.torch.FallbackWarning")
@pytest.mark.parametrize("name", sets.NAMES)
def test_every_case_runs_on_rapt(name):
    cases, _ = sets.read(name)
    assert cases or name in ("backward", "delta_rule", "index")  # of other operations
    for case in cases:
        rapt._refusals.warned.clear()
        small = dataclasses.replace(case, sq=1, sk=2)
        with torch.inference_mode():
            tensors = small.tensors(0)
            out = ops.run_side("rapt", small, tensors)
        assert out.shape == (case.b, case.hq, 1, case.dv) and out.dtype == sets.DTYPES[case.dtype]


def test_sets_ask_the_library_nothing_on_import(monkeypatch):
    def refuse():
        raise AssertionError("entries() at import")

    monkeypatch.setattr(_core, "entries", refuse)
    assert runpy.run_path(sets.__file__, run_name="sets")["NAMES"] == sets.NAMES


def test_sets_are_those_of_the_repository():
    folder = Path(__file__).parents[2] / "bench" / "sets"
    assert sets.NAMES == sorted(file.stem for file in folder.glob("*.txt"))
    assert {"quick", "paper", "decode", "models", "cuda"} <= set(sets.NAMES)
    for name in sets.NAMES:
        lines = [line.partition("#")[0].strip() for line in (folder / f"{name}.txt").read_text().splitlines()]
        cases, left_out = sets.read(name)
        assert len(cases) + len(left_out) == len([line for line in lines if line])


def test_a_side_is_what_the_problem_says():
    case = sets.parse("attention dtype=f16 b=2 hq=6 hk=2 sq=5 sk=7 d=8 dv=4 layout=bhds")
    q, k, v = case.tensors(1)
    assert [tuple(t.shape) for t in (q, k, v)] == [(2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4)]
    assert {t.dtype for t in (q, k, v)} == {torch.float16} and q.stride() == (240, 40, 1, 5)
    assert case.name == "b=2 hq=6 hk=2 sq=5 sk=7 d=8 dv=4 layout=bhds"
    assert sets.parse("sq=5 hq=2 d=4 layout=bshd").tensors(0)[0].stride() == (40, 4, 8, 1)
    decode = sets.parse("b=2 hq=6 hk=2 sq=1 sk=9 d=8 dv=4 layout=bshd")
    tensors = decode.tensors(2)
    sides = ops.sides_of(decode, tensors, True)
    assert sides == ["rapt", "torch", "folded", "math"]
    outs = [ops.run_side(side, decode, tensors) for side in sides]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@pytest.mark.parametrize("shape", ["b=2 hq=6 hk=2 sq=5 sk=7 d=8 dv=4", "hq=2 sq=9 sk=4 d=8", "sq=6 d=4 dtype=f16"])
@pytest.mark.parametrize("causal", ["", " causal"])
def test_work(shape, causal):
    case = sets.parse(shape + causal)
    seen = [[j for j in range(case.sk) if not causal or j <= i] for i in range(case.sq)]
    assert case.flops == case.b * case.hq * sum(map(len, seen)) * 2 * (case.d + case.dv)
    heads = case.hq * case.sq + case.hk * len(set().union(*seen))
    assert case.bytes == case.b * heads * (case.d + case.dv) * (2 if case.dtype == "f16" else 4)


BAD_LINES = {
    "sideways": '"sideways"; wanted a word of a problem',
    "b=1 hq=2 sq=x d=8": '"sq=x"; wanted a number from 1 after =',
    "sq=8 d=0": '"d=0"; wanted a number from 1 after =',
    "dtype=fp32 sq=8 d=8": '"dtype=fp32"; wanted f32, bf16, f16',
    "sq=8 d=8 layout=sideways": '"layout=sideways"; wanted bhsd, ',
    "sq=8 d=8 sq=8": '"sq=8"; wanted each word once',
    "b=1 sq=8": '"b=1 sq=8"; wanted d=',
    "hq=3 hk=2 sq=8 d=8": '"hk=2"; wanted a divisor of hq=3',
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines(line, tmp_path, capsys):
    file = tmp_path / "own.txt"
    file.write_text(f"# own\nsq=8 d=8\n{line}  # bad\n")
    with pytest.raises(SystemExit):
        bench.main(["--set", str(file)])
    assert f"error: {file}:3: {BAD_LINES[line]}" in capsys.readouterr().err
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="own.txt: no problems; wanted"):
        sets.read(str(file))


def test_progress(monkeypatch, capsys):
    def run():
        with Progress(4) as progress:
            for name in ("first", "second", "third"):
                progress.begin(name)

    run()
    assert capsys.readouterr().err == "", "nothing where there is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(report.time, "monotonic", iter([0, 60, 70]).__next__)
    run()
    *bars, end = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert bars == [f"[{'.' * 20}] 1/4  first", f"[{'#' * 5}{'.' * 15}] 2/4  3:00 left  second"] + [
        f"[{'#' * 10}{'.' * 10}] 3/4  1:10 left  third"
    ]
    assert end == ""


def test_lines_of_other_operations_are_left_out(tmp_path):
    others = ["append_kv dtype=bf16 b=8 n=1 sk=64 d=8 page=16", "attention_backward sq=4 d=8 dlse", "sq=4 d=8 dropout=0.1"]
    file = tmp_path / "own.txt"
    file.write_text("\n".join([others[0] + " # named", "sq=2 d=4", *others[1:]]))
    cases, left_out = sets.read(str(file))
    assert [case.sq for case in cases] == [2] and left_out == others


WRONG = [["--dtype", "int8"], ["--threads", "0"], ["--set", "none"], ["--json", "/no/such/x"], ["--quick"]]
WRONG += [["--problem", "b=1 sq=x d=8"], ["--problem", "kv=i8 groups=1 sq=8 d=8"], ["--device", "abacus"]]


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert stop.value.code == 2 and (words[0] in (said := capsys.readouterr().err) or words[1] in said)


@pytest.mark.parametrize("words", [[], ["--generate"]], ids=str)
def test_cuda_is_refused_where_it_is_not(words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main([*words, "--device", "cuda"])
    assert re.search(r"--device: cuda, but .+; wanted cpu", capsys.readouterr().err)


def test_help_ends_with_examples(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    examples = capsys.readouterr().out.rpartition("examples:\n")[2].splitlines()
    assert 2 <= len(examples) <= 5
    for example in examples:
        bench.parse_arguments(shlex.split(example.removeprefix("  python -m rapt.bench ")))


def row_of(name, paused, back_to_back):
    row = {"name": name, "dtype": "f32", "threads": 1, "rapt": timing.statistics_of(paused[1])}
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


@pytest.mark.parametrize("pause", [True, False])
def test_turns(pause, monkeypatch):
    """Paused, each side calls alone after a pause and a call that is not counted; back to back, they alternate."""
    turns = []
    monkeypatch.setattr(timing, "calls_per_sample", lambda call, min_seconds, clock: 2 if call.__name__ == "a" else 3)
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
    order = [(n, dtype, m.name) for n in (1, 2) for dtype in ("f32", "bf16") for m in models.quick()]
    assert [(row["threads"], row["dtype"], row["name"]) for row in document["rows"]] == order
    for row in document["rows"]:
        assert 0 < row["difference"] / row["largest"] < (1e-5 if row["dtype"] == "f32" else 0.05)
        assert row["vs_sdpa_best"] == pytest.approx(row["sdpa"]["best_ms"] / row["rapt"]["best_ms"])
        for side in models.SIDES:
            assert 0 < row[side]["best_ms"] <= row[side]["median_ms"] and 0 < row[side]["attention"] < 1
    assert [line["back_to_back"]["cases"] for line in document["summary"]] == [7] * 4
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
    assert sizes == pytest.approx([109.5, 22.7, 86.4, 20.6, 160.0, 213.1, 213.1], rel=0.01)


GENERATE = ["--generate", "--quick", "--threads", "1", "--tokens", "4", "--samples", "1", "--seconds", "0"]


@pytest.mark.parametrize(
    ("model", "more"),
    [("llama", ["--batch", "2,3", "--cache", "i8,i4x2"]), ("qwen3-next", ["--fill"]), ("deepseek", ["--chunk", "9", "--cache", "i8"]),
     ("deepseek-sparse", []), ("gpt-oss", ["--fill", "--cache", "i8"])],
)  # fmt: skip
def test_generation(model, more, tmp_path, capsys):
    generate = pytest.importorskip("rapt.bench.generate", reason="needs transformers")
    files = tmp_path / "generation.json", tmp_path / "generation.svg"
    lengths, batches, dtypes = ((20,), (2, 3), ("f32", "bf16")) if model == "llama" else ((20, 30), (1,), ("f32",))
    words = [*GENERATE, "--model", model, "--lengths", ",".join(map(str, lengths)), "--dtype", ",".join(dtypes), *more]
    bench.main([*words, "--json", str(files[0]), "--svg", str(files[1])])
    document = json.loads(files[0].read_text())
    peer, caches = "eager" if model == "gpt-oss" else "sdpa", more[-1].split(",") if "--cache" in more else []
    sides = [f"{peer}, DynamicCache", f"{peer}, StaticCache", "rapt, Cache", *(f"rapt, Cache {word}" for word in caches)]
    assert [(row["dtype"], row["batch"], row["length"], row["side"]) for row in document["rows"]] == [
        (dtype, batch, length, side) for dtype in dtypes for batch in batches for length in lengths for side in sides
    ]
    for row in document["rows"]:
        assert row["model"] == model and row["step"]["samples"] == 3
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["step"]["best_ms"])
        assert (row["first"] is None) == ("--fill" in more) and row["speedup_best"] > 0
    if model == "llama":  # 4 layers, 2 heads of 16 columns for keys and for values; the last token of the steps is in no cache
        held = {(row["dtype"], row["batch"], row["length"], row["side"]): row["cache_bytes"] for row in document["rows"]}
        for (dtype, batch, length, side), size in held.items():
            of_a_row = {"i8": 20, "i4x2": 12}.get(side.split()[-1], 64 if dtype == "f32" else 32)
            room = length + (5 if "Static" in side else 4)
            assert size == batch * room * 4 * 2 * 2 * of_a_row
    text = " ".join(t.data for t in nodes(xml.dom.minidom.parse(str(files[1]))))
    assert "tokens per second by context length" in text and f"{lengths[-1]} tokens" in text and f"batch {batches[-1]}" in text and all(side in text for side in sides)
    printed = capsys.readouterr().out
    assert all(side in printed for side in sides) and "tokens/s" in printed
    assert len(generate.cells_of(document["rows"][0])) == len(generate.HEAD)


def test_compiled_steps(tmp_path):
    pytest.importorskip("rapt.bench.generate", reason="needs transformers")
    file = tmp_path / "generation.json"
    bench.main([*GENERATE, "--model", "llama", "--lengths", "20", "--dtype", "f32", "--compiled", "--json", str(file)])
    sides = [row["side"] for row in json.loads(file.read_text())["rows"]]
    assert sides == ["sdpa, DynamicCache", "sdpa, StaticCache", "sdpa, StaticCache, compiled", "rapt, StaticCache, compiled", "rapt, Cache"]


def test_generation_times_nothing_where_tokens_differ(monkeypatch):
    generate = pytest.importorskip("rapt.bench.generate", reason="needs transformers")
    run = generate.Side._run

    def wrong(self, model, tokens):
        run(self, model, tokens)
        self.token = self.token + (self.name == "rapt, Cache")
        return self.token

    monkeypatch.setattr(generate.Side, "_run", wrong)
    with pytest.raises(SystemExit, match="--generate: rapt, Cache gives the tokens .* in fp32, and sdpa, DynamicCache .*: nothing is timed"):
        bench.main([*GENERATE, "--lengths", "20"])


@pytest.mark.parametrize("where", ["prefill", "step"])
@pytest.mark.parametrize("name", ["sdpa, DynamicCache", "rapt, Cache"])
def test_sides_without_memory_are_left_out(name, where, tmp_path, monkeypatch, capsys):
    """Those of a length, on a GPU: a row of it has no threads."""
    generate = pytest.importorskip("rapt.bench.generate", reason="needs transformers")
    options = bench.parse_arguments([*GENERATE, "--model", "llama", "--lengths", "70,20", "--dtype", "f32"])
    options.threads, run = [None], getattr(generate.Side, where)

    def too_large(self, *given):
        if self.name == name and (self.cache.get_seq_length() if where == "step" else given[0].shape[1]) > 69:
            raise torch.OutOfMemoryError("out of memory")
        return run(self, *given)

    monkeypatch.setattr(generate.Side, where, too_large)
    rows = generate.measure(options)
    sides = ["sdpa, DynamicCache", "sdpa, StaticCache", "rapt, Cache"]
    assert [(row["length"], row["side"]) for row in rows] == [(n, side) for n in (70, 20) for side in sides if (n, side) != (70, name)]
    assert options.left_out == [f"f32, GPU, 1 x 70 tokens, {name}"]
    assert f"Left out, as the GPU's memory is too small: {options.left_out[0]}\n" in capsys.readouterr().out
    compared = ["speedup" in row for row in rows]
    assert compared == ([False, False, True, True, True] if name.startswith("sdpa") else [True] * 5)
    assert [generate.cells_of(row)[6] == "-" for row in rows] == [not has for has in compared]
    context = {"torch_cpu_capability": "", "cpu": "", "rapt": "", "torch": "", "date": ""}
    text = " ".join(t.data for t in nodes(xml.dom.minidom.parseString(_chart.generation_svg(context, rows))))
    assert "batch 1, f32, GPU" in text and text.count("×") == sum(compared)


ENGINES = ["--engines", "--quick", "--threads", "1", "--samples", "1", "--seconds", "0", "--batch", "2", "--tokens", "3", "--texts", "5"]


def test_engines(tmp_path, capsys, caplog, monkeypatch):
    engines = pytest.importorskip("rapt.bench.engines", reason="needs transformers")
    files, there = (tmp_path / "engines.json", tmp_path / "engines.svg"), importlib.util.find_spec("sentence_transformers")
    logger = logging.getLogger("ContinuousBatchingLogger")  # it has a handler of its own, and hands nothing on
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    bench.main([*ENGINES, "--lengths", "9,20", "--dtype", "bf16", "--json", str(files[0]), "--svg", str(files[1])])
    rows = json.loads(files[0].read_text())["rows"]
    loads = ["2 of 9 tokens, 3 more", "2 of 20 tokens, 3 more", *["5 of 3 to 500 tokens"] * bool(there)]
    assert [(row["dtype"], row["load"], row["side"]) for row in rows] == [
        ("bf16", load, side) for load in loads for side in ("sdpa", "rapt_flash")
    ]
    for row in rows:
        assert row["run"]["samples"] == 1 and row["speedup"] > 0
        assert row["per_s"] == pytest.approx(1e3 * (2 if row["unit"] == "requests" else 5) / row["run"]["median_ms"])
        if row["unit"] == "requests":
            assert row["tokens_per_s"] == pytest.approx(3 * row["per_s"])
    text = " ".join(t.data for t in nodes(xml.dom.minidom.parse(str(files[1]))))
    assert "continuous batching, requests/s, bf16, 1 thread" in text and all(load in text for load in loads)
    printed = capsys.readouterr().out
    assert "requests, texts/s" in printed and len(engines.cells_of(rows[0])) == len(engines.HEAD)
    assert "psutil" not in caplog.text
    assert there or "Left out: sentence-transformers is not installed: pip install 'sentence-transformers>=" in printed


def test_engines_time_nothing_where_results_differ(monkeypatch):
    engines = pytest.importorskip("rapt.bench.engines", reason="needs transformers")
    monkeypatch.setattr(engines, "ENGINES", [engines.ContinuousBatching])
    monkeypatch.setattr(engines, "SIDES", ("sdpa", "sdpa"))
    with pytest.raises(SystemExit, match="--engines: continuous batching did not call rapt: nothing is timed"):
        bench.main([*ENGINES, "--lengths", "9"])
    run, made = engines.ContinuousBatching._run, []

    def wrong(self, prompts, tokens):
        made.append(run(self, prompts, tokens))
        return [[token + len(made) for token in each] for each in made[-1]]

    monkeypatch.setattr(engines.ContinuousBatching, "_run", wrong)
    with pytest.raises(SystemExit, match="gives the tokens .* in fp32, and sdpa .*: nothing is timed"):
        bench.main([*ENGINES, "--lengths", "9"])


@pytest.mark.parametrize("words, said", [
    (["--lengths", "1k"], "--lengths: wanted --generate or --engines with it"),
    (["--generate", "--texts", "9"], "--texts: wanted --engines with it"),
    (["--engines", "--cache", "i8"], "--cache: wanted --generate with it"),
    (["--engines", "--seeds", "4"], "--seeds: has no meaning with --engines"),
    (["--engines", "--device", "cuda"], "--device: cuda; wanted cpu with --engines"),
    (["--models", "--cache", "i8"], "--cache: wanted --generate with it"),
    (["--generate", "--lengths", "1"], "--lengths: 1; wanted numbers of tokens from 2, for example 1k,8k"),
    (["--generate", "--lengths", "1m"], "--lengths: 1m; wanted numbers of tokens from 2"),
    (["--generate", "--cache", "int8"], "--cache: int8; wanted some of i4x2,i8,f8e4m3,f8e5m2"),
    (["--generate", "--tokens", "3"], "--tokens: 3; wanted 4 or more"),
    (["--generate", "--seeds", "4"], "--seeds: has no meaning with --generate"),
    (["--generate", "--no-math"], "--no-math: has no meaning with --generate"),
    (["--generate", "--device", "cuda", "--threads", "2"], "--threads: of the CPU; wanted without --device cuda"),
    (["--generate", "--model", "deepseek-sparse", "--fill"], "--fill: its layers choose keys by what they hold"),
    (["--generate", "--model", "bert"], "argument --model: invalid choice: 'bert'"),
])  # fmt: skip
def test_wrong_options_of_generation_and_engines(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, missing, command",
    [([], "torch", "pip install torch"), *(([word], "transformers", "pip install 'transformers") for word in ("--models", "--generate", "--engines"))],
)
def test_what_is_missing_is_named(words, missing, command, tmp_path):
    (tmp_path / f"{missing}.py").write_text("raise ImportError")
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-m", "rapt.bench", *words], capture_output=True, text=True, env=environment)
    assert run.returncode == 1 and command in run.stderr


def test_training_of_models(tmp_path, capsys, monkeypatch):
    models = pytest.importorskip("rapt.bench.models", reason="needs transformers")
    monkeypatch.setattr(timing, "NOISY", math.inf)
    file = tmp_path / "training.json"
    with backward_calls() as calls:
        bench.main(["--models", "--train", "--quick", *ONCE, "--dtype", "f32", "--threads", "1", "--json", str(file)])
    assert calls.count > 2 * 5
    document = json.loads(file.read_text())
    assert document["context"]["set"] == "training of whole models"
    assert [row["name"] for row in document["rows"]] == [m.name for m in models.quick() if m.kind != "decode"]
    for row in document["rows"]:
        assert 0 < row["difference"] / row["largest"] < 1e-4 and row["rapt"]["attention"] is None
    assert "sdpa / rapt, back to back: geometric mean" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--train"])
    assert "--train: wanted --models with it" in capsys.readouterr().err
