#!/usr/bin/env python3
"""Writes a software bill of materials (SPDX 2.3, JSON) of a build: what it is made of, by docs/dependencies.md.

    tools/sbom.py BUILD [FILE]    BUILD is a folder that CMake has built in; without FILE it is printed

Versions are those of the packages that CMake found. Fails if the library is linked with something that is not in the table.
"""

import datetime
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Components that a build may use, by the entry of CMake's cache that says so; "": it always does. Others are requirements of
# the Python package.
IN_CACHE = {
    "TBB": "TBB_DIR", "xsimd": "RAPT_XSIMD_INCLUDE_DIR", "ittnotify": "RAPT_ITT_LIBRARY", "CUDAToolkit": "CMAKE_CUDA_COMPILER",
    "fmt": "fmt_DIR", "CLI11": "CLI11_DIR", "nlohmann_json": "nlohmann_json_DIR", "Eigen3": "Eigen3_DIR", "Catch2": "Catch2_DIR",
    "nanobind": "", "robin_map": "", "OpenMP": "OpenMP_CXX_LIB_NAMES", "libomp": "OpenMP_CXX_LIB_NAMES", "g++": "", "Threads": "",
}
# Options that leave a component out.
SWITCHES = {"ittnotify": "RAPT_ITT", "CUDAToolkit": "RAPT_CUDA", "OpenMP": "RAPT_OPENMP", "libomp": "RAPT_OPENMP"}
# What is built, by the option for it.
PARTS = {"library": "", "command": "RAPT_BUILD_TOOLS", "tests": "RAPT_BUILD_TESTS", "Python": "RAPT_PYTHON"}


def components():
    """The rows of the table: [{"name", "url", "licence", "parts", "how", "names"}]."""
    text = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    found = []
    for line in re.findall(r"(?m)^\| \[.*$", text):
        name, licence, parts, how, names = (cell.strip() for cell in line.strip("|").split(" | "))
        title, url = re.match(r"\[(.+)\]\((.+)\)", name).groups()
        found.append({"name": title, "url": url, "licence": licence, "parts": parts.split(", "), "how": how,
                      "names": re.findall(r"`([^`]+)`", names)})
    return found


def read_cache(build):
    """CMake's cache, without what it did not find."""
    if not (build / "CMakeCache.txt").exists():
        sys.exit(f"{build}: no folder that CMake has built in")
    text = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    cache = dict(re.findall(r"(?m)^([\w+.-]+):\w+=(.*)$", text))
    return {name: value for name, value in cache.items() if value and not value.endswith("NOTFOUND")}


def is_on(cache, switch):
    return not switch or cache.get(switch, "OFF").upper() in ("ON", "TRUE", "YES", "1")


def version_of(name, cache):
    """Of what CMake found, or None."""
    key = IN_CACHE[name] or f"{name}_DIR"
    where = cache.get(key, "")
    if name == "xsimd":
        text = (Path(where) / "xsimd/config/xsimd_config.hpp").read_text(encoding="utf-8")
        return ".".join(re.search(rf"XSIMD_VERSION_{part} +(\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    if name in ("OpenMP", "libomp", "g++", "CUDAToolkit"):  # have their compiler's version
        compiler = where if name == "CUDAToolkit" else cache["CMAKE_CXX_COMPILER"]
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release [\d.]+, V([\d.]+)" if name == "CUDAToolkit" else r"(\d+\.\d+\.\d+)", text)
        return found[1] if found else None
    if where and key.endswith("_DIR"):
        for file in sorted(Path(where).glob("*[vV]ersion.cmake")):
            found = re.search(r'set\(PACKAGE_VERSION "?([\d.]+)"?\)', file.read_text(encoding="utf-8"))
            if found:
                return found[1]
    return None


def linked(build, cache):
    """Names of the shared libraries that library and command are linked with: {"libtbb"}; empty where the library is static."""
    programs = [path for path in (build / "librapt.so", build / "rapt") if path.exists()]
    if not programs or programs[0].suffix != ".so":
        return set()
    text = subprocess.run([cache.get("CMAKE_READELF", "readelf"), "-d", *programs], capture_output=True, text=True, check=True).stdout
    return {re.match(r"(.+?)(-x86-64|-aarch64)?\.so", name)[1] for name in re.findall(r"NEEDED.*\[(.+)\]", text)} - {"librapt"}


def name_in_use(component, cache, libraries):
    """The name under which the build found a component, or None where the build does not use it."""
    shared = {name for name in component["names"] if name.startswith("lib") and not name.endswith("-dev")}
    if shared and libraries and not shared & libraries:
        return None
    other_openmp = "libomp" if "gomp" in cache.get("OpenMP_CXX_LIB_NAMES", "") else "OpenMP"
    for name in component["names"]:
        key = IN_CACHE.get(name) if name != other_openmp else None
        if key is not None and (not key or key in cache) and cache.get(SWITCHES.get(name), "").upper() not in ("OFF", "FALSE", "NO", "0"):
            return name
    return None


def package(name, version, licence, homepage, comment):
    found = {"SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", name), "name": name, "downloadLocation": "NOASSERTION", "homepage": homepage,
             "filesAnalyzed": False, "licenseConcluded": "NOASSERTION", "licenseDeclared": licence, "copyrightText": "NOASSERTION",
             "comment": comment}
    return {**found, "versionInfo": version} if version else found


def document(build):
    cache = read_cache(build)
    table = components()
    known = {name for component in table for name in component["names"]}
    libraries = linked(build, cache)
    if libraries - known:
        sys.exit(f"this build is linked with {', '.join(sorted(libraries - known))}: docs/dependencies.md has no such component")
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    version = re.search(r"project\(rapt VERSION ([\d.]+)", cmake)[1] + re.search(r'set\(rapt_version_suffix "(.*)"\)', cmake)[1]
    git = subprocess.run(["env", "git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # env: there may be no git
                         capture_output=True, text=True, check=False)
    commit = git.stdout.strip() or "unknown"
    parts = [part for part, switch in PARTS.items() if is_on(cache, switch)]
    packages, relationships = [], []
    for part in parts:
        packages.append(package("rapt" if part == "library" else f"rapt-{part.lower()}", version, "Apache-2.0", "NOASSERTION", f"commit {commit}"))
        relationships.append(("SPDXRef-DOCUMENT", "DESCRIBES", packages[-1]["SPDXID"]))
    of_part = dict(zip(parts, (one["SPDXID"] for one in packages)))
    for component in table:
        name = name_in_use(component, cache, libraries)
        users = [part for part in component["parts"] if part in parts]
        required = "Python" in users and not set(component["names"]) & set(IN_CACHE)
        if not users or (name is None and not required):
            continue
        packages.append(package(component["name"], version_of(name, cache) if name else None, component["licence"], component["url"],
                                component["how"]))
        for part in users:
            static = re.search("statically|headers|compiled into", component["how"])
            kind = "STATIC_LINK" if static else "DYNAMIC_LINK" if name else "OPTIONAL_DEPENDENCY_OF" if "optional" in component["how"] else "DEPENDS_ON"
            ends = (of_part[part], kind, packages[-1]["SPDXID"])
            relationships.append(ends if kind != "OPTIONAL_DEPENDENCY_OF" else ends[::-1])
    licences = {component["licence"] for component in table if component["licence"].startswith("LicenseRef-")} & {one["licenseDeclared"] for one in packages}
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"rapt-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/rapt-{version}-{uuid.uuid4()}",
        "creationInfo": {"created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": ["Tool: rapt-sbom"]},
        "packages": packages,
        "relationships": [{"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b} for a, kind, b in relationships],
        **({"hasExtractedLicensingInfos": [{"licenseId": licence, "extractedText": "See the component's downloadLocation."} for licence in sorted(licences)]}
           if licences else {}),
    }


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    text = json.dumps(document(Path(sys.argv[1])), indent=2) + "\n"
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
