"""Fails if docs/dependencies.md lacks something that is built, installed or imported, or lists something that is not; if the folder notices
lacks a component that is compiled into packages; and if the bill of materials of this build lacks what SPDX 2.3 demands.

usage: dependencies.py <repository> <build folder>
"""

import re
import sys
from pathlib import Path

# Found by no find_package: what compilers and nanobind bring, and headers and libraries that are looked for by themselves.
OTHERS = {"xsimd": "cmake/RaptRequirements.cmake", "ittnotify": "CMakeLists.txt"}
COMPILERS = {"libtbb", "libgomp", "libomp", "libomp-dev", "libstdc++", "libgcc_s", "libc", "libm", "libdl", "librt", "libpthread", "ld-linux",
             "robin_map"}
IDENTIFIER = re.compile(r"(LicenseRef-)?[A-Za-z0-9.+-]+( (OR|AND|WITH) [A-Za-z0-9.+-]+)*")
OWN = {"rapt", "flash_attn", "one"}  # rapt.flash_attn.install() makes flash_attn; "one" begins a line of a docstring


def names_in_use(root):
    """{name: where}"""
    found = dict(OTHERS)
    folders = [root / folder for folder in ("bench", "cmake", "python", "tests", "tools")]
    for path in [root / "CMakeLists.txt", *(path for folder in folders for path in folder.rglob("*")
                                            if path.name == "CMakeLists.txt" or path.suffix == ".cmake")]:
        place = path.relative_to(root)
        if "package" in place.parts:  # consumers look for rapt
            continue
        for name in re.findall(r"(?m)^\s*find_package\((\w+)", path.read_text(encoding="utf-8")):
            found[name] = str(place)
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    for line in re.findall(r"(?m)^(?:requires|dependencies|torch|transformers|test) = \[(.+)\]", project):
        for name in re.findall(r'"([\w-]+)', line):
            found[name] = "pyproject.toml"
    script = (root / "tools/dev").read_text(encoding="utf-8").replace("\\\n", "")  # lines that go on are one
    packages = re.search(r"(?s)^packages=\((.*?)\)", script, re.MULTILINE)[1].split()
    packages += [name for line in re.findall(r"""(?m)^ +install (?:"\S+" )?((?:[\w+-]+ ?)+)$""", script) for name in line.split()]
    for line in re.findall(r"(?m)(?:pip install|^ +install_python) (.+)", script):
        packages += re.findall(r"(?:^| )([a-zA-Z][\w-]+)(?:==| )", re.sub(r"'[^']*'|(?<!\S)-\S+", "", line))
    found.update((name, "tools/dev") for name in packages)
    if sys.version_info < (3, 10):  # which does not know its own modules
        return {**found, "triton": "", "safetensors": ""}
    modules = [path for folder in ("bench", "docs", "python", "tests", "tools") for path in (root / folder).rglob("*.py")]
    own = OWN | {path.parent.name if path.stem == "__init__" else path.stem for path in modules if "rapt" not in path.relative_to(root).parts}
    for path in modules:
        for name in re.findall(r"(?m)^ *(?:import|from) ([A-Za-z_]\w*)", path.read_text(encoding="utf-8")):
            if name not in sys.stdlib_module_names and name not in own:
                found[name] = str(path.relative_to(root))
    return found


def violations(root, build, sbom):
    table = sbom.components()
    listed = {name for component in table for name in component["names"]}
    used = names_in_use(root)
    for name in sorted(set(used) - listed):
        yield f"{used[name]}: {name} is not in docs/dependencies.md"
    for component in table:
        if not set(component["names"]) & (set(used) | COMPILERS):
            yield f"docs/dependencies.md: nothing uses {component['name']}"
        if not IDENTIFIER.fullmatch(component["licence"]):
            yield f"docs/dependencies.md: {component['licence']} is no SPDX expression"
        if set(component["parts"]) - set(sbom.PARTS) - {"development"}:
            yield f"docs/dependencies.md: {component['name']} is used by {component['parts']}"
    compiled_in = {component["names"][0] for component in table if re.match("headers|compiled into", component["how"])}
    notices = {path.stem for path in (root / "notices").iterdir()}
    if compiled_in != notices:
        yield f"notices: of {sorted(notices)}; docs/dependencies.md says that packages contain {sorted(compiled_in)}"

    document = sbom.document(build)
    for field in ("spdxVersion", "dataLicense", "SPDXID", "name", "documentNamespace", "creationInfo"):
        if not document.get(field):
            yield f"bill of materials: no {field}"
    ids = ["SPDXRef-DOCUMENT"] + [package["SPDXID"] for package in document["packages"]]
    if len(ids) != len(set(ids)) or not all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", name) for name in ids):
        yield f"bill of materials: identifiers {ids}"
    for package in document["packages"]:
        for field in ("name", "downloadLocation", "licenseDeclared", "licenseConcluded", "copyrightText"):
            if not package.get(field):
                yield f"bill of materials: {package['SPDXID']} has no {field}"
    related = {end for one in document["relationships"] for end in (one["spdxElementId"], one["relatedSpdxElement"])}
    if related != set(ids):
        yield f"bill of materials: relationships of {sorted(related ^ set(ids))}, which are not there or alone"
    versions = {package["name"]: package.get("versionInfo", "") for package in document["packages"]}
    for name in ("rapt", "oneTBB", "xsimd"):
        if not re.match(r"\d+\.\d+", versions.get(name, "")):
            yield f"bill of materials: {name} has the version '{versions.get(name)}'"


def main():
    root, build = (Path(argument).resolve() for argument in sys.argv[1:])
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root / "tools"))
    import sbom
    found = list(violations(root, build, sbom))
    print("\n".join(found) or f"{len(sbom.components())} components")
    sys.exit(1 if found else 0)


main()
