"""Fails if a package, a page or a test names another version than CMakeLists.txt: the project's, with the suffix of development versions.

usage: versions.py <repository>
"""

import re
import sys
from pathlib import Path

# Patterns whose group is the whole version, its numbers, its first two numbers (the version of the ABI), or Conan's form of it.
PLACES = [("pyproject.toml", r'(?m)^version = "(.+)"', "whole"),
          ("python/cuda/pyproject.toml", r'(?m)^version = "(.+)"', "whole"),
          ("python/cuda/pyproject.toml", r'"rapt-attention==(.+)"', "whole"),
          ("tools/packaging/vcpkg/vcpkg.json", r'"version": "(.+)"', "numbers"),
          ("docs/guide/cpp.md", r"`rapt/(\d\S*)`", "Conan's"),
          ("docs/guide/cpp.md", r"find_package\(rapt (\S+)", "ABI"),
          ("docs/guide/cpp.md", r"librapt-cuda(\d[\d.]*\d)", "ABI"),
          ("docs/guide/cuda.md", r"librapt-cuda(\d[\d.]*\d)", "ABI"),
          ("docs/guide/cuda.md", r"librapt_cuda\.so\.(\d[\d.]*\d)", "ABI"),
          ("tests/package/find_package/CMakeLists.txt", r"find_package\(rapt (\S+)", "ABI"),
          ("tests/package/find_package_c/CMakeLists.txt", r"find_package\(rapt (\S+)", "ABI")]


def violations(root):
    def read(name):
        return (root / name).read_text(encoding="utf-8")

    numbers = re.search(r"project\(rapt VERSION (\d+\.\d+\.\d+) ", read("CMakeLists.txt"))[1]
    suffix = re.search(r'set\(rapt_version_suffix "((?:\.dev\d+)?)"\)', read("CMakeLists.txt"))[1]
    forms = {"whole": numbers + suffix, "numbers": numbers, "ABI": numbers.rpartition(".")[0], "Conan's": numbers + suffix.replace(".dev", "-dev")}
    for name, pattern, form in PLACES:
        found = re.findall(pattern, read(name))
        if set(found) != {forms[form]}:
            yield f"{name}: {pattern} finds {found}; wanted {forms[form]}"

    version, date = re.search(r"(?m)^## (\S+) \((.+)\)$", read("CHANGELOG.md")).groups()
    if version != numbers or not re.fullmatch("unreleased" if suffix else r"\d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md: begins with {version} ({date}); wanted {numbers} ({'unreleased' if suffix else 'the date'})"
    released = re.findall(r"(?m)^## (\d+\.\d+)\.\d+ \(\d{4}-", read("CHANGELOG.md"))[:1]
    supported = re.findall(r"(?m)^\| (\S+) and the main branch \| yes \|$", read("SECURITY.md"))
    if supported != released:
        yield f"SECURITY.md: supports {supported}; wanted {released}, the last release, and the main branch"


found = list(violations(Path(sys.argv[1])))
print("\n".join(found) or f"one version in {len(PLACES) + 2} places")
sys.exit(1 if found else 0)
