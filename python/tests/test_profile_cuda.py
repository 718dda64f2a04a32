"""bench/profile_cuda.py with a made-up ncu: what it makes of Nsight Compute's CSV, and what it says where there is none."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import profile_cuda  # noqa: E402

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)
NUMBERS = {
    "tensor": ("%", "57.21"),
    "warps": ("%", "18.70"),
    "sm": ("%", "71.04"),
    "dram": ("%", "3.50"),
    "registers": ("register/thread", "168"),
    "local_loads": ("byte", "1,024"),
    "local_stores": ("Kbyte", "2"),
    "dynamic": ("byte/block", "214,016"),
    "static": ("Kbyte/block", "1.024"),
    "time": ("ns", "1,234,400"),
    "clock": ("cycle/nsecond", "1.71"),
}


def launch(number, kernel, stream, **changes):
    """The lines of one kernel."""
    for key, (unit, value) in (NUMBERS | changes).items():
        yield (
            f'"{number}","77","python3","127.0.0.1","{kernel}","1","{stream}","(384, 1, 1)","(132, 1, 1)","0","9.0",'
            f'"Command line profiler metrics","{profile_cuda.METRICS[key]}","{unit}","{value}"'
        )


def call(entry, **changes):
    return {"entry": entry, "dtype": "bf16", "b": 2, "hq": 16, "sq": 4096, "d": 128, "causal": False} | changes


CALLS = [call("attention_prefill.bf16"), call("attention_prefill.bf16", causal=True), call("attention_naive.f32", dtype="f32")]
SAMPLE = "\n".join(
    [
        "==PROF== Connected to process 77 (/usr/bin/python3)",
        '==PROF== Profiling "attention_prefill" - 0: 0%....50%....100% - 9 passes',
        "what the program prints, with a comma",
        HEADER,
        *launch(0, "attention_prefill", 13),
        *launch(1, "simt", 13, time=("us", "2.5")),
        *launch(2, "attention_prefill", 17, tensor=("", "n/a"), local_loads=("byte", "0"), local_stores=("byte", "0")),
        *launch(3, "naive_scores", 21),
        *launch(4, "naive_values", 21, time=("msecond", "2"), clock=("hz", "1,980,000,000")),
        "==PROF== Disconnected from process 77",
        "",
    ]
)


def test_parse():
    launches = profile_cuda.parse_csv(SAMPLE)
    assert [(one["kernel"], one["stream"]) for one in launches] == [
        *(("attention_prefill", "13"), ("simt", "13"), ("attention_prefill", "17"), ("naive_scores", "21"), ("naive_values", "21"))
    ]
    named = [{key: one["metrics"][name] for key, name in profile_cuda.METRICS.items()} for one in launches]
    assert named[0] == pytest.approx(
        {
            **{"tensor": 57.21, "warps": 18.7, "sm": 71.04, "dram": 3.5, "registers": 168, "local_loads": 1024},
            **{"local_stores": 2000, "dynamic": 214016, "static": 1024, "time": 1.2344e-3, "clock": 1.71e9},
        }
    )
    assert named[1]["time"] == pytest.approx(2.5e-6)
    assert named[2]["tensor"] is None
    assert (named[4]["time"], named[4]["clock"]) == pytest.approx((2e-3, 1.98e9))
    for nothing in ("", "==ERROR== something", "==WARNING== No kernels were profiled.\n"):
        assert profile_cuda.parse_csv(nothing) == []


def test_table():
    attributed = profile_cuda.attribute(profile_cuda.parse_csv(SAMPLE), CALLS)
    assert [len(launches) for _, launches in attributed] == [2, 1, 2]
    rows = [line.strip("| ").split(" | ") for line in profile_cuda.table(attributed)]
    assert len({len(row) for i, row in enumerate(rows) if i != 1}) == 1
    assert [row[:2] for row in rows[2:]] == [
        ["attention_prefill.bf16", "attention_prefill"],  # its simt took too little time
        ["attention_prefill.bf16", "attention_prefill"],
        ["attention_naive.f32", "naive_scores"],
        ["attention_naive.f32", "naive_values"],
    ]
    first, second = (dict(zip(rows[0], row, strict=True)) for row in rows[2:4])
    assert {name: first[name] for name in ("ms", "tensor %", "registers", "spills", "shared", "GHz", "b x h")} == {
        **{"ms": "1.234", "tensor %": "57.2", "registers": "168", "spills": "3024", "shared": "214016 + 1024"},
        **{"GHz": "1.71", "b x h": "2 x 16"},
    }
    assert (second["tensor %"], second["spills"], second["mask"]) == ("-", "0", "causal")
    with pytest.raises(profile_cuda.Failure, match="2 calls were made, but ncu lists kernels of 3"):
        profile_cuda.attribute(profile_cuda.parse_csv(SAMPLE), CALLS[:2])


def test_plan():
    options = profile_cuda.parse_arguments([])
    cases = list(profile_cuda.planned({"phase": "prefill", "arithmetic": "f16"}, options))
    assert {case.dtype for case in cases} == {"f16"}
    assert [(c.sq, c.b, c.hq) for c in cases[::2]] == [(1024, 8, 16), (4096, 2, 16), (16384, 1, 8)] * 2
    naive = list(profile_cuda.planned({"phase": "naive", "arithmetic": "f32"}, options))
    assert [(c.sq, c.b, c.hq, c.dtype) for c in naive[::2]] == [(1024, 1, 4, "f32"), (4096, 1, 4, "f32")] * 2
    with pytest.raises(SystemExit):
        profile_cuda.parse_arguments(["--set", "endless"])


REPORT = {
    "calls": CALLS,
    "left_out": [call("attention_naive.f32", reason="no time was left")],
    "gpu": "A GPU",
}
ENTRIES = [
    {"name": "attention_prefill.bf16", "backend": "cuda", "unusable": ""},
    {"name": "attention_prefill.f32.avx2", "backend": "cpu", "unusable": ""},
    {"name": "attention_new", "backend": "cuda", "unusable": "not on this GPU"},
]
FAKE = """#!{python}
import json, os, sys
words = sys.argv[1:]
if words == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1) (public-release)")
    sys.exit()
assert words[words.index("--clock-control") + 1] == "none"
assert os.environ["RAPT_KERNEL"] == "attention_prefill.bf16"
open(words[words.index("--log-file") + 1], "w").write({log!r})
report = {report!r}
if report:
    open(words[words.index("--drive") + 1], "w").write(report)
print({output!r})
sys.exit({status})
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes a program that behaves like ncu to this extent, and returns its path."""

    monkeypatch.setattr(profile_cuda.rapt, "info", lambda: {"entries": ENTRIES})

    def make(log="", report=None, output="", status=0):
        path = tmp_path / "ncu"
        report = report and json.dumps(report)
        path.write_text(FAKE.format(python=sys.executable, log=log, report=report, output=output, status=status))
        path.chmod(0o755)
        return str(path)

    return make


def test_report(ncu, tmp_path, capsys):
    raw = tmp_path / "raw.csv"
    profile_cuda.main(["--ncu", ncu(SAMPLE, REPORT), "--csv", str(raw), "--commit", "abc"])
    assert raw.read_text() == SAMPLE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A GPU, driver ")
    assert ", Nsight Compute 2025.3.1.0, commit abc, " in lines[0]
    assert lines[-2:] == ["- attention_naive.f32, 1 calls: no time was left", "- attention_new: not on this GPU"]
    assert sum(line.startswith("| attention") for line in lines) == 4


FAILURES = {
    "may not read this GPU's performance counters": {"log": "==ERROR== ERR_NVGPUCTRPERM - no permission", "report": REPORT},
    "LibraryNotLoaded": {"log": "==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "status": 1},
    "No module named 'torch'": {"output": "ModuleNotFoundError: No module named 'torch'", "status": 1},
    "3 calls were made, but ncu lists kernels of 0": {"log": "==WARNING== No kernels were profiled.", "report": REPORT},
}


@pytest.mark.parametrize("message", FAILURES)
def test_failures(message, ncu):
    with pytest.raises(SystemExit) as stop:
        profile_cuda.main(["--ncu", ncu(**FAILURES[message])])
    assert message in str(stop.value)


@pytest.mark.parametrize(
    "words, reason", [(["--entries", "new"], "not on this GPU"), (["--entries", "avx2"], "none of that name in this build")]
)
def test_without_entries(words, reason, ncu):
    with pytest.raises(SystemExit) as stop:
        profile_cuda.main(["--ncu", ncu(), *words])
    assert f"no CUDA entry can run: {reason}" in str(stop.value)


def test_without_ncu(monkeypatch):
    monkeypatch.setattr(profile_cuda, "PLACES", ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as stop:
        profile_cuda.main([])
    assert "no ncu: Nsight Compute is not installed" in str(stop.value)
