"""Fails if `tools/dev COMMAND --help` does anything but print what the command is for, if `test` does not say how long it takes, if GPU
kernels are built without a GPU and unasked, or if a missing program is not named with what to install.

usage: dev_help.py <repository>
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def violations(root):
    dev = [shutil.which("bash"), str(root / "tools/dev")]
    usage = subprocess.run([*dev, "help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"(?m)^  (\w+) {3,}", usage.partition("\n\nOn Debian")[0])
    if not {"report", "test", "setup"} <= set(commands):
        yield f"the usage lists {commands}"
    with tempfile.TemporaryDirectory() as path:  # no cmake, apt, pip or formatter
        for program in ("awk", "cat", "dirname", "env"):
            Path(path, program).symlink_to(shutil.which(program))
        Path(path, "python3").symlink_to(sys.executable)
        for command in commands:
            for arguments in (["--help"], ["--quick", "-h"]):
                result = subprocess.run([*dev, command, *arguments], capture_output=True, text=True, env={"PATH": path})
                if result.returncode != 0 or result.stderr or not result.stdout.startswith(f"  {command} "):
                    yield f"tools/dev {command} {' '.join(arguments)}: exit code {result.returncode}, {result.stdout}{result.stderr}"
                if ("--only" in result.stdout) != (command == "report"):  # an option of bench/measure.py
                    yield f"tools/dev {command} {' '.join(arguments)}: {result.stdout}"


def builds(root):
    """What `test` and `demo` say and build, with programs that build nothing."""
    with tempfile.TemporaryDirectory() as path:
        tools, log = Path(path, "tools"), Path(path, "log")
        tools.mkdir()
        Path(tools, "dev").write_text((root / "tools/dev").read_text())
        programs = Path(path, "programs")
        programs.mkdir()
        for program in ("cat", "dirname", "grep", "head", "nproc", "sed", "sort"):
            Path(programs, program).symlink_to(shutil.which(program))
        echoes = {"cmake": f"cmake version 3.25.0; echo \"$@\" >>{log}"}
        for program in ("cmake", "ctest", "nvcc", "g++", "ninja", "pkg-config", "python3"):
            Path(programs, program).write_text(f"#!{shutil.which('bash')}\necho {echoes.get(program, program)}\n")
            Path(programs, program).chmod(0o755)

        def run(command, **environment):
            log.write_text("")
            result = subprocess.run([shutil.which("bash"), str(tools / "dev"), command], capture_output=True, text=True,
                                    env={"PATH": str(programs), **environment})
            return result.stderr, log.read_text()

        def test(choice, kernels, **environment):
            said, built = run("test", **environment)
            if not re.search(rf"{kernels} GPU kernels .* takes about \d+ minutes on \d+ cores", said) or f"-DRAPT_CUDA={choice} " not in built:
                yield f"tools/dev test with {environment}: {said}{built}"

        yield from test("OFF", "without")
        yield from test("ON", "with", RAPT_CUDA="ON")
        _, built = run("demo")
        if "-DRAPT_CUDA=OFF" not in built or "-DRAPT_BUILD_TESTS=OFF" not in built or "--target rapt_cli" not in built:
            yield f"tools/dev demo: {built}"
        Path(programs, "nvidia-smi").write_text(f"#!{shutil.which('bash')}\necho GPU 0: one\n")
        Path(programs, "nvidia-smi").chmod(0o755)
        yield from test("AUTO", "with")
        yield from test("OFF", "without", RAPT_CUDA="OFF")
        # Without a program, one line says what to install.
        Path(programs, "ninja").unlink()
        for command in ("demo", "test"):
            said, built = run(command)
            if built or not re.search(r"error: missing: ninja-build\. .*install the equivalents of: g\+\+ cmake ninja-build", said):
                yield f"tools/dev {command} without ninja: {said}{built}"
        for program, text in (("dpkg-query", "amd64 installed"), ("dpkg", "amd64"), ("id", "1000")):
            Path(programs, program).write_text(f"#!{shutil.which('bash')}\necho {text}\n")
            Path(programs, program).chmod(0o755)
        for reason, environment in (("RAPT_NO_INSTALL is set", {"RAPT_NO_INSTALL": "1"}), ("no sudo", {})):
            said, built = run("demo", **environment)
            if built or not re.search(rf"error: .*{reason}\. As root, run: apt-get install ninja-build\n", said):
                yield f"tools/dev demo on Debian without ninja: {said}{built}"


root = Path(sys.argv[1])
found = [*violations(root), *builds(root)]
print("\n".join(found))
sys.exit(bool(found))
