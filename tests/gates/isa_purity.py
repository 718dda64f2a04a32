"""Fails if an object compiled for one ISA shares code with the rest of the program.

usage: isa_purity.py <nm> <isa>[:<vector isa>] <object>...

A weak symbol outside rapt::cpu::<isa> (an inline function that was not inlined, a template of the standard library or
of xsimd) could be the copy that the linker keeps for everyone, and older CPUs would crash in it. A call out of the
kernels, except to a few C functions, means that a kernel allocates, throws or logs. Kernels may hand over to those of
<vector isa>, by way of its list of kernels.
"""

import re
import subprocess
import sys

# Compilers make calls to the memory functions on their own, and to the stack check where a distribution turns it on.
ALLOWED_CALLS = {"memcpy", "memset", "memmove", "__memcpy_chk", "__memset_chk", "__memmove_chk", "__stack_chk_fail",
                 "__stack_chk_guard", "_GLOBAL_OFFSET_TABLE_"}
LIBM = {"exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sqrt", "floor", "ceil", "pow", "fma", "ldexp", "scalbn"}
ALLOWED_CALLS |= LIBM | {name + "f" for name in LIBM}


def symbols(nm, path):
    """Yields (name, type letter) of every symbol of an object."""
    listing = subprocess.run([nm, "--format=posix", path], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        name, kind = line.split()[:2]
        yield name, kind


def violations(nm, isa, calls, path):
    # A mangled name in the namespace itself: special prefixes (typeinfo, guards, statics of functions), then the
    # nesting. A standard template over one of our types does not match, and need not be weak to be wrong.
    inside = re.compile(rf"_Z(T[VTISC]|GV|GR|Z|L)*N[rVKRO]*4rapt3cpu{len(isa)}{isa}")
    for name, kind in symbols(nm, path):
        if inside.match(name):
            continue
        if kind in "Uvw":
            if name not in calls:
                yield f"calls {name}"
        elif kind.isupper() or kind == "u":
            yield f"defines {name} ({kind}) outside rapt::cpu::{isa}"


def main():
    nm, isas, *objects = sys.argv[1:]
    isa, _, vector_isa = isas.partition(":")
    calls = ALLOWED_CALLS | ({f"_ZN4rapt3cpu{len(vector_isa)}{vector_isa}8kKernelsE"} if vector_isa else set())
    if not objects:
        sys.exit("no objects given")
    seen = 0
    failed = False
    for path in objects:
        seen += sum(1 for _ in symbols(nm, path))
        for violation in violations(nm, isa, calls, path):
            demangled = subprocess.run(["c++filt"], input=violation, capture_output=True, text=True).stdout
            print(f"{path}: {demangled.strip()}")
            failed = True
    if not seen:
        sys.exit("the objects have no symbols: is this the right nm?")
    print(f"{isa}: {len(objects)} objects, {seen} symbols")
    sys.exit(failed)


main()
