"""Fails if a wheel of rapt needs more than it should, or computes anything wrong.

usage: check_wheel.py WHEEL [PYTHON]     an interpreter that the wheel is for; default: the one that runs this

Reads the shared objects: which libraries and which versions of symbols they need. Then installs the wheel into an environment of its own, where
no compiler is on PATH, and runs commands of `rapt` there. Of the wheel of the GPU kernels: installs the wheel of rapt beside it, too, and asks rapt
whether it has loaded them. For a wheel of another architecture PYTHON is a command that runs one under emulation: arm64_python.sh makes one.
"""

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from cli_test import OTHERS, PROBLEM  # noqa: E402

MOST_BYTES = 12_000_000
MOST_BYTES_OF_GPUS = 100_000_000  # the most that the index of Python's packages takes
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
# Of manylinux_2_28 and manylinux_2_34, as PEP 600 and auditwheel have them.
NEWEST = {
    "x86_64": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    "aarch64": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0)},
}
# Below .dist-info/licenses: of what is compiled in. A wheel with oneTBB has its licence, too.
LICENCES = {"LICENSE", *(f"notices/{name}.txt" for name in ("CLI11", "Eigen3", "fmt", "nanobind", "nlohmann_json", "robin_map", "xsimd"))}
LICENCES_OF_GPUS = {"LICENSE", "NOTICE"}
PYTHONS_OWN = re.compile(r"_?Py[A-Z_]")


def dump(machine, file, *options):
    program = "objdump" if machine == platform.machine() else f"{machine}-linux-gnu-objdump"
    return subprocess.run([program, *options, file], capture_output=True, text=True, check=True).stdout


def violations_of(machine, file, bundled, elsewhere):
    """`elsewhere` are the symbols that bundled libraries define."""
    for name in re.findall(r"(?m)^ +NEEDED +(\S+)", dump(machine, file, "-p")):
        if name not in SYSTEM | {LOADERS[machine]} | bundled:
            yield f"{file.name} needs {name}"
    for flags, version, symbol in re.findall(r"(?m)^\S+ ( *\w*) +D?\w* +\*UND\*\t\S+ +(?:\(?([^\s)]+)\)? +)?(\S+)$", dump(machine, file, "-T")):
        family, _, number = version.partition("_")
        if version in ("", "Base"):
            if "w" not in flags and symbol not in elsewhere and not PYTHONS_OWN.match(symbol):
                yield f"{file.name}: nothing that it needs defines {symbol}"
        elif not re.fullmatch(r"[\d.]+", number) or tuple(map(int, number.split("."))) > NEWEST[machine].get(family, ()):
            yield f"{file.name} needs {symbol} of {version}"


def violations(wheel, python, folder):
    machine = re.search(r"_(x86_64|aarch64)\.whl$", wheel.name)[1]
    of_gpus = wheel.name.startswith("rapt_attention_cuda-")
    most, export = (MOST_BYTES_OF_GPUS, "rapt_cuda_library") if of_gpus else (MOST_BYTES, "PyInit__core")
    if wheel.stat().st_size > most:
        yield f"{wheel.name} has {wheel.stat().st_size} bytes; it may have {most}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    objects = [path for path in (folder / "wheel").rglob("*") if re.search(r"\.so(\.\d+)*$", path.name)]
    bundled = {path.name for path in objects if path.parent.name == "rapt_attention.libs"}
    if len(objects) != len(bundled) + 1 or not all(name.startswith("libtbb") for name in bundled):
        yield f"{wheel.name} has {sorted(path.name for path in objects)}"
    yield from violations_of_licences(wheel, folder / "wheel", LICENCES_OF_GPUS if of_gpus else LICENCES, bundled)
    if of_gpus:
        yield from violations_of_payload(wheel, folder / "wheel")
    defined = {path.name: set(re.findall(r"(?m) g +D[FO] \.\S+\t\S+ +\S+ +(\S+)$", dump(machine, path, "-T"))) for path in objects}
    for file in objects:
        yield from violations_of(machine, file, bundled, set().union(*defined.values()))
        if file.name not in bundled and defined[file.name] != {export}:
            yield f"{file.name} exports {sorted(defined[file.name])[:5]}; wanted {export} alone"

    emulated = machine != platform.machine()
    environment, site = folder / "venv", folder / "site"
    subprocess.run([sys.executable if emulated else python, "-m", "venv", environment], check=True)
    pip = [environment / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    if emulated:  # by this machine's pip, which must be told what it installs for
        version = subprocess.run([python, "-c", "import sys; print(sys.implementation.cache_tag)"], capture_output=True, text=True, check=True).stdout
        pip += ["--target", site, "--python-version", version.strip().rpartition("-")[2]]
        pip += [f"--platform=manylinux{policy}_{machine}" for policy in ("_2_34", "_2_28", "_2_27", "2014")]
    subprocess.run([*pip, "--find-links", wheel.parent, wheel], check=True)
    if of_gpus:
        code = "import rapt; print(rapt.__file__.rpartition('/')[0], *rapt.info()['backends'][1].values(), sep='|')"
        told = subprocess.run([environment / "bin/python", "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
        package, name, library, version, missing = told.strip().split("|")
        if (name, missing) != ("cuda", "") or Path(library).parent != Path(package) or f"-{version}-" not in wheel.name:
            yield f"rapt.info() says {told}"
        return
    rapt = [python, "-m", "rapt"] if emulated else [environment / "bin/rapt"]
    variables = {"PATH": str(environment / "bin")}
    if emulated:  # where NumPy's threads that wait take time from each other
        variables |= {"PYTHONPATH": str(site), "OPENBLAS_NUM_THREADS": "1"}
    few = [word for problem in (PROBLEM, f"dtype=bf16 {PROBLEM}", *OTHERS.values()) for word in ("--problem", problem)]
    for command in (["info"], ["check", "--entry", ".", *few], *([] if emulated else [["check"], ["demo", "--threads", "1"]])):
        result = subprocess.run([*rapt, *command], cwd=folder, env=variables, capture_output=True, text=True)
        if result.returncode != 0:
            yield f"rapt {' '.join(command)}: exit code {result.returncode}: {result.stdout}{result.stderr}"


def violations_of_licences(wheel, folder, wanted, bundled):
    licences = next(folder.glob("*.dist-info")) / "licenses"
    found = {path.relative_to(licences).as_posix() for path in licences.rglob("*") if path.is_file() and path.stat().st_size > 0}
    for name in sorted(wanted - found):
        yield f"{wheel.name} lacks the licence {name}; it has {sorted(found)}"
    if bundled and not any(name.startswith("oneTBB/") for name in found):
        yield f"{wheel.name} has {sorted(bundled)} without a licence in licenses/oneTBB; it has {sorted(found)}"


def violations_of_payload(wheel, folder):
    """Of the wheel of the GPU kernels: one file in the folder of rapt's own package."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    payload = {name for name in files if ".dist-info/" not in name}
    if len(payload) != 1 or not re.fullmatch(r"rapt/librapt_cuda\.so\.[\d.]+", min(payload, default="")):
        yield f"{wheel.name} has {sorted(payload)}"
    metadata = next(folder.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    version = re.search(r"(?m)^Version: (.+)$", metadata)[1]
    if f"Requires-Dist: rapt-attention=={version}\n" not in metadata:
        yield f"{wheel.name} does not require rapt-attention=={version}: {metadata}"


def main(wheel, python=sys.executable):
    with tempfile.TemporaryDirectory() as folder:
        found = list(violations(Path(wheel).resolve(), python, Path(folder)))
    print("\n".join(found) or f"{Path(wheel).name}: {Path(wheel).stat().st_size / 1e6:.1f} MB, nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
