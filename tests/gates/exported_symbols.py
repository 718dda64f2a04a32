"""Fails unless the shared library exports what the installed headers mark with RAPT_API, and nothing else.

usage: exported_symbols.py <nm> <library> <folder of the headers>
"""

import re
import subprocess
import sys
from pathlib import Path

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^#(?!define RAPT_OPERATION)[^\n]*", re.MULTILINE | re.DOTALL)  # and directives
CLASS = re.compile(r"^(?:class|struct) (RAPT_API )?(\w+)[^;{]*\{(.*?)^\};", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"RAPT_API [^;({]*?(\w+)\(")  # the first parenthesis opens the parameters
# A class that is exported as a whole: out of line are its virtual destructor, and a constructor that has no body.
MEMBER = re.compile(r"^  (?:virtual )?(~?\w+)\([^)]*\)\s*;", re.MULTILINE)


def declared(folder):
    names = set()
    for header in sorted(folder.glob("*.h*")):
        text = COMMENT.sub("", header.read_text())
        for exported, name, body in CLASS.findall(text):
            scope = f"rapt::{name}::"
            if exported:
                names |= {f"typeinfo for rapt::{name}", f"typeinfo name for rapt::{name}", f"vtable for rapt::{name}"}
                names |= {scope + member for member in MEMBER.findall(body)}
            names |= {scope + member for member in FUNCTION.findall(body)}
        scope = "" if header.suffix == ".h" else "rapt::"
        names |= {scope + name for name in FUNCTION.findall(CLASS.sub("", text))}
    return names


def exported(nm, library):
    listing = subprocess.run([nm, "-DC", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    symbols = [line.split(maxsplit=2)[2] for line in listing.splitlines()]
    return {re.split(r"\[abi:|\(", symbol)[0] for symbol in symbols}  # without parameters: overloads count as one


def main():
    nm, library, headers = sys.argv[1:]
    wanted, got = declared(Path(headers)), exported(nm, library)
    for name in sorted(got - wanted):
        print(f"exported, but no header declares it RAPT_API: {name}")
    for name in sorted(wanted - got):
        print(f"RAPT_API, but not exported: {name}")
    print(f"{len(got)} exported names")
    sys.exit(got != wanted)


main()
