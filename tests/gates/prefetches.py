"""Fails if a kernel that fetches ahead was compiled without an instruction that does.

usage: prefetches.py <objdump> <object>...

GCC drops calls of functions that do nothing but prefetch, unless they are inlined, and says nothing.
"""

import re
import subprocess
import sys

KERNELS = {"attention_decode", "attention_prefill", "delta_rule", "delta_rule_backward", "delta_rule_decode"}
PREFETCH = re.compile(r"\t(prefetch\w*|prfm)\s")


def main():
    objdump, *objects = sys.argv[1:]
    kernels = {path: name for path in objects for name in [re.sub(r"\.cpp\.\w+$", "", path.rsplit("/", 1)[-1])] if name in KERNELS}
    if not kernels:
        sys.exit("none of the objects is a kernel that fetches ahead")
    failed = False
    for path in kernels:
        code = subprocess.run([objdump, "-d", path], check=True, capture_output=True, text=True).stdout
        if not PREFETCH.search(code):
            print(f"{path}: prefetches nothing")
            failed = True
    print(f"{len(kernels)} kernels")
    sys.exit(failed)


if __name__ == "__main__":
    main()
