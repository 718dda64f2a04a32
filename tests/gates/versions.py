"""Fails if a package has another version than CMake's project.

usage: versions.py <repository>
"""

import re
import sys
from pathlib import Path

# Each is searched for a version, which may be followed by `.dev0`.
PLACES = [("pyproject.toml", r'(?m)^version = "([\d.]+?)(?:\.dev\d*)?"'),
          ("python/cuda/pyproject.toml", r'(?m)^version = "([\d.]+?)(?:\.dev\d*)?"'),
          ("python/cuda/pyproject.toml", r'"rapt-attention==([\d.]+?)(?:\.dev\d*)?"'),
          ("tools/packaging/vcpkg/vcpkg.json", r'"version": "([\d.]+)"')]


def main():
    root = Path(sys.argv[1])
    wanted = re.search(r"project\(rapt VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text(encoding="utf-8"))[1]
    wrong = []
    for name, pattern in PLACES:
        found = re.findall(pattern, (root / name).read_text(encoding="utf-8"))
        if found != [wanted]:
            wrong.append(f"{name}: {pattern} finds {found}; wanted {wanted}, CMakeLists.txt's version")
    print("\n".join(wrong) or f"{wanted} in {len(PLACES)} places")
    sys.exit(1 if wrong else 0)


main()
