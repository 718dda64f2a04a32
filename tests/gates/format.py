"""Fails if a source file is not formatted by .clang-format; `tools/dev format` formats them.

usage: format.py <repository>      exit code 77: skipped

Versions of clang-format disagree, so only the one named here decides.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = 14
FOLDERS = ("include", "src", "python", "tests", "tools", "bench", "docs")


def clang_format():
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path:
            text = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
            if re.search(rf"version {VERSION}\.", text):
                return path
    return None


def main():
    root = Path(sys.argv[1])
    tool = clang_format()
    if not tool:
        print(f"skipped: clang-format {VERSION} is not installed")
        sys.exit(77)
    files = [str(path) for folder in FOLDERS for path in sorted((root / folder).rglob("*"))
             if path.suffix in (".hpp", ".cpp", ".h", ".c", ".cu", ".cuh")]
    if not files:
        sys.exit(f"no sources under {root}")
    print(f"{len(files)} files")
    sys.exit(subprocess.run([tool, "--dry-run", "--Werror", "--style=file", *files]).returncode)


main()
