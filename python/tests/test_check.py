"""`python -m rapt`: its check finds right results right and wrong ones wrong."""

import os
import subprocess
import sys

import numpy as np
import pytest

import rapt
from rapt import __main__, _check

ENTRIES = [entry for entry in rapt.info()["entries"] if entry["backend"] == "cpu" and not entry["unusable"]]
FIRST = {entry["operation"]: entry for entry in reversed(ENTRIES)}  # of each operation, the one that is considered first
PROBLEM = "attention b=1 hq=1 sq=2 d=4"


def functions(operation):
    module = rapt.dsa if operation in ("index_scores", "select_topk") else rapt
    return module, getattr(module, operation)


def test_checks_every_operation():
    assert set(_check.CHECKS) == {name for name in FIRST if hasattr(rapt, name) or hasattr(rapt.dsa, name)}


@pytest.mark.parametrize("operation", _check.CHECKS)
def test_finds_results_right_that_are(operation):
    verdicts = list(_check.CHECKS[operation](FIRST[operation]))
    assert verdicts and all(error <= 1 for _, error in verdicts), verdicts


@pytest.mark.parametrize("operation", _check.CHECKS)
def test_finds_a_wrong_result(operation, monkeypatch):
    module, right = functions(operation)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        if operation == "append_kv":
            args[2][0, 0, 3] += 2
        elif operation == "select_topk":
            result = result[:, ::-1]
        elif hasattr(result, "_fields"):  # gradients
            result = result._replace(dk=result.dk * 1.5)
        else:
            result = tuple(x if x is None else x * 1.2 for x in result) if isinstance(result, tuple) else result * np.float32(1.2)
        return result

    monkeypatch.setattr(module, operation, wrong)
    verdicts = list(_check.CHECKS[operation](FIRST[operation]))
    assert verdicts and all(error > 1 for _, error in verdicts), verdicts


@pytest.fixture
def two_kernels(monkeypatch):
    """Leaves two kernels of this machine."""
    info = {**rapt.info(), "entries": [FIRST["merge_states"], FIRST["select_topk"]]}
    monkeypatch.setattr(rapt, "info", lambda: info)


def test_ends_in_a_line_for_all(two_kernels, capsys):
    assert _check.run() == 0
    assert capsys.readouterr().out.startswith(f"OK: rapt {rapt.__version__}: 2 kernels, ")


def test_says_what_it_could_not_check(two_kernels, monkeypatch, capsys):
    monkeypatch.setattr(_check, "find_spec", lambda name: None)
    assert _check.run() == 0
    assert capsys.readouterr().out.endswith("were not checked, which needs ml_dtypes\n")


def test_names_an_operation_without_a_check(two_kernels, monkeypatch, capsys):
    monkeypatch.delitem(_check.CHECKS, "merge_states")
    assert _check.run() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("merge_states: not checked: ") and ": 1 kernels, " in last


def test_reports_a_kernel_that_crashes(two_kernels, monkeypatch, capsys):
    crashed = subprocess.CompletedProcess([], -4, "", "illegal instruction\n")
    monkeypatch.setattr(_check, "run_child", lambda entry: crashed)
    assert _check.run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{FIRST['merge_states']['name']}: exit code -4: illegal instruction" and lines[-1].startswith("FAILED: ")


def test_fails_where_nothing_was_checked(two_kernels, monkeypatch, capsys):
    monkeypatch.setattr(_check, "run_child", lambda entry: subprocess.CompletedProcess([], 0, "[]", ""))
    assert _check.run() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: ")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "rapt check"),
        (["chek"], 2, "chek: unknown command; wanted check, info, --version or --help"),
        (["check", "now"], 2, "now: check takes no arguments; wanted"),
        (["info", PROBLEM, "now"], 2, "now: info takes one argument; wanted"),
        (["info", "attention b=1 now"], 2, "now"),
        (["info", PROBLEM], 0, "chosen"),
        (["--help"], 0, "rapt check"),
        (["check", "--help"], 0, "rapt check"),
        (["--version"], 0, rapt.__version__),
    ],
)
def test_the_command(arguments, status, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rapt", *arguments])
    assert __main__.main() == status
    printed = capsys.readouterr()
    assert text in (printed.err if status else printed.out)


def test_info_lists_every_kernel_even_where_a_wrong_one_is_forced():
    run = subprocess.run([sys.executable, "-m", "rapt", "info"], env=os.environ | {"RAPT_KERNEL": "none"}, capture_output=True, text=True)
    entries = [line.split()[1].rstrip(":") for line in run.stdout.splitlines() if line.startswith("entry ")]
    assert entries == [entry["name"] for entry in rapt.info()["entries"]]
    assert "set      RAPT_KERNEL=none" in run.stdout.splitlines()


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    command = [sys.executable, "-m", "rapt", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        assert run.stderr.read() == b""
