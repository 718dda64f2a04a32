"""Fails if the shared library exports anything but the names of the public interface.

usage: exported_symbols.py <nm> <library>
"""

import re
import subprocess
import sys

PREFIX = r"_Z(T[VTIS]|GV|Z)*N?[rVKRO]*"  # mangled: tables and statics of functions, then the nesting
PUBLIC = re.compile(rf"{PREFIX}4rapt(?!3cpu|4cuda|6detail|7testing)|rapt_[a-z0-9_]+$")
# The standard library's own namespaces have default visibility: what is instantiated from them is exported weakly.
STANDARD = re.compile(rf"{PREFIX}(S[tabsiod]|9__gnu_cxx)")


def main():
    nm, library = sys.argv[1:]
    listing = subprocess.run([nm, "-D", "--format=posix", "--defined-only", library], check=True, capture_output=True,
                             text=True).stdout
    symbols = [line.split()[:2] for line in listing.splitlines()]
    wrong = [name for name, kind in symbols
             if not PUBLIC.match(name) and not (kind in "WVu" and STANDARD.match(name))]
    for name in wrong:
        demangled = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout
        print(f"exported: {demangled.strip()}")
    if not any(name.startswith("_ZN4rapt9attentionE") for name, _ in symbols):
        sys.exit("rapt::attention is not exported")
    print(f"{len(symbols)} exported symbols")
    sys.exit(bool(wrong))


main()
