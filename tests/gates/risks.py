"""Fails if docs/risks.md names a test that does not exist, or a risk without one.

usage: risks.py <repository>
"""

import re
import sys
from pathlib import Path


def test_names(root):
    names = set()
    for path in (root / "tests").rglob("*.cpp"):
        names.update(re.findall(r'TEST_CASE\(\s*"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8")))
    return names


def main():
    root = Path(sys.argv[1])
    names = test_names(root)
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in (root / "docs/risks.md").read_text(encoding="utf-8").splitlines()
            if line.startswith("| ") and not line.startswith("| risk |")]
    found, count = [], 0
    for risk, *_, held in rows:
        tests = re.findall(r"`([^`]+)`", held)
        count += len(tests)
        if not tests:
            found.append(f"docs/risks.md: {risk}: no test holds it")
        found += [f"docs/risks.md: {risk}: no test is called {test!r}" for test in tests if test not in names]
    print("\n".join(found) or f"{len(rows)} risks, {count} tests")
    sys.exit(1 if found or not rows else 0)


main()
