"""Fails if librapt has CUDA code, if librapt_cuda exports more than its border or needs more than the system's libraries, or if
both hold a variable of rapt's: a process would have two of it (src/README.md, "The GPU backend's library").

usage: cuda_library.py <nm> <objdump> <librapt> <librapt_cuda>
"""

import re
import subprocess
import sys

SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s|ld-linux.*)\.so[.\d]*")
CONSTANT = re.compile(r"(vtable|typeinfo|typeinfo name|construction vtable|VTT) for ")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def variables(nm, library):
    """Names of rapt's in memory that a program writes, local ones too; tables of constants are there where they hold addresses."""
    symbols = re.findall(r"(?m)^[0-9a-f]+ ([A-Za-z]) (.+)$", run(nm, "-C", library))
    return {name for kind, name in symbols if kind in "bBdDuV" and "rapt::" in name and not CONSTANT.match(name)}


def violations(nm, objdump, librapt, librapt_cuda):
    for name in sorted(set(re.findall(r"rapt::cuda::[\w:()]+|\bcuda[A-Z]\w+|\bcu[A-Z][a-z]\w+", run(nm, "-C", librapt)))):
        yield f"librapt has {name}"
    exports = {line.split()[-1] for line in run(nm, "-D", "--defined-only", librapt_cuda).splitlines()}
    if exports != {"rapt_cuda_library"}:
        yield f"librapt_cuda exports {sorted(exports)}; wanted rapt_cuda_library alone"
    for name in re.findall(r"NEEDED +(\S+)", run(objdump, "-p", librapt_cuda)):
        if not SYSTEM.fullmatch(name):
            yield f"librapt_cuda needs {name}"
    mine = variables(nm, librapt_cuda)
    if not mine:
        yield "librapt_cuda has no variables: it is stripped, or this does not see them"
    for name in sorted(mine & variables(nm, librapt)):
        yield f"both libraries have {name}"


found = list(violations(*sys.argv[1:]))
print("\n".join(found) or "librapt and librapt_cuda are apart")
sys.exit(bool(found))
