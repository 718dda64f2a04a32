#!/usr/bin/env python3
"""Writes a folder of libraries to link with, so that what is built here also runs on older Linux systems.

usage: old_runtime.py FOLDER [POLICY]

POLICY is a manylinux policy of auditwheel, by default manylinux_2_28. The libraries have the names and symbols of this machine's C and C++
libraries, without code, and only the versions of symbols that the policy allows. `-L FOLDER` has the linker bind to those: a version of
`pthread_create` that is old enough, though the machine's default is newer. What the old C++ library lacks comes from the static one, and what
the old C library lacks from compat.c. The code that compilers make is the same with and without.
"""

import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

# What headers of newer C libraries refer to: fstat and its relatives were inline functions before glibc 2.33, and programs of one thread
# took locks before 2.32.
COMPAT = r"""
#define HIDDEN __attribute__((visibility("hidden")))
struct stat;
int __xstat(int, const char*, struct stat*);
int __lxstat(int, const char*, struct stat*);
int __fxstat(int, int, struct stat*);
int __fxstatat(int, int, const char*, struct stat*, int);
HIDDEN int stat(const char* path, struct stat* result) { return __xstat(1, path, result); }
HIDDEN int lstat(const char* path, struct stat* result) { return __lxstat(1, path, result); }
HIDDEN int fstat(int file, struct stat* result) { return __fxstat(1, file, result); }
HIDDEN int fstatat(int folder, const char* path, struct stat* result, int flags) { return __fxstatat(1, folder, path, result, flags); }
HIDDEN char __libc_single_threaded = 0;
"""
# glibc 2.34 moved these into libc.so.6; older systems have them in libraries that must be named.
PLACES = {"libpthread.so.0": r"(pthread|sem)_", "libdl.so.2": r"dl(open|close|sym|vsym|addr1?|info|mopen|error)$"}


def newest_allowed(policy):
    """{"GLIBC": (2, 28), ...}"""
    table = json.loads(resources.files("auditwheel").joinpath("policy/manylinux-policy.json").read_text(encoding="utf-8"))
    names = [entry["name"] for entry in table]
    if policy not in names:
        sys.exit(f"old_runtime.py: POLICY is {policy}; it must be one of {', '.join(names)}")
    versions = table[names.index(policy)]["symbol_versions"]["x86_64"]
    return {family: max(number(v) for v in values if v[0].isdigit()) for family, values in versions.items()}


def number(version):
    return tuple(int(part) for part in version.split("."))


def symbols_of(library, newest):
    """{name: (kind, size, version)}: of each symbol that the library defines the newest version that may be used."""
    found = {}
    listing = subprocess.run(["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True).stdout
    for size, kind, name, version in re.findall(
            r"(?m)^ +\d+: [0-9a-f]+ +(\w+) (FUNC|IFUNC|OBJECT|TLS) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +(?!UND)\w+ (\S+?)@@?(\S+)", listing):
        family, _, text = version.partition("_")
        if not re.fullmatch(r"[\d.]+", text) or number(text) > newest.get(family, ()):
            continue
        if name not in found or number(text) > number(found[name][2].partition("_")[2]):
            found[name] = (kind, int(size, 0), version)
    return found


def write_library(file, soname, symbols):
    """A shared library without code."""
    lines = []
    sections = {"OBJECT": ".data", "TLS": ".section .tbss,\"awT\",@nobits"}
    for index, (name, (kind, size, version)) in enumerate(sorted(symbols.items())):
        label = f"stub_{index}"
        lines += [sections.get(kind, ".text"), f".globl {label}", f".type {label}, @{'object' if kind in sections else 'function'}",
                  f"{label}: .zero {max(size, 1) if kind in sections else 1}", f".size {label}, {size}", f".symver {label}, {name}@@{version}, remove"]
    versions = sorted({version for _, _, version in symbols.values()})
    source, script = file.with_suffix(".s"), file.with_suffix(".map")
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script.write_text("".join(f"{version} {{}};\n" for version in versions), encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", file, source, f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"], check=True)


def path_of(name):
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def main(folder, policy="manylinux_2_28"):
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    newest = newest_allowed(policy)
    for soname in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        symbols = symbols_of(path_of(soname), newest)
        if soname == "libc.so.6":
            for place, pattern in PLACES.items():
                write_library(folder / place, place, {name: symbols.pop(name) for name in list(symbols) if re.match(pattern, name)})
        write_library(folder / soname, soname, symbols)
    source = folder / "compat.c"
    source.write_text(COMPAT, encoding="utf-8")
    subprocess.run(["gcc", "-O2", "-fPIC", "-fno-builtin", "-c", source, "-o", folder / "compat.o"], check=True)
    subprocess.run(["ar", "rcs", folder / "libcompat.a", folder / "compat.o"], check=True)
    # Scripts that the linker finds by -lc, -lm and -lstdc++. Of the CUDA runtime atexit() is in the archive, thread-local memory in the loader.
    libraries = f"{folder}/libc.so.6 {folder}/libcompat.a {path_of('libc_nonshared.a')}"
    others = f"{folder}/libpthread.so.0 {folder}/libdl.so.2 {path_of('ld-linux-x86-64.so.2')}"
    (folder / "libc.so").write_text(f"GROUP({libraries} AS_NEEDED({others}))\n", encoding="utf-8")
    (folder / "libm.so").write_text(f"INPUT({folder}/libm.so.6)\n", encoding="utf-8")
    (folder / "libstdc++.so").write_text(f"GROUP({folder}/libstdc++.so.6 {path_of('libstdc++.a')})\n", encoding="utf-8")
    (folder / "libdl.so").write_text(f"INPUT({folder}/libdl.so.2)\n", encoding="utf-8")
    (folder / "libpthread.so").write_text(f"INPUT({folder}/libpthread.so.0)\n", encoding="utf-8")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
