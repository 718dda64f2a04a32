"""Fails if an #include points against the architecture (src/README.md).

usage: include_dag.py <repository>

Each folder has the list of what its files may include; the first folder that contains a file decides.
"""

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r"^\s*#\s*include\s+(.+?)\s*(//.*|/\*.*)?$")
STD = r"<[a-z_]+>"
C_STD = r"<(std[a-z]+|string)\.h>"
# What a kernel may know: its own vocabulary, the POD border, xsimd, intrinsics, and freestanding headers that leave no
# code behind.
KERNEL = [r'"cpu/(isa|tile|kernels)/\w+\.hpp"', r'"cpu/(params|registry)\.hpp"', r"<xsimd/xsimd\.hpp>",
          r"<(immintrin|emmintrin|arm_neon)\.h>", r"<(cstddef|cstdint|type_traits|utility|limits|bit)>"]
# The spine and the CPU framework: anything but the kernels' side, the tests' side, and SIMD.
NOT_FRAMEWORK = r'(?!"(\.\.|cpu/(isa|tile|kernels)/|support/|oracle/|tools/|bench/))(?!<(xsimd|Eigen|fmt|immintrin))'
CUDA_KERNEL = [r'"cuda/(tile|kernels)/\w+\.(cuh|hpp)"', r'"cuda/params\.hpp"', r"<(algorithm|cmath|numeric|type_traits|cuda\w*|cstddef|cstdint)(\.h)?>"]
# Programs see the public interface, the oracle, how problems are timed and the files beside them, never src.
PROGRAM = [r'"(rapt|support|oracle|bench)/[\w/]+\.hp?p?"', r"<(?!rapt/)[^>]+>", "beside"]

RULES = [  # (path prefix, or whole path and $; allowed includes)
    ("include/rapt/interop/", [STD, r'"rapt/\w+\.hpp"', r"<(Eigen/Core|dlpack/dlpack\.h)>"]),
    ("include/rapt/rapt.h$", [C_STD, r'"rapt/export\.h"']),
    ("include/rapt/", [STD, r'"rapt/\w+\.(hpp|h)"']),
    ("src/score_params.hpp", [r"<cstdint>"]),
    ("src/cpu/params.hpp", [r"<cstd(def|int)>", r'"score_params\.hpp"']),
    ("src/cpu/registry.hpp", [r"<cstd(def|int)>", r'"cpu/params\.hpp"']),
    ("src/cpu/isa/", KERNEL + [r"RAPT_LEAF_\(RAPT_(ISA|AMX_MODEL)\)"]),
    ("src/cpu/tile/", KERNEL),
    ("src/cpu/kernels/", KERNEL),
    ("src/cpu/", [NOT_FRAMEWORK + r'(?!"cuda/)(?!<cuda)']),
    ("src/cuda/params.hpp", [r"<cstdint>", r'"(score_params|rapt/types)\.hpp"']),
    ("src/cuda/tile/", CUDA_KERNEL),
    ("src/cuda/kernels/", CUDA_KERNEL),
    ("src/cuda/", [NOT_FRAMEWORK + r'(?!"cpu/)(?!"cuda/tile/)']),
    ("src/", [NOT_FRAMEWORK + r'(?!"(cpu|cuda)/)(?!<cuda)']),
    ("tools/", PROGRAM),
    ("bench/", PROGRAM),
    ("python/", PROGRAM),
    ("tests/support/", PROGRAM),
    ("tests/oracle/", PROGRAM),
]


def violations(root):
    for folder in ("include", "src", "tools", "bench", "tests/support", "tests/oracle"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".hpp", ".cpp", ".h", ".c", ".cu", ".cuh"):
                continue
            name = path.relative_to(root).as_posix()
            allowed = next((patterns for prefix, patterns in RULES if f"{name}$".startswith(prefix)), [])
            if "beside" in allowed:
                allowed = allowed + [f'"{re.escape(header.name)}"' for header in path.parent.glob("*.hpp")]
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if match and not any(re.match(pattern, match[1]) for pattern in allowed):
                    yield f"{name}:{number}: may not include {match[1]}"


def main():
    root = Path(sys.argv[1])
    if not (root / "include/rapt/rapt.hpp").is_file():
        sys.exit(f"{root} is not the repository")
    found = list(violations(root))
    print("\n".join(found) or "every include points the right way")
    sys.exit(bool(found))


main()
