"""Fails if `tools/dev COMMAND --help` does anything but print what the command is for.

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


found = list(violations(Path(sys.argv[1])))
print("\n".join(found))
sys.exit(bool(found))
