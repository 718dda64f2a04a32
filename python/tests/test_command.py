"""`rapt` and `python -m rapt`: the program of C++, which has its tests in tests/cli."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rapt
from rapt import __main__

COMMAND = (sys.executable, "-m", "rapt")
CLI_TESTS = Path(__file__).resolve().parents[2] / "tests/cli"


def run(*arguments, **environment):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, **environment})


def test_the_wheel_installs_it():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="rapt")
    assert command.load() is __main__.main


@pytest.mark.parametrize("case", ["Usage.test_errors", "Usage.test_control_characters_are_escaped", "JsonFiles"])
def test_it_is_the_program_of_cpp(case, tmp_path):
    program = tmp_path / "rapt"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rapt "$@"\n')
    program.chmod(0o755)
    tests = subprocess.run(
        [sys.executable, CLI_TESTS / "test_cli.py", case], env={**os.environ, "RAPT_CLI": str(program)}, capture_output=True, text=True
    )
    assert tests.returncode == 0, tests.stderr


def test_it_has_the_kernels_of_the_package():
    info = json.loads(run("info", "--json").stdout)
    assert [entry["name"] for entry in info["entries"]] == [entry["name"] for entry in rapt.info()["entries"]]


def test_a_wrong_environment_is_an_error():
    checked = run("check", "--problem", "sq=9 d=8", RAPT_KERNEL="none")
    assert checked.returncode == 2 and checked.stderr.startswith("rapt: ")


def test_the_demonstration_finds_its_recordings():
    help_text = run("demo", "--help").stdout
    assert str(Path(rapt._core.__file__).parent / "data") in "".join(help_text.split())


def test_it_names_an_entry_before_it_runs_and_an_interrupt_ends_it():
    long = [*COMMAND, "check", "--problem", "hq=8 sq=16384 d=64", "--seeds", "9"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # also if this process ignores it, as under nohup
    with subprocess.Popen(long, env=buffered, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as command:
        assert command.stdout.readline().startswith("problem ") and command.stdout.readline().startswith("attention_")
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == -signal.SIGINT and command.stdout.read() == ""


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    with subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
